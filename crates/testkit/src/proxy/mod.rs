//! A proxy in front of an S3 server that imitates a bad network: it loses replies, resets connections, throttles, truncates
//! bodies, delays replies, and returns stale listings. The seed and the request number determine each fault.
//!
//! Each connection has its own thread. `GET /-/faults?seed=7&lose=10&…` changes the settings of a running proxy; fault rates are
//! per thousand requests. `GET /-/counts` returns the counters as JSON.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use penstock_error::{Error, Result};

use crate::random::Random;

mod faults;
mod http;

pub use faults::Faults;
use faults::{Fault, NAMES};
use http::{BUFFER_BYTES, Body, Head, MOST_HEADERS, Request, body_of, broken, header, read_head};

#[derive(Default)]
struct ProxyState {
    faults: Faults,
    struck: [u64; NAMES.len()],
    in_a_row: HashMap<String, u64>,
    listings: HashMap<String, Vec<Vec<u8>>>,
}

struct Shared {
    upstream: SocketAddr,
    state: Mutex<ProxyState>,
    requests: AtomicU64,
    at_once: AtomicU64,
    /// The largest number of requests in progress at the same time.
    most_at_once: AtomicU64,
    /// Bytes of reply bodies forwarded to clients, not counting listings and chunked bodies.
    body_bytes: AtomicU64,
}

/// A running proxy. The proxy accepts connections until the process exits; each connection's thread ends when the connection closes.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

/// Run a schedule for each seed, `workers` at a time. Each worker has a proxy before the server.
pub fn schedules(
    upstream: SocketAddr,
    seeds: Range<u64>,
    workers: u64,
    run: impl Fn(u64, &Proxy) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicU64::new(seeds.start);
    let worker = || {
        let proxy = Proxy::start("127.0.0.1:0", upstream, Faults::default())
            .map_err(|error| Error::new("internal", format!("cannot start the proxy: {error}")))?;
        loop {
            match next.fetch_add(1, Relaxed) {
                seed if seed < seeds.end => run(seed, &proxy)?,
                _ => return Ok(()),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(Error::new("internal", "a worker panicked"))))
    })
}

impl Proxy {
    pub fn start(listen: &str, upstream: SocketAddr, faults: Faults) -> io::Result<Proxy> {
        let listener = TcpListener::bind(listen)?;
        let address = listener.local_addr()?;
        let state = Mutex::new(ProxyState { faults, ..ProxyState::default() });
        let shared = Arc::new(Shared {
            upstream,
            state,
            requests: AtomicU64::new(0),
            at_once: AtomicU64::new(0),
            most_at_once: AtomicU64::new(0),
            body_bytes: AtomicU64::new(0),
        });
        let accepting = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = accepting.clone();
                // Broken connections are intended here, so their errors are ignored.
                std::thread::spawn(move || Connection { shared, client, upstream: None }.serve());
            }
        });
        Ok(Proxy { address, shared })
    }

    pub fn set(&self, faults: Faults) {
        self.shared.set(faults);
    }

    /// Return the counters: requests, body bytes, the peak number of requests in progress, and how often each fault occurred.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        self.shared.counts()
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, ProxyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Set the faults, and count from 0 again.
    fn set(&self, faults: Faults) {
        *self.state() = ProxyState { faults, ..ProxyState::default() };
        [&self.requests, &self.body_bytes, &self.most_at_once].iter().for_each(|count| count.store(0, Relaxed));
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let struck = self.state().struck;
        let load = |count: &AtomicU64| count.load(Relaxed);
        let all = [
            ("requests", load(&self.requests)),
            ("body_bytes", load(&self.body_bytes)),
            ("most_at_once", load(&self.most_at_once)),
        ];
        all.into_iter().chain(NAMES.iter().zip(struck).map(|((name, _), count)| (*name, count))).collect()
    }

    /// Choose a fault for this request and a delay for its reply.
    fn decide(&self, request: &Request) -> (Fault, Duration) {
        let number = self.requests.fetch_add(1, Relaxed);
        let mut state = self.state();
        let mut random =
            Random(state.faults.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.wrapping_mul(0xd1b5_4a32_d192_ed03));
        let mut at = random.below(1000);
        let mut fault = Fault::None;
        for (index, (_, candidate)) in NAMES.iter().enumerate() {
            let rate = state.faults.per_mille[index];
            if at < rate {
                fault = *candidate;
                break;
            }
            at -= rate;
        }
        if fault == Fault::Stale && !request.is_listing() {
            fault = Fault::None;
        }
        let key = format!("{} {}", request.method, request.path);
        let row = state.in_a_row.get(&key).copied().unwrap_or(0);
        if state.faults.in_a_row > 0 && row >= state.faults.in_a_row {
            fault = Fault::None;
        }
        state.in_a_row.insert(key, if fault == Fault::None { 0 } else { row + 1 });
        if let Some(index) = NAMES.iter().position(|(_, known)| *known == fault) {
            state.struck[index] += 1;
        }
        let late = if fault == Fault::Late { random.below(state.faults.late_ms + 1) } else { 0 };
        (fault, Duration::from_millis(state.faults.delay_ms + late))
    }
}

