//! Spread work over scoped threads. Unlike pool threads, scoped threads are not lost in a fork and need not be joined at exit.

use penstock_error::{Error, Result};

use crate::config::Config;

/// Work on fewer bytes is done by the calling thread alone, because starting a thread takes about 20 µs.
pub const WORTH_A_THREAD_BYTES: usize = 1 << 20;

/// Return `work(i)` for each i in 0..count, in order, using up to `Config::threads` threads. `bytes` is an estimate of how much
/// memory the work reads.
pub fn map<T: Send>(count: usize, bytes: usize, work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
    let threads = Config::threads().min(count).min(bytes / WORTH_A_THREAD_BYTES + 1);
    if threads <= 1 {
        return Ok((0..count).map(work).collect());
    }
    let next = std::sync::atomic::AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if index >= count {
                return done;
            }
            done.push((index, work(index)));
        }
    };
    let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
    std::thread::scope(|scope| {
        // If a thread cannot be started, the other threads do its share.
        let helpers: Vec<_> =
            (1..threads).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, worker).ok()).collect();
        let mut parts = vec![worker()];
        for helper in helpers {
            parts.push(helper.join().map_err(|_| Error::new("internal", "a worker thread panicked"))?);
        }
        for (index, result) in parts.into_iter().flatten() {
            results[index] = Some(result);
        }
        Ok(())
    })?;
    results
        .into_iter()
        .map(|result| result.ok_or_else(|| Error::new("internal", "a worker thread returned no result")))
        .collect()
}
