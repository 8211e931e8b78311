//! Object storage: S3, Google Cloud Storage, Azure, and plain HTTP(S) for reading. See docs/design/0004-stores.md.

mod connect;
mod cost;
mod level;
mod patience;
mod ranges;
mod service;
mod upload;

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use object_store::list::PaginatedListOptions;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload};
use penstock_error::{Error, Kind, Result};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::counters::{Counters, add};
use crate::options::Options;
use crate::process::{self, PerProcess};
use crate::{Access, Created, ObjectWriter, RangeRequest, RequestCost, Storage, Then};
use connect::{Client, Place};
use cost::Cost;
use level::Level;
use patience::{Patience, Tries, Verdict, attempt, verdict};
use ranges::Asked;
use service::Told;

/// The most bytes requested over one connection at once.
const RANGE_BYTES: u64 = 8 << 20;

/// Maximum length of objects that are read whole: records, roots, pages, words.
const READ_BYTES: usize = 256 << 20;
/// Number of names that a listing for the newest commit requests. Foreign names may sort before it.
const FIRST_NAMES: usize = 10;

/// Concurrent creates of one name, and rounds of them, that prove a store. In the first round connections are opened, so creates
/// arrive one by one. Later they arrive together, and a server that checks before it writes accepts two of them.
const RACERS: usize = 8;
const RACES: usize = 3;

/// Services whose create-only puts this process has proven.
static PROVEN: PerProcess<Mutex<HashSet<String>>> = PerProcess::new(Mutex::default);

/// The runtime of all requests of this process.
static RUNTIME: PerProcess<std::result::Result<Runtime, String>> = PerProcess::new(|| {
    // Half of the processors: one thread moves 1 GB per second, and the threads that wait for the bytes must process them.
    let threads = (std::thread::available_parallelism().map_or(2, usize::from) / 2).clamp(1, 8);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name("penstock-io").enable_all().build().map_err(|error| error.to_string())
});

fn runtime() -> Result<&'static Runtime> {
    RUNTIME.get().as_ref().map_err(|error| Error::new("internal", format!("cannot start the network threads: {error}")))
}

/// How often a waiting thread checks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);

/// Wait for network work. The work is dropped if the user wants to stop.
fn wait<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    runtime()?.block_on(async {
        tokio::pin!(work);
        loop {
            match tokio::time::timeout(LOOK, &mut work).await {
                Ok(answer) => return answer,
                Err(_) if process::interrupted() => return Err(Error::new("interrupted", "interrupted while waiting for the store")),
                Err(_) => {}
            }
        }
    })
}

/// The state of a store in one process.
struct Live {
    client: Client,
    patience: Patience,
    /// Durations of the last ranges in seconds, for hedging.
    recent: Mutex<VecDeque<f64>>,
    cost: Cost,
}

type Connect = Box<dyn Fn() -> Result<Arc<Live>> + Send + Sync>;

/// A store below a prefix of a bucket.
pub struct Remote {
    place: Place,
    /// Scheme, bucket, endpoint and profile: the key in `PROVEN`.
    service: String,
    told: Arc<Told>,
    live: PerProcess<Result<Arc<Live>>, Connect>,
    hedge: bool,
    deadline: Duration,
    /// Number of consecutive creates whose answer was lost. Each waits longer than the one before.
    lost: AtomicU32,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Remote({})", self.place.uri)
    }
}

impl Remote {
    /// Open a store. Cost: no request.
    pub fn open(uri: &str, options: &Options) -> Result<Remote> {
        let place = Place::parse(uri)?;
        let told = Arc::new(Told::new());
        let deadline = options.timeout()?;
        let connect: Connect = {
            let (place, options, told) = (place.clone(), options.clone(), told.clone());
            Box::new(move || {
                let client = place.connect(&options, told.clone())?;
                Ok(Arc::new(Live {
                    client,
                    patience: Patience { deadline, level: Level::new() },
                    recent: Mutex::default(),
                    cost: Cost::default(),
                }))
            })
        };
        let service = format!("{} {:?} {:?}", place.bucket(), options.get("endpoint_url"), options.get("profile"));
        let remote = Remote {
            place,
            service,
            told,
            live: PerProcess::new(connect),
            hedge: options.flag("hedge")?,
            deadline,
            lost: AtomicU32::new(0),
        };
        remote.live()?;
        Ok(remote)
    }

