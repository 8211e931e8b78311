//! Parsing of HTTP message heads and body lengths.

use std::io::{self, Read};
use std::net::TcpStream;

pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) head: Vec<u8>,
    pub(super) body: Vec<u8>,
}

impl Request {
    pub(super) fn is_listing(&self) -> bool {
        self.method == "GET" && self.path.contains("list-type=2")
    }
}

/// The head of a message, and the bytes already read after it.
pub(super) struct Head {
    pub(super) bytes: Vec<u8>,
    pub(super) rest: Vec<u8>,
}

pub(super) const MOST_HEADERS: usize = 128;
pub(super) const BUFFER_BYTES: usize = 256 << 10;

pub(super) fn broken(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

pub(super) fn read_head(stream: &mut TcpStream, mut begun: Vec<u8>) -> io::Result<Option<Head>> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        if let Some(end) = begun.windows(4).position(|four| four == b"\r\n\r\n") {
            let rest = begun.split_off(end + 4);
            return Ok(Some(Head { bytes: begun, rest }));
        }
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            return if begun.is_empty() {
                Ok(None)
            } else {
                Err(broken("the connection closed in the middle of a message head"))
            };
        }
        begun.extend_from_slice(&buffer[..count]);
    }
}

pub(super) fn header<'a>(headers: &'a [httparse::Header<'a>], name: &str) -> Option<&'a str> {
    headers
        .iter()
        .find(|header| header.name.eq_ignore_ascii_case(name))
        .and_then(|header| std::str::from_utf8(header.value).ok())
}

/// How a reply specifies the length of its body.
pub(super) enum Body {
    Bytes(u64),
    Chunked,
}

pub(super) fn body_of(head: &[u8], method: &str) -> io::Result<Body> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut parsed = httparse::Response::new(&mut headers);
    parsed.parse(head).map_err(|error| broken(&error.to_string()))?;
    if method == "HEAD" || matches!(parsed.code, Some(204 | 304)) {
        return Ok(Body::Bytes(0));
    }
    if header(parsed.headers, "transfer-encoding").is_some_and(|encoding| encoding.eq_ignore_ascii_case("chunked")) {
        return Ok(Body::Chunked);
    }
    let length = header(parsed.headers, "content-length").and_then(|length| length.parse().ok());
    length.map(Body::Bytes).ok_or_else(|| broken("the reply has no length"))
}
