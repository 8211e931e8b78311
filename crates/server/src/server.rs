//! The server itself: its configuration, its connections and their limits, and how it ends.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use penstock_cache::{Drives, Spec, Trust};
use penstock_error::Result;

use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::{S3Service, S3ServiceBuilder};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use crate::access_keys::Keys;
use crate::authentication::Taken;
use crate::back::WriteBack;
use crate::batch::Batch;
use crate::cold::remote::Remote;
use crate::folder::Folder;
use crate::hosts::{BucketNames, Domains, Hosts};
use crate::limits::quota::Quotas;
use crate::memory::Memory;
use crate::metrics::{Counted, Metrics};
use crate::middleware::{Gate, LIST_BYTES, Limits, Middleware};
use crate::ops::dispatch::Dispatch;
use crate::ops::tier::Tier;
use crate::read::arena::Arena;
use crate::read::blocks::{Blocks, Reading};
use crate::read::immutable::{Immutable, MarkerOf};
use crate::read::memory_cache::MemoryCache;
use crate::read::zero_copy::ZeroCopy;
use crate::tls::Certificates;
use crate::watch::access_log::AccessLog;
use crate::watch::admin::{self, Admin};
use crate::watch::sampler::Sampler;
use config::{check_values, failed, not_served, only_bucket, pending_folder, quotas, token};

mod config;

pub use config::{Config, check};

/// The longest headers of a request.
const HEADER_BYTES: usize = 64 << 10;
/// What is on the way between a client and a server without a socket.
const PIPE_BYTES: usize = 64 << 10;
/// How long a client may take to begin an encrypted connection.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Where a server listens.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    pub listen: SocketAddr,
    pub status: Option<SocketAddr>,
}

/// Serve until SIGTERM or Ctrl-C. Calls `ready` when connections are accepted, and `note` with what an operator should know. SIGHUP reads keys and
/// certificates again, and opens the access log again.
pub fn serve(config: Config, marker_of: MarkerOf, ready: impl FnOnce(Addresses), note: fn(&str)) -> Result<()> {
    check_values(&config)?;
    allow_descriptors();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failed("threads", error))?;
    let ended = runtime.block_on(run(config, marker_of, ready, note));
    // Threads that wait for a drive or a cold store must not hold up the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// Allow as many open files as the system lets this process have. Many clients need more than the usual 1,024.
fn allow_descriptors() {
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // With fewer, connections wait until others end.
    let _ = rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: limits.maximum, ..limits },
    );
}

/// A server without a socket, for programs that send bytes as a client would.
pub struct Unconnected {
    middleware: Arc<Middleware>,
    idle: Duration,
}

impl Unconnected {
    /// Open the cold store and the cache of a configuration. Nobody listens.
    pub async fn open(config: &Config) -> Result<Unconnected> {
        let Parts { middleware, .. } = parts(config, |_| None, &Arc::new(Metrics::new()), |_| {}).await?;
        Ok(Unconnected { middleware, idle: config.idle_seconds })
    }

