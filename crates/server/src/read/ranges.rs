//! Ranges that S3 ignores.

use hyper::header::{HeaderMap, RANGE};

/// Remove a range that a client must not rely on: other units, several ranges, and those whose end is before their begin. The response is then the
/// whole object, as HTTP allows.
pub fn drop_odd_range(headers: &mut HeaderMap) {
    if has_odd_range(headers) {
        headers.remove(RANGE);
    }
}

/// Return whether a range is one that S3 ignores.
pub fn has_odd_range(headers: &HeaderMap) -> bool {
    headers.get(RANGE).is_some_and(|value| !value.to_str().is_ok_and(is_plain_range))
}

/// Return whether a header names one range of bytes.
fn is_plain_range(value: &str) -> bool {
    let Some((begin, end)) = value.trim().strip_prefix("bytes=").and_then(|range| range.split_once('-')) else { return false };
    let number = |text: &str| if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse::<u64>().ok() } else { None };
    match (begin.is_empty(), end.is_empty()) {
        (true, true) => false,
        (true, false) => number(end).is_some(),
        (false, true) => number(begin).is_some(),
        (false, false) => number(begin).zip(number(end)).is_some_and(|(begin, end)| begin <= end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_ranges_remain() {
        for plain in ["bytes=0-", "bytes=0-0", "bytes=5-9", "bytes=-5", "bytes=-0"] {
            assert!(is_plain_range(plain), "{plain}");
        }
        for odd in ["bytes=5-2", "bytes=x", "bytes=0-1,3-4", "items=0-1", "bytes=-", "bytes=+1-2", "bytes=1-+2", "bytes=--1", "0-1", ""] {
            assert!(!is_plain_range(odd), "{odd}");
        }
    }
}
