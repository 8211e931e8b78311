//! The S3 server of the tier, and load for any S3 endpoint.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use penstock_error::Error;
use penstock_server::load::{Line, Load, Warm, Warmed};
use penstock_server::{Addresses, Config, Revalidate};
use penstock_storage::{Io, Options};
use pyo3::prelude::*;
use serde::Deserialize;

use crate::errors::{OrRaise, interrupted};

/// What `serve` is given, in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Serving {
    cold: String,
    cache: Option<String>,
    write_back: Option<String>,
    listen: String,
    status: Option<String>,
    status_token: Option<PathBuf>,
    status_tls: bool,
    keys: Option<PathBuf>,
    signature_v2: bool,
    tls: Option<(PathBuf, PathBuf)>,
    access_log: Option<PathBuf>,
    domains: Vec<String>,
    revalidate: String,
    stale_if_error: f64,
    immutable: Vec<String>,
    quotas: Vec<String>,
    memory_bytes: u64,
    connections: usize,
    requests: usize,
    idle_seconds: f64,
    lame_duck: f64,
    drain_seconds: f64,
    storage_options: BTreeMap<String, String>,
}

impl Serving {
    fn config(self) -> penstock_error::Result<Config> {
        Ok(Config {
            cold: self.cold,
            options: Options::new(self.storage_options, Io::Auto)?,
            cache: self.cache,
            write_back: self.write_back,
            listen: address(&self.listen)?,
            status: self.status.as_deref().map(address).transpose()?,
            status_token: self.status_token,
            status_tls: self.status_tls,
            keys: self.keys,
            takes_version_2: self.signature_v2,
            tls: self.tls,
            access_log: self.access_log,
            domains: self.domains,
            revalidate: policy(&self.revalidate)?,
            stale_if_error: Duration::from_secs_f64(self.stale_if_error.clamp(0.0, 1e9)),
            marker_of: penstock_format::ids::marker_of,
            immutable: self.immutable,
            quotas: self.quotas,
            memory_bytes: self.memory_bytes,
            connections: self.connections,
            requests: self.requests,
            idle: Duration::from_secs_f64(self.idle_seconds.clamp(0.1, 1e6)),
            lame_duck: Duration::from_secs_f64(self.lame_duck.clamp(0.0, 1e6)),
            drain: Duration::from_secs_f64(self.drain_seconds.clamp(0.0, 1e6)),
        })
    }
}

fn parsed<'a, T: Deserialize<'a>>(json: &'a str) -> penstock_error::Result<T> {
    serde_json::from_str(json).map_err(|error| Error::new("invalid-argument", format!("the configuration is not valid: {error}")))
}

/// Serve a cold store, as the configuration in JSON says, until SIGTERM or Ctrl-C. Calls `ready(address, status_address)` when connections are
/// accepted.
#[pyfunction]
pub fn serve(py: Python<'_>, config: &str, ready: Py<PyAny>) -> PyResult<()> {
    let config = parsed(config).and_then(Serving::config).or_raise(py)?;
    let report = |addresses: Addresses| {
        Python::attach(|py| {
            // A function that fails must not end the server.
            let reported = ready.call1(py, (addresses.listen.to_string(), addresses.status.map(|status| status.to_string())));
            reported.err().into_iter().for_each(|error| error.print(py));
        });
    };
    py.detach(|| penstock_server::serve(config, report, |text| eprintln!("{text}"))).or_raise(py)
}

/// Check the configuration of a server, in JSON, and the files that it names, without serving or creating anything.
#[pyfunction]
pub fn check_serve(py: Python<'_>, config: &str) -> PyResult<()> {
    let config = parsed(config).and_then(Serving::config).or_raise(py)?;
    py.detach(|| penstock_server::check(&config, |text| eprintln!("{text}"))).or_raise(py)
}

fn address(text: &str) -> penstock_error::Result<SocketAddr> {
    text.parse().map_err(|_| Error::new("invalid-argument", format!("cannot listen at `{text}`")).hint("write it as 127.0.0.1:9100"))
}

fn policy(text: &str) -> penstock_error::Result<Revalidate> {
    let bad =
        || Error::new("invalid-argument", format!("--revalidate cannot be `{text}`")).hint("write always, never, or a time such as 60s");
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

/// The result of a search for the knee: workers, bytes per second, mean milliseconds, and the same of each step.
type Tuned = (usize, f64, f64, Vec<(usize, f64, f64)>);

/// What `load` is given, in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Loading {
    bucket: String,
    prefix: String,
    puts: f64,
    object_bytes: usize,
    objects: usize,
    workers: usize,
    seconds: f64,
    interval_seconds: f64,
    verifies: bool,
    reuses: bool,
    cleans_up: bool,
    storage_options: BTreeMap<String, String>,
}

