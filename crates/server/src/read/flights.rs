//! Work that several requests wait for, and that is done once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared, ready};
use s3s::{S3Error, S3Result};

/// The result of work, for all who wait for it.
pub type Fetched<T> = Shared<BoxFuture<'static, Result<T, Arc<S3Error>>>>;

/// Work that runs now, by what it is for.
pub struct Flights<K, T>(Arc<Mutex<HashMap<K, Fetched<T>>>>);

impl<K, T> Default for Flights<K, T> {
    fn default() -> Self {
        Flights(Arc::default())
    }
}

impl<K: Clone + Eq + Hash + Send + 'static, T: Clone + Send + Sync + 'static> Flights<K, T> {
    /// Return the work that runs for a key.
    pub fn get(&self, key: &K) -> Option<Fetched<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Begin work for a key, unless it runs already, or `known` has its result: work that has just ended left it there. It runs to its end, even if
    /// nobody waits for it any more.
    pub fn join<F: Future<Output = S3Result<T>> + Send + 'static>(
        &self,
        key: &K,
        known: impl FnOnce() -> Option<T>,
        work: impl FnOnce() -> F,
    ) -> Fetched<T> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = running.get(key) {
            return known.clone();
        }
        if let Some(known) = known() {
            return ready(Ok(known)).boxed().shared();
        }
        let (flights, own, work) = (self.0.clone(), key.clone(), work());
        let joined = tokio::spawn(async move {
            let result = work.await.map_err(Arc::new);
            flights.lock().unwrap_or_else(PoisonError::into_inner).remove(&own);
            result
        });
        let work = joined
            .map(|joined| joined.unwrap_or_else(|error| Err(Arc::new(S3Error::internal_error(error)))))
            .boxed()
            .shared();
        running.insert(key.clone(), work.clone());
        work
    }
}

/// Errors are not `Clone`, because of their sources.
pub fn copy(error: &S3Error) -> S3Error {
    let mut copy = S3Error::new(error.code().clone());
    if let Some(message) = error.message() {
        copy.set_message(message.to_owned());
    }
    if let Some(status) = error.status_code() {
        copy.set_status_code(status);
    }
    if let Some(headers) = error.headers() {
        copy.set_headers(headers.clone());
    }
    copy
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    /// Work leaves its result where latecomers look. A reader that looked there before it ended, and joins afterwards, must not do it again.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn work_that_has_just_ended_is_not_begun_again() {
        for _ in 0..200 {
            let (flights, left, works) =
                (Arc::new(Flights::default()), Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
            let readers = (0..24).map(|_| {
                let (flights, left, works): (Arc<Flights<(), u64>>, Arc<Mutex<Option<u64>>>, _) =
                    (flights.clone(), left.clone(), works.clone());
                tokio::spawn(async move {
                    let known = || *left.lock().unwrap();
                    let work = || {
                        let (left, works) = (left.clone(), works.clone());
                        async move {
                            works.fetch_add(1, SeqCst);
                            *left.lock().unwrap() = Some(7);
                            Ok(7)
                        }
                    };
                    flights.join(&(), known, work).await
                })
            });
            for found in futures::future::join_all(readers).await {
                assert_eq!(found.unwrap().unwrap(), 7);
            }
            assert_eq!(works.load(SeqCst), 1);
        }
    }
}
