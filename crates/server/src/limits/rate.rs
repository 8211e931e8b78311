//! Rates of keys: how many requests and bytes per second a key may have. Requests beyond it are refused, and bodies wait.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use hyper::header::{HeaderMap, HeaderValue, RETRY_AFTER};
use s3s::{S3Result, s3_error};

use crate::metrics::Metrics;

/// What may come at once.
const BURST: Duration = Duration::from_secs(1);

/// A number of tokens per second, with a burst of one second. Source: the generic cell rate algorithm, ITU-T I.371.
#[derive(Debug)]
struct Rate {
    per_second: u64,
    began: Instant,
    /// When all tokens that were taken are paid for, in nanoseconds after `began`.
    paid_ns: AtomicU64,
}

impl Rate {
    fn new(per_second: u64) -> Rate {
        Rate { per_second, began: Instant::now(), paid_ns: AtomicU64::new(0) }
    }

    /// Return the nanoseconds until `now`, and those that so many tokens cost.
    fn at(&self, now: Instant, tokens: u64) -> (u64, u64) {
        let cost = (u128::from(tokens) * 1_000_000_000).div_ceil(u128::from(self.per_second));
        (nanoseconds(now.saturating_duration_since(self.began)), u64::try_from(cost).unwrap_or(u64::MAX))
    }

    /// Take one token. Without one, returns how long it takes until one is free.
    fn try_take(&self, now: Instant) -> Result<(), Duration> {
        let ((now, cost), most) = (self.at(now, 1), nanoseconds(BURST));
        let taken =
            |paid: u64| Some(paid.max(now).saturating_add(cost)).filter(|paid| *paid <= now.saturating_add(most));
        let left = |paid: u64| paid.max(now).saturating_add(cost) - now.saturating_add(most);
        self.paid_ns.fetch_update(Relaxed, Relaxed, taken).map(drop).map_err(|paid| Duration::from_nanos(left(paid)))
    }

