//! The server itself: its configuration, its connections and their limits, and how it ends.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use penstock_cache::{DriveSpec, Drives, Spec};
use penstock_error::{Error, Result};
use penstock_storage::Options;

use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::{S3Service, S3ServiceBuilder};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use crate::authentication::Taken;
use crate::back::WriteBack;
use crate::batch::Batch;
use crate::cold::remote::Remote;
use crate::folder::Folder;
use crate::front::{Front, LIST_BYTES, Limits};
use crate::hosts::{BucketNames, Domains, Hosts};
use crate::keys::Keys;
use crate::memory::Memory;
use crate::metrics::{Counted, Metrics};
use crate::ops::tier::Tier;
use crate::read::arena::Arena;
use crate::read::blocks::{Blocks, Revalidate};
use crate::read::hot::Hot;
use crate::read::wire::Wire;
use crate::tier::Shared;
use crate::tls::Certificates;
use crate::watch::access_log::AccessLog;
use crate::watch::admin;
use crate::watch::sampler::Sampler;

/// The longest headers of a request.
const HEADER_BYTES: usize = 64 << 10;
/// The least memory that lets each kind of request proceed.
const LEAST_MEMORY_BYTES: u64 = 64 << 20;
/// What is on the way between a client and a server without a socket.
const PIPE_BYTES: usize = 64 << 10;
/// How long a client may take to begin an encrypted connection.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct Config {
    /// `s3://`, `s3://bucket` or a folder.
    pub cold: String,
    pub options: Options,
    /// The drives of the cache, such as `/nvme:2TB`, or None to cache nothing.
    pub cache: Option<String>,
    /// A folder and a size for puts that are acknowledged before the cold store has them, such as `/nvme/pending:50GB`, or None to wait for it.
    pub write_back: Option<String>,
    pub listen: SocketAddr,
    /// The address of the status page and of the counts, or None.
    pub status: Option<SocketAddr>,
    /// A file with access keys, or None to allow everything to everybody.
    pub keys: Option<PathBuf>,
    /// Whether signatures of version 2 are taken.
    pub takes_version_2: bool,
    /// Files with a chain of certificates and its private key, or None for plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The file of the access log, or None.
    pub access_log: Option<PathBuf>,
    /// Domains whose subdomains are buckets.
    pub domains: Vec<String>,
    pub revalidate: Revalidate,
    /// Returns whether an object never changes.
    pub is_immutable: fn(&str) -> bool,
    pub memory_bytes: u64,
    pub connections: usize,
    /// Requests that are answered at once.
    pub requests: usize,
    /// How long a connection may do nothing.
    pub idle: Duration,
    /// How long requests may take to end after SIGTERM.
    pub drain: Duration,
}

/// Where a server listens.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    pub listen: SocketAddr,
    pub status: Option<SocketAddr>,
}

fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    Error::new("storage-failed", format!("cannot serve: {what}: {error}"))
}

/// Serve until SIGTERM or Ctrl-C. Calls `ready` when connections are accepted, and `note` with what an operator should know. SIGHUP reads keys and
/// certificates again, and opens the access log again.
pub fn serve(config: Config, ready: impl FnOnce(Addresses), note: fn(&str)) -> Result<()> {
    if config.keys.is_none() && !config.listen.ip().is_loopback() {
        return Err(Error::new("invalid-argument", format!("cannot serve at {}: everybody could write", config.listen))
            .hint("give --keys FILE, or listen at 127.0.0.1"));
    }
    if config.memory_bytes < LEAST_MEMORY_BYTES {
        return Err(Error::new("invalid-argument", format!("cannot serve with {} bytes of memory for bodies", config.memory_bytes))
            .hint("give --memory-bytes of 67108864 or more"));
    }
    allow_descriptors();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failed("threads", error))?;
    let ended = runtime.block_on(run(config, ready, note));
    // Threads that wait for a drive or a cold store must not hold up the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// Allow as many open files as the system lets this process have. Many clients need more than the usual 1,024.
fn allow_descriptors() {
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // With fewer, connections wait until others end.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, rustix::process::Rlimit { current: limits.maximum, ..limits });
}

