//! Ranges that S3 ignores, and those that the library of the protocol does not read.

use hyper::header::{HeaderMap, HeaderValue, RANGE};

/// The largest number that `s3s` reads. No object is as long.
const MOST: u64 = i64::MAX as u64;

/// Write a range as `s3s` reads it. One that a client must not rely on is removed: other units, several ranges, and those whose end is before their begin.
/// The response is then the whole object, as HTTP allows.
pub fn mend_range(headers: &mut HeaderMap) {
    let Some(given) = headers.remove(RANGE) else { return };
    let mended = given.to_str().ok().and_then(mended).and_then(|range| HeaderValue::try_from(range).ok());
    mended.into_iter().for_each(|range| drop(headers.insert(RANGE, range)));
}

/// Return whether a range is one that S3 ignores, or that `s3s` does not read.
pub fn has_odd_range(headers: &HeaderMap) -> bool {
    headers.get(RANGE).is_some_and(|value| !value.to_str().is_ok_and(|value| mended(value).as_deref() == Some(value)))
}

/// Return the range of bytes that a header names, with numbers that `s3s` reads, or None if it does not name one. Source: RFC 9110, section 14.1.2.
fn mended(value: &str) -> Option<String> {
    let (begin, end) = value.trim().strip_prefix("bytes=")?.split_once('-')?;
    let number =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().unwrap_or(MOST).min(MOST));
    match (begin.is_empty(), end.is_empty()) {
        (true, true) => None,
        (true, false) => Some(format!("bytes=-{}", number(end)?)),
        (false, true) => Some(format!("bytes={}-", number(begin)?)),
        (false, false) => {
            let (begin, end) = (number(begin)?, number(end)?);
            (begin <= end).then(|| format!("bytes={begin}-{end}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_ranges_remain() {
        for plain in ["bytes=0-", "bytes=0-0", "bytes=5-9", "bytes=-5", "bytes=-0"] {
            assert_eq!(mended(plain).as_deref(), Some(plain));
        }
        for odd in [
            "bytes=5-2", "bytes=x", "bytes=0-1,3-4", "items=0-1", "bytes=-", "bytes=+1-2", "bytes=1-+2", "bytes=--1",
            "0-1", "",
        ] {
            assert_eq!(mended(odd), None, "{odd}");
        }
        for (large, expected) in [
            ("bytes=0-18446744073709551616", "bytes=0-9223372036854775807"),
            ("bytes=18446744073709551616-", "bytes=9223372036854775807-"),
            ("bytes=18446744073709551615-", "bytes=9223372036854775807-"),
            ("bytes=-99999999999999999999", "bytes=-9223372036854775807"),
        ] {
            assert_eq!(mended(large).as_deref(), Some(expected));
        }
    }
}
