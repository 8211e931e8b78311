//! Requests that S3 takes and `s3s` refuses although their signature of version 4 is right: with a region that has capitals, or with a signed range or
//! condition that `s3s` does not read. Their signature is verified here. Then they are signed again without what is odd, and `s3s` verifies the new signature.

use std::borrow::Cow;
use std::time::SystemTime;

use aws_sigv4::sign::v4::{calculate_signature, generate_signing_key};
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue, RANGE};
use hyper::{Request, Uri};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use s3s::auth::SecretKey;
use s3s::crypto::{Checksum as _, Sha256};

use super::{Form, date_of, parameter, parameters, parts_of};
use crate::read::conditions::{ALL, has_odd_conditions, mend_conditions};
use crate::read::ranges::{has_odd_range, mend_range};
use crate::upload::hex;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// The region of requests that are signed again. A server has only one, so it is nothing but a part of the signature.
const REGION: &str = "us-east-1";

/// What signatures escape in queries.
const IN_QUERY: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const IN_PATH: AsciiSet = IN_QUERY.remove(b'/');

/// A signature of version 4, as it was sent.
struct Sent {
    access_key: String,
    date: String,
    region: String,
    service: String,
    /// Names of the headers that it covers, in order.
    covered: Vec<String>,
    signature: String,
    is_in_address: bool,
    /// The time, as in the request.
    time: String,
}

/// What signs the requests of a key on a day.
#[derive(Debug, Clone)]
pub struct Signer {
    pub(super) key: Vec<u8>,
    pub(super) time: String,
    pub(super) scope: String,
}

impl Signer {
    fn new(secret: &SecretKey, sent: &Sent, region: &str) -> Option<Signer> {
        let (time, service) = (SystemTime::from(date_of(&sent.time)?), &sent.service);
        let key = generate_signing_key(secret.expose(), time, region, service).as_ref().to_vec();
        Some(Signer { key, time: sent.time.clone(), scope: format!("{}/{region}/{service}/aws4_request", sent.date) })
    }

    /// Sign a text. `kind` says what it is of.
    pub fn sign(&self, kind: &str, text: &str) -> String {
        calculate_signature(&self.key, format!("{kind}\n{}\n{}\n{text}", self.time, self.scope).as_bytes())
    }
}

/// The signatures of a body in chunks: each covers the one before it. Has what they are compared with, and what signs them again.
#[derive(Debug, Clone)]
pub struct Chain {
    pub signers: [Signer; 2],
    /// The last signatures, by each of them.
    pub last: [String; 2],
}

impl Chain {
    /// Compare a signature of a chunk, or of what follows all of them, and return the new one.
    pub fn next(&mut self, kind: &str, text: &str, given: &str) -> Option<&str> {
        let [own, new] = std::array::from_fn(|i| self.signers[i].sign(kind, &format!("{}\n{text}", self.last[i])));
        if own != given {
            return None;
        }
        self.last = [own, new];
        Some(&self.last[1])
    }
}

/// Change headers that S3 ignores or reads, and `s3s` does not.
fn mend(headers: &mut HeaderMap) {
    mend_range(headers);
    mend_conditions(headers);
}

/// Mend what `s3s` would refuse of a request, and sign the request again if its signature covers that. Returns what signs the chunks of its body again.
/// A request whose signature is wrong keeps what it covers: `s3s` refuses it.
pub fn mend_and_sign<B>(
    request: &mut Request<B>,
    form: &Form,
    secret_of: impl FnOnce(&str) -> Option<SecretKey>,
) -> Option<Chain> {
    let has_odd_headers = has_odd_range(request.headers()) || has_odd_conditions(request.headers());
    let covers = ALL.iter().chain([&RANGE]).any(|name| form.covers(name.as_str()));
    if has_odd_headers && !covers {
        mend(request.headers_mut());
    }
    if !(has_odd_region(request) || has_odd_headers && covers) {
        return None;
    }
    let sent = Sent::of(request)?;
    let secret = secret_of(&sent.access_key)?;
    let signers = [Signer::new(&secret, &sent, &sent.region)?, Signer::new(&secret, &sent, REGION)?];
    // Some clients sign the path as they send it.
    let decoded = percent_decode_str(request.uri().path()).decode_utf8().ok()?;
    let path = utf8_percent_encode(&decoded, &IN_PATH).to_string();
    let is_right = |path: &str| Some(signers[0].sign(ALGORITHM, &sent.canonical(request, path)?) == sent.signature);
    if !is_right(&path)? && !is_right(request.uri().path())? {
        return None;
    }
    let mut new = Sent { region: REGION.into(), ..sent };
    mend(request.headers_mut());
    new.covered.retain(|name| request.headers().contains_key(name.as_str()));
    let old = std::mem::take(&mut new.signature);
    new.write(request)?;
    new.signature = signers[1].sign(ALGORITHM, &new.canonical(request, &path)?);
    new.write(request)?;
    Some(Chain { signers, last: [old, new.signature] })
}

