//! Create-only puts, and a check that a store honours them.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use object_store::{ObjectStore as _, PutMode, PutOptions, PutPayload};
use penstock_error::{Error, Kind, Result};
use tokio::time::Instant;

use super::live::{Live, wait};
use super::retry::{self, Tries, Verdict, attempt};
use super::store::Remote;
use crate::process::PerProcess;
use crate::read::Read as _;
use crate::store::{Created, Store as _};

/// Number of concurrent creates of the same name in each race.
const RACERS: usize = 8;
/// Number of races that a store must pass. The first one opens connections, so its creates arrive one by one. In later races
/// they arrive together, so a server that checks and writes in separate steps accepts more than one of them.
const RACES: usize = 3;

/// Services whose create-only puts have passed the check in this process.
static PROVEN: PerProcess<Mutex<HashSet<String>>> = PerProcess::new(Mutex::default);

impl Remote {
    /// Send one put that must not overwrite an object. Once sent, it is not repeated, because only the caller can interpret a second reply.
    pub(super) async fn create_once(&self, live: &Live, name: &str, body: Bytes) -> Result<Created> {
        let (path, what) = (self.path(name), self.what("create", name));
        let until = Instant::now() + live.retry.deadline;
        let mut permit = live.retry.concurrency.permit().await;
        let mut tries = Tries::default();
        loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let payload = PutPayload::from_bytes(body.clone());
            // Each attempt gets only part of the deadline, to leave time for a retry.
            let patience = (live.retry.deadline / 4).clamp(Duration::from_secs(3), Duration::from_secs(15));
            let within = until.min(Instant::now() + patience);
            let (result, ending) = attempt(within, live.client.store.put_opts(&path, payload, options)).await;
            let error = match result {
                Ok(_) => return Ok(Created::Created),
                Err(object_store::Error::AlreadyExists { .. }) if ending.says_taken() => return Ok(Created::Exists),
                Err(error) => error,
            };
            permit = match live.retry.verdict(&what, &error, &ending) {
                Verdict::Final(error) => return Err(error),
                Verdict::Again { sent: true, throttled, .. } => {
                    permit.throttled = throttled;
                    return Ok(Created::Unknown);
                }
                unsent => live.retry.again(&self.traffic.counters, unsent, &mut tries, until, permit).await?,
            };
        }
    }

    /// Run concurrent creates of one name, and repeat each until its outcome is certain. Returns a reason if the store cannot be trusted.
    fn race(&self, name: &str) -> Result<Option<&'static str>> {
        let live = self.live()?;
        let bodies: Vec<Bytes> = (0..RACERS).map(|racer| Bytes::from(format!("penstock {racer}"))).collect();
        let racer = |body: Bytes| async move {
            let until = Instant::now() + live.retry.deadline;
            let mut lost = 0;
            loop {
                match self.create_once(live, name, body.clone()).await? {
                    Created::Unknown if Instant::now() < until => {
                        lost += 1;
                        tokio::time::sleep(retry::wait(lost.min(8), false)).await;
                    }
                    Created::Unknown => {
                        let text = format!("cannot {}: no definite reply", self.what("create", name));
                        return Err(Error::new("storage-failed", text));
                    }
                    certain => return Ok(certain),
                }
            }
        };
        let answers = wait(async { futures::future::try_join_all(bodies.iter().cloned().map(racer)).await })?;
        let late = wait(racer(Bytes::from_static(b"penstock late")))?;
        let kept = self.read(name)?;
        let winners: Vec<usize> = (0..RACERS).filter(|racer| answers[*racer] == Created::Created).collect();
        Ok(match winners[..] {
            _ if late == Created::Created => Some("a create-only put of an existing name was not rejected"),
            [] if bodies.contains(&kept) => None, // The winner's reply was lost.
            [winner] if bodies[winner] == kept => None,
            [_] | [] => Some("a create-only put was acknowledged, but a different body is stored"),
            _ => Some("more than one create-only put of the same name was acknowledged"),
        })
    }

    pub(super) fn prove_creates(&self) -> Result<()> {
        let proven = || PROVEN.get().lock().unwrap_or_else(PoisonError::into_inner);
        if proven().contains(&self.service) {
            return Ok(());
        }
        for _ in 0..RACES {
            let mut random = [0u8; 8];
            getrandom::fill(&mut random)
                .map_err(|error| Error::new("internal", format!("cannot get random numbers: {error}")))?;
            let name = format!("probe-{:016x}", u64::from_le_bytes(random));
            let raced = self.race(&name);
            let _ = self.delete(&name); // A leftover probe is harmless.
            let why = match raced {
                Ok(None) => continue,
                Ok(Some(why)) => why.to_owned(),
                Err(error) if error.kind() == Kind::Unsupported => error.message().to_owned(),
                Err(error) => return Err(error),
            };
            let text = format!("cannot write to dataset `{}`: {why}", self.place.uri);
            let hint = "two writers could overwrite each other's commits there; choose a store with conditional puts (If-None-Match)";
            return Err(Error::new("unsupported-storage", text).hint(hint));
        }
        proven().insert(self.service.clone());
        Ok(())
    }
}
