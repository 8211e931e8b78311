//! Uploads an object in one put if it is small, and otherwise in parts that are sent while the caller prepares the next ones.

use std::sync::Arc;

use bytes::Bytes;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{MultipartId, ObjectStoreExt as _, PutPayload};
use penstock_error::{Error, Result};
use tokio::task::JoinHandle;

use super::connect::Client;
use super::connect::service::Traffic;
use super::live::{Live, runtime, wait};
use crate::process;
use crate::store::ObjectWriter;

/// Bytes per part. S3 requires parts of at least 5 MiB.
const PART_BYTES: usize = 8 << 20;
/// The most parts that S3 accepts, and Google.
const PARTS: usize = 10_000;
/// Maximum number of parts in flight. Together with the part being filled, these bound an upload's memory use.
const PARTS_AT_ONCE: usize = 4;

pub struct Upload {
    live: Arc<Live>,
    traffic: Arc<Traffic>,
    path: Path,
    what: String,
    buffer: Vec<u8>,
    multipart: Option<Multipart>,
    bytes: u64,
    /// Identifies the process that began the upload. In a forked child, the upload still belongs to the parent.
    generation: u64,
}

struct Multipart {
    id: MultipartId,
    parts: Vec<Option<PartId>>,
    travelling: Vec<(usize, JoinHandle<Result<PartId>>)>,
}

impl Upload {
    pub fn new(live: Arc<Live>, traffic: Arc<Traffic>, path: Path, what: String) -> Upload {
        Upload {
            live,
            traffic,
            path,
            what,
            buffer: Vec::new(),
            multipart: None,
            bytes: 0,
            generation: process::generation(),
        }
    }

    /// Send one request about the object, and repeat it as `retry` allows.
    fn ask<T, W: Future<Output = object_store::Result<T>>>(&self, work: impl Fn(Client, Path) -> W) -> Result<T> {
        wait(
            self.live
                .retry
                .ask(&self.traffic.counters, &self.what, || work(self.live.client.clone(), self.path.clone())),
        )
    }

    fn store(&self) -> Result<Arc<dyn MultipartStore>> {
        self.live
            .client
            .parts
            .clone()
            .ok_or_else(|| Error::new("read-only", format!("cannot {}: the store is read-only", self.what)))
    }

    /// Send the buffer as the next part.
    fn send_part(&mut self) -> Result<()> {
        let store = self.store()?;
        if self.multipart.is_none() {
            let id = self.ask(|_, path| {
                let store = store.clone();
                async move { store.create_multipart(&path).await }
            })?;
            self.multipart = Some(Multipart { id, parts: Vec::new(), travelling: Vec::new() });
        }
        let Some(multipart) = &mut self.multipart else { return Ok(()) };
        while multipart.travelling.len() >= PARTS_AT_ONCE {
            multipart.land_first()?;
        }
        let body = Bytes::from(std::mem::replace(&mut self.buffer, Vec::with_capacity(PART_BYTES)));
        let index = multipart.parts.len();
        if index >= PARTS {
            let text = format!("cannot {}: it has more than {} GB", self.what, PARTS * PART_BYTES / 1_000_000_000);
            return Err(Error::new("invalid-value", text).hint("store it as several values, or on a local disk"));
        }
        multipart.parts.push(None);
        let (live, traffic, path, what, id) =
            (self.live.clone(), self.traffic.clone(), self.path.clone(), self.what.clone(), multipart.id.clone());
        let task = runtime()?.spawn(async move {
            let ask = || {
                let (store, path, id, payload) =
                    (store.clone(), path.clone(), id.clone(), PutPayload::from_bytes(body.clone()));
                async move { store.put_part(&path, &id, index, payload).await }
            };
            live.retry.ask(&traffic.counters, &what, ask).await
        });
        multipart.travelling.push((index, task));
        Ok(())
    }

    fn complete(&mut self) -> Result<()> {
        let Some(multipart) = &mut self.multipart else { return Ok(()) };
        while !multipart.travelling.is_empty() {
            multipart.land_first()?;
        }
        let parts = multipart.parts.iter().cloned().collect::<Option<Vec<PartId>>>();
        let parts = parts.ok_or_else(|| Error::new("internal", "a part of an upload was not sent"))?;
        let (id, store) = (multipart.id.clone(), self.store()?);
        let completed = self.ask(|_, path| {
            let (store, id, parts) = (store.clone(), id.clone(), parts.clone());
            async move { store.complete_multipart(&path, &id, parts).await.map(|_| ()) }
        });
        match completed {
            Ok(()) => Ok(()),
            // If the reply to the first attempt was lost, a second attempt finds no such upload, but the object exists.
            Err(error) if error.code() == "object-not-found" => {
                let found = self
                    .ask(|client, path| async move { client.store.head(&path).await })
                    .map_err(|_| error.clone())?;
                if found.size == self.bytes { Ok(()) } else { Err(error) }
            }
            Err(error) => Err(error),
        }
    }
}

impl Multipart {
    /// Wait for the oldest part in flight.
    fn land_first(&mut self) -> Result<()> {
        let (index, task) = self.travelling.remove(0);
        let landed = wait(async {
            task.await.map_err(|error| Error::new("internal", format!("an upload task failed: {error}")))?
        })?;
        self.parts[index] = Some(landed);
        Ok(())
    }
}

impl ObjectWriter for Upload {
    fn write(&mut self, bytes: Vec<u8>) -> Result<()> {
        let mut bytes = &bytes[..];
        self.bytes += bytes.len() as u64;
        while self.buffer.len() + bytes.len() > PART_BYTES {
            let (now, later) = bytes.split_at(PART_BYTES - self.buffer.len());
            self.buffer.extend_from_slice(now);
            bytes = later;
            self.send_part()?;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        if self.multipart.is_none() {
            let body = Bytes::from(std::mem::take(&mut self.buffer));
            return self.ask(|client, path| {
                let payload = PutPayload::from_bytes(body.clone());
                async move { client.store.put(&path, payload).await.map(|_| ()) }
            });
        }
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        self.complete()?;
        self.multipart = None;
        Ok(())
    }
}

impl Drop for Upload {
    /// Abort an unfinished upload, so that its parts incur no storage cost.
    fn drop(&mut self) {
        let Some(multipart) = self.multipart.take() else { return };
        if self.generation != process::generation() {
            return;
        }
        multipart.travelling.iter().for_each(|(_, task)| task.abort());
        let (Ok(runtime), Ok(store)) = (runtime(), self.store()) else { return };
        let (path, id) = (self.path.clone(), multipart.id);
        // One attempt is enough: a store's lifecycle rules can expire abandoned uploads.
        let give_up =
            async { tokio::time::timeout(std::time::Duration::from_secs(5), store.abort_multipart(&path, &id)).await };
        let _ = runtime.block_on(give_up);
    }
}
