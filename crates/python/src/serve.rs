//! The S3 server of the tier.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use penstock_error::Error;
use penstock_server::{Addresses, Config, Revalidate};
use penstock_storage::{Io, Options};
use pyo3::prelude::*;

use crate::errors::OrRaise;

/// Serve a cold store until SIGTERM or Ctrl-C. Calls `ready(address, status_address)` when connections are accepted.
#[pyfunction]
// Over 6 parameters: Python passes each by name.
#[pyo3(signature = (
    *, cold, cache, listen, status, keys, tls, access_log, domains, revalidate, memory_bytes, connections, requests, idle_seconds, drain_seconds,
    storage_options, ready
))]
#[allow(clippy::too_many_arguments)]
pub fn serve(
    py: Python<'_>,
    cold: String,
    cache: Option<String>,
    listen: &str,
    status: Option<String>,
    keys: Option<PathBuf>,
    tls: Option<(PathBuf, PathBuf)>,
    access_log: Option<PathBuf>,
    domains: Vec<String>,
    revalidate: &str,
    memory_bytes: u64,
    connections: usize,
    requests: usize,
    idle_seconds: f64,
    drain_seconds: f64,
    storage_options: Vec<(String, String)>,
    ready: Py<PyAny>,
) -> PyResult<()> {
    let config = || {
        Ok(Config {
            cold,
            options: Options::new(storage_options, Io::Auto)?,
            cache,
            listen: address(listen)?,
            status: status.as_deref().map(address).transpose()?,
            keys,
            tls,
            access_log,
            domains,
            revalidate: policy(revalidate)?,
            is_immutable,
            memory_bytes,
            connections,
            requests,
            idle: Duration::from_secs_f64(idle_seconds.clamp(0.1, 1e6)),
            drain: Duration::from_secs_f64(drain_seconds.clamp(0.0, 1e6)),
        })
    };
    let config = config().or_raise(py)?;
    let tell = |addresses: Addresses| {
        Python::attach(|py| {
            // A function that fails must not end the server.
            let told = ready.call1(py, (addresses.listen.to_string(), addresses.status.map(|status| status.to_string())));
            told.err().into_iter().for_each(|error| error.print(py));
        });
    };
    py.detach(|| penstock_server::serve(config, tell, |text| eprintln!("{text}"))).or_raise(py)
}

fn address(text: &str) -> penstock_error::Result<SocketAddr> {
    text.parse().map_err(|_| Error::new("invalid-argument", format!("cannot listen at `{text}`")).hint("write it as 127.0.0.1:9100"))
}

/// Return whether an object of a dataset never changes, wherever the dataset is in its bucket.
fn is_immutable(key: &str) -> bool {
    let begin = key.rmatch_indices('/').nth(1).map_or(0, |(at, _)| at + 1);
    penstock_format::ids::is_immutable(&key[begin..])
}

fn policy(text: &str) -> penstock_error::Result<Revalidate> {
    let bad = || {
        Error::new("invalid-argument", format!("the policy `{text}` is not known")).hint("write always, never, or a time such as 60s")
    };
    match text {
        "always" => Ok(Revalidate::Always),
        "never" => Ok(Revalidate::Never),
        _ => {
            let seconds: f64 = text.strip_suffix('s').and_then(|seconds| seconds.parse().ok()).ok_or_else(bad)?;
            if !(0.0..=1e9).contains(&seconds) {
                return Err(bad());
            }
            Ok(Revalidate::After(Duration::from_secs_f64(seconds)))
        }
    }
}
