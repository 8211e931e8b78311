//! Handles panics in loader threads.

use penstock_error::{Error, Result};

/// Convert a panic into a batch error, so that the consumer does not wait forever.
pub fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        Err(Error::new("internal", format!("a loader thread panicked: {}", text.unwrap_or("no message"))))
    })
}
