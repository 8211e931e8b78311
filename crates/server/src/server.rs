//! The server itself: its configuration, its connections and their limits, and how it ends.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use penstock_cache::{Drives, Spec};
use penstock_error::{Error, Result};
use penstock_storage::Options;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use crate::blocks::{Blocks, Revalidate};
use crate::cold::remote::Remote;
use crate::folder::Folder;
use crate::keys::Keys;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::tier::Tier;

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct Config {
    /// `s3://`, `s3://bucket` or a folder.
    pub cold: String,
    pub options: Options,
    /// The drives of the cache, such as `/nvme:2TB`, or None to cache nothing.
    pub cache: Option<String>,
    pub listen: SocketAddr,
    /// A file with access keys, or None to allow everything to everybody.
    pub keys: Option<PathBuf>,
    /// Domains whose subdomains are buckets.
    pub domains: Vec<String>,
    pub revalidate: Revalidate,
    /// Returns whether an object never changes.
    pub is_immutable: fn(&str) -> bool,
    pub memory_bytes: u64,
    pub connections: usize,
    /// How long a connection may do nothing.
    pub idle: Duration,
    /// How long requests may take to end after SIGTERM.
    pub drain: Duration,
}

fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    Error::new("storage-failed", format!("cannot serve: {what}: {error}"))
}

/// Serve until SIGTERM or Ctrl-C. Calls `ready` with the address when connections are accepted.
pub fn serve(config: Config, ready: impl FnOnce(SocketAddr)) -> Result<()> {
    if config.keys.is_none() && !config.listen.ip().is_loopback() {
        return Err(Error::new("invalid-argument", format!("cannot serve at {}: everybody could write", config.listen))
            .hint("give --keys FILE, or listen at 127.0.0.1"));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failed("threads", error))?;
    let ended = runtime.block_on(run(config, ready));
    // Threads that wait for a drive or a cold store must not hold up the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

async fn run(config: Config, ready: impl FnOnce(SocketAddr)) -> Result<()> {
    let metrics = Arc::new(Metrics::new());
    let service = service(&config, &metrics).await?;
    let listener = TcpListener::bind(config.listen).await.map_err(|error| failed(&format!("listen at {}", config.listen), error))?;
    ready(listener.local_addr().map_err(|error| failed("listen", error))?);
    let (graceful, room) = (GracefulShutdown::new(), Arc::new(Semaphore::new(config.connections)));
    let mut stop = std::pin::pin!(stopped());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let Ok((stream, _peer)) = accepted else {
            // No descriptors are left: some connection must end first.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = room.clone().try_acquire_owned() else {
            metrics.refused.inc();
            tokio::spawn(refuse(stream));
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (service, metrics) = (service.clone(), metrics.clone());
        let mut stream = TimeoutStream::new(stream);
        stream.set_read_timeout(Some(config.idle));
        stream.set_write_timeout(Some(config.idle));
        let answered = service_fn(move |request: hyper::Request<Incoming>| {
            let (service, metrics) = (service.clone(), metrics.clone());
            async move {
                let began = Instant::now();
                metrics.running.inc();
                let response = service.call(request.map(s3s::Body::from)).await;
                metrics.running.dec();
                let _ = began;
                response
            }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(config.idle)
            .serve_connection(TokioIo::new(Box::pin(stream)), answered);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // Clients may end a connection at any time.
            let _ = connection.await;
            drop(permit);
        });
    }
    drop(listener);
    // Connections that are still busy after this time are cut.
    let _ = tokio::time::timeout(config.drain, graceful.shutdown()).await;
    Ok(())
}

async fn service(config: &Config, metrics: &Arc<Metrics>) -> Result<S3Service> {
    let (cold, identity): (Arc<dyn s3s::S3>, String) = if config.cold.starts_with("s3://") {
        let (remote, identity) = Remote::open(&config.cold, &config.options).await?;
        (Arc::new(remote), identity)
    } else {
        let path = config.cold.strip_prefix("file://").unwrap_or(&config.cold);
        if path.contains("://") {
            return Err(Error::new("unsupported-storage", format!("cannot serve `{}`", config.cold))
                .hint("serve s3://bucket, s3:// or a folder; other stores have S3 gateways of their own"));
        }
        let folder = Folder::open(Path::new(path))?;
        let identity = format!("serve {}", std::fs::canonicalize(path).map_err(|error| failed(path, error))?.display());
        (Arc::new(folder), identity)
    };
    let memory = Memory::new(config.memory_bytes);
    let blocks = match &config.cache {
        None => None,
        Some(spec) => {
            let drives = Drives::open(&Spec::parse(spec)?)?;
            let (cold, metrics) = (cold.clone(), metrics.clone());
            let blocks = Blocks::new(cold, identity, drives, memory.clone(), config.revalidate, config.is_immutable, metrics);
            Some(Arc::new(blocks))
        }
    };
    let mut builder = S3ServiceBuilder::new(Tier { cold, blocks, memory });
    if let Some(path) = &config.keys {
        let keys = Keys::open(path)?;
        builder.set_auth(keys.clone());
        builder.set_access(keys);
    }
    if !config.domains.is_empty() {
        let domains = s3s::host::MultiDomain::new(&config.domains);
        builder.set_host(domains.map_err(|error| Error::new("invalid-argument", format!("cannot serve domains: {error}")))?);
    }
    Ok(builder.build())
}

/// Answer a connection that the server has no room for.
async fn refuse(mut stream: TcpStream) {
    use tokio::io::AsyncWriteExt as _;
    let text = b"HTTP/1.1 503 Slow Down\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let _ = tokio::time::timeout(Duration::from_secs(5), stream.write_all(text)).await;
}

/// Wait for SIGTERM or Ctrl-C.
async fn stopped() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        }
        _ => std::future::pending().await,
    }
}
