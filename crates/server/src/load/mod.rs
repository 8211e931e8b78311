//! Load on an S3 endpoint: workers that read and write objects, what they measure, and a search for the number of workers at the knee.

mod line;
mod measure;
mod tune;
mod worker;

use std::ops::ControlFlow;
use std::time::Duration;

use penstock_error::{Error, Result};

pub use line::{Line, Load};
use measure::measure;
pub use tune::Tuned;
use worker::Workers;

/// Run a load. Calls `see` with the lines of each interval, until it breaks, and returns the lines of the whole.
pub fn run(load: &Load, see: &mut dyn FnMut(&[Line]) -> ControlFlow<()>) -> Result<Vec<Line>> {
    on_runtime(async {
        let workers = Workers::prepare(load, see).await?;
        let lines = measure(&workers, load.workers, load.seconds, load.interval_seconds, see).await;
        workers.clean_up().await;
        lines
    })
}

/// Search for the number of workers at the knee, up to `load.workers`. Calls `see` with the lines of each step, until it breaks.
pub fn tune(load: &Load, see: &mut dyn FnMut(&[Line]) -> ControlFlow<()>) -> Result<Tuned> {
    on_runtime(async {
        let workers = Workers::prepare(load, see).await?;
        let tuned = tune::search(&workers, load.workers, load.seconds, see).await;
        workers.clean_up().await;
        tuned
    })
}

fn on_runtime<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::new("storage-failed", format!("cannot start threads: {error}")))?;
    let done = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}
