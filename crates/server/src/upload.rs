//! Bodies of uploads, compared with the checksums that came with them before the last bytes are passed on.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Md5, Sha1, Sha256};
use s3s::dto::{Checksum, StreamingBlob};
use s3s::{S3Error, S3ErrorCode, S3Result, StdError, TrailingHeaders, s3_error};

use crate::memory::{Memory, NO_ROOM, Taken, overloaded};

/// Bodies of up to this length are received whole before the cold store is asked, so that they can be sent again.
const WHOLE_BYTES: u64 = 16 << 20;
/// Memory for a body before its first bytes arrive.
const FIRST_BYTES: u64 = 64 << 10;
/// The longest object that one request may upload, as in S3.
const MOST_BYTES: u64 = 5 << 30;
const TRAILER_PREFIX: &str = "x-amz-checksum-";

/// A body that is received.
pub enum Body {
    Whole(Bytes),
    Stream(StreamingBlob, Broken),
}

/// Why a stream broke off. The cold store's client only says that it did.
#[derive(Debug, Clone, Default)]
pub struct Broken(Arc<Mutex<Option<S3Error>>>);

impl Broken {
    fn note(&self, error: S3Error) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// Return the reason, or else the error of the cold store.
    pub fn or(&self, error: S3Error) -> S3Error {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or(error)
    }
}

/// Return the length of a body, as its headers say it.
pub fn length(content_length: Option<i64>, headers: &hyper::HeaderMap) -> Option<u64> {
    // A body in chunks says how long its content is in a header of its own.
    let decoded = headers.get("x-amz-decoded-content-length").and_then(|value| value.to_str().ok()?.parse().ok());
    decoded.or_else(|| content_length.and_then(|bytes| u64::try_from(bytes).ok()))
}

/// What a body is compared with.
pub struct Expected {
    pub bytes: u64,
    pub md5: Option<String>,
    /// Checksums from headers.
    pub given: Checksum,
    /// Names of the algorithms whose checksums come after the body.
    trailers: Vec<String>,
    trailing: Option<TrailingHeaders>,
}

impl Expected {
    /// Take what the headers of a request say of its body. Fails without a length.
    pub fn new(
        content_length: Option<i64>,
        md5: Option<String>,
        given: Checksum,
        headers: &hyper::HeaderMap,
        trailing: Option<TrailingHeaders>,
    ) -> S3Result<Expected> {
        let bytes = length(content_length, headers)
            .ok_or_else(|| s3_error!(MissingContentLength, "the request does not declare the length of its body"))?;
        if bytes > MOST_BYTES {
            return Err(s3_error!(EntityTooLarge, "one request can upload at most 5 GiB; use a multipart upload"));
        }
        let named = headers.get_all("x-amz-trailer").iter().filter_map(|value| value.to_str().ok());
        let named =
            named.flat_map(|value| value.split(',')).filter_map(|name| name.trim().strip_prefix(TRAILER_PREFIX));
        Ok(Expected { bytes, md5, given, trailers: named.map(str::to_owned).collect(), trailing })
    }

    fn wants(&self, algorithm: &str, given: Option<&String>) -> bool {
        given.is_some() || self.trailers.iter().any(|name| name == algorithm)
    }

    /// Return the checksums of headers and trailers. Call it after the body.
    fn all(&self) -> S3Result<Checksum> {
        let mut all = self.given.clone();
        for name in &self.trailers {
            let header = format!("{TRAILER_PREFIX}{name}");
            let read = |trailing: &TrailingHeaders| {
                trailing
                    .read(|headers| headers.get(&header).and_then(|value| value.to_str().ok().map(str::to_owned)))
                    .flatten()
            };
            let value = self.trailing.as_ref().and_then(read);
            let value = value.ok_or_else(|| s3_error!(InvalidRequest, "the trailer `{header}` is missing"))?;
            let field = match name.as_str() {
                "crc32" => &mut all.checksum_crc32,
                "crc32c" => &mut all.checksum_crc32c,
                "crc64nvme" => &mut all.checksum_crc64nvme,
                "sha1" => &mut all.checksum_sha1,
                "sha256" => &mut all.checksum_sha256,
                _ => return Err(s3_error!(InvalidRequest, "the checksum algorithm `{name}` is not known")),
            };
            *field = Some(value);
        }
        Ok(all)
    }

