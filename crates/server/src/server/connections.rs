//! Accepts connections, of clients and to the status page, and answers the requests on them.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::config::Config;
use super::parts::Parts;
use crate::metrics::{Counted, Metrics};
use crate::middleware::Middleware;
use crate::read::zero_copy::ZeroCopy;
use crate::tls::Certificates;
use crate::watch::admin::{self, Admin};

/// The longest headers of a request.
const HEADER_BYTES: usize = 64 << 10;
/// How long a client may take to begin an encrypted connection.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Accept connections for ever.
pub async fn accept(
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
pub type Stream = Pin<Box<dyn Bytes>>;

pub trait Bytes: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Bytes for S {}

/// Begin a connection, encrypted if there is an acceptor. None if the client does not.
async fn begun(stream: Stream, acceptor: Option<TlsAcceptor>) -> Option<Stream> {
    match acceptor {
        None => Some(stream),
        Some(acceptor) => Some(Box::pin(tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await.ok()?.ok()?)),
    }
}

/// Answer the requests of a connection.
pub async fn converse(
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

/// Answer a connection that the server has no room for.
async fn refuse(mut stream: TcpStream) {
    let text = b"HTTP/1.1 503 Slow Down\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let _ = tokio::time::timeout(Duration::from_secs(5), stream.write_all(text)).await;
}

/// Answer the connections to the status page for ever.
pub async fn show_status(listener: TcpListener, admin: Arc<Admin>, certificates: Option<Arc<Certificates>>) {
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
