//! Workers: each sends one request after the other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use bytes::Bytes;
use futures::StreamExt as _;
use penstock_error::{Error, Result};
use penstock_storage::{Io, Options};

use super::line::{Counts, Load};
use super::see::{See, seen, stopped};
use crate::cold::remote::{causes, client};

/// Requests that prepare or delete objects at once.
const AT_ONCE: usize = 16;

/// The objects of a load and the counts of its workers.
pub struct Workers {
    load: Load,
    /// Tries once.
    client: Client,
    /// Tries again what may succeed later.
    patient: Client,
    /// Bytes from which all bodies are cut.
    random: Bytes,
    counts: Mutex<[Counts; 2]>,
    error: Mutex<Option<String>>,
    /// The state of a simple generator, which all workers share.
    dice: AtomicU64,
}

/// Workers that run. They end when this is dropped.
pub struct Running {
    stop: Arc<AtomicBool>,
    tasks: tokio::task::JoinSet<()>,
}

impl Running {
    /// Let the workers end after their present requests.
    pub async fn stop(mut self) {
        self.stop.store(true, Relaxed);
        // A worker only ends early if it panicked, and its requests are then missing from the counts.
        while self.tasks.join_next().await.is_some() {}
    }
}

impl Workers {
    pub async fn new(load: &Load) -> Result<Arc<Workers>> {
        let options = Options::new(load.storage_options.clone(), Io::Auto)?;
        if load.objects == 0 || load.workers == 0 || !(0.0..=1.0).contains(&load.puts) {
            return Err(Error::new(
                "invalid-argument",
                "cannot load: expected at least one object and one worker, and a share of puts from 0 to 1",
            ));
        }
        // Each error counts while requests are measured.
        let (patient, _) = client(&options).await?;
        let client = Client::from_conf(patient.config().to_builder().retry_config(RetryConfig::disabled()).build());
        let mut random = vec![0; load.object_bytes + 4096];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        random.iter_mut().for_each(|byte| *byte = next(&mut state) as u8);
        Ok(Arc::new(Workers {
            load: load.clone(),
            client,
            patient,
            random: random.into(),
            counts: Mutex::new([Counts::new(), Counts::new()]),
            error: Mutex::default(),
            dice: AtomicU64::new(state),
        }))
    }

    /// Write the objects that will be read, or check that the first of them is there.
    pub async fn prepare(&self, see: &mut See<'_>) -> Result<()> {
        let load = &self.load;
        let each = (0..if load.reuses { 1 } else { load.objects }).map(|number| async move {
            if load.reuses {
                self.get(&self.patient, number).await.map(drop)
            } else {
                self.put(&self.patient, number).await
            }
        });
        let mut done = futures::stream::iter(each).buffer_unordered(AT_ONCE);
        while let Some(done) = seen(done.next(), see).await.ok_or_else(stopped)? {
            done.map_err(|why| {
                let hint = match load.reuses {
                    false => "check the endpoint, the keys and the bucket, which must allow writes",
                    true => "run first with --keep and the same size and prefix to create the objects; check the endpoint and the keys",
                };
                Error::new("storage-failed", format!("cannot load bucket `{}`: {why}", load.bucket)).hint(hint)
            })?;
            if see(&[]).is_break() {
                return Err(stopped());
            }
        }
        Ok(())
    }

    /// Return one of the errors of measured requests, if there were any.
    pub fn an_error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn key(&self, number: usize) -> String {
        format!("{}{number:08}", self.load.prefix)
    }

    /// Return the body of an object: a part of the random bytes.
    fn body(&self, number: usize) -> Bytes {
        let begin = number * 37 % 4096;
        self.random.slice(begin..begin + self.load.object_bytes)
    }

    async fn put(&self, client: &Client, number: usize) -> std::result::Result<(), String> {
        let body = ByteStream::from(self.body(number));
        let put = client.put_object().bucket(&self.load.bucket).key(self.key(number)).body(body);
        put.send().await.map(|_| ()).map_err(|error| failed(&error))
    }