struct Connection {
    shared: Arc<Shared>,
    client: TcpStream,
    upstream: Option<TcpStream>,
}

impl Connection {
    fn serve(mut self) {
        let _ = self.client.set_nodelay(true);
        let mut left = Vec::new();
        while let Ok(Some((request, rest))) = self.read_request(left) {
            left = rest;
            let at_once = self.shared.at_once.fetch_add(1, Relaxed) + 1;
            self.shared.most_at_once.fetch_max(at_once, Relaxed);
            let answered = self.answer(request);
            self.shared.at_once.fetch_sub(1, Relaxed);
            if answered.is_err() {
                return;
            }
        }
    }

    fn read_request(&mut self, begun: Vec<u8>) -> io::Result<Option<(Request, Vec<u8>)>> {
        let Some(head) = read_head(&mut self.client, begun)? else { return Ok(None) };
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        parsed.parse(&head.bytes).map_err(|error| broken(&error.to_string()))?;
        let (method, path) = (parsed.method.unwrap_or("").to_owned(), parsed.path.unwrap_or("").to_owned());
        let length: usize =
            header(parsed.headers, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let expects = header(parsed.headers, "expect").is_some();
        let mut body = head.rest;
        if expects && body.is_empty() {
            self.client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let mut forwarded = Vec::with_capacity(head.bytes.len());
        for line in head.bytes.split_inclusive(|byte| *byte == b'\n') {
            if !line.to_ascii_lowercase().starts_with(b"expect:") {
                forwarded.extend_from_slice(line);
            }
        }
        if body.len() < length {
            let have = body.len();
            body.resize(length, 0);
            self.client.read_exact(&mut body[have..])?;
        }
        let rest = body.split_off(length);
        Ok(Some((Request { method, path, head: forwarded, body }, rest)))
    }

    fn reply(&mut self, status: &str, body: &str) -> io::Result<()> {
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nContent-Type: application/xml\r\n\r\n", body.len());
        self.client.write_all(format!("{head}{body}").as_bytes())
    }

    /// Make the connection close with a reset.
    fn reset(&mut self) -> io::Error {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the descriptor is open, and SO_LINGER expects a `libc::linger`.
        unsafe {
            libc::setsockopt(
                self.client.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of::<libc::linger>() as libc::socklen_t,
            )
        };
        broken("reset on purpose")
    }

    fn answer(&mut self, request: Request) -> io::Result<()> {
        if let Some(control) = request.path.strip_prefix("/-/") {
            return self.control(control);
        }
        let (fault, delay) = self.shared.decide(&request);
        let error = |code: &str| {
            format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>on purpose</Message></Error>")
        };
        match fault {
            Fault::Reset => return Err(self.reset()),
            Fault::Throttle => return self.reply("503 Service Unavailable", &error("SlowDown")),
            Fault::TooMany => return self.reply("429 Too Many Requests", &error("TooManyRequests")),
            Fault::Fail => return self.reply("500 Internal Server Error", &error("InternalError")),
            Fault::Stale => {
                let old =
                    self.shared.state().listings.get(&request.path).and_then(|listings| listings.first().cloned());
                if let Some(old) = old {
                    return self.client.write_all(&old);
                }
            }
            _ => {}
        }
        let head = self.forward(&request)?;
        if !delay.is_zero() {
            std::thread::sleep(delay); // Simulate a slow network.
        }
        if fault == Fault::Lose {
            self.upstream = None;
            return Err(self.reset());
        }
        let body = body_of(&head.bytes, &request.method)?;
        if request.is_listing() {
            return self.pass_listing(&request, head, body);
        }
        match body {
            Body::Bytes(length) => {
                let most = if fault == Fault::Truncate && length > 0 { length / 2 } else { length };
                self.pass_bytes(head, most)?;
                if most < length {
                    self.upstream = None;
                    return Err(broken("truncated on purpose"));
                }
                Ok(())
            }
            Body::Chunked => {
                let whole = self.read_chunked(head.rest)?;
                self.client.write_all(&head.bytes)?;
                let most = if fault == Fault::Truncate { whole.len() / 2 } else { whole.len() };
                self.client.write_all(&whole[..most])?;
                if most < whole.len() { Err(broken("truncated on purpose")) } else { Ok(()) }
            }
        }
    }

    fn control(&mut self, control: &str) -> io::Result<()> {
        let (verb, query) = control.split_once('?').unwrap_or((control, ""));
        match verb {
            "faults" => match Faults::parse(query) {
                Ok(faults) => {
                    self.shared.set(faults);
                    self.reply("200 OK", "{}")
                }
                Err(why) => self.reply("400 Bad Request", &why),
            },
            "counts" => {
                let counts: Vec<String> =
                    self.shared.counts().iter().map(|(name, count)| format!("\"{name}\": {count}")).collect();
                self.reply("200 OK", &format!("{{{}}}", counts.join(", ")))
            }
            _ => self.reply("404 Not Found", "unknown path, expected /-/faults or /-/counts"),
        }
    }

    /// Forward the request and read the head of the reply. If the server closed a kept-alive connection, reconnect once.
    fn forward(&mut self, request: &Request) -> io::Result<Head> {
        for fresh in [false, true] {
            if fresh || self.upstream.is_none() {
                let stream = TcpStream::connect(self.shared.upstream)?;
                stream.set_nodelay(true)?;
                self.upstream = Some(stream);
            }
            let Some(upstream) = &mut self.upstream else { break };
            let sent = upstream.write_all(&request.head).and_then(|()| upstream.write_all(&request.body));
            let mut head = sent.and_then(|()| read_head(upstream, Vec::new()));
            while let Ok(Some(interim)) = &mut head
                && interim.bytes.starts_with(b"HTTP/1.1 100")
            {
                head = read_head(upstream, std::mem::take(&mut interim.rest));
            }
            match head {
                Ok(Some(head)) => return Ok(head),
                Ok(None) | Err(_) if !fresh => {}
                Ok(None) => return Err(broken("the server closed the connection")),
                Err(error) => return Err(error),
            }
        }
        Err(broken("no server"))
    }

    /// Forward the first `most` bytes of the body as they arrive.
    fn pass_bytes(&mut self, head: Head, most: u64) -> io::Result<()> {
        // Counted first: a client that has all bytes may ask for the count at once.
        self.shared.body_bytes.fetch_add(most, Relaxed);
        self.client.write_all(&head.bytes)?;
        let first = (head.rest.len() as u64).min(most);
        self.client.write_all(&head.rest[..first as usize])?;
        let Some(upstream) = &mut self.upstream else { return Err(broken("no server")) };
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut left = most - first;
        while left > 0 {
            let wanted = buffer.len().min(left as usize);
            let count = upstream.read(&mut buffer[..wanted])?;
            if count == 0 {
                return Err(broken("the server closed the connection in the middle of a body"));
            }
            self.client.write_all(&buffer[..count])?;
            left -= count as u64;
        }
        Ok(())
    }

    /// Forward a listing, and keep a copy to return later as a stale listing.
    fn pass_listing(&mut self, request: &Request, mut head: Head, body: Body) -> io::Result<()> {
        let content = match body {
            Body::Chunked => self.read_chunked(head.rest)?,
            Body::Bytes(length) => {
                let have = head.rest.len();
                head.rest.resize(length as usize, 0);
                if let Some(upstream) = &mut self.upstream {
                    upstream.read_exact(&mut head.rest[have..])?;
                }
                head.rest
            }
        };
        let reply = [head.bytes, content].concat();
        {
            let mut state = self.shared.state();
            let listings = state.listings.entry(request.path.clone()).or_default();
            listings.push(reply.clone());
            if listings.len() > 3 {
                listings.remove(0);
            }
        }
        self.client.write_all(&reply)
    }

    /// Read a chunked body and return it with its framing.
    fn read_chunked(&mut self, mut bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let Some(upstream) = &mut self.upstream else { return Err(broken("no server")) };
        let mut at = 0;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            while let Some(line) = bytes[at..].windows(2).position(|two| two == b"\r\n") {
                let size = std::str::from_utf8(&bytes[at..at + line])
                    .ok()
                    .and_then(|size| usize::from_str_radix(size.trim(), 16).ok());
                let size = size.ok_or_else(|| broken("invalid chunk size"))?;
                let end = at + line + 2 + size + 2;
                if end > bytes.len() {
                    break;
                }
                at = end;
                if size == 0 {
                    return Ok(bytes);
                }
            }
            let count = upstream.read(&mut buffer)?;
            if count == 0 {
                return Err(broken("the server closed the connection in the middle of a body"));
            }
            bytes.extend_from_slice(&buffer[..count]);
        }
    }
}
