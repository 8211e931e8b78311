//! Workers that run for a time, and what they did.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_error::{Error, Result};

use super::line::{Counts, Line};
use super::see::{See, seen, stopped};
use super::worker::Workers;

/// Let some workers run for a time, and return the lines of the whole time. Fails if no request succeeded.
pub async fn measure(
    workers: &Arc<Workers>,
    count: usize,
    seconds: f64,
    interval_seconds: f64,
    see: &mut See<'_>,
) -> Result<Vec<Line>> {
    let running = workers.start(count);
    let (began, mut last) = (Instant::now(), Instant::now());
    let mut whole = [Counts::new(), Counts::new()];
    let mut flow = ControlFlow::Continue(());
    while flow.is_continue() && began.elapsed().as_secs_f64() < seconds {
        let left = seconds - began.elapsed().as_secs_f64();
        let interval = Duration::from_secs_f64(left.min(interval_seconds).max(0.001));
        if seen(tokio::time::sleep(interval), see).await.is_none() {
            return Err(stopped());
        }
        let counts = workers.take();
        let lines = lines(&counts, count, began.elapsed().as_secs_f64(), last.elapsed().as_secs_f64());
        last = Instant::now();
        whole.iter_mut().zip(&counts).for_each(|(whole, counts)| whole.add(counts));
        if flow.is_continue() && !lines.is_empty() {
            flow = see(&lines);
        }
    }
    let elapsed = began.elapsed().as_secs_f64();
    if flow.is_break() || seen(running.stop(), see).await.is_none() {
        return Err(stopped());
    }
    // What ended too late has no part in the rates, but errors are not hidden.
    let late = workers.take();
    whole.iter_mut().zip(&late).for_each(|(whole, late)| whole.errors += late.errors);
    if whole.iter().all(|counts| counts.latency.is_empty()) {
        let why = workers.an_error().unwrap_or_else(|| format!("none finished within {seconds} s"));
        let text = format!("none of the requests from {count} workers succeeded: {why}");
        return Err(Error::new("storage-failed", text)
            .hint("check the endpoint, the keys and the objects, or increase --seconds"));
    }
    Ok(lines(&whole, count, elapsed, elapsed))
}

fn lines(counts: &[Counts; 2], workers: usize, at_seconds: f64, seconds: f64) -> Vec<Line> {
    let each = counts.iter().zip(["get", "put"]).filter(|(counts, _)| !counts.latency.is_empty() || counts.errors > 0);
    each.map(|(counts, operation)| counts.line(operation, workers, at_seconds, seconds)).collect()
}
