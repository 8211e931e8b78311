//! The network threads of this process, and the state of each store.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use penstock_error::{Error, Result};
use tokio::runtime::Runtime;

use super::connect::Client;
use super::cost::Cost;
use super::retry::Retry;
use crate::process::{self, PerProcess};

/// The runtime for all requests in this process.
static RUNTIME: PerProcess<std::result::Result<Runtime, String>> = PerProcess::new(|| {
    // Use half of the CPUs. One network thread can move 1 GB per second, and other threads must process the bytes.
    let threads = (std::thread::available_parallelism().map_or(2, usize::from) / 2).clamp(1, 8);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name("penstock-io").enable_all().build().map_err(|error| error.to_string())
});

pub fn runtime() -> Result<&'static Runtime> {
    RUNTIME.get().as_ref().map_err(|error| Error::new("internal", format!("cannot start the network threads: {error}")))
}

/// How often a waiting thread checks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);

/// Block until network work completes. The work is dropped if the user wants to stop.
pub fn wait<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    runtime()?.block_on(async {
        tokio::pin!(work);
        loop {
            match tokio::time::timeout(LOOK, &mut work).await {
                Ok(answer) => return answer,
                Err(_) if process::interrupted() => {
                    return Err(Error::new("interrupted", "interrupted while waiting for the store"));
                }
                Err(_) => {}
            }
        }
    })
}

/// The state of a store in one process.
pub struct Live {
    pub client: Client,
    pub retry: Retry,
    /// How long the most recent ranges took, in seconds. Used for hedging.
    pub recent: Mutex<VecDeque<f64>>,
    pub cost: Cost,
}