/// A server without a socket, for programs that send bytes as a client would.
pub struct Unconnected {
    front: Arc<Front>,
    idle: Duration,
}

impl Unconnected {
    /// Open the cold store and the cache of a configuration. Nobody listens.
    pub async fn open(config: &Config) -> Result<Unconnected> {
        let Parts { front, .. } = parts(config, &Arc::new(Metrics::new()), |_| {}).await?;
        Ok(Unconnected { front, idle: config.idle })
    }

    /// Answer all requests of a connection, on which a client sends these bytes and then nothing more. Returns what the server sends.
    pub async fn answer(&self, sent: &[u8]) -> Vec<u8> {
        let (mut client, server) = tokio::io::duplex(PIPE_BYTES);
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        // The connection would end at once without it.
        let shutdown = GracefulShutdown::new();
        let served = converse(server, peer, self.front.clone(), shutdown.watcher(), self.idle);
        let asked = async move {
            let (mut from, mut to) = tokio::io::split(&mut client);
            let mut received = Vec::new();
            // The server may end the connection before all is sent or received.
            let send = async {
                let _ = to.write_all(sent).await;
                let _ = to.shutdown().await;
            };
            let _ = tokio::join!(send, from.read_to_end(&mut received));
            received
        };
        tokio::join!(served, asked).1
    }
}

/// What is read again on SIGHUP, or serves all connections.
struct Parts {
    front: Arc<Front>,
    keys: Option<Keys>,
    certificates: Option<Arc<Certificates>>,
    sampler: Arc<Sampler>,
    back: Option<Arc<WriteBack>>,
    arena: Option<Arc<Arena>>,
}

async fn run(config: Config, ready: impl FnOnce(Addresses), note: fn(&str)) -> Result<()> {
    let signals = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
    let [Ok(mut terminate), Ok(mut interrupt), Ok(hangup)] = signals else { return Err(failed("signals", "they cannot be received")) };
    let metrics = Arc::new(Metrics::new());
    let parts = parts(&config, &metrics, note).await?;
    let bind = |address: SocketAddr| async move {
        let hint = "name another address or port, or end the program that uses it";
        TcpListener::bind(address).await.map_err(|error| failed(&format!("listen at {address}"), error).hint(hint))
    };
    let listener = bind(config.listen).await?;
    let mut addresses = Addresses { listen: listener.local_addr().map_err(|error| failed("listen", error))?, status: None };
    if let Some(address) = config.status {
        let listener = bind(address).await?;
        addresses.status = listener.local_addr().ok();
        tokio::spawn(show_status(listener, metrics.clone(), parts.sampler.clone()));
    }
    tokio::spawn(sample_each_second(parts.sampler.clone()));
    tokio::spawn(reload_on(hangup, parts.keys.clone(), parts.certificates.clone(), parts.front.clone(), note));
    ready(addresses);
    let graceful = GracefulShutdown::new();
    tokio::select! {
        () = accept(&listener, &config, &parts, &metrics, &graceful) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    drop(listener);
    metrics.draining.set(1);
    note(&format!("ending: {} requests are being answered", metrics.running.get()));
    // Connections that are still busy after this time are cut.
    if tokio::time::timeout(config.drain, graceful.shutdown()).await.is_err() {
        note(&format!("cut {} requests after {} seconds", metrics.running.get(), config.drain.as_secs()));
    }
    if let Some(back) = &parts.back {
        let _ = tokio::time::timeout(config.drain, back.settle_all()).await;
        if back.pending_objects() > 0 {
            note(&format!("{} objects are not in the cold store yet; they are sent when the server starts again", back.pending_objects()));
        }
    }
    Ok(())
}

/// Accept connections for ever.
async fn accept(listener: &TcpListener, config: &Config, parts: &Parts, metrics: &Arc<Metrics>, graceful: &GracefulShutdown) {
    let room = Arc::new(Semaphore::new(config.connections));
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            // No descriptors are left: some connection must end first.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = room.clone().try_acquire_owned() else {
            metrics.refused.inc();
            tokio::spawn(refuse(stream));
            continue;
        };
        let mut stream = TimeoutStream::new(Wire::new(stream, parts.arena.clone()));
        stream.set_write_timeout(Some(config.idle));
        let stream = Box::pin(stream);
        let (front, metrics, watcher, idle) = (parts.front.clone(), metrics.clone(), graceful.watcher(), config.idle);
        let acceptor = parts.certificates.as_ref().map(|certificates| certificates.acceptor());
        tokio::spawn(async move {
            let _open = Counted::begin(&metrics.connections);
            match acceptor {
                None => converse(stream, peer, front, watcher, idle).await,
                Some(acceptor) => {
                    if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                        converse(stream, peer, front, watcher, idle).await;
                    }
                }
            }

            drop(permit);
        });
    }
}

