//! The server itself: how it starts, what it reads again on SIGHUP, and how it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use penstock_error::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::access_keys::Keys;
use crate::metrics::Metrics;
use crate::middleware::Middleware;
use crate::read::immutable::MarkerOf;
use crate::tls::Certificates;
use crate::watch::admin::Admin;
use crate::watch::sampler::Sampler;
use config::{check_values, failed, token};
use connections::{accept, converse, show_status};
use parts::Parts;

mod config;
mod connections;
mod parts;

pub use config::{Addresses, Config, check};

/// What is on the way between a client and a server without a socket.
const PIPE_BYTES: usize = 64 << 10;

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
        let Parts { middleware, .. } = Parts::open(config, |_| None, &Arc::new(Metrics::new()), |_| {}).await?;
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

async fn run(config: Config, marker_of: MarkerOf, ready: impl FnOnce(Addresses), note: fn(&str)) -> Result<()> {
    let signals = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
    let [Ok(mut terminate), Ok(mut interrupt), Ok(hangup)] = signals else {
        return Err(failed("signals", "they cannot be received"));
    };
    let metrics = Arc::new(Metrics::new());
    let parts = Parts::open(&config, marker_of, &metrics, note).await?;
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
        let admin = Admin {
            metrics: metrics.clone(),
            sampler: parts.sampler.clone(),
            cached_objects: parts.cached_objects.clone(),
            token,
        };
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
        note(&format!("aborted {} requests after {} seconds", metrics.running.get(), config.drain_seconds.as_secs()));
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
