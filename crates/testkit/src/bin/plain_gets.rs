//! Measures the maximum read throughput of object storage by sending signed ranged GETs with the same HTTP library and discarding
//! the bodies.
//!
//! `plain-gets BUCKET AT_ONCE` reads the standard AWS environment variables, and one batch per line of standard input. A batch
//! is a list of ranges of the form `key begin end`, separated by `;`. Batches run one after another, each with at most AT_ONCE
//! concurrent ranges. Prints the elapsed seconds and received bytes for all batches except the first, which is a warm-up.
#![allow(unused_crate_dependencies)] // Only the library and the other binaries use the remaining dependencies.

use std::io::BufRead as _;
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt as _;
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore};

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn discard(store: &dyn ObjectStore, key: &Path, begin: u64, end: u64) -> Result<u64, Failure> {
    let options = GetOptions { range: Some(GetRange::Bounded(begin..end)), ..GetOptions::default() };
    let mut stream = store.get_opts(key, options).await?.into_stream();
    let mut bytes = 0;
    while let Some(chunk) = stream.next().await {
        bytes += chunk?.len() as u64;
    }
    if bytes == end - begin { Ok(bytes) } else { Err("the reply is shorter than the range".into()) }
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bucket, at_once] = &arguments[..] else { return Err("usage: plain-gets BUCKET AT_ONCE".into()) };
    let at_once: usize = at_once.parse()?;
    let store: Arc<dyn ObjectStore> =
        Arc::new(AmazonS3Builder::from_env().with_bucket_name(bucket).with_allow_http(true).build()?);
    let mut batches: Vec<Vec<(Path, u64, u64)>> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let parse = |range: &str| -> Result<(Path, u64, u64), Failure> {
            let parts: Vec<&str> = range.split(' ').collect();
            let [key, begin, end] = parts[..] else {
                return Err("cannot parse a range: expected `key begin end`".into());
            };
            Ok((Path::from(key), begin.parse()?, end.parse()?))
        };
        batches.push(line?.split(';').map(parse).collect::<Result<_, _>>()?);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut began = Instant::now();
        let mut bytes = 0;
        for (number, batch) in batches.into_iter().enumerate() {
            // Each GET runs in its own task, so that the GETs use all cores.
            let gets = batch.into_iter().map(|(key, begin, end)| {
                let store = store.clone();
                async move { tokio::spawn(async move { discard(store.as_ref(), &key, begin, end).await }).await }
            });
            let mut answers = futures::stream::iter(gets).buffer_unordered(at_once);
            while let Some(answer) = answers.next().await {
                bytes += answer??;
            }
            if number == 0 {
                (began, bytes) = (Instant::now(), 0);
            }
        }
        println!("{} {bytes}", began.elapsed().as_secs_f64());
        Ok(())
    })
}