/// Answer the requests of a connection.
async fn converse<S>(stream: S, peer: SocketAddr, front: Arc<Front>, watcher: hyper_util::server::graceful::Watcher, idle: Duration)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answer = service_fn(move |request: hyper::Request<Incoming>| front.clone().answer(peer, request));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_buf_size(HEADER_BYTES)
        // A client may end its side after its last request.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), answer);
    // Clients may end a connection at any time.
    let _ = watcher.watch(connection).await;
}

async fn parts(config: &Config, metrics: &Arc<Metrics>, note: fn(&str)) -> Result<Parts> {
    let (mut cold, identity) = open_cold(config, metrics, note).await?;
    let back = match &config.write_back {
        None => None,
        Some(text) => {
            let (folder, bytes) = pending_folder(text)?;
            let back = WriteBack::open((cold, &identity), &folder, bytes, metrics.clone(), note).await?;
            cold = back.clone();
            let objects = back.pending_objects();
            note(&format!("puts are acknowledged before the cold store has them: {} may have the only copy", folder.display()));
            if objects > 0 {
                note(&format!("{objects} objects of an earlier run are sent now"));
            }
            Some(back)
        }
    };
    let (memory, hot) = memory(config, note);
    let arena = hot.as_ref().map(|hot| hot.arena().clone());
    let blocks = match &config.cache {
        None => None,
        Some(spec) => {
            let drives = Drives::open(&Spec::parse(spec)?)?;
            for (folder, error) in &drives.failed {
                note(&format!("the cache {} is not used: {error}", folder.display()));
            }
            let (cold, metrics) = (cold.clone(), metrics.clone());
            Some(Arc::new(Blocks::new(cold, identity, drives, memory.clone(), hot, config.revalidate, config.is_immutable, metrics)))
        }
    };
    let sampler = Arc::new(Sampler::new(metrics.clone(), blocks.clone()));
    let keys = config.keys.as_deref().map(Keys::open).transpose()?;
    let certificates = config.tls.as_ref().map(|(chain, key)| Certificates::open(chain, key)).transpose()?.map(Arc::new);
    let log = config.access_log.as_deref().map(|path| AccessLog::open(path, metrics.clone())).transpose()?;
    let domains = Arc::new(Domains::new(&config.domains)?);
    let service = service(Tier { cold, blocks, memory: memory.clone() }, keys.clone(), &domains);
    let limits = Limits { requests: config.requests, idle: config.idle, memory };
    let taken = match (&keys, config.takes_version_2) {
        (None, _) => Taken::Unverified,
        (Some(_), false) => Taken::Version4,
        (Some(_), true) => Taken::Both,
    };
    let front = Arc::new(Front::new(service, metrics.clone(), log, limits, domains, taken));
    Ok(Parts { front, keys, certificates, sampler, back, arena })
}

/// Return the memory for bodies. Before a cache, a quarter of it holds what is read often.
fn memory(config: &Config, note: fn(&str)) -> (Memory, Option<Hot>) {
    let hot_bytes = config.memory_bytes / 4;
    match config.cache.as_ref().map(|_| Hot::new(hot_bytes)) {
        Some(Ok(hot)) => return (Memory::new(config.memory_bytes - hot_bytes), Some(hot)),
        Some(Err(error)) => note(&format!("what is read often is not held in memory: {error}")),
        None => {}
    }
    (Memory::new(config.memory_bytes), None)
}