    /// Answer all requests of a connection, on which a client sends these bytes and then nothing more. Returns what the server sends.
    pub async fn answer(&self, sent: &[u8]) -> Vec<u8> {
        let (mut client, server) = tokio::io::duplex(PIPE_BYTES);
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        // The connection would end at once without it.
        let shutdown = GracefulShutdown::new();
        let served = converse(Box::pin(server), peer, self.middleware.clone(), shutdown.watcher(), self.idle);
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
    middleware: Arc<Middleware>,
    keys: Option<Keys>,
    certificates: Option<Arc<Certificates>>,
    sampler: Arc<Sampler>,
    blocks: Option<Arc<Blocks>>,
    back: Option<Arc<WriteBack>>,
    arena: Option<Arc<Arena>>,
}

async fn run(config: Config, marker_of: MarkerOf, ready: impl FnOnce(Addresses), note: fn(&str)) -> Result<()> {
    let signals = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
    let [Ok(mut terminate), Ok(mut interrupt), Ok(hangup)] = signals else {
        return Err(failed("signals", "they cannot be received"));
    };
    let metrics = Arc::new(Metrics::new());
    let parts = parts(&config, marker_of, &metrics, note).await?;
    let bind = |address: SocketAddr| async move {
        let hint = "name another address or port, or end the program that uses it";
        TcpListener::bind(address).await.map_err(|error| failed(&format!("listen at {address}"), error).hint(hint))
    };
    let wanted = config.addresses()?;
    let listener = bind(wanted.listen).await?;
    let mut addresses =
        Addresses { listen: listener.local_addr().map_err(|error| failed("listen", error))?, status: None };
    if let Some(address) = wanted.status {
        let listener = bind(address).await?;
        addresses.status = listener.local_addr().ok();
        let token = config.status_token.as_deref().map(token).transpose()?;
        let admin =
            Admin { metrics: metrics.clone(), sampler: parts.sampler.clone(), blocks: parts.blocks.clone(), token };
        tokio::spawn(show_status(listener, Arc::new(admin), parts.certificates.clone().filter(|_| config.status_tls)));
    }
    tokio::spawn(sample_each_second(parts.sampler.clone()));
    parts.certificates.iter().for_each(|certificates| certificates.watch(&metrics, note));
    tokio::spawn(reload_on(
        hangup,
        (parts.keys.clone(), parts.certificates.clone()),
        parts.middleware.clone(),
        metrics.clone(),
        note,
    ));
    ready(addresses);
    let graceful = GracefulShutdown::new();
    let mut accepting = Box::pin(accept(&listener, &config, &parts, &metrics, &graceful));
    let is_asked = tokio::select! {
        () = &mut accepting => false,
        _ = terminate.recv() => true,
        _ = interrupt.recv() => false,
    };
    metrics.draining.set(1);
    if is_asked && !config.lame_duck.is_zero() {
        note(&format!(
            "stopping in {} seconds; health checks report it to load balancers",
            config.lame_duck.as_secs_f64()
        ));
        tokio::select! {
            () = &mut accepting => {}
            () = tokio::time::sleep(config.lame_duck) => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    drop(accepting);
    drop(listener);
    note(&format!("stopping: {} requests are being answered", metrics.running.get()));
    // Connections that are still busy after this time are cut.
    if tokio::time::timeout(config.drain_seconds, graceful.shutdown()).await.is_err() {
        note(&format!("cut {} requests after {} seconds", metrics.running.get(), config.drain_seconds.as_secs()));
    }
    if let Some(back) = &parts.back {
        let _ = tokio::time::timeout(config.drain_seconds, back.settle_all()).await;
        if back.pending_objects() > 0 {
            note(&format!(
                "{} objects are not in the cold store yet; they are sent when the server starts again",
                back.pending_objects()
            ));
        }
    }
    Ok(())
}

/// Accept connections for ever.
async fn accept(
    listener: &TcpListener,
    config: &Config,
    parts: &Parts,
    metrics: &Arc<Metrics>,
    graceful: &GracefulShutdown,
) {
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
        let mut stream = TimeoutStream::new(ZeroCopy::new(stream, parts.arena.clone()));
        stream.set_write_timeout(Some(config.idle_seconds));
        let (middleware, metrics, watcher, idle) =
            (parts.middleware.clone(), metrics.clone(), graceful.watcher(), config.idle_seconds);
        let acceptor = parts.certificates.as_ref().map(|certificates| certificates.acceptor());
        tokio::spawn(async move {
            let _open = Counted::begin(&metrics.connections);
            if let Some(stream) = begun(Box::pin(stream), acceptor).await {
                converse(stream, peer, middleware, watcher, idle).await;
            }
            drop(permit);
        });
    }
}

/// The bytes of a connection, encrypted or not. What is generic over both would be compiled for each of them.
type Stream = Pin<Box<dyn Bytes>>;

trait Bytes: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Bytes for S {}

/// Begin a connection, encrypted if there is an acceptor. None if the client does not.
async fn begun(stream: Stream, acceptor: Option<TlsAcceptor>) -> Option<Stream> {
    match acceptor {
        None => Some(stream),
        Some(acceptor) => Some(Box::pin(tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await.ok()?.ok()?)),
    }
}

/// Answer the requests of a connection.
async fn converse(
    stream: Stream,
    peer: SocketAddr,
    middleware: Arc<Middleware>,
    watcher: hyper_util::server::graceful::Watcher,
    idle: Duration,
) {
    let answer = service_fn(move |request: hyper::Request<Incoming>| middleware.clone().answer(peer, request));
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

async fn parts(config: &Config, marker_of: MarkerOf, metrics: &Arc<Metrics>, note: fn(&str)) -> Result<Parts> {
    let limits = quotas(config)?;
    let (mut cold, identity) = open_cold(config, metrics, note).await?;
    let back = match &config.write_back {
        None => None,
        Some(text) => {
            let (folder, bytes) = pending_folder(text)?;
            let back = WriteBack::open((cold, &identity), &folder, bytes, metrics.clone(), note).await?;
            cold = back.clone();
            let objects = back.pending_objects();
            note(&format!(
                "puts are acknowledged before the cold store has them: {} may have the only copy",
                folder.display()
            ));
            if objects > 0 {
                note(&format!("sending {objects} objects of an earlier run"));
            }
            Some(back)
        }
    };
    let (memory, memory_cache) = memory(config, note);
    let arena = memory_cache.as_ref().map(|memory_cache| memory_cache.arena().clone());
    let is_folder = !config.cold.starts_with("s3://");
    let (blocks, trust) = match &config.cache {
        // It lets other servers of the store know that this one writes.
        None => (None, Arc::new(Trust::without_drives(&identity)?)),
        Some(spec) => {
            let drives = Drives::open(&Spec::parse(spec)?)?;
            for (folder, error) in &drives.failed {
                note(&format!("the cache {} is not used: {error}", folder.display()));
            }
            let immutable = Immutable::new(cold.clone(), marker_of, config.immutable.clone(), metrics.clone());
            let (revalidate, stale_if_error, states_bytes) =
                (config.revalidate()?, config.stale_if_error, config.memory_bytes / 8);
            let reading =
                Reading { memory: memory.clone(), memory_cache, states_bytes, revalidate, stale_if_error, immutable };
            let blocks = Blocks::new(cold.clone(), identity, drives, reading, metrics.clone())?;
            // What was acknowledged earlier is sent now. A server without the folder may have run meanwhile, and knows nothing of it.
            if back.as_ref().is_some_and(|back| back.pending_objects() > 0) {
                blocks.cached.distrust_notes();
            }
            let trust = blocks.cached.trust().ok_or_else(|| failed(&config.cold, "its cache stores no notes"))?.clone();
            (Some(Arc::new(blocks)), trust)
        }
    };
    let waiting = |bucket: &str, prefix: &str| back.as_ref().map_or(0, |back| back.pending_bytes_of(bucket, prefix));
    let quotas = Quotas::open(limits, cold.clone(), waiting, metrics, note);
    let sampler = Arc::new(Sampler::new(metrics.clone(), blocks.clone(), quotas.clone()));
    let keys = config.keys.as_deref().map(|path| Keys::open(path, only_bucket(config)?)).transpose()?;
    let certificates =
        config.tls.as_ref().map(|(chain, key)| Certificates::open(chain, key)).transpose()?.map(Arc::new);
    let log = config.access_log.as_deref().map(|path| AccessLog::open(path, metrics.clone())).transpose()?;
    let domains = Arc::new(Domains::new(&config.domain)?);
    let service = service(
        Tier { cold, is_folder, blocks: blocks.clone(), trust, memory: memory.clone(), quotas },
        keys.clone(),
        &domains,
    );
    let limits = Limits { requests: config.requests, idle: config.idle_seconds, memory };
    let taken = match (&keys, config.signature_v2) {
        (None, _) => Taken::Unverified,
        (Some(_), false) => Taken::Version4,
        (Some(_), true) => Taken::Both,
    };
    let gate = Gate { domains, taken, keys: keys.clone() };
    let middleware = Arc::new(Middleware::new(service, metrics.clone(), log, limits, gate));
    Ok(Parts { middleware, keys, certificates, sampler, blocks, back, arena })
}

/// Return the memory for bodies. Before a cache, a quarter of it holds what is read often, and an eighth what is known of objects.
fn memory(config: &Config, note: fn(&str)) -> (Memory, Option<MemoryCache>) {
    if config.cache.is_none() {
        return (Memory::new(config.memory_bytes), None);
    }
    let bytes = config.memory_bytes - config.memory_bytes / 8;
    match MemoryCache::new(config.memory_bytes / 4) {
        Ok(memory_cache) => (Memory::new(bytes - config.memory_bytes / 4), Some(memory_cache)),
        Err(error) => {
            note(&format!("frequently read data is not kept in memory: {error}"));
            (Memory::new(bytes), None)
        }
    }
}

/// Open the cold store. Returns it, and a text that identifies it in the keys of the cache.
async fn open_cold(config: &Config, metrics: &Metrics, note: fn(&str)) -> Result<(Arc<dyn s3s::S3>, String)> {
    if config.cold.starts_with("s3://") {
        let (remote, identity) = Remote::open(&config.cold, &config.options()?, metrics.cold_running.clone()).await?;
        let remote = Arc::new(remote);
        let (tried, cold) = (remote.clone(), config.cold.clone());
        tokio::spawn(async move {
            // It may be reached later, and what is cached can be read meanwhile.
            if let Err(error) = tried.try_out().await {
                let why = error.message().unwrap_or(error.code().as_str());
                note(&format!(
                    "the cold store {cold} does not respond as expected: {why}; check the bucket, the endpoint and the credentials"
                ));
            }
        });
        return Ok((remote, identity));
    }
    let path = penstock_storage::local_path(&config.cold)?.ok_or_else(|| not_served(&config.cold))?;
    let folder = Folder::open(&path, metrics, note)?;
    let identity =
        format!("serve {}", std::fs::canonicalize(&path).map_err(|error| failed(&config.cold, error))?.display());
    Ok((Arc::new(folder), identity))
}

fn service(tier: Tier, keys: Option<Keys>, domains: &Arc<Domains>) -> S3Service {
    let tier = Arc::new(tier);
    let mut builder = S3ServiceBuilder::new(Dispatch(tier.clone()));
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

async fn show_status(listener: TcpListener, admin: Arc<Admin>, certificates: Option<Arc<Certificates>>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let admin = admin.clone();
        let acceptor = certificates.as_ref().map(|certificates| certificates.acceptor());
        tokio::spawn(async move {
            if let Some(stream) = begun(Box::pin(stream), acceptor).await {
                show(stream, admin).await;
            }
        });
    }
}

/// Answer the requests of a connection to the status page.
async fn show(stream: Stream, admin: Arc<Admin>) {
    let answer = service_fn(move |request| admin::answer(admin.clone(), request));
    let mut builder = hyper::server::conn::http1::Builder::new();
    let builder =
        builder.timer(TokioTimer::new()).header_read_timeout(HANDSHAKE).max_buf_size(HEADER_BYTES).half_close(true);
    // Clients may end a connection at any time.
    let _ = builder.serve_connection(TokioIo::new(stream), answer).await;
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
async fn reload_on(
    mut hangup: Signal,
    (keys, certificates): (Option<Keys>, Option<Arc<Certificates>>),
    middleware: Arc<Middleware>,
    metrics: Arc<Metrics>,
    note: fn(&str),
) {
    while hangup.recv().await.is_some() {
        let (known, own) = (keys.clone(), certificates.clone());
        // A drive that hangs must not hold up connections.
        let read = move || [known.as_ref().map(Keys::reload), own.as_ref().map(|certificates| certificates.reload())];
        let Ok(results) = tokio::task::spawn_blocking(read).await else { continue };
        let refused: Vec<String> =
            results.into_iter().flatten().filter_map(Result::err).map(|error| error.message().to_owned()).collect();
        match refused.is_empty() {
            true => note("reloaded keys and certificates"),
            false => refused.iter().for_each(|why| note(&format!("{why}; the previous one remains in use"))),
        }
        certificates.iter().for_each(|certificates| certificates.watch(&metrics, note));
        middleware.reopen_log();
    }
}