    fn hashers(&self) -> Hashers {
        Hashers {
            sums: ChecksumHasher {
                crc32: self.wants("crc32", self.given.checksum_crc32.as_ref()).then(Crc32::new),
                crc32c: self.wants("crc32c", self.given.checksum_crc32c.as_ref()).then(Crc32c::new),
                sha1: self.wants("sha1", self.given.checksum_sha1.as_ref()).then(Sha1::new),
                sha256: self.wants("sha256", self.given.checksum_sha256.as_ref()).then(Sha256::new),
                crc64nvme: self.wants("crc64nvme", self.given.checksum_crc64nvme.as_ref()).then(Crc64Nvme::new),
            },
            md5: self.md5.is_some().then(Md5::new),
            bytes: 0,
        }
    }
}

struct Hashers {
    sums: ChecksumHasher,
    md5: Option<Md5>,
    bytes: u64,
}

impl Hashers {
    fn update(&mut self, part: &[u8]) {
        self.bytes += part.len() as u64;
        self.sums.update(part);
        self.md5.iter_mut().for_each(|md5| md5.update(part));
    }

    /// Compare with what was expected, and return the checksums.
    fn check(self, expected: &Expected) -> S3Result<Checksum> {
        if self.bytes != expected.bytes {
            return Err(s3_error!(IncompleteBody, "the body has {} bytes, expected {}", self.bytes, expected.bytes));
        }
        if let (Some(md5), Some(given)) = (self.md5, &expected.md5) {
            let found = base64(md5.finalize().as_ref());
            if found != *given {
                return Err(s3_error!(BadDigest, "the MD5 of the body is {found}, expected {given}"));
            }
        }
        let (found, given) = (self.sums.finalize(), expected.all()?);
        let pairs = [
            (&found.checksum_crc32, &given.checksum_crc32),
            (&found.checksum_crc32c, &given.checksum_crc32c),
            (&found.checksum_crc64nvme, &given.checksum_crc64nvme),
            (&found.checksum_sha1, &given.checksum_sha1),
            (&found.checksum_sha256, &given.checksum_sha256),
        ];
        if let Some((found, given)) = pairs.into_iter().find(|(found, given)| given.is_some() && found != given) {
            let text = |sum: &Option<String>| sum.clone().unwrap_or_default();
            return Err(s3_error!(BadDigest, "the checksum of the body is {}, expected {}", text(found), text(given)));
        }
        Ok(given)
    }
}

/// Return the encoding of an object without that of the request.
pub fn encoding(text: &str) -> Option<String> {
    let kept: Vec<&str> =
        text.split(',').map(str::trim).filter(|name| !name.is_empty() && *name != "aws-chunked").collect();
    (!kept.is_empty()).then(|| kept.join(", "))
}

/// Encode bytes as headers do.
pub fn base64(bytes: &[u8]) -> String {
    base64_simd::STANDARD.encode_to_string(bytes)
}

/// Write bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Receive the body of a put or of a part, and write its length and checksums into the input.
macro_rules! received {
    ($input:ident, $headers:expr, $trailing:expr, $memory:expr) => {{
        let given = s3s::dto::Checksum {
            checksum_crc32: $input.checksum_crc32.take(),
            checksum_crc32c: $input.checksum_crc32c.take(),
            checksum_crc64nvme: $input.checksum_crc64nvme.take(),
            checksum_sha1: $input.checksum_sha1.take(),
            checksum_sha256: $input.checksum_sha256.take(),
            ..s3s::dto::Checksum::default()
        };
        let md5 = $input.content_md5.clone();
        let expected = $crate::upload::Expected::new($input.content_length, md5, given, $headers, $trailing)?;
        $input.content_length = i64::try_from(expected.bytes).ok();
        let (body, sums) = $crate::upload::receive($input.body.take(), expected, $memory).await?;
        $input.checksum_crc32 = sums.checksum_crc32;
        $input.checksum_crc32c = sums.checksum_crc32c;
        $input.checksum_crc64nvme = sums.checksum_crc64nvme;
        $input.checksum_sha1 = sums.checksum_sha1;
        $input.checksum_sha256 = sums.checksum_sha256;
        body
    }};
}
pub(crate) use received;

