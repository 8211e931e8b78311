//! Bodies in the chunks of S3 (`aws-chunked`), before `s3s` reads them: it holds each chunk in memory, and does not miss the last one.

use std::collections::VecDeque;
use std::pin::Pin;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use hyper::Request;
use hyper::header::AUTHORIZATION;
use s3s::StdError;

use super::resign::{Chain, hash_of};
use crate::memory::{Memory, NO_ROOM, Taken};

/// The longest signed chunk. It is held until its signature is compared.
const CHUNK_BYTES: u64 = 16 << 20;
/// The longest line before a chunk, and the longest text after the last one.
const LINE_BYTES: usize = 1 << 10;
const TAIL_BYTES: usize = 16 << 10;
/// Shorter parts are put together.
const PIECE_BYTES: usize = 64 << 10;

/// How the chunks of a body are signed.
#[derive(Debug, Clone)]
pub enum Signed {
    /// Not at all.
    No,
    Yes,
    /// They are signed again.
    Again(Box<Chain>),
}

impl Signed {
    /// Return how the body of a request is signed, or None if it is not in chunks.
    pub fn of<B>(request: &Request<B>, again: Option<Chain>) -> Option<Signed> {
        let kind = request.headers().get("x-amz-content-sha256")?.to_str().ok()?.strip_prefix("STREAMING-")?;
        if !request.headers().contains_key(AUTHORIZATION) {
            return None;
        }
        match (kind.starts_with("UNSIGNED-"), again) {
            (true, _) => Some(Signed::No),
            (false, None) => Some(Signed::Yes),
            (false, Some(chain)) => Some(Signed::Again(Box::new(chain))),
        }
    }
}

type Parts = Pin<Box<dyn Stream<Item = Result<Bytes, StdError>> + Send>>;

/// The next part of a body.
enum Next {
    Line,
    /// Bytes of a chunk.
    Data(u64),
    /// The line end after a chunk.
    End,
    /// What follows the last chunk.
    Tail,
    Nothing,
}

struct Chunks {
    parts: Parts,
    /// What was received and not read.
    received: Bytes,
    next: Next,
    signed: Signed,
    /// The signature of a chunk that is signed again, and the chunk.
    given: String,
    held: BytesMut,
    ready: VecDeque<Bytes>,
    /// Memory is counted for a signed chunk: `s3s` holds it, and what signs it again does, too.
    memory: Memory,
    taken: Option<Taken>,
}

/// Pass a body on. It fails without a last chunk, with a signed chunk of over 16 MiB, and with a wrong signature if it is signed again. Chunks that are
/// not signed become as short as they arrive.
pub fn checked(
    parts: impl Stream<Item = Result<Bytes, StdError>> + Send + 'static,
    signed: Signed,
    memory: Memory,
) -> impl Stream<Item = Result<Bytes, StdError>> + Send + 'static {
    let (received, given, held, ready) = (Bytes::new(), String::new(), BytesMut::new(), VecDeque::new());
    let chunks =
        Chunks { parts: Box::pin(parts), received, next: Next::Line, signed, given, held, ready, memory, taken: None };
    futures::stream::unfold(chunks, |mut chunks| async move {
        loop {
            if let Some(bytes) = chunks.ready.pop_front() {
                return Some((Ok(bytes), chunks));
            }
            if matches!(chunks.next, Next::Nothing) {
                return None;
            }
            if let Err(error) = chunks.proceed().await {
                chunks.next = Next::Nothing;
                return Some((Err(error), chunks));
            }
        }
    })
}

impl Chunks {
    /// Read the next part.
    async fn proceed(&mut self) -> Result<(), StdError> {
        self.next = match self.next {
            Next::Line => self.begin().await?,
            Next::Data(bytes) => {
                self.expect().await?;
                let part = self.received.split_to(self.received.len().min(usize::try_from(bytes)?));
                let left = bytes - part.len() as u64;
                match &self.signed {
                    Signed::No => {
                        self.ready.extend([format!("{:x}\r\n", part.len()).into(), part, Bytes::from_static(b"\r\n")])
                    }
                    Signed::Yes if self.held.is_empty() && part.len() >= PIECE_BYTES => self.ready.push_back(part),
                    // Many short parts would need more memory than the bytes.
                    Signed::Yes => {
                        self.held.extend_from_slice(&part);
                        if self.held.len() >= PIECE_BYTES || left == 0 {
                            self.ready.push_back(self.held.split().freeze());
                        }
                    }
                    Signed::Again(_) => self.held.extend_from_slice(&part),
                }
                if left == 0 { Next::End } else { Next::Data(left) }
            }
            Next::End => {
                let line = self.line().await?;
                if &line[..] != b"\r\n" {
                    return Err("a chunk of the body is longer than its declared length".into());
                }
                self.sign_chunk()?;
                if !matches!(self.signed, Signed::No) {
                    self.ready.push_back(line);
                }
                Next::Line
            }
            Next::Tail => {
                let mut tail = BytesMut::new();
                while self.receive().await? {
                    tail.extend_from_slice(&std::mem::take(&mut self.received));
                    if tail.len() > TAIL_BYTES {
                        return Err("the trailer of the body is too long".into());
                    }
                }
                let tail = self.sign_tail(tail.freeze())?;
                self.ready.push_back(tail);
                Next::Nothing
            }
            Next::Nothing => Next::Nothing,
        };
        Ok(())
    }