    fn live(&self) -> Result<&Arc<Live>> {
        self.live.get().as_ref().map_err(Clone::clone)
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').filter(|part| !part.is_empty()).fold(self.place.prefix.clone(), |path, part| path.join(part))
    }

    fn what(&self, verb: &str, name: &str) -> String {
        format!("{verb} `{}/{name}`", self.place.uri)
    }

    /// Send one request, and repeat it as `patience` allows.
    fn ask<T, W>(&self, verb: &str, name: &str, work: impl Fn(Client, Path) -> W) -> Result<T>
    where
        W: Future<Output = object_store::Result<T>>,
    {
        let (live, path, what) = (self.live()?, self.path(name), self.what(verb, name));
        wait(live.patience.ask(&self.told.counters, &what, || work(live.client.clone(), path.clone())))
    }

    /// Send one put that must not overwrite. Not repeated once sent: only the caller knows what a second answer means.
    async fn create_once(&self, live: &Live, name: &str, body: Bytes) -> Result<Created> {
        let (path, what) = (self.path(name), self.what("create", name));
        let until = Instant::now() + live.patience.deadline;
        let mut permit = live.patience.level.permit().await;
        let mut tries = Tries::default();
        loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let payload = PutPayload::from_bytes(body.clone());
            // One try gets only part of the deadline, because the next one may be answered.
            let patience = (live.patience.deadline / 4).clamp(Duration::from_secs(3), Duration::from_secs(15));
            let within = until.min(Instant::now() + patience);
            let (result, ending) = attempt(within, live.client.store.put_opts(&path, payload, options)).await;
            let error = match result {
                Ok(_) => return Ok(Created::Created),
                Err(object_store::Error::AlreadyExists { .. }) if ending.says_taken() => return Ok(Created::Exists),
                Err(error) => error,
            };
            permit = match verdict(&what, &error, &ending) {
                Verdict::Final(error) => return Err(error),
                Verdict::Again { sent: true, throttled, .. } => {
                    permit.throttled = throttled;
                    return Ok(Created::Unknown);
                }
                unsent => live.patience.again(&self.told.counters, unsent, &mut tries, until, permit).await?,
            };
        }
    }

    /// Run concurrent creates of one name, each repeated until its answer is certain. Returns why the store cannot be trusted, if so.
    fn race(&self, name: &str) -> Result<Option<&'static str>> {
        let live = self.live()?;
        let bodies: Vec<Bytes> = (0..RACERS).map(|racer| Bytes::from(format!("penstock {racer}"))).collect();
        let racer = |body: Bytes| async move {
            let until = Instant::now() + live.patience.deadline;
            let mut lost = 0;
            loop {
                match self.create_once(live, name, body.clone()).await? {
                    Created::Unknown if Instant::now() < until => {
                        lost += 1;
                        tokio::time::sleep(patience::wait(lost.min(8), false)).await;
                    }
                    Created::Unknown => {
                        let text = format!("cannot {}: no certain answer", self.what("create", name));
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
            _ if late == Created::Created => Some("a create-only put did not reject an existing name"),
            [] if bodies.contains(&kept) => None, // The winner's answer was lost.
            [winner] if bodies[winner] == kept => None,
            [_] | [] => Some("a create-only put was acknowledged, but another body is stored"),
            _ => Some("more than one of several create-only puts of one name was acknowledged"),
        })
    }

    /// Return a page of the objects below a prefix, and the token of the next page. Empty if the store cannot list.
    fn page(
        &self,
        folder: &str,
        prefix: Option<&str>,
        most: Option<usize>,
        token: Option<String>,
    ) -> Result<(Vec<ObjectMeta>, Option<String>)> {
        self.ask("list", folder, |client, _| {
            let options = PaginatedListOptions { max_keys: most, page_token: token.clone(), ..PaginatedListOptions::default() };
            async move {
                let Some(pages) = &client.pages else { return Ok((Vec::new(), None)) };
                let page = pages.list_paginated(prefix, options).await?;
                Ok((page.result.objects, page.page_token))
            }
        })
    }
}

