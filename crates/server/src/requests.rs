//! What a request is freed of, or refused for, before its operation: ranges that S3 ignores, headers that no signature covers, and
//! signatures that nobody verifies.

use hyper::Request;
use hyper::Uri;
use hyper::header::{AUTHORIZATION, HeaderName, RANGE};
use percent_encoding::percent_decode_str;

/// Headers whose change does no harm: the hash of the body is a part of the signature, and the other one is a name.
const FREE: [&str; 2] = ["x-amz-content-sha256", "x-amz-user-agent"];

/// Remove a range that a client must not rely on: other units, several ranges, and those whose end is before their begin. The response is then the
/// whole object, as HTTP allows. A range that is signed cannot be removed, and is refused.
pub fn drop_odd_range<B>(request: &mut Request<B>) {
    let is_plain = request.headers().get(RANGE).is_none_or(|value| value.to_str().is_ok_and(is_plain_range));
    if !is_plain && !signed_headers(request).is_some_and(|signed| signed.split(';').any(|name| name == "range")) {
        request.headers_mut().remove(RANGE);
    }
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

/// Return a header of S3 that the request's signature does not cover, so that somebody else may have added it. Signatures of version 2 cover all.
pub fn unsigned_header<B>(request: &Request<B>) -> Option<&HeaderName> {
    let signed = signed_headers(request)?;
    let is_open = |name: &&HeaderName| {
        name.as_str().starts_with("x-amz-") && !FREE.contains(&name.as_str()) && !signed.split(';').any(|signed| signed == name.as_str())
    };
    request.headers().keys().find(is_open)
}

/// Return the names of the headers that a signature of version 4 covers.
fn signed_headers<B>(request: &Request<B>) -> Option<String> {
    let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let in_header = authorization.split([',', ' ']).find_map(|part| part.trim().strip_prefix("SignedHeaders="));
    let in_query = || {
        let parameter = |pair: &str| pair.strip_prefix("X-Amz-SignedHeaders=").map(str::to_owned);
        request.uri().query().and_then(|query| query.split('&').find_map(parameter))
    };
    let signed = in_header.map(str::to_owned).or_else(in_query)?;
    Some(percent_decode_str(&signed).decode_utf8_lossy().to_ascii_lowercase())
}

/// Return an address without the signature in its query.
pub fn without_signature(uri: &Uri) -> Option<Uri> {
    let (path, query) = uri.path_and_query()?.as_str().split_once('?')?;
    let of_signature = |pair: &&str| {
        let name = pair.split('=').next().unwrap_or_default();
        !name.starts_with("X-Amz-") && !matches!(name, "AWSAccessKeyId" | "Signature" | "Expires")
    };
    let rest: Vec<&str> = query.split('&').filter(of_signature).collect();
    let text = if rest.is_empty() { path.to_owned() } else { format!("{path}?{}", rest.join("&")) };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = text.parse().ok();
    Uri::from_parts(parts).ok()
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

    #[test]
    fn headers_of_s3_must_be_signed() {
        let request = |signed: &str, more: &str| {
            let builder =
                Request::builder().header(AUTHORIZATION, format!("AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders={signed}, Signature=0"));
            builder.header("x-amz-content-sha256", "0").header(more, "1").body(()).map(|request| unsigned_header(&request).cloned())
        };
        assert!(request("host;x-amz-date", "x-amz-date").is_ok_and(|found| found.is_none()));
        assert!(request("host;x-amz-date", "range").is_ok_and(|found| found.is_none()));
        assert!(request("host", "x-amz-copy-source").is_ok_and(|found| found.is_some()));
        let url = |headers: &str| {
            let builder = Request::builder().uri(format!("/b/k?X-Amz-SignedHeaders={headers}&X-Amz-Signature=0"));
            builder.header("x-amz-copy-source", "b/secret").body(()).map(|request| unsigned_header(&request).is_some())
        };
        assert!(url("host").is_ok_and(|open| open) && url("host%3Bx-amz-copy-source").is_ok_and(|open| !open));
    }

    #[test]
    fn signatures_leave_the_rest_of_an_address() {
        let of = |text: &str| text.parse().ok().and_then(|uri| without_signature(&uri)).map(|uri| uri.to_string());
        assert_eq!(of("/b?batch=&X-Amz-Date=1&X-Amz-Signature=2").as_deref(), Some("/b?batch="));
        assert_eq!(of("http://h/b/k?AWSAccessKeyId=a&Signature=b&Expires=1").as_deref(), Some("http://h/b/k"));
        assert_eq!(of("/b/k"), None);
    }
}
