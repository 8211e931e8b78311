//! How a request is signed: in a header or in its address, by version 4 or 2 of the signatures of S3.
//!
//! Checks must read what `s3s` verifies. So a request has one signature only, and its query is decoded as `s3s` decodes it.

pub mod chunks;
pub mod query_headers;
pub mod resign;

use std::borrow::Cow;

use hyper::header::{AUTHORIZATION, DATE, HeaderName, HeaderValue};
use hyper::{Request, Uri};
use time::format_description::well_known::Rfc2822;
use time::macros::format_description;
use time::{Duration, OffsetDateTime, PrimitiveDateTime};

/// Headers whose change does no harm: the hash of the body is a part of the signature, and the other one is a name.
const FREE: [&str; 2] = ["x-amz-content-sha256", "x-amz-user-agent"];

/// How far the date of a signature may be from the time of the server, as in S3.
const MOST_SKEW: Duration = Duration::minutes(15);

/// The parameters of signatures of version 2.
const OF_VERSION_2: [&str; 3] = ["AWSAccessKeyId", "Signature", "Expires"];

/// How a request is signed.
#[derive(Debug, PartialEq, Eq)]
pub enum Form {
    /// Not at all.
    Unsigned,
    /// By version 4, in a header or in the address. Has the names of the headers that the signature covers, in lower case.
    Version4 { covered: Vec<String> },
    /// By version 2, which covers all headers that begin with x-amz-.
    Version2 { is_in_address: bool },
}

impl Form {
    /// Return whether a signature of version 4 covers a header.
    pub fn covers(&self, header: &str) -> bool {
        matches!(self, Form::Version4 { covered } if covered.iter().any(|name| name == header))
    }
}

/// Which signatures a server takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// None is verified: everybody may use the server.
    Unverified,
    Version4,
    Both,
}

/// Why a request is refused before its signature is verified: the code of S3, and a message.
pub type Refusal = (&'static str, String);

/// Return how a request is signed. Refuses one with several signatures, and one whose signature cannot be read.
pub fn form_of<B>(request: &Request<B>) -> Result<Form, Refusal> {
    let mut headers = request.headers().get_all(AUTHORIZATION).iter();
    let header = headers.next();
    let has_parameter = |name: &str| parameters(request.uri()).any(|(own, _)| own == name);
    let in_address = [has_parameter("X-Amz-Signature"), has_parameter("Signature")];
    if headers.next().is_some()
        || usize::from(header.is_some()) + in_address.iter().filter(|is_there| **is_there).count() > 1
    {
        let text =
            "The request has several signatures. Sign it once, either in the URL or in the Authorization header.";
        return Err(("InvalidArgument", text.into()));
    }
    let covered = |list: &str| list.split(';').map(str::to_ascii_lowercase).collect();
    if let Some(header) = header {
        if header.as_bytes().starts_with(b"AWS ") {
            return Ok(Form::Version2 { is_in_address: false });
        }
        let [_, list, _] = parts_of(header).ok_or_else(|| unreadable("the Authorization header"))?;
        return Ok(Form::Version4 { covered: covered(list) });
    }
    match in_address {
        [true, _] => {
            let list = parameter(request.uri(), "X-Amz-SignedHeaders").ok_or_else(|| unreadable("the address"))?;
            Ok(Form::Version4 { covered: covered(&list) })
        }
        [_, true] => Ok(Form::Version2 { is_in_address: true }),
        _ => Ok(Form::Unsigned),
    }
}

/// Return the parts of a header of version 4: `Credential`, `SignedHeaders` and `Signature`, which must be all, in this order.
fn parts_of(header: &HeaderValue) -> Option<[&str; 3]> {
    let (_, parts) = header.to_str().ok()?.split_once(' ')?;
    let mut parts = parts.split(',').map(str::trim);
    let credential = parts.next()?.strip_prefix("Credential=")?;
    let list = parts.next()?.strip_prefix("SignedHeaders=")?;
    let signature = parts.next()?.strip_prefix("Signature=")?;
    parts.next().is_none().then_some([credential, list, signature])
}

fn unreadable(place: &str) -> Refusal {
    ("InvalidArgument", format!("The signature in {place} cannot be parsed."))
}

/// Refuse a signature that leaves out what it must cover, or of a version that is not `taken`.
pub fn check<B>(form: &Form, request: &Request<B>, taken: Taken, now: OffsetDateTime) -> Result<(), Refusal> {
    match form {
        Form::Unsigned => Ok(()),
        Form::Version2 { .. } if taken != Taken::Both => {
            let text = "This server does not accept version 2 signatures. Sign with version 4 (presigned URLs of boto3: \
                Config(signature_version='s3v4')), or start the server with --signature-v2.";
            Err(("InvalidRequest", text.into()))
        }
        Form::Version2 { is_in_address: true } => Ok(()), // It has a date at which it ends.
        Form::Version2 { is_in_address: false } => check_date(request, now),
        Form::Version4 { covered, .. } => {
            let lacks = |name: &str| !covered.iter().any(|own| own == name);
            let is_open = |name: &&HeaderName| {
                name.as_str().starts_with("x-amz-") && !FREE.contains(&name.as_str()) && lacks(name.as_str())
            };
            if lacks("host") {
                return Err(("AccessDenied", "The signature does not cover the host header.".into()));
            }
            match request.headers().keys().find(is_open) {
                None => Ok(()),
                Some(name) => {
                    let text = format!(
                        "The signature does not cover the {name} header. Sign all headers that begin with x-amz-."
                    );
                    Err(("AccessDenied", text))
                }
            }
        }
    }
}

/// Refuse a signature of version 2 whose date is not about now. Otherwise, a request that somebody else sees could be sent again for ever.
fn check_date<B>(request: &Request<B>, now: OffsetDateTime) -> Result<(), Refusal> {
    let once = |name: HeaderName| {
        let mut values = request.headers().get_all(name).iter();
        values.next().filter(|_| values.next().is_none())
    };
    // The one that the signature covers: x-amz-date replaces the other one.
    let amz_date = HeaderName::from_static("x-amz-date");
    let text = if request.headers().contains_key(&amz_date) { once(amz_date) } else { once(DATE) };
    let date = text.and_then(|text| text.to_str().ok()).and_then(date_of);
    let Some(date) = date else {
        return Err(("AccessDenied", "A version 2 signature requires exactly one Date or x-amz-date header.".into()));
    };
    if (now - date).abs() > MOST_SKEW {
        return Err((
            "RequestTimeTooSkewed",
            "The date of the request differs too much from the server's time.".into(),
        ));
    }
    Ok(())
}

/// Parse a date as HTTP writes it, or as signatures of version 4 do.
fn date_of(text: &str) -> Option<OffsetDateTime> {
    let short = format_description!("[year][month][day]T[hour][minute][second]Z");
    let in_short = || PrimitiveDateTime::parse(text, &short).ok().map(PrimitiveDateTime::assume_utc);
    OffsetDateTime::parse(text, &Rfc2822).ok().or_else(in_short)
}

/// Return the parameters of an address, decoded as `s3s` decodes them.
pub fn parameters(uri: &Uri) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes())
}