impl Storage for Remote {
    fn uri(&self) -> &str {
        &self.place.uri
    }

    fn access(&self, _name: &str) -> Access {
        Access::Ranged
    }

    fn range_bytes(&self) -> u64 {
        RANGE_BYTES
    }

    fn request_cost(&self) -> RequestCost {
        self.live().map_or_else(|_| Cost::default().of_request(), |live| live.cost.of_request())
    }

    fn fills_slots(&self) -> bool {
        true
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn clock_skew(&self) -> Option<Duration> {
        self.told.skew()
    }

    fn read(&self, name: &str) -> Result<Bytes> {
        let body = self.ask("read", name, |client, path| async move {
            // Read in chunks: memory grows with the bytes received, not with the length that the server claims.
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
                format!("cannot {}: more than {READ_BYTES} bytes, the limit for objects that are read whole", self.what("read", name)),
            )
        })?;
        add(&self.told.counters.reads, 1);
        add(&self.told.counters.read_bytes, body.len() as u64);
        Ok(body)
    }

    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        let count = ranges.len();
        let (live, runtime) = match (self.live(), runtime()) {
            (Ok(live), Ok(runtime)) => (live, runtime),
            (Err(error), _) | (_, Err(error)) => return (0..count).map(|_| Err(error.clone())).collect(),
        };
        add(&self.told.counters.ranges, count as u64);
        let bytes = ranges.iter().map(|range| range.end() - range.begin).sum();
        add(&self.told.counters.range_bytes, bytes);
        let began = Instant::now();
        let stop: Arc<Mutex<Option<Error>>> = Arc::default();
        let mut tasks = JoinSet::new();
        for (index, range) in ranges.into_iter().enumerate() {
            let stop = stop.clone();
            let (live, told, hedge, then) = (live.clone(), self.told.clone(), self.hedge, then.clone());
            let (path, what) = (self.path(&range.name), self.what("read", &range.name));
            let task = async move {
                let permit = live.patience.level.permit().await;
                // Once one range has failed for good, the others need not wait for their own deadlines.
                if let Some(error) = stop.lock().unwrap_or_else(PoisonError::into_inner).clone() {
                    return (index, Err(error));
                }
                let seen = |piece: usize, bytes: &Bytes| then(index, piece, bytes);
                let asked = Asked { counters: &told.counters, path, what, then: &seen };
                let pieces = match hedge {
                    true => live.hedged(&asked, range, permit).await,
                    false => live.range(&asked, range, permit).await,
                };
                if let Some(error) = pieces.as_ref().err().filter(|error| error.kind() == Kind::Unavailable) {
                    stop.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
                }
                (index, pieces)
            };
            tasks.spawn_on(task, runtime.handle());
        }
        // One task waits for all others, so that the caller's thread is woken once and not for each range. Dropping a task set
        // aborts its tasks.
        let broken = || Error::new("internal", "a network task failed");
        let mut all = JoinSet::new();
        let join = async move {
            let mut answers: Vec<Result<Vec<Bytes>>> = (0..count).map(|_| Err(broken())).collect();
            while let Some(joined) = tasks.join_next().await {
                joined.into_iter().for_each(|(index, answer)| answers[index] = answer);
            }
            answers
        };
        all.spawn_on(join, runtime.handle());
        match wait(async { all.join_next().await.and_then(|joined| joined.ok()).ok_or_else(broken) }) {
            Ok(answers) => {
                live.cost.note(count, bytes, began.elapsed());
                answers
            }
            Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
        }
    }

    fn map(&self, name: &str, bytes: u64) -> Result<Bytes> {
        add(&self.told.counters.maps, 1);
        add(&self.told.counters.mapped_bytes, bytes);
        if bytes == 0 {
            // An empty range cannot be requested.
            return match self.read(name)? {
                body if body.is_empty() => Ok(body),
                body => {
                    Err(Error::new("object-truncated", format!("cannot {}: {} bytes, expected 0", self.what("read", name), body.len())))
                }
            };
        }
        let starts = (0..bytes).step_by(RANGE_BYTES as usize);
        let ranges: Vec<_> = starts.map(|begin| RangeRequest::plain(name, begin, (bytes - begin).min(RANGE_BYTES), Some(bytes))).collect();
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

    fn newest(&self, folder: &str) -> Result<Option<Vec<String>>> {
        if !self.lists() {
            return Ok(None);
        }
        add(&self.told.counters.lists, 1);
        let (objects, _) = self.page(folder, Some(&format!("{}/", self.path(folder))), Some(FIRST_NAMES), None)?;
        // A store that lists in another order, such as an S3 directory bucket, does not return the first names.
        let in_order = objects.is_sorted_by(|one, next| one.location.as_ref() < next.location.as_ref());
        let names = objects.iter().filter_map(|object| object.location.filename().map(str::to_owned));
        Ok(in_order.then(|| names.collect()))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        add(&self.told.counters.lookups, 1);
        match self.ask("look for", name, |client, path| async move { client.store.head(&path).await.map(|_| ()) }) {
            Ok(()) => Ok(true),
            Err(error) if error.code() == "object-not-found" => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn lists(&self) -> bool {
        self.live().is_ok_and(|live| live.client.pages.is_some())
    }

    fn list(&self, folder: &str) -> Result<Vec<(String, u64)>> {
        add(&self.told.counters.lists, 1);
        let listed = self.ask("list", folder, |client, path| async move { client.store.list_with_delimiter(Some(&path)).await })?;
        Ok(listed.objects.into_iter().filter_map(|object| Some((object.location.filename()?.to_owned(), object.size))).collect())
    }

    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>> {
        self.writable()?;
        add(&self.told.counters.puts, 1);
        let upload = upload::Upload::new(self.live()?.clone(), self.told.clone(), self.path(name), self.what("write", name));
        Ok(Box::new(upload))
    }

    fn sync(&self, _folders: &[&str]) -> Result<()> {
        Ok(()) // What an object store has acknowledged is durable.
    }

    fn create(&self, name: &str, body: &[u8]) -> Result<Created> {
        self.writable()?;
        add(&self.told.counters.creates, 1);
        let live = self.live()?;
        // Not interruptible: an interrupt would leave open whether the name exists.
        let answer = runtime()?.block_on(self.create_once(live, name, Bytes::copy_from_slice(body)))?;
        if answer == Created::Unknown {
            let lost = self.lost.fetch_add(1, Relaxed) + 1;
            std::thread::sleep(patience::wait(lost.min(8), false));
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
        add(&self.told.counters.deletes, 1);
        match self.ask("delete", name, |client, path| async move { client.store.delete(&path).await }) {
            Err(error) if error.code() == "object-not-found" => Ok(()),
            other => other,
        }
    }

    fn survey(&self, see: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()> {
        let prefix = Some(format!("{}/", self.place.prefix)).filter(|prefix| prefix != "/");
        let mut token = None;
        loop {
            let (objects, next) = self.page("", prefix.as_deref(), None, token)?;
            for object in objects {
                let name = object.location.as_ref();
                let name = name.strip_prefix(prefix.as_deref().unwrap_or("")).unwrap_or(name);
                // Web consoles create an empty object to represent a folder. Skip it.
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
        self.writable()?;
        self.prove()
    }

    fn prove(&self) -> Result<()> {
        let proven = || PROVEN.get().lock().unwrap_or_else(PoisonError::into_inner);
        if proven().contains(&self.service) {
            return Ok(());
        }
        for _ in 0..RACES {
            let mut random = [0u8; 8];
            getrandom::fill(&mut random).map_err(|error| Error::new("internal", format!("cannot get random numbers: {error}")))?;
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

    fn writable(&self) -> Result<()> {
        match self.live()?.client.parts {
            Some(_) => Ok(()),
            None => Err(Error::new("read-only", format!("cannot write to `{}`: datasets over HTTP are read-only", self.place.uri))
                .hint("write through s3://, gs://, az:// or a local path")),
        }
    }

    fn counters(&self) -> &Counters {
        &self.told.counters
    }
}
