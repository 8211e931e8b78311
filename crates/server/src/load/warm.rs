//! Reads of all objects below a prefix, once each, so that a server between here and the store has them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aws_sdk_s3::Client;
use futures::{Stream, StreamExt as _};
use penstock_error::{Error, Result};
use penstock_storage::{Io, Options};
use serde::Deserialize;

use super::on_runtime;
use super::see::{seen_each, stopped};
use super::worker::failed;
use crate::cold::remote::client;

/// Failures that are named.
const NAMED: usize = 5;
/// How often a body that breaks off is read.
const TRIES: usize = 2;

/// What is read.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Warm {
    pub storage_options: BTreeMap<String, String>,
    pub bucket: String,
    /// The beginning of the keys, which may end anywhere in a name.
    pub prefix: String,
    /// Objects that are read at once.
    pub workers: usize,
}

/// What was read so far.
#[derive(Debug, Clone, Default)]
pub struct Warmed {
    pub objects: u64,
    pub bytes: u64,
    pub failed: u64,
    /// The keys of the first objects that could not be read, and why.
    pub failures: Vec<(String, String)>,
}

/// Read all objects below a prefix. Calls `see` several times a second, and ends when it breaks. Cost: one request for a thousand objects and one for
/// each; holds the names of a thousand objects, and a piece of each that is being read.
pub fn warm(warm: &Warm, see: &mut dyn FnMut(&Warmed) -> ControlFlow<()>) -> Result<Warmed> {
    on_runtime(run(warm, see))
}

async fn run(warm: &Warm, see: &mut dyn FnMut(&Warmed) -> ControlFlow<()>) -> Result<Warmed> {
    let (client, _) = client(&Options::new(warm.storage_options.clone(), Io::Auto)?).await?;
    let bytes = AtomicU64::new(0);
    let read = keys(&client, warm).map(|key| {
        let (client, bytes) = (&client, &bytes);
        async move {
            let key = key?;
            let done = read(client, &warm.bucket, &key, bytes).await;
            Ok::<_, String>((key, done))
        }
    });
    let mut read = std::pin::pin!(read.buffer_unordered(warm.workers));
    let mut warmed = Warmed::default();
    loop {
        let next = seen_each(read.next(), || {
            warmed.bytes = bytes.load(Relaxed);
            see(&warmed)
        });
        match next.await.ok_or_else(stopped)? {
            None => break,
            Some(Err(why)) => {
                let text = format!("cannot list `s3://{}/{}`: {why}", warm.bucket, warm.prefix);
                return Err(Error::new("storage-failed", text).hint("check the endpoint, the keys and the bucket"));
            }
            Some(Ok((_, Ok(())))) => warmed.objects += 1,
            Some(Ok((key, Err(why)))) => {
                warmed.failed += 1;
                if warmed.failures.len() < NAMED {
                    warmed.failures.push((key, why));
                }
            }
        }
    }
    warmed.bytes = bytes.load(Relaxed);
    if warmed.objects + warmed.failed == 0 {
        let text = format!("cannot warm `s3://{}/{}`: no key begins with this prefix", warm.bucket, warm.prefix);
        return Err(Error::new("object-not-found", text)
            .hint("a prefix is compared as text, from the beginning of the key; `aws s3 ls` lists keys"));
    }
    Ok(warmed)
}

/// List the keys below a prefix, a page at a time.
fn keys<'a>(client: &'a Client, warm: &'a Warm) -> impl Stream<Item = std::result::Result<String, String>> + 'a {
    // The token of the next page. None at the end.
    let pages = futures::stream::unfold(Some(None), move |after: Option<Option<String>>| async move {
        let after = after?;
        let list =
            client.list_objects_v2().bucket(&warm.bucket).prefix(&warm.prefix).set_continuation_token(after.clone());
        match list.send().await {
            Err(error) => Some((vec![Err(failed(&error))], None)),
            Ok(page) => {
                let keys =
                    page.contents.unwrap_or_default().into_iter().filter_map(|object| object.key.map(Ok)).collect();
                let next = page.next_continuation_token.filter(|_| page.is_truncated.unwrap_or(false));
                if next.is_some() && next == after {
                    return Some((vec![Err("the store keeps returning the same page".to_owned())], None));
                }
                Some((keys, next.map(Some)))
            }
        }
    });
    pages.flat_map(futures::stream::iter)
}

/// Read an object to its end. A body that breaks off is read again.
async fn read(client: &Client, bucket: &str, key: &str, bytes: &AtomicU64) -> std::result::Result<(), String> {
    let mut why = String::new();
    for _ in 0..TRIES {
        let mut body = client.get_object().bucket(bucket).key(key).send().await.map_err(|error| failed(&error))?.body;
        let mut read_bytes = 0;
        loop {
            match body.next().await {
                None => return Ok(()),
                Some(Ok(part)) => {
                    read_bytes += part.len() as u64;
                    bytes.fetch_add(part.len() as u64, Relaxed);
                }
                Some(Err(error)) => {
                    // Bytes that come again are counted once.
                    bytes.fetch_sub(read_bytes, Relaxed);
                    why = error.to_string();
                    break;
                }
            }
        }
    }
    Err(why)
}