/// Receive a short body whole, or return a long one as a stream that fails before its last bytes if a checksum does not match. Also returns the
/// checksums of a whole body, and of a stream those that its headers gave.
pub async fn receive(body: Option<StreamingBlob>, expected: Expected, memory: &Memory) -> S3Result<(Body, Checksum)> {
    let mut body = body.unwrap_or_else(|| StreamingBlob::from(s3s::Body::empty()));
    if expected.bytes > WHOLE_BYTES {
        let given = expected.given.clone();
        let broken = Broken::default();
        return Ok((Body::Stream(checked(body, expected, broken.clone()), broken), given));
    }
    // A client that sends slowly holds only the memory of what it has sent.
    let mut taken_bytes = expected.bytes.min(FIRST_BYTES);
    let mut taken: Taken = memory.take(taken_bytes).await?;
    let (mut whole, mut hashers) = (BytesMut::with_capacity(taken_bytes as usize), expected.hashers());
    while let Some(part) = body.next().await {
        let part = part.map_err(broken)?;
        let needed_bytes = (whole.len() + part.len()) as u64;
        if needed_bytes > taken_bytes && taken_bytes < expected.bytes {
            let more = needed_bytes.next_power_of_two().min(expected.bytes).saturating_sub(taken_bytes);
            taken.merge(memory.take(more).await?);
            taken_bytes += more;
            whole.reserve((taken_bytes as usize).saturating_sub(whole.len()));
        }
        if whole.len() + part.len() > expected.bytes as usize {
            return Err(s3_error!(IncompleteBody, "the body is longer than {} bytes", expected.bytes));
        }
        hashers.update(&part);
        whole.extend_from_slice(&part);
    }
    let sums = hashers.check(&expected)?;
    Ok((Body::Whole(taken.with(whole.freeze())), sums))
}

/// A body that ends early or breaks its own rules is the client's.
fn broken(error: StdError) -> S3Error {
    let text = error.to_string().replace("AwsChunkedStreamError: ", "").replace("Underlying: ", "");
    if text.ends_with(NO_ROOM) {
        return overloaded();
    }
    let mut broken = S3Error::with_source(S3ErrorCode::IncompleteBody, error);
    broken.set_message(format!("the body could not be received: {text}"));
    broken
}

/// Pass a body on, but the last part only after all checksums match.
fn checked(body: StreamingBlob, expected: Expected, why: Broken) -> StreamingBlob {
    struct State {
        body: StreamingBlob,
        hashers: Option<Hashers>,
        held: Option<Bytes>,
        expected: Expected,
        why: Broken,
    }
    let bytes = expected.bytes as usize;
    let state = State { body, hashers: Some(expected.hashers()), held: None, expected, why };
    let parts = futures::stream::unfold(state, |mut state| async move {
        loop {
            let mut hashers = state.hashers.take()?;
            let failed = match state.body.next().await {
                Some(Ok(part)) => {
                    hashers.update(&part);
                    state.hashers = Some(hashers);
                    match state.held.replace(part) {
                        Some(held) => return Some((Ok(held), state)),
                        None => continue,
                    }
                }
                Some(Err(error)) => broken(error),
                None => match hashers.check(&state.expected) {
                    Ok(_) => return state.held.take().map(|held| (Ok(held), state)),
                    Err(error) => error,
                },
            };
            let text = failed.to_string();
            state.why.note(failed);
            return Some((Err(StdError::from(text)), state));
        }
    });
    crate::body::with_length(parts, bytes)
}