impl Loading {
    fn load(self) -> penstock_error::Result<Load> {
        Ok(Load {
            options: Options::new(self.storage_options, Io::Auto)?,
            bucket: self.bucket,
            prefix: self.prefix,
            puts: self.puts,
            object_bytes: self.object_bytes,
            objects: self.objects,
            workers: self.workers,
            seconds: self.seconds,
            interval_seconds: self.interval_seconds,
            verifies: self.verifies,
            reuses: self.reuses,
            cleans_up: self.cleans_up,
        })
    }
}

/// Load an S3 endpoint, as the configuration in JSON says. Calls `see` with the lines of each interval, as a list of names and values, and returns
/// the lines of the whole. With `tune`, searches for the number of workers at the knee and returns it instead. Last, returns one of the errors.
#[pyfunction]
pub fn load(py: Python<'_>, config: &str, tune: bool, see: Py<PyAny>) -> PyResult<(Vec<Values>, Option<Tuned>, Option<String>)> {
    let load = parsed(config).and_then(Loading::load).or_raise(py)?;
    let mut failed = None;
    let done = py.detach(|| {
        let mut each = |lines: &[Line]| {
            if !lines.is_empty() {
                failed = Python::attach(|py| see.call1(py, (lines.iter().map(values).collect::<Vec<_>>(),)).err());
            }
            if failed.is_some() || interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        match tune {
            false => penstock_server::load::run(&load, &mut each).map(|(lines, error)| (lines.iter().map(values).collect(), None, error)),
            true => penstock_server::load::tune(&load, &mut each).map(|(tuned, error)| {
                let steps = tuned.steps.iter().map(|step| (step.workers, step.bytes_per_second, step.mean_ms)).collect();
                (Vec::new(), Some((tuned.workers, tuned.bytes_per_second, tuned.mean_ms, steps)), error)
            }),
        }
    });
    match failed {
        Some(error) => Err(error),
        None => done.or_raise(py),
    }
}

/// What `warm_objects` is given, in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Warming {
    bucket: String,
    prefix: String,
    workers: usize,
    storage_options: BTreeMap<String, String>,
}

impl Warming {
    fn warm(self) -> penstock_error::Result<Warm> {
        let options = Options::new(self.storage_options, Io::Auto)?;
        Ok(Warm { options, bucket: self.bucket, prefix: self.prefix, workers: self.workers })
    }
}

/// How many objects were read, their bytes, how many were not, and the first keys of these with the reasons.
type WarmedObjects = (u64, u64, u64, Vec<(String, String)>);

/// Read all objects below a prefix of an S3 endpoint, as the configuration in JSON says. Calls `see(objects, bytes)` several times a second. Returns
/// how many objects were read, and their bytes. Then how many were not, and the first keys of these with the reasons.
#[pyfunction]
pub fn warm_objects(py: Python<'_>, config: &str, see: Py<PyAny>) -> PyResult<WarmedObjects> {
    let warm = parsed(config).and_then(Warming::warm).or_raise(py)?;
    let mut failed = None;
    let done = py.detach(|| {
        penstock_server::load::warm(&warm, &mut |warmed: &Warmed| {
            failed = Python::attach(|py| see.call1(py, (warmed.objects, warmed.bytes)).err());
            if failed.is_some() || interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    });
    match failed {
        Some(error) => Err(error),
        None => done.map(|warmed| (warmed.objects, warmed.bytes, warmed.failed, warmed.failures)).or_raise(py),
    }
}

/// The name of an operation, and the names and values of its counts.
type Values = (&'static str, Vec<(&'static str, f64)>);

fn values(line: &Line) -> Values {
    let values = vec![
        ("workers", line.workers as f64),
        ("at_seconds", line.at_seconds),
        ("seconds", line.seconds),
        ("requests", line.requests as f64),
        ("bytes", line.bytes as f64),
        ("errors", line.errors as f64),
        ("bytes_per_second", line.bytes_per_second()),
        ("least_ms", line.least_ms),
        ("mean_ms", line.mean_ms),
        ("p50_ms", line.p50_ms),
        ("p99_ms", line.p99_ms),
        ("most_ms", line.most_ms),
    ];
    (line.operation, values)
}
