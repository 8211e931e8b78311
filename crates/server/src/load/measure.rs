//! Workers that run for a time, and what they did.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_error::{Error, Result};

use super::line::{Counts, Line};
use super::worker::Workers;

/// Let some workers run for a time, and return the lines of the whole time.
pub async fn measure(
    workers: &Arc<Workers>,
    count: usize,
    seconds: f64,
    interval_seconds: f64,
    see: &mut dyn FnMut(&[Line]) -> ControlFlow<()>,
) -> Result<Vec<Line>> {
    let running = workers.start(count);
    let (began, mut last) = (Instant::now(), Instant::now());
    let mut whole = [Counts::new(), Counts::new()];
    let mut flow = ControlFlow::Continue(());
    while flow.is_continue() && began.elapsed().as_secs_f64() < seconds {
        let left = seconds - began.elapsed().as_secs_f64();
        let until = Instant::now() + Duration::from_secs_f64(left.min(interval_seconds).max(0.001));
        // Ctrl-C is noticed soon.
        while flow.is_continue() && Instant::now() < until {
            tokio::time::sleep((until - Instant::now()).min(Duration::from_millis(200))).await;
            flow = see(&[]);
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
    running.stop().await;
    if flow.is_break() {
        return Err(Error::new("interrupted", "the load was stopped"));
    }
    Ok(lines(&whole, count, elapsed, elapsed))
}

fn lines(counts: &[Counts; 2], workers: usize, at_seconds: f64, seconds: f64) -> Vec<Line> {
    let each = counts.iter().zip(["get", "put"]).filter(|(counts, _)| !counts.latency.is_empty() || counts.errors > 0);
    each.map(|(counts, operation)| counts.line(operation, workers, at_seconds, seconds)).collect()
}