/// Return a parameter of an address, or None if it is not there once.
pub fn parameter<'u>(uri: &'u Uri, wanted: &str) -> Option<Cow<'u, str>> {
    let mut values = parameters(uri).filter(|(name, _)| name == wanted).map(|(_, value)| value);
    values.next().filter(|_| values.next().is_none())
}

/// Return an address without the signature in its query.
pub fn without_signature(uri: &Uri) -> Option<Uri> {
    let (path, query) = uri.path_and_query()?.as_str().split_once('?')?;
    let of_signature = |pair: &&str| {
        let name = form_urlencoded::parse(pair.as_bytes()).next().map(|(name, _)| name).unwrap_or_default();
        !name.starts_with("X-Amz-") && !OF_VERSION_2.contains(&&*name)
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

    const NOW: OffsetDateTime = time::macros::datetime!(2026-11-29 12:00 UTC);
    const V4: &str =
        "AWS4-HMAC-SHA256 Credential=a/20261129/us/s3/aws4_request, SignedHeaders=host;x-amz-date, Signature=0";
    const V2: &str = "AWS key:signature";
    const URL4: &str = "X-Amz-SignedHeaders=host&X-Amz-Signature=0";
    const URL2: &str = "AWSAccessKeyId=key&Signature=0&Expires=9";

    fn request(headers: &[&str], query: &str) -> Request<()> {
        let builder = Request::builder().uri(format!("/b/k?{query}")).header("host", "h");
        headers.iter().fold(builder, |builder, header| builder.header(AUTHORIZATION, *header)).body(()).unwrap()
    }

    fn with(mut request: Request<()>, name: &str, values: &[&str]) -> Request<()> {
        for value in values {
            request
                .headers_mut()
                .append(HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap());
        }
        request
    }

    fn refused(request: &Request<()>, takes_version_2: bool) -> Option<&'static str> {
        let taken = if takes_version_2 { Taken::Both } else { Taken::Version4 };
        form_of(request).and_then(|form| check(&form, request, taken, NOW)).err().map(|(code, _)| code)
    }

    #[test]
    fn a_request_has_one_signature() {
        let headers: [&[&str]; 5] = [&[], &[V4], &[V2], &["SignedHeaders=x-amz-copy-source"], &["Bearer x"]];
        let queries = ["", URL4, URL2, "X-Amz-Signat%75re=0&X-Amz-SignedHeaders=host", "list-type=2&Signature=0"];
        for header in headers {
            for query in queries {
                let signatures = header.len() + usize::from(query.contains("Signature") || query.contains("%75"));
                let found = form_of(&request(header, query));
                match signatures {
                    0 => assert_eq!(found, Ok(Form::Unsigned)),
                    1 if header.is_empty() => assert!(found.is_ok_and(|form| form != Form::Unsigned), "{query}"),
                    1 if [V4, V2].contains(&header[0]) => {
                        assert!(found.is_ok_and(|form| form != Form::Unsigned), "{header:?}")
                    }
                    1 => assert!(found.is_err(), "{header:?} cannot be read"),
                    _ => assert_eq!(found.map_err(|(code, _)| code), Err("InvalidArgument"), "{header:?} {query}"),
                }
            }
        }
        assert!(form_of(&request(&[V4, V4], "")).is_err());
        assert!(form_of(&request(&[], &format!("{URL4}&{URL2}"))).is_err());
        assert!(form_of(&request(&[], &format!("{URL4}&X-Amz-SignedHeaders=x-amz-copy-source"))).is_err());
        for wrong in [
            "AWS4-HMAC-SHA256",
            "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, SignedHeaders=x-amz-acl, Signature=0",
            "",
        ] {
            assert!(form_of(&request(&[wrong], "")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn signatures_cover_the_host_and_all_headers_of_s3() {
        let header = |list: &str| request(&[&V4.replace("host;x-amz-date", list)], "");
        let url = |list: &str| request(&[], &URL4.replace("host", list));
        for (bare, all) in [
            (header("x-amz-date"), header("host;x-amz-date;x-amz-copy-source")),
            (url("x-amz-date"), url("HOST%3Bx-amz-copy-source")),
        ] {
            assert_eq!(refused(&bare, true), Some("AccessDenied"));
            assert_eq!(refused(&with(all, "x-amz-copy-source", &["b/k"]), true), None);
        }
        for own in [header("host"), url("host")] {
            assert_eq!(refused(&own, true), None);
            assert_eq!(refused(&with(own, "range", &["bytes=0-1"]), true), None);
        }
        for name in ["x-amz-copy-source", "x-amz-acl", "x-amz-date", "x-amz-meta-a", "x-amz-security-token"] {
            assert_eq!(refused(&with(header("host"), name, &["1"]), true), Some("AccessDenied"), "{name}");
            assert_eq!(refused(&with(url("host"), name, &["1"]), true), Some("AccessDenied"), "{name}");
        }
        assert_eq!(refused(&with(header("host"), "x-amz-content-sha256", &["0"]), true), None);
    }

    #[test]
    fn version_2_is_taken_if_it_is_asked_for_and_only_for_some_minutes() {
        let signed = || request(&[V2], "");
        let of = |name: &str, date: &str| refused(&with(signed(), name, &[date]), true);
        for (name, date) in [
            ("date", "Sun, 29 Nov 2026 12:14:00 GMT"),
            ("date", "Sun, 29 Nov 2026 06:46:00 -0500"),
            ("x-amz-date", "Sun, 29 Nov 2026 11:46:00 GMT"),
            ("x-amz-date", "20261129T120000Z"),
        ] {
            assert_eq!(of(name, date), None, "{date}");
            assert_eq!(refused(&with(signed(), name, &[date]), false), Some("InvalidRequest"));
        }
        assert_eq!(refused(&request(&[], URL2), true), None);
        assert_eq!(refused(&request(&[], URL2), false), Some("InvalidRequest"));
        for date in ["Sun, 29 Nov 2026 12:16:00 GMT", "Sun, 29 Nov 2026 11:44:00 GMT", "Thu, 01 Jan 1970 00:00:00 GMT"]
        {
            assert_eq!(of("date", date), Some("RequestTimeTooSkewed"), "{date}");
        }
        for date in ["", "now", "2026-11-29"] {
            assert_eq!(of("date", date), Some("AccessDenied"), "{date}");
        }
        assert_eq!(refused(&signed(), true), Some("AccessDenied"));
        // `x-amz-date` counts, as in the signature, and one date only.
        let now = "Sun, 29 Nov 2026 12:00:00 GMT";
        let old = "Sun, 29 Nov 2025 12:00:00 GMT";
        assert_eq!(
            refused(&with(with(signed(), "date", &[now]), "x-amz-date", &[old]), true),
            Some("RequestTimeTooSkewed")
        );
        assert_eq!(refused(&with(signed(), "date", &[now, old]), true), Some("AccessDenied"));
        assert_eq!(
            refused(&with(with(signed(), "date", &[now]), "x-amz-date", &[now, old]), true),
            Some("AccessDenied")
        );
    }

    #[test]
    fn signatures_leave_the_rest_of_an_address() {
        let of = |text: &str| text.parse().ok().and_then(|uri| without_signature(&uri)).map(|uri| uri.to_string());
        assert_eq!(of("/b?batch=&X-Amz-Date=1&X-Amz-Signature=2").as_deref(), Some("/b?batch="));
        assert_eq!(of("http://h/b/k?AWSAccessKeyId=a&Signat%75re=b&Expires=1").as_deref(), Some("http://h/b/k"));
        assert_eq!(of("/b/k"), None);
    }
}