    async fn get(&self, client: &Client, number: usize) -> std::result::Result<u64, String> {
        let get = client.get_object().bucket(&self.load.bucket).key(self.key(number)).send().await;
        let mut body = get.map_err(|error| failed(&error))?.body;
        let (mut bytes, mut digest) = (0, crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi));
        while let Some(part) = body.next().await {
            let part = part.map_err(|error| error.to_string())?;
            bytes += part.len() as u64;
            if self.load.verifies {
                digest.update(&part);
            }
        }
        if bytes != self.load.object_bytes as u64 {
            return Err(format!("`{}` has {bytes} bytes, expected {}", self.key(number), self.load.object_bytes));
        }
        if self.load.verifies && digest.finalize() as u32 != crc_fast::crc32_iscsi(&self.body(number)) {
            return Err(format!("`{}` differs from what was written", self.key(number)));
        }
        Ok(bytes)
    }

    /// Start some workers.
    pub fn start(self: &Arc<Self>, count: usize) -> Running {
        // Counts of earlier workers do not belong to these.
        self.take();
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = (0..count).map(|_| work(self.clone(), stop.clone())).collect();
        Running { stop, tasks }
    }

    /// Return the counts since the last call: of reads, and of writes.
    pub fn take(&self) -> [Counts; 2] {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *counts, [Counts::new(), Counts::new()])
    }

    fn roll(&self) -> u64 {
        let mut state = self.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        next(&mut state)
    }

    /// Delete the objects, if this was asked, for at most this long. Fails if some are left.
    pub async fn clean_up(&self, most: Duration, see: &mut See<'_>) -> Result<()> {
        if !self.load.cleans_up {
            return Ok(());
        }
        let each = (0..self.load.objects).map(|number| {
            let delete = self.patient.delete_object().bucket(&self.load.bucket).key(self.key(number)).send();
            async { delete.await.map(drop).map_err(|error| failed(&error)) }
        });
        let mut done = futures::stream::iter(each).buffer_unordered(AT_ONCE);
        let (began, mut deleted, mut why) = (Instant::now(), 0, None);
        loop {
            let next = tokio::time::timeout(most.saturating_sub(began.elapsed()), done.next());
            match seen(next, see).await {
                Some(Ok(Some(Ok(())))) => deleted += 1,
                Some(Ok(Some(Err(error)))) => why = Some(error),
                Some(Ok(None)) => break,
                Some(Err(_)) | None => {
                    why = Some("the load was stopped".to_owned());
                    break;
                }
            }
        }
        let Some(why) = why else { return Ok(()) };
        let left = self.load.objects - deleted;
        let text =
            format!("up to {left} objects of `s3://{}/{}` were not deleted: {why}", self.load.bucket, self.load.prefix);
        Err(Error::new("storage-failed", text).hint("delete the objects under this prefix"))
    }
}

async fn work(workers: Arc<Workers>, stop: Arc<AtomicBool>) {
    while !stop.load(Relaxed) {
        let dice = workers.roll();
        let number = (dice >> 16) as usize % workers.load.objects;
        let is_put = (dice & 0xffff) as f64 / 65536.0 < workers.load.puts;
        let began = Instant::now();
        let done = match is_put {
            true => workers.put(&workers.client, number).await.map(|()| workers.load.object_bytes as u64),
            false => workers.get(&workers.client, number).await,
        };
        let latency = began.elapsed().as_micros() as u64;
        if let Err(error) = &done {
            workers.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
        }
        {
            let mut counts = workers.counts.lock().unwrap_or_else(PoisonError::into_inner);
            let counts = &mut counts[usize::from(is_put)];
            match &done {
                Ok(bytes) => {
                    counts.latency.saturating_record(latency);
                    counts.bytes += bytes;
                }
                Err(_) => counts.errors += 1,
            }
        }
        if done.is_err() {
            // A server that is down should not be asked a million times.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// The next number of a simple generator. Source: SplitMix64, https://prng.di.unimi.it/splitmix64.c
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Return what the server said, or an error and its causes.
pub fn failed<E: ProvideErrorMetadata + std::error::Error + 'static>(error: &SdkError<E>) -> String {
    if let Some(code) = error.code() {
        return error.message().map_or_else(|| code.to_owned(), |message| format!("{code}: {message}"));
    }
    causes(Some(error))
}
