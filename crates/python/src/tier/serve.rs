//! The S3 server of the tier, and load for any S3 endpoint.

use std::ops::ControlFlow;

use penstock_error::Error;
use penstock_server::load::{Line, Load, Warm, Warmed};
use penstock_server::{Addresses, Config};
use pyo3::prelude::*;
use serde::Deserialize;

use crate::errors::{OrRaise, interrupted};

fn parsed<'a, T: Deserialize<'a>>(json: &'a str) -> penstock_error::Result<T> {
    serde_json::from_str(json)
        .map_err(|error| Error::new("invalid-argument", format!("the configuration is not valid: {error}")))
}

/// Serve a cold store, as the configuration in JSON says, until SIGTERM or Ctrl-C. Calls `ready(address, status_address)` when connections are
/// accepted.
#[pyfunction]
pub fn serve(py: Python<'_>, config: &str, ready: Py<PyAny>) -> PyResult<()> {
    let config = parsed::<Config>(config).or_raise(py)?;
    let report = |addresses: Addresses| {
        Python::attach(|py| {
            // A function that fails must not end the server.
            let reported =
                ready.call1(py, (addresses.listen.to_string(), addresses.status.map(|status| status.to_string())));
            reported.err().into_iter().for_each(|error| error.print(py));
        });
    };
    py.detach(|| penstock_server::serve(config, penstock_format::ids::marker_of, report, |text| eprintln!("{text}")))
        .or_raise(py)
}

/// Check the configuration of a server, in JSON, and the files that it names, without serving or creating anything.
#[pyfunction]
pub fn check_serve(py: Python<'_>, config: &str) -> PyResult<()> {
    let config = parsed::<Config>(config).or_raise(py)?;
    py.detach(|| penstock_server::check(&config, |text| eprintln!("{text}"))).or_raise(py)
}

/// Return whether to continue: `see` did not fail, and the user does not want to stop.
fn continues(failed: &Option<PyErr>) -> ControlFlow<()> {
    if failed.is_some() || interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// The result of a search for the knee: workers, bytes per second, mean milliseconds, and the same of each step.
type Tuned = (usize, f64, f64, Vec<(usize, f64, f64)>);

/// Load an S3 endpoint, as the configuration in JSON says. Calls `see` with the lines of each interval, as a list of names and values, and returns
/// the lines of the whole. With `tune`, searches for the number of workers at the knee and returns it instead. Last, returns one of the errors.
#[pyfunction]
pub fn load(
    py: Python<'_>,
    config: &str,
    tune: bool,
    see: Py<PyAny>,
) -> PyResult<(Vec<Values>, Option<Tuned>, Option<String>)> {
    let load: Load = parsed(config).or_raise(py)?;
    let mut failed = None;
    let done = py.detach(|| {
        let mut each = |lines: &[Line]| {
            if !lines.is_empty() {
                failed = Python::attach(|py| see.call1(py, (lines.iter().map(values).collect::<Vec<_>>(),)).err());
            }
            continues(&failed)
        };
        match tune {
            false => penstock_server::load::run(&load, &mut each)
                .map(|(lines, error)| (lines.iter().map(values).collect(), None, error)),
            true => penstock_server::load::tune(&load, &mut each).map(|(tuned, error)| {
                let steps =
                    tuned.steps.iter().map(|step| (step.workers, step.bytes_per_second, step.mean_ms)).collect();
                (Vec::new(), Some((tuned.workers, tuned.bytes_per_second, tuned.mean_ms, steps)), error)
            }),
        }
    });
    match failed {
        Some(error) => Err(error),
        None => done.or_raise(py),
    }
}

/// How many objects were read, their bytes, how many were not, and the first keys of these with the reasons.
type WarmedObjects = (u64, u64, u64, Vec<(String, String)>);

/// Read all objects below a prefix of an S3 endpoint, as the configuration in JSON says. Calls `see(objects, bytes)` several times a second. Returns
/// how many objects were read, and their bytes. Then how many were not, and the first keys of these with the reasons.
#[pyfunction]
pub fn warm_objects(py: Python<'_>, config: &str, see: Py<PyAny>) -> PyResult<WarmedObjects> {
    let warm: Warm = parsed(config).or_raise(py)?;
    let mut failed = None;
    let done = py.detach(|| {
        penstock_server::load::warm(&warm, &mut |warmed: &Warmed| {
            failed = Python::attach(|py| see.call1(py, (warmed.objects, warmed.bytes)).err());
            continues(&failed)
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
