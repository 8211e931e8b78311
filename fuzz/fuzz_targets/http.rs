//! Fuzzes the requests of `penstock serve` before a folder: whatever a client sends, the server answers or ends the connection, no answer is an
//! internal error, and nothing outside the bucket of the requests changes.
#![no_main]
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use penstock_server::{Config, Unconnected};
use tokio::runtime::Runtime;

const METHODS: [&str; 6] = ["GET", "PUT", "HEAD", "DELETE", "POST", "PATCH"];
const QUERIES: [&str; 12] = [
    "", "list-type=2", "delete", "uploads", "uploadId=x", "partNumber=1&uploadId=x", "batch", "versions", "attributes", "location", "acl", "x-id=GetObject",
];
const HEADERS: [&str; 16] = [
    "Range", "If-Match", "If-None-Match", "If-Modified-Since", "If-Range", "Content-MD5", "Content-Length", "Transfer-Encoding", "Expect",
    "x-amz-copy-source", "x-amz-copy-source-range", "x-amz-checksum-crc32", "x-amz-trailer", "x-amz-decoded-content-length", "x-amz-meta-a", "Content-Type",
];
const KEPT: &str = "kept";

struct Served {
    folder: tempfile::TempDir,
    runtime: Runtime,
    server: Unconnected,
}

fn served() -> &'static Served {
    static SERVED: OnceLock<Served> = OnceLock::new();
    SERVED.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        for bucket in ["penstock", "other"] {
            std::fs::create_dir_all(folder.path().join("served").join(bucket)).expect("a bucket");
        }
        std::fs::write(folder.path().join("served/penstock/a"), KEPT).expect("an object");
        std::fs::write(folder.path().join("served/other/a"), KEPT).expect("an object");
        let config = Config {
            cold: folder.path().join("served").display().to_string(),
            storage_options: std::collections::BTreeMap::new(),
            cache: Some(format!("{}:10MB", folder.path().join("cache").display())),
            write_back: None,
            listen: "127.0.0.1:0".into(),
            status: None,
            status_token: None,
            status_tls: false,
            keys: None,
            signature_v2: true,
            tls: None,
            access_log: None,
            domain: Vec::new(),
            revalidate: "always".into(),
            stale_if_error: Duration::ZERO,
            immutable: Vec::new(),
            quota: Vec::new(),
            memory_bytes: 64 << 20,
            connections: 16,
            requests: 16,
            idle_seconds: Duration::from_millis(500),
            lame_duck: Duration::ZERO,
            drain_seconds: Duration::ZERO,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
        let server = runtime.block_on(Unconnected::open(&config)).expect("a server");
        let sent = b"GET /penstock/a HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
        let answer = runtime.block_on(server.answer(sent));
        assert!(answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(KEPT.as_bytes()), "{:?}", String::from_utf8_lossy(&answer));
        Served { folder, runtime, server }
    })
}

/// Write requests from bytes: numbers choose the method, the query and names of headers, and text up to the next 0xff is what they get.
fn requests(data: &[u8]) -> Vec<u8> {
    let mut sent = Vec::new();
    for one in data.split(|byte| *byte == 0xfe).take(4) {
        let [method, query, rest @ ..] = one else { continue };
        let mut texts = rest.split(|byte| *byte == 0xff);
        let key = texts.next().unwrap_or_default();
        let (body, headers): (Vec<&[u8]>, Vec<&[u8]>) = texts.partition(|text| text.first() == Some(&0));
        let body = body.first().map_or(&[][..], |body| &body[1..]);
        let method = METHODS[usize::from(*method) % METHODS.len()];
        sent.extend_from_slice(format!("{method} /penstock/").as_bytes());
        sent.extend_from_slice(key);
        let query = QUERIES[usize::from(*query) % QUERIES.len()];
        sent.extend_from_slice(format!("?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n").as_bytes());
        let mut has_length = false;
        for header in headers {
            let [name, value @ ..] = header else { continue };
            let name = HEADERS[usize::from(*name) % HEADERS.len()];
            has_length |= matches!(name, "Content-Length" | "Transfer-Encoding");
            sent.extend_from_slice(format!("{name}: ").as_bytes());
            sent.extend_from_slice(value);
            sent.extend_from_slice(b"\r\n");
        }
        if !has_length {
            sent.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
        }
        sent.extend_from_slice(b"\r\n");
        sent.extend_from_slice(body);
    }
    sent
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").file_name().to_string_lossy().into()).collect();
    names.sort();
    names
}

fuzz_target!(|data: &[u8]| {
    let Served { folder, runtime, server } = served();
    let answer = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), server.answer(&requests(data))).await });
    let answer = answer.expect("the server hangs");
    // What is not HTTP ends a connection without an answer.
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "{:?}", String::from_utf8_lossy(&answer));
    assert!(!answer.windows(13).any(|part| part == b"InternalError"), "{:?}", String::from_utf8_lossy(&answer));
    assert_eq!(names(folder.path()), ["cache", "served"]);
    assert_eq!(names(&folder.path().join("served")), [".penstock-serve", "other", "penstock"]);
    assert_eq!(names(&folder.path().join("served/other")), ["a"]);
    assert_eq!(std::fs::read(folder.path().join("served/other/a")).expect("the object"), KEPT.as_bytes());
});
