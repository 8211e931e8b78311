//! A store below a bucket prefix, and the requests that implement its operations.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use object_store::list::PaginatedListOptions;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt as _, PutPayload};
use penstock_error::{Error, Kind, Result};

use super::concurrency::ConcurrencyLimit;
use super::connect::place::StorePlace;
use super::connect::service::Traffic;
use super::connect::{Client, connect, credentials_hint};
use super::cost::Cost;
use super::live::{Live, runtime, wait};
use super::retry::{self, Retry};
use super::upload::Upload;
use crate::counters::{Counters, add};
use crate::listing::{ListedObject, Listing};
use crate::options::Options;
use crate::process::PerProcess;
use crate::ranges::{RangeRequest, Then};
use crate::read::{Access, Features, Read};
use crate::store::{Created, ObjectWriter, Store};

// Cycle with `prove.rs`: it implements create-only puts for `Remote`, and `receive.rs` implements reads of many ranges.
/// Maximum number of bytes per request.
const RANGE_BYTES: u64 = 8 << 20;

/// Maximum length of objects that are read whole: records, roots, pages and words.
const READ_BYTES: usize = 256 << 20;

/// Number of names requested to find the newest commit. Foreign names may sort before the commit's name.
const FIRST_NAMES: usize = 10;

type Connect = Box<dyn Fn() -> Result<Arc<Live>> + Send + Sync>;

/// A store below a bucket prefix.
pub struct Remote {
    pub(super) place: StorePlace,
    /// Scheme, bucket, endpoint and profile: the key in `PROVEN`.
    pub(super) service: String,
    endpoint: Option<String>,
    pub(super) traffic: Arc<Traffic>,
    live: PerProcess<Result<Arc<Live>>, Connect>,
    pub(super) hedge: bool,
    pub(super) deadline: Duration,
    /// Number of consecutive creates whose replies were lost. Each lost reply makes the next wait longer.
    pub(super) lost: AtomicU32,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Remote({})", self.place.uri)
    }
}

impl Remote {
    /// Open a store. Cost: no requests.
    pub fn open(uri: &str, options: &Options) -> Result<Remote> {
        let place = StorePlace::parse(uri)?;
        let traffic = Arc::new(Traffic::new());
        let deadline = options.timeout()?;
        let reconnect: Connect = {
            let (place, options, traffic) = (place.clone(), options.clone(), traffic.clone());
            Box::new(move || {
                let client = connect(&place, &options, traffic.clone())?;
                Ok(Arc::new(Live {
                    client,
                    retry: Retry {
                        deadline,
                        concurrency: ConcurrencyLimit::new(),
                        credentials_hint: credentials_hint(&place),
                        traffic: traffic.clone(),
                    },
                    recent: Mutex::default(),
                    cost: Cost::default(),
                }))
            })
        };
        let service = format!(
            "{} {:?} {:?} {:?}",
            place.bucket(),
            options.get("endpoint_url"),
            options.get("profile"),
            options.without_secrets()
        );
        let remote = Remote {
            place,
            service,
            endpoint: options.get("endpoint_url"),
            traffic,
            live: PerProcess::new(reconnect),
            hedge: options.flag("hedge")?,
            deadline,
            lost: AtomicU32::new(0),
        };
        remote.live()?;
        Ok(remote)
    }

    pub(super) fn live(&self) -> Result<&Arc<Live>> {
        self.live.get().as_ref().map_err(Clone::clone)
    }

    pub(super) fn path(&self, name: &str) -> Path {
        name.split('/').filter(|part| !part.is_empty()).fold(self.place.prefix.clone(), |path, part| path.join(part))
    }

    pub(super) fn what(&self, verb: &str, name: &str) -> String {
        format!("{verb} `{}/{name}`", self.place.uri)
    }

    /// Send one request, and repeat it as `retry` allows.
    fn ask<T, W>(&self, verb: &str, name: &str, work: impl Fn(Client, Path) -> W) -> Result<T>
    where
        W: Future<Output = object_store::Result<T>>,
    {
        let (live, path, what) = (self.live()?, self.path(name), self.what(verb, name));
        wait(live.retry.ask(&self.traffic.counters, &what, || work(live.client.clone(), path.clone())))
    }