    /// Take tokens that are used already. Returns how long to wait before more are used.
    fn take(&self, tokens: u64, now: Instant) -> Duration {
        let (now, cost) = self.at(now, tokens);
        let after = |paid: u64| paid.max(now).saturating_add(cost);
        let before = self.paid_ns.fetch_update(Relaxed, Relaxed, |paid| Some(after(paid))).unwrap_or_else(|paid| paid);
        Duration::from_nanos(after(before) - now).saturating_sub(BURST)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The rates of a key.
#[derive(Debug)]
pub struct Rates {
    requests: Option<Rate>,
    bytes: Option<Rate>,
}

impl Rates {
    /// Return the rates of a key, or None without any.
    pub fn new(requests: Option<u64>, bytes: Option<u64>) -> Option<Rates> {
        (requests.is_some() || bytes.is_some())
            .then(|| Rates { requests: requests.map(Rate::new), bytes: bytes.map(Rate::new) })
    }

    pub fn is_same(&self, other: &Rates) -> bool {
        let numbers =
            |rates: &Rates| [&rates.requests, &rates.bytes].map(|rate| rate.as_ref().map(|rate| rate.per_second));
        numbers(self) == numbers(other)
    }
}

/// The place where a request finds the rates of its key, once its signature is verified. Clones share it.
#[derive(Debug, Clone)]
pub struct Slot(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    rates: OnceLock<Arc<Rates>>,
    metrics: Arc<Metrics>,
}

impl Slot {
    pub fn new(metrics: &Arc<Metrics>) -> Slot {
        Slot(Arc::new(Shared { rates: OnceLock::new(), metrics: metrics.clone() }))
    }

    /// Count a request of a key, or refuse it with 503.
    pub fn admit(&self, rates: &Arc<Rates>) -> S3Result<()> {
        if let Some(Err(wait)) = rates.requests.as_ref().map(|rate| rate.try_take(Instant::now())) {
            self.0.metrics.rate_refusals.inc();
            let mut error = s3_error!(SlowDown, "this key sends too many requests per second; try again later");
            let seconds = HeaderValue::from(wait.as_nanos().div_ceil(1_000_000_000).max(1) as u64);
            error.set_headers(HeaderMap::from_iter([(RETRY_AFTER, seconds)]));
            return Err(error);
        }
        // A request is checked once.
        let _ = self.0.rates.set(rates.clone());
        Ok(())
    }

    fn bytes(&self) -> Option<&Rate> {
        self.0.rates.get()?.bytes.as_ref()
    }

    /// Return the pace of the response, or None if its key may have any.
    pub fn of_response(&self) -> Option<Pace> {
        self.bytes().is_some().then(|| Pace::new(self.clone()))
    }
}

/// Lets a body wait between its frames. Nothing is held meanwhile.
pub struct Pace {
    slot: Slot,
    has_begun: bool,
    wait: Option<(Instant, std::pin::Pin<Box<tokio::time::Sleep>>)>,
}

impl Pace {
    pub fn new(slot: Slot) -> Pace {
        Pace { slot, has_begun: false, wait: None }
    }

    fn wait_for(&mut self, time: Duration) {
        if !time.is_zero() {
            self.slot.0.metrics.rate_waits.inc();
            self.wait = Some((Instant::now(), Box::pin(tokio::time::sleep(time))));
        }
    }

    /// Wait until the next frame may be taken. Returns how long this took.
    pub fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<Duration> {
        if let Some(rate) = self.slot.bytes().filter(|_| !self.has_begun) {
            // What other bodies of the key took is paid for first.
            let time = rate.take(0, Instant::now());
            self.has_begun = true;
            self.wait_for(time);
        }
        let Some((since, wait)) = &mut self.wait else { return Poll::Ready(Duration::ZERO) };
        ready!(wait.as_mut().poll(context));
        let waited = since.elapsed();
        self.wait = None;
        Poll::Ready(waited)
    }

    /// Note the bytes of a frame.
    pub fn took(&mut self, bytes: usize) {
        if let Some(rate) = self.slot.bytes() {
            let time = rate.take(bytes as u64, Instant::now());
            self.wait_for(time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn requests_have_a_burst_of_one_second_and_then_their_rate() {
        let rate = Rate::new(5);
        let begin = Instant::now();
        let after_one_more = |now: Instant| (0..100).filter(|_| rate.try_take(now).is_ok()).count();
        assert_eq!(after_one_more(begin), 5);
        assert_eq!(after_one_more(begin), 0);
        let wait = rate.try_take(begin).expect_err("the burst is used up");
        assert!(wait > SECOND / 10 && wait <= SECOND / 5, "{wait:?}");
        assert_eq!(after_one_more(begin + wait), 1);
        // A refusal costs nothing, and time that was not used is lost after a second.
        assert_eq!(after_one_more(begin + wait + SECOND), 5);
        assert_eq!(after_one_more(begin + 100 * SECOND), 5);
    }

    #[test]
    fn the_lowest_rate_lets_one_request_pass() {
        let (rate, begin) = (Rate::new(1), Instant::now());
        assert!(rate.try_take(begin).is_ok() && rate.try_take(begin).is_err());
        assert!(rate.try_take(begin + SECOND * 2).is_ok());
    }

    #[test]
    fn bytes_wait_after_a_burst_of_one_second() {
        let (rate, begin) = (Rate::new(1000), Instant::now());
        assert_eq!(rate.take(0, begin), Duration::ZERO);
        assert_eq!(rate.take(1000, begin), Duration::ZERO);
        let wait = rate.take(500, begin);
        assert!(wait > SECOND / 3 && wait <= SECOND / 2, "{wait:?}");
        // Another body waits for what this one took.
        assert!(rate.take(0, begin) >= wait);
        assert_eq!(rate.take(0, begin + SECOND), Duration::ZERO);
        // A frame that is longer than the burst is sent, and paid for later.
        assert!(rate.take(1_000_000, begin + SECOND) > 998 * SECOND);
    }

    #[test]
    fn numbers_at_the_end_of_their_range_do_not_overflow() {
        for per_second in [1, u64::MAX] {
            let (rate, now) = (Rate::new(per_second), Instant::now());
            for _ in 0..3 {
                rate.take(u64::MAX, now);
                let _ = rate.try_take(now);
            }
        }
    }
}