    /// Read the line before a chunk: its length in hexadecimal, and its signature.
    async fn begin(&mut self) -> Result<Next, StdError> {
        let line = self.line().await?;
        let text = std::str::from_utf8(&line)?.trim_end();
        let (bytes, signature) = text.split_once(";chunk-signature=").unwrap_or((text, ""));
        let is_hex = !bytes.is_empty() && bytes.len() <= 8 && bytes.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bytes = u64::from_str_radix(bytes, 16)
            .ok()
            .filter(|_| is_hex)
            .ok_or("the length of a chunk of the body cannot be parsed")?;
        if bytes > CHUNK_BYTES && !matches!(self.signed, Signed::No) {
            return Err("a signed chunk of the body exceeds 16 MiB".into());
        }
        self.given = signature.to_owned();
        self.taken = None;
        let copies = match self.signed {
            Signed::No => 0,
            Signed::Yes => 1,
            Signed::Again(_) => 2,
        };
        if bytes * copies > 0 {
            self.taken = Some(self.memory.take(bytes * copies).await.map_err(|_| NO_ROOM)?);
        }
        let next = if bytes == 0 { Next::Tail } else { Next::Data(bytes) };
        match (&self.signed, bytes) {
            (Signed::Again(_), 0) => self.sign_chunk()?,
            (Signed::Yes, _) | (Signed::No, 0) => self.ready.push_back(line),
            _ => {}
        }
        Ok(next)
    }

    /// Compare the signature of a chunk, and let it pass with a new one, if it is signed again.
    fn sign_chunk(&mut self) -> Result<(), StdError> {
        let Signed::Again(chain) = &mut self.signed else { return Ok(()) };
        let chunk = self.held.split().freeze();
        let text = format!("{}\n{}", hash_of(b""), hash_of(&chunk));
        let new = chain
            .next("AWS4-HMAC-SHA256-PAYLOAD", &text, &self.given)
            .ok_or("the signature of a chunk does not match")?;
        self.ready.push_back(format!("{:x};chunk-signature={new}\r\n", chunk.len()).into());
        self.ready.extend(Some(chunk).filter(|chunk| !chunk.is_empty()));
        Ok(())
    }

    /// Compare the signature of what follows the last chunk, and return it with a new one, if it is signed again.
    fn sign_tail(&mut self, tail: Bytes) -> Result<Bytes, StdError> {
        const NAME: &str = "x-amz-trailer-signature";
        let Signed::Again(chain) = &mut self.signed else { return Ok(tail) };
        let lines = std::str::from_utf8(&tail)?.lines().filter(|line| !line.is_empty());
        let named =
            lines.map(|line| line.split_once(':').map(|(name, value)| (name.to_ascii_lowercase(), value.trim())));
        let mut fields = named.collect::<Option<Vec<_>>>().ok_or("the trailer of the body cannot be parsed")?;
        let Some(at) = fields.iter().position(|(name, _)| name == NAME) else { return Ok(tail) };
        let (_, given) = fields.remove(at);
        fields.sort();
        let text: String = fields.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
        let new = chain.next("AWS4-HMAC-SHA256-TRAILER", &hash_of(text.as_bytes()), given);
        let new = new.ok_or("the signature of the trailer does not match")?;
        Ok(format!("{}{NAME}:{new}\r\n\r\n", text.replace('\n', "\r\n")).into())
    }

    /// Wait for bytes, if none are left. Returns whether there are some: none come after the end of the body.
    async fn receive(&mut self) -> Result<bool, StdError> {
        while self.received.is_empty() {
            match self.parts.next().await {
                None => return Ok(false),
                Some(part) => self.received = part?,
            }
        }
        Ok(true)
    }

    /// Wait for bytes that must come.
    async fn expect(&mut self) -> Result<(), StdError> {
        if self.receive().await? { Ok(()) } else { Err("the body ends before its last chunk".into()) }
    }