    /// Return at most `most` objects below a folder, and the token for the next ones. `flat` leaves out those in folders below it, and `after` is
    /// the token of the objects before. The list is empty if the store cannot list.
    fn page(
        &self,
        folder: &str,
        flat: bool,
        most: Option<usize>,
        after: Option<&str>,
    ) -> Result<(Vec<ObjectMeta>, Option<String>)> {
        let prefix = Some(format!("{}/", self.path(folder))).filter(|prefix| prefix != "/");
        self.ask("list", folder, |client, _| {
            let delimiter = flat.then_some(Cow::Borrowed("/"));
            let page_token = after.map(str::to_owned);
            let options =
                PaginatedListOptions { max_keys: most, page_token, delimiter, ..PaginatedListOptions::default() };
            let prefix = prefix.clone();
            async move {
                let Some(pages) = &client.pages else { return Ok((Vec::new(), None)) };
                let page = pages.list_paginated(prefix.as_deref(), options).await?;
                Ok((page.result.objects, page.page_token))
            }
        })
    }

    /// Check whether a refused create was stored nevertheless: some servers store a body and then report a failure. A refused read
    /// proves nothing, unless these credentials may neither read nor write.
    fn after_refusal(&self, name: &str, body: &[u8], refusal: Error) -> Result<Created> {
        match self.read(name) {
            Ok(stored) if stored == body => Ok(Created::Created),
            Ok(_) => Ok(Created::Exists),
            Err(error) if error.code() == "object-not-found" => Err(refusal),
            Err(error) if (error.kind(), refusal.kind()) == (Kind::PermissionDenied, Kind::PermissionDenied) => {
                Err(refusal)
            }
            Err(_) => Ok(Created::Unknown),
        }
    }
}

impl Read for Remote {
    fn uri(&self) -> &str {
        &self.place.uri
    }

    fn identity(&self) -> String {
        match &self.endpoint {
            Some(endpoint) => format!("{} at {}", self.place.uri, endpoint.trim_end_matches('/')),
            None => self.place.uri.clone(),
        }
    }

    fn features(&self) -> Features {
        let request_cost = self.live().map_or_else(|_| Cost::default().of_request(), |live| live.cost.of_request());
        let (access, fills_slots) = (Some(Access::Ranged), true);
        Features {
            access,
            range_bytes: RANGE_BYTES,
            request_cost,
            fills_slots,
            deadline: self.deadline,
            ..Features::default()
        }
    }

    fn counters(&self) -> &Counters {
        &self.traffic.counters
    }

    fn read(&self, name: &str) -> Result<Bytes> {
        let body = self.ask("read", name, |client, path| async move {
            // Read in chunks, so that memory grows with the bytes received, not with the length that the server claims.
            let mut stream = client.store.get(&path).await?.into_stream();
            let mut body = Vec::new();
            while let Some(chunk) = stream.next().await {
                body.extend_from_slice(&chunk?);
                if body.len() > READ_BYTES {
                    return Ok(None);
                }
            }
            Ok(Some(Bytes::from(body)))
        })?;
        let body = body.ok_or_else(|| {
            Error::new(
                "object-malformed",
                format!(
                    "cannot {}: the object exceeds {READ_BYTES} bytes, the limit for whole-object reads",
                    self.what("read", name)
                ),
            )
        })?;
        add(&self.traffic.counters.reads, 1);
        add(&self.traffic.counters.read_bytes, body.len() as u64);
        Ok(body)
    }

    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        self.receive(ranges, then)
    }

    fn map(&self, name: &str, bytes: u64) -> Result<Bytes> {
        add(&self.traffic.counters.maps, 1);
        add(&self.traffic.counters.mapped_bytes, bytes);
        if bytes == 0 {
            // An empty range cannot be requested.
            return match self.read(name)? {
                body if body.is_empty() => Ok(body),
                body => Err(Error::new(
                    "object-truncated",
                    format!("cannot {}: the object has {} bytes, expected 0", self.what("read", name), body.len()),
                )),
            };
        }
        let starts = (0..bytes).step_by(RANGE_BYTES as usize);
        let ranges: Vec<_> = starts
            .map(|begin| RangeRequest::plain(name, begin, (bytes - begin).min(RANGE_BYTES), Some(bytes)))
            .collect();
        let mut parts = self.fetch(ranges).into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten();
        match (parts.next(), bytes <= RANGE_BYTES) {
            (Some(only), true) => Ok(only),
            (first, _) => {
                let mut whole = Vec::with_capacity(bytes as usize);
                first.into_iter().chain(parts).for_each(|part| whole.extend_from_slice(&part));
                Ok(whole.into())
            }
        }
    }
}