/// Return whether `s3s` does not take the region of a request.
fn has_odd_region<B>(request: &Request<B>) -> bool {
    let credential = match request.headers().get(AUTHORIZATION) {
        Some(value) => parts_of(value).map(|[credential, ..]| Cow::from(credential)),
        None => parameter(request.uri(), "X-Amz-Credential"),
    };
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    credential
        .is_some_and(|credential| credential.rsplit('/').nth(2).is_some_and(|region| !region.bytes().all(is_plain)))
}

impl Sent {
    fn of<B>(request: &Request<B>) -> Option<Sent> {
        let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        let in_header = match request.headers().get(AUTHORIZATION) {
            None => None,
            Some(value) => Some(parts_of(value)?),
        };
        let [credential, list, signature, time] = match in_header {
            Some([credential, list, signature]) => {
                [credential.into(), list.into(), signature.into(), Cow::from(header("x-amz-date")?)]
            }
            None => {
                let query_parameter = |name| parameter(request.uri(), name);
                [
                    query_parameter("X-Amz-Credential")?,
                    query_parameter("X-Amz-SignedHeaders")?,
                    query_parameter("X-Amz-Signature")?,
                    query_parameter("X-Amz-Date")?,
                ]
            }
        };
        // Access keys may have slashes.
        let mut parts = credential.rsplit('/');
        let (_, service, region, date) =
            (parts.next().filter(|end| *end == "aws4_request")?, parts.next()?, parts.next()?, parts.next()?);
        let key_bytes =
            credential.len().checked_sub("////aws4_request".len() + service.len() + region.len() + date.len())?;
        let mut covered: Vec<String> = list.split(';').map(str::to_ascii_lowercase).collect();
        covered.sort_unstable();
        Some(Sent {
            access_key: credential.get(..key_bytes)?.to_owned(),
            date: date.to_owned(),
            region: region.to_owned(),
            service: service.to_owned(),
            covered,
            signature: signature.into_owned(),
            is_in_address: in_header.is_none(),
            time: time.into_owned(),
        })
    }

    /// Return the hash of what is signed of a request.
    fn canonical<B>(&self, request: &Request<B>, path: &str) -> Option<String> {
        let escaped = |text: &str| utf8_percent_encode(text, &IN_QUERY).to_string();
        let signed = parameters(request.uri()).filter(|(name, _)| name != "X-Amz-Signature");
        let mut pairs: Vec<(String, String)> = signed.map(|(name, value)| (escaped(&name), escaped(&value))).collect();
        pairs.sort_by(|(one, _), (other, _)| one.cmp(other));
        let pairs: Vec<String> = pairs.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut text = format!("{}\n{path}\n{}\n", request.method(), pairs.join("&"));
        let mut names = Vec::new();
        for name in self.covered.iter().filter(|name| request.headers().contains_key(name.as_str())) {
            let mut values = Vec::new();
            for value in request.headers().get_all(name.as_str()) {
                values
                    .push(std::str::from_utf8(value.as_bytes()).ok()?.split_whitespace().collect::<Vec<_>>().join(" "));
            }
            text.push_str(&format!("{name}:{}\n", values.join(",")));
            names.push(name.as_str());
        }
        let body = match self.is_in_address {
            true => "UNSIGNED-PAYLOAD",
            false => request.headers().get("x-amz-content-sha256")?.to_str().ok()?,
        };
        text.push_str(&format!("\n{}\n{body}", names.join(";")));
        Some(hash_of(text.as_bytes()))
    }

    /// Write the signature into a request.
    fn write<B>(&self, request: &mut Request<B>) -> Option<()> {
        let Sent { access_key, date, region, service, signature, .. } = self;
        let credential = format!("{access_key}/{date}/{region}/{service}/aws4_request");
        let list = self.covered.join(";");
        if !self.is_in_address {
            let text = format!("{ALGORITHM} Credential={credential}, SignedHeaders={list}, Signature={signature}");
            request.headers_mut().insert(AUTHORIZATION, HeaderValue::from_str(&text).ok()?);
            return Some(());
        }
        let mut query = form_urlencoded::Serializer::new(String::new());
        for (name, value) in parameters(request.uri()) {
            query.append_pair(
                &name,
                match &*name {
                    "X-Amz-Credential" => &credential,
                    "X-Amz-SignedHeaders" => &list,
                    "X-Amz-Signature" => signature,
                    _ => &value,
                },
            );
        }
        let query = query.finish();
        let mut parts = request.uri().clone().into_parts();
        parts.path_and_query = Some(format!("{}?{query}", request.uri().path()).parse().ok()?);
        *request.uri_mut() = Uri::from_parts(parts).ok()?;
        Some(())
    }
}

/// Return the SHA-256 of bytes, in hexadecimal.
pub fn hash_of(bytes: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(bytes);
    hex(hash.finalize().as_ref())
}
