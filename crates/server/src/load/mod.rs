//! Load on an S3 endpoint: workers that read and write objects, what they measure, and a search for the number of workers at the knee.

mod line;
mod measure;
mod see;
mod tune;
mod warm;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use penstock_error::{Error, Result};

pub use line::{Line, Load};
use measure::measure;
use see::See;
pub use tune::Tuned;
pub use warm::{Warm, Warmed, warm};
use worker::Workers;

/// How long objects are deleted after a load that failed or was stopped.
const CLEANS_UP: Duration = Duration::from_secs(10);

/// Run a load, and return the lines of the whole and one of the errors, if there were any. Fails if no request succeeded.
pub fn run(load: &Load, see: &mut See<'_>) -> Result<(Vec<Line>, Option<String>)> {
    on_runtime(prepared(load, see, async |workers, see| {
        measure(workers, load.workers, load.seconds, load.interval_seconds, see).await
    }))
}

/// Search for the number of workers at the knee, up to `load.workers`. `see` gets the lines of each step. Fails if no request of a step succeeded.
pub fn tune(load: &Load, see: &mut See<'_>) -> Result<(Tuned, Option<String>)> {
    on_runtime(prepared(load, see, async |workers, see| tune::search(workers, load.workers, load.seconds, see).await))
}

/// Write the objects, do the work, and clean up. Returns what the work found, and one of the errors of its requests. What was not deleted is more
/// important than that the user stopped the load.
async fn prepared<T>(
    load: &Load,
    see: &mut See<'_>,
    work: impl AsyncFnOnce(&Arc<Workers>, &mut See<'_>) -> Result<T>,
) -> Result<(T, Option<String>)> {
    let workers = Workers::new(load).await?;
    let done = match workers.prepare(see).await {
        Ok(()) => work(&workers, see).await,
        Err(error) => Err(error),
    };
    let most = if done.is_ok() { Duration::MAX } else { CLEANS_UP };
    match (done, workers.clean_up(most, see).await) {
        (Err(error), Err(left)) => Err(if error.code() == "interrupted" { left } else { error }),
        (done, cleaned) => cleaned.and(done).map(|done| (done, workers.an_error())),
    }
}

fn on_runtime<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::new("storage-failed", format!("cannot start threads: {error}")))?;
    let done = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}