impl Store for Remote {
    fn clock_skew(&self) -> Option<Duration> {
        self.traffic.skew()
    }

    fn newest(&self, folder: &str) -> Result<Option<Vec<String>>> {
        if !self.lists() {
            return Ok(None);
        }
        add(&self.traffic.counters.lists, 1);
        let (objects, _) = self.page(folder, false, Some(FIRST_NAMES), None)?;
        // A store that lists in another order, such as an S3 directory bucket, may not return the lowest names first.
        let in_order = objects.is_sorted_by(|one, next| one.location.as_ref() < next.location.as_ref());
        let names = objects.iter().filter_map(|object| object.location.filename().map(str::to_owned));
        Ok(in_order.then(|| names.collect()))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        add(&self.traffic.counters.lookups, 1);
        match self.ask("look for", name, |client, path| async move { client.store.head(&path).await.map(|_| ()) }) {
            Ok(()) => Ok(true),
            Err(error) if error.code() == "object-not-found" => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn lists(&self) -> bool {
        self.live().is_ok_and(|live| live.client.pages.is_some())
    }

    fn list_page(&self, folder: &str, after: Option<&str>) -> Result<Listing> {
        add(&self.traffic.counters.lists, 1);
        let (objects, next) = self.page(folder, true, None, after)?;
        let entry = |object: ObjectMeta| {
            let name = object.location.filename()?.to_owned();
            Some(ListedObject { name, bytes: object.size, modified: Some(object.last_modified.into()) })
        };
        Ok(Listing { entries: objects.into_iter().filter_map(entry).collect(), next })
    }

    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>> {
        self.writable()?;
        add(&self.traffic.counters.puts, 1);
        let upload = Upload::new(self.live()?.clone(), self.traffic.clone(), self.path(name), self.what("write", name));
        Ok(Box::new(upload))
    }

    fn sync(&self, _folders: &[&str]) -> Result<()> {
        Ok(()) // An object store acknowledges only durable writes.
    }

    fn create(&self, name: &str, body: &[u8]) -> Result<Created> {
        self.writable()?;
        add(&self.traffic.counters.creates, 1);
        let live = self.live()?;
        // Not interruptible: after an interrupt, it would be unknown whether the name exists.
        let answer = match runtime()?.block_on(self.create_once(live, name, Bytes::copy_from_slice(body))) {
            Err(refusal) if refusal.code() != "storage-unreachable" => self.after_refusal(name, body, refusal)?,
            answer => answer?,
        };
        if answer == Created::Unknown {
            let lost = self.lost.fetch_add(1, Relaxed) + 1;
            std::thread::sleep(retry::wait(lost.min(8), false));
        } else {
            self.lost.store(0, Relaxed);
        }
        Ok(answer)
    }

    fn overwrite(&self, name: &str, body: &[u8]) -> Result<()> {
        self.writable()?;
        let body = Bytes::copy_from_slice(body);
        self.ask("write", name, |client, path| {
            let payload = PutPayload::from_bytes(body.clone());
            async move { client.store.put(&path, payload).await.map(|_| ()) }
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.writable()?;
        add(&self.traffic.counters.deletes, 1);
        match self.ask("delete", name, |client, path| async move { client.store.delete(&path).await }) {
            Err(error) if error.code() == "object-not-found" => Ok(()),
            other => other,
        }
    }

    fn survey(&self, see: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()> {
        let prefix = format!("{}/", self.place.prefix);
        let mut token: Option<String> = None;
        loop {
            let (objects, next) = self.page("", false, None, token.as_deref())?;
            for object in objects {
                let name = object.location.as_ref();
                let name = name.strip_prefix(&prefix).unwrap_or(name);
                // Web consoles create an empty object to represent a folder. Skip such objects.
                if object.size > 0 && see(name).is_break() {
                    return Ok(());
                }
            }
            token = next;
            if token.is_none() {
                return Ok(());
            }
        }
    }

    fn initialise(&self) -> Result<()> {
        self.writable()
    }

    fn prove(&self) -> Result<()> {
        self.prove_creates()
    }

    fn writable(&self) -> Result<()> {
        match self.live()?.client.parts {
            Some(_) => Ok(()),
            None => Err(Error::new(
                "read-only",
                format!("cannot write to `{}`: datasets over HTTP are read-only", self.place.uri),
            )
            .hint("write to an s3://, gs:// or az:// URI, or to a local path")),
        }
    }
}
