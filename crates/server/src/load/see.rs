//! How a load shows what it does, and learns that it should end.

use std::ops::ControlFlow;
use std::time::Duration;

use penstock_error::Error;

use super::line::Line;

/// Called with the lines of each interval, and with none several times a second. The load ends when it breaks.
pub type See<'a> = dyn FnMut(&[Line]) -> ControlFlow<()> + 'a;

/// Wait for `work`, and call `see` in the meantime. Returns None if it breaks.
pub async fn seen<T>(work: impl Future<Output = T>, see: &mut See<'_>) -> Option<T> {
    seen_each(work, || see(&[])).await
}

/// Wait for `work`, and call `see` several times a second in the meantime. Returns None if it breaks.
pub async fn seen_each<T>(work: impl Future<Output = T>, mut see: impl FnMut() -> ControlFlow<()>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    loop {
        match tokio::time::timeout(Duration::from_millis(200), &mut work).await {
            Ok(done) => return Some(done),
            Err(_) if see().is_break() => return None,
            Err(_) => {}
        }
    }
}

/// Return the error of a load that `see` ended.
pub fn stopped() -> Error {
    Error::new("interrupted", "the load was stopped")
}