    /// Read a line with its end.
    async fn line(&mut self) -> Result<Bytes, StdError> {
        let mut line = BytesMut::new();
        loop {
            self.expect().await?;
            let end = self.received.iter().position(|byte| *byte == b'\n');
            let part = self.received.split_to(end.map_or(self.received.len(), |end| end + 1));
            if line.len() + part.len() > LINE_BYTES {
                return Err("a line between the chunks of the body is too long".into());
            }
            if line.is_empty() && end.is_some() {
                return Ok(part);
            }
            line.extend_from_slice(&part);
            if end.is_some() {
                return Ok(line.freeze());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::resign::Signer;
    use super::*;

    /// Return a body in chunks that a chain signs.
    fn signed(signer: &Signer, chunks: &[&[u8]], trailer: &str) -> Vec<u8> {
        let (mut chain, mut body) = (chain_of(signer, signer), Vec::new());
        let mut sign = |kind: &str, text: &str| {
            let own = signer.sign(kind, &format!("{}\n{text}", chain.last[0]));
            chain.next(kind, text, &own).map(str::to_owned).unwrap_or_default()
        };
        for chunk in chunks.iter().chain([&&b""[..]]) {
            let signature = sign("AWS4-HMAC-SHA256-PAYLOAD", &format!("{}\n{}", hash_of(b""), hash_of(chunk)));
            body.extend_from_slice(format!("{:x};chunk-signature={signature}\r\n", chunk.len()).as_bytes());
            body.extend_from_slice(chunk);
            body.extend_from_slice(if chunk.is_empty() { b"" } else { b"\r\n" });
        }
        let signature = sign("AWS4-HMAC-SHA256-TRAILER", &hash_of(format!("{trailer}\n").as_bytes()));
        body.extend_from_slice(format!("{trailer}\r\nx-amz-trailer-signature:{signature}\r\n\r\n").as_bytes());
        body
    }

    fn chain_of(own: &Signer, new: &Signer) -> Chain {
        Chain { signers: [own.clone(), new.clone()], last: ["seed".into(), "seed".into()] }
    }

    fn signer(scope: &str) -> Signer {
        Signer { key: scope.as_bytes().to_vec(), time: "now".into(), scope: scope.into() }
    }

    /// Pass on a body that arrives in parts of `most` bytes.
    async fn passed(body: &[u8], most: usize, signed: Signed) -> Result<Vec<u8>, String> {
        let parts: Vec<_> = body.chunks(most).map(|part| Ok(Bytes::copy_from_slice(part))).collect();
        let mut all = Vec::new();
        let mut parts = Box::pin(checked(futures::stream::iter(parts), signed, Memory::new(64 << 20)));
        while let Some(part) = parts.next().await {
            all.extend_from_slice(&part.map_err(|error| error.to_string())?);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn bodies_pass_however_they_arrive_and_not_if_any_end_is_missing() -> Result<(), String> {
        let [one, other] = [signer("one"), signer("other")];
        let chunks: [&[u8]; 3] = [b"first\r\n", b"x", &[7; 300]];
        let (body, wanted) =
            (signed(&one, &chunks, "x-amz-checksum-crc32:a"), signed(&other, &chunks, "x-amz-checksum-crc32:a"));
        let again = || Signed::Again(Box::new(chain_of(&one, &other)));
        for most in [1, 2, 3, 7, 64, 100, body.len()] {
            assert_eq!(passed(&body, most, Signed::Yes).await?, body);
            assert_eq!(passed(&body, most, again()).await?, wanted);
            let reframed = passed(b"8\r\nabc\r\nefg\r\nB\r\n0123456789a\r\n0\r\na:b\r\n\r\n", most, Signed::No).await?;
            // Each piece has a line of its own.
            let (mut rest, mut data) = (&reframed[..], Vec::new());
            loop {
                let end = rest.iter().position(|byte| *byte == b'\n').ok_or("a line")?;
                let bytes = usize::from_str_radix(
                    std::str::from_utf8(&rest[..end]).map_err(|error| error.to_string())?.trim(),
                    16,
                );
                let bytes = bytes.map_err(|error| error.to_string())?;
                rest = &rest[end + 1..];
                if bytes == 0 {
                    break;
                }
                data.extend_from_slice(&rest[..bytes]);
                assert_eq!(&rest[bytes..bytes + 2], b"\r\n");
                rest = &rest[bytes + 2..];
            }
            assert_eq!((&data[..], rest), (&b"abc\r\nefg0123456789a"[..], &b"a:b\r\n\r\n"[..]));
        }
        let tail = body.len() - body.windows(2).rposition(|two| two == b"0;").ok_or("the last chunk")?;
        for kept in 0..body.len() - tail + 80 {
            assert!(passed(&body[..kept], 100, Signed::Yes).await.is_err(), "{kept} bytes");
            assert!(passed(&body[..kept], 100, again()).await.is_err(), "{kept} bytes");
        }
        let is_line_end = |at: &usize| matches!(body[*at], b'\r' | b'\n');
        for changed in (0..body.len()).filter(|at| !is_line_end(at)) {
            let mut body = body.clone();
            body[changed] ^= 1;
            assert_ne!(passed(&body, 100, again()).await, Ok(wanted.clone()), "byte {changed}");
        }
        Ok(())
    }
}
