//! Headers of S3 in the query of an address. Presigners of SDKs move them there (JavaScript v3, Go v2, and boto3 with version 2 of signatures), so that
//! those who use the address need not send them. The signature covers them: that of version 4 as a part of the query, and that of version 2 as headers.

use hyper::Request;
use hyper::header::{HeaderName, HeaderValue};

use super::{Refusal, parameters};

/// Parameters of the signature itself.
const OF_SIGNATURE: [&str; 7] = [
    "x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-expires", "x-amz-security-token", "x-amz-signature",
    "x-amz-signedheaders",
];

/// Checksums of the body. S3 ignores them in addresses, and must: the SDK for JavaScript signs that of an empty body, because it does not know the body yet.
/// Source: https://github.com/aws/aws-sdk-go-v2/issues/2610, https://github.com/localstack/localstack/issues/12169.
const IGNORED: [&str; 6] = [
    "x-amz-checksum-crc32", "x-amz-checksum-crc32c", "x-amz-checksum-crc64nvme", "x-amz-checksum-sha1",
    "x-amz-checksum-sha256", "x-amz-sdk-checksum-algorithm",
];

/// Return whether a parameter of an address has the name of a header of S3, or belongs to a signature.
pub fn is_header(name: &str) -> bool {
    name.get(..6).is_some_and(|begin| begin.eq_ignore_ascii_case("x-amz-"))
}

/// Write the headers in an address into the headers of the request, so that every check sees them. Refuses a header that is there twice, and any of them
/// if the address is not signed: S3 does not say what they are then, and an ignored one may be a condition that its client relies on.
pub fn move_to_headers<B>(request: &mut Request<B>) -> Result<(), Refusal> {
    let is_signed = parameters(request.uri()).any(|(name, _)| name == "X-Amz-Signature" || name == "Signature");
    let mut moved: Vec<(HeaderName, HeaderValue)> = Vec::new();
    for (name, value) in parameters(request.uri()) {
        let lower = name.to_ascii_lowercase();
        if !is_header(&lower) || OF_SIGNATURE.contains(&&*lower) {
            continue;
        }
        let invalid = |why: &str| ("InvalidArgument", format!("The query parameter {name} {why}."));
        if !is_signed {
            return Err(invalid("is accepted only in signed URLs. Send it as a header"));
        }
        if IGNORED.contains(&&*lower) {
            continue;
        }
        let name = HeaderName::try_from(&lower).map_err(|_| invalid("is not a valid header name"))?;
        let value = HeaderValue::try_from(&*value).map_err(|_| invalid("has a value that is not valid in a header"))?;
        let others = request.headers().get_all(&name).iter();
        if others.into_iter().any(|other| other != value) || moved.iter().any(|(other, _)| *other == name) {
            return Err(invalid("also occurs as a header with another value, or occurs twice"));
        }
        moved.push((name, value));
    }
    request.headers_mut().extend(moved.into_iter().map(|(name, value)| (Some(name), value)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(query: &str, headers: &[(&str, &str)]) -> Result<Vec<(String, String)>, &'static str> {
        let builder = Request::builder().uri(format!("/b/k?{query}"));
        let mut request =
            headers.iter().fold(builder, |builder, (name, value)| builder.header(*name, *value)).body(()).unwrap();
        move_to_headers(&mut request).map_err(|(code, _)| code)?;
        let header_text = |(name, value): (&HeaderName, &HeaderValue)| {
            (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        Ok(request.headers().iter().map(header_text).collect())
    }

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn headers_of_signed_addresses_are_headers() {
        const V4: &str = "X-Amz-Algorithm=a&X-Amz-Credential=b&X-Amz-Date=c&X-Amz-Expires=1&X-Amz-SignedHeaders=host&X-Amz-Signature=0";
        for signed in [V4, "AWSAccessKeyId=key&Signature=0&Expires=9"] {
            let with = |query: &str, headers: &[(&str, &str)]| moved(&format!("{query}&{signed}"), headers);
            assert_eq!(with("x-id=PutObject&partNumber=1", &[]), Ok(vec![]));
            assert_eq!(
                with("X-Amz-M%65ta-A=%2F+b&x-amz-acl=", &[]),
                Ok(vec![pair("x-amz-meta-a", "/ b"), pair("x-amz-acl", "")])
            );
            assert_eq!(with("x-amz-meta-a=%C3%BC", &[]), Ok(vec![pair("x-amz-meta-a", "ü")]));
            assert_eq!(with("x-amz-checksum-crc32=AAAAAA==&x-amz-sdk-checksum-algorithm=CRC32", &[]), Ok(vec![]));
            assert_eq!(with("x-amz-meta-a=1", &[("x-amz-meta-a", "1")]), Ok(vec![pair("x-amz-meta-a", "1")]));
            for (query, header) in [
                ("x-amz-meta-a=1", "2"),
                ("x-amz-meta-a=1&X-AMZ-meta-a=1", "1"),
                ("x-amz-m+a=1", "1"),
                ("x-amz-a=%0A", "1"),
            ] {
                assert_eq!(with(query, &[("x-amz-meta-a", header)]), Err("InvalidArgument"), "{query}");
            }
        }
    }

    #[test]
    fn headers_of_other_addresses_are_refused() {
        for query in ["x-amz-meta-a=1", "X-Amz-If-Match-Size=1", "x-amz-checksum-crc32=AAAAAA==", "%78-amz-acl"] {
            assert_eq!(moved(query, &[]), Err("InvalidArgument"), "{query}");
        }
        assert_eq!(moved("x-id=PutObject&X-Amz-Expires=1&list-type=2", &[]), Ok(vec![]));
    }
}