/// Return the folder and the size of `--write-back`.
fn pending_folder(text: &str) -> Result<(PathBuf, u64)> {
    match Spec::parse(text)?.drives.as_slice() {
        [DriveSpec { folder, budget_bytes: Some(bytes), is_in_memory: false }] => Ok((folder.clone(), *bytes)),
        _ => Err(Error::new("invalid-argument", format!("cannot write back through `{text}`"))
            .hint("name one folder on a drive and the most bytes that wait there, such as /nvme/pending:50GB")),
    }
}

/// Open the cold store. Returns it, and a text that identifies it in the keys of the cache.
async fn open_cold(config: &Config, metrics: &Metrics, note: fn(&str)) -> Result<(Arc<dyn s3s::S3>, String)> {
    if config.cold.starts_with("s3://") {
        let (remote, identity) = Remote::open(&config.cold, &config.options, metrics.cold_running.clone()).await?;
        let remote = Arc::new(remote);
        let (tried, cold) = (remote.clone(), config.cold.clone());
        tokio::spawn(async move {
            // It may be reached later, and what is cached can be read meanwhile.
            if let Err(error) = tried.try_out().await {
                let why = error.message().unwrap_or(error.code().as_str());
                note(&format!(
                    "the cold store {cold} does not answer as it should: {why}; check the bucket, the endpoint and the credentials"
                ));
            }
        });
        return Ok((remote, identity));
    }
    let path = penstock_storage::local_path(&config.cold)?.ok_or_else(|| {
        Error::new("unsupported-storage", format!("cannot serve `{}`", config.cold))
            .hint("serve s3://bucket, s3:// or a folder; most other stores have an S3 endpoint")
    })?;
    let folder = Folder::open(&path)?;
    let identity = format!("serve {}", std::fs::canonicalize(&path).map_err(|error| failed(&config.cold, error))?.display());
    Ok((Arc::new(folder), identity))
}

fn service(tier: Tier, keys: Option<Keys>, domains: &Arc<Domains>) -> S3Service {
    let tier = Arc::new(tier);
    let mut builder = S3ServiceBuilder::new(Shared(tier.clone()));
    builder.set_validation(BucketNames);
    builder.set_route(Batch { tier, keys: keys.clone(), domains: domains.clone() });
    builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(limits()))));
    if let Some(keys) = keys {
        builder.set_auth(keys.clone());
        builder.set_access(keys);
    }
    if domains.is_some() {
        builder.set_host(Hosts(domains.clone()));
    }
    builder.build()
}

/// Limits of what is held in memory before a request is understood.
fn limits() -> S3Config {
    let mut limits = S3Config::default();
    limits.xml_max_body_size = LIST_BYTES as usize;
    limits
}

/// Answer a connection that the server has no room for.
async fn refuse(mut stream: TcpStream) {
    let text = b"HTTP/1.1 503 Slow Down\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let _ = tokio::time::timeout(Duration::from_secs(5), stream.write_all(text)).await;
}

async fn show_status(listener: TcpListener, metrics: Arc<Metrics>, sampler: Arc<Sampler>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (metrics, sampler) = (metrics.clone(), sampler.clone());
        let answer = service_fn(move |request| admin::answer(metrics.clone(), sampler.clone(), request));
        tokio::spawn(async move {
            let mut builder = hyper::server::conn::http1::Builder::new();
            // Clients may end a connection at any time.
            let _ = builder.timer(TokioTimer::new()).max_buf_size(HEADER_BYTES).serve_connection(TokioIo::new(stream), answer).await;
        });
    }
}

async fn sample_each_second(sampler: Arc<Sampler>) {
    let mut second = tokio::time::interval(Duration::from_secs(1));
    loop {
        second.tick().await;
        let sampler = sampler.clone();
        // A drive that hangs must not hold up the runtime.
        let _ = tokio::task::spawn_blocking(move || sampler.take()).await;
    }
}

/// Read keys and certificates again on each SIGHUP.
async fn reload_on(mut hangup: Signal, keys: Option<Keys>, certificates: Option<Arc<Certificates>>, front: Arc<Front>, note: fn(&str)) {
    while hangup.recv().await.is_some() {
        let results = [keys.as_ref().map(Keys::reload), certificates.as_ref().map(|certificates| certificates.reload())];
        for error in results.into_iter().flatten().filter_map(Result::err) {
            note(&format!("{}; it stays as it was", error.message()));
        }
        front.reopen_log();
    }
}
