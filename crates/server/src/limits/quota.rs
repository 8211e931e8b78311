//! Quotas of buckets and prefixes. A write that would exceed one is refused before its body is received (docs/design/0021-server.md, point 11).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use penstock_cache::size_bytes;
use penstock_error::{Error, Result};
use s3s::{S3, S3Error, S3ErrorCode, S3Result};
use tokio::sync::watch;

use super::measure;
use super::usage::{Found, Usage};
use crate::cold::may_be_there;
use crate::hosts::is_bucket_name;
use crate::metrics::{Level, Metrics, QuotaLabels};

/// A refused write lets its prefix be listed again at most this often.
const LISTS_AGAIN: Duration = Duration::from_secs(60);
/// A prefix whose listing fails is listed again after this time, and then after twice as long each time.
const FAILED: Duration = Duration::from_secs(1);
/// How often a prefix is listed anyway.
const LISTS: Duration = Duration::from_secs(3600);
/// How long a write waits for such a listing before it is refused.
const PATIENCE: Duration = Duration::from_secs(20);

/// A quota, as it is given: `bucket/prefix=100GB`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// `bucket/prefix`, which may end anywhere in a key.
    name: String,
    bucket: String,
    prefix: String,
    size: String,
    bytes: u64,
}

impl Limit {
    fn parse(text: &str) -> Result<Limit> {
        let invalid = |why: &str| {
            Error::new("invalid-argument", format!("cannot use quota `{text}`: {why}")).hint(
                "write a bucket or a prefix and its size, such as --quota bucket=1TB or --quota bucket/folder/=100GB",
            )
        };
        let (name, size) = text.rsplit_once('=').ok_or_else(|| invalid("it has no size"))?;
        let bytes = size_bytes(size).ok_or_else(|| invalid(&format!("`{size}` is not a size above 0")))?;
        let (bucket, prefix) = name.split_once('/').unwrap_or((name, ""));
        if !is_bucket_name(bucket) {
            return Err(invalid(&format!("`{bucket}` is not the name of a bucket")));
        }
        let name = if prefix.is_empty() { bucket.to_owned() } else { name.to_owned() };
        Ok(Limit { name, bucket: bucket.to_owned(), prefix: prefix.to_owned(), size: size.to_owned(), bytes })
    }

    /// Parse all quotas of a server. `only` is the bucket that it serves, if it serves one.
    pub fn parse_all(texts: &[String], only: Option<&str>) -> Result<Vec<Limit>> {
        let limits: Vec<Limit> = texts.iter().map(|text| Limit::parse(text)).collect::<Result<_>>()?;
        for (at, limit) in limits.iter().enumerate() {
            if limits[..at].iter().any(|other| other.name == limit.name) {
                let text = format!("cannot use quota `{}`: `{}` has two sizes", texts[at], limit.name);
                return Err(Error::new("invalid-argument", text).hint("give each bucket or prefix one --quota"));
            }
            if only.is_some_and(|only| only != limit.bucket) {
                let text = format!(
                    "cannot use quota `{}`: only the bucket `{}` is served",
                    texts[at],
                    only.unwrap_or_default()
                );
                return Err(Error::new("invalid-argument", text).hint("name the --cold bucket"));
            }
        }
        Ok(limits)
    }

    fn covers(&self, bucket: &str, key: &str) -> bool {
        self.bucket == bucket && key.starts_with(&self.prefix)
    }
}

/// One quota and what it counts.
struct Quota {
    limit: Limit,
    usage: Mutex<Usage>,
    /// When a refused write let the prefix be listed last.
    asked: Mutex<Option<Instant>>,
    /// Changes when a listing ends.
    ended: watch::Sender<()>,
    used: Level,
    metrics: Arc<Metrics>,
    note: fn(&str),
}

/// All quotas of a server. Without any, nothing is counted.
pub struct Quotas {
    each: Vec<Arc<Quota>>,
    cold: Arc<dyn S3>,
}

/// Bytes that are counted for a write until this is dropped.
struct Reserved {
    quotas: Vec<Arc<Quota>>,
    bytes: u64,
    may_be_there: bool,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        for quota in &self.quotas {
            quota.change(|usage| usage.end(self.bytes, self.may_be_there));
        }
    }
}

impl Quotas {
    /// Begin to count. Each prefix is listed in the background, now and then once an hour. `waiting` returns the bytes below a prefix of a bucket that are
    /// not in the cold store yet: until the first listing ends, they are all that is known to be there.
    pub fn open(
        limits: Vec<Limit>,
        cold: Arc<dyn S3>,
        waiting: impl Fn(&str, &str) -> u64,
        metrics: &Arc<Metrics>,
        note: fn(&str),
    ) -> Arc<Quotas> {
        let quota = |limit: Limit| {
            let labels = QuotaLabels { quota: limit.name.clone() };
            metrics.quota_limit_bytes.get_or_create(&labels).set(i64::try_from(limit.bytes).unwrap_or(i64::MAX));
            // Counts are shown from the beginning.
            for counts in [&metrics.quota_refusals, &metrics.quota_listings, &metrics.quota_failures] {
                drop(counts.get_or_create(&labels));
            }
            let usage = Mutex::new(Usage::beginning(waiting(&limit.bucket, &limit.prefix)));
            let (asked, ended) = (Mutex::default(), watch::Sender::new(()));
            let used = metrics.quota_used_bytes.get_or_create(&labels).clone();
            Arc::new(Quota { limit, usage, asked, ended, used, metrics: metrics.clone(), note })
        };
        let quotas = Arc::new(Quotas { each: limits.into_iter().map(quota).collect(), cold });
        for quota in &quotas.each {
            let (quota, cold) = (quota.clone(), quotas.cold.clone());
            tokio::spawn(async move {
                let mut pause = FAILED;
                loop {
                    let is_listed = quota.list(&cold).await;
                    // Until a listing succeeds, the quota does not hold.
                    pause = if is_listed { FAILED } else { (2 * pause).min(LISTS_AGAIN) };
                    tokio::time::sleep(if is_listed { LISTS } else { pause }).await;
                }
            });
        }
        quotas
    }

    fn of(&self, bucket: &str, key: &str) -> Vec<Arc<Quota>> {
        self.each.iter().filter(|quota| quota.limit.covers(bucket, key)).cloned().collect()
    }

    /// Return whether a write of an object is counted.
    pub fn cover(&self, bucket: &str, key: &str) -> bool {
        self.each.iter().any(|quota| quota.limit.covers(bucket, key))
    }

    /// Return each quota with the bytes that it counts and its limit.
    pub fn levels(&self) -> impl Iterator<Item = (String, u64, u64)> {
        self.each.iter().map(|quota| (quota.limit.name.clone(), quota.usage().bytes(), quota.limit.bytes))
    }

    /// Write an object of so many bytes, unless a quota would be exceeded.
    pub async fn count<T>(
        &self,
        bucket: &str,
        key: &str,
        bytes: u64,
        write: impl Future<Output = S3Result<T>>,
    ) -> S3Result<T> {
        let quotas = self.of(bucket, key);
        self.counted(quotas, bytes, write).await
    }

    /// Note a new upload. All of its parts are counted from now on. Others, of an earlier run or of another server, are measured when they are completed.
    pub fn begin(&self, (bucket, key, id): (&str, &str, &str)) {
        let upload = (key.to_owned(), id.to_owned());
        self.of(bucket, key).iter().for_each(|quota| quota.change(|usage| usage.begin_upload(&upload)));
    }

    /// Make an object of an upload. Its parts are counted already, or they are measured first.
    pub async fn complete<T>(
        &self,
        (bucket, key, id): (&str, &str, &str),
        write: impl Future<Output = S3Result<T>>,
    ) -> S3Result<T> {
        let (quotas, upload) = (self.of(bucket, key), (key.to_owned(), id.to_owned()));
        let unknown: Vec<_> = quotas.iter().filter(|quota| !quota.usage().counts(&upload)).cloned().collect();
        let bytes =
            if unknown.is_empty() { 0 } else { measure::upload(&self.cold, bucket, &upload).await?.unwrap_or(0) };
        let done = self.counted(unknown, bytes, write).await;
        if done.is_ok() {
            self.forget((bucket, key, id));
        }
        done
    }

    /// Note that an upload has ended.
    pub fn forget(&self, (bucket, key, id): (&str, &str, &str)) {
        let upload = (key.to_owned(), id.to_owned());
        self.of(bucket, key).iter().for_each(|quota| quota.change(|usage| usage.end_upload(&upload)));
    }

    async fn counted<T>(
        &self,
        quotas: Vec<Arc<Quota>>,
        bytes: u64,
        write: impl Future<Output = S3Result<T>>,
    ) -> S3Result<T> {
        if quotas.is_empty() {
            return write.await;
        }
        let mut reserved = self.reserve(quotas, bytes).await?;
        let done = write.await;
        reserved.may_be_there = done.as_ref().err().is_none_or(may_be_there);
        done
    }

    /// Count bytes before they are written. Where they do not fit, the prefix is listed again first.
    async fn reserve(&self, quotas: Vec<Arc<Quota>>, bytes: u64) -> S3Result<Reserved> {
        loop {
            let mut reserved = Reserved { quotas: Vec::new(), bytes, may_be_there: false };
            let full = quotas.iter().find(|quota| {
                let fits = quota.change(|usage| usage.reserve(bytes, quota.limit.bytes));
                if fits {
                    reserved.quotas.push((*quota).clone());
                }
                !fits
            });
            let Some(full) = full else {
                reserved.may_be_there = true;
                return Ok(reserved);
            };
            drop(reserved);
            if !full.list_again(&self.cold).await {
                full.metrics.quota_refusals.get_or_create(&full.labels()).inc();
                return Err(full.refused(bytes));
            }
        }
    }
}

impl Quota {
    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Usage) -> T) -> T {
        let mut usage = self.usage();
        let answer = change(&mut usage);
        self.used.set(i64::try_from(usage.bytes()).unwrap_or(i64::MAX));
        answer
    }

    fn labels(&self) -> QuotaLabels {
        QuotaLabels { quota: self.limit.name.clone() }
    }

    fn refused(&self, bytes: u64) -> S3Error {
        let (limit, used) = (&self.limit, self.usage().bytes());
        let text = format!(
            "the quota of `{}` is {} ({} bytes); {used} bytes are in use, and this needs {bytes} more; delete objects or raise the quota",
            limit.name, limit.size, limit.bytes
        );
        let mut error = S3Error::with_message(S3ErrorCode::Custom("QuotaExceeded".into()), text);
        error.set_status_code(StatusCode::FORBIDDEN);
        error
    }

    /// List the prefix for a write that does not fit, unless another write has done so within a minute. Returns whether a listing has ended, so
    /// that the write may fit now.
    async fn list_again(self: &Arc<Quota>, cold: &Arc<dyn S3>) -> bool {
        let mut ended = self.ended.subscribe();
        if !self.usage().is_listing() {
            let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            if asked.is_some_and(|asked| asked.elapsed() < LISTS_AGAIN) {
                return false;
            }
            *asked = Some(Instant::now());
            drop(asked);
            let (quota, cold) = (self.clone(), cold.clone());
            // It continues if the client ends its connection.
            tokio::spawn(async move { quota.list(&cold).await });
        }
        tokio::time::timeout(PATIENCE, ended.changed()).await.is_ok()
    }

    /// List what is below the prefix, unless another task does. Returns whether that succeeded.
    async fn list(&self, cold: &Arc<dyn S3>) -> bool {
        let Some((was_listed, known)) =
            self.change(|usage| (!usage.is_listing()).then(|| (usage.is_listed(), usage.begin_listing())))
        else {
            return false;
        };
        let limit = &self.limit;
        let found = measure::below(cold, (&limit.bucket, &limit.prefix), &known).await;
        self.change(|usage| usage.end_listing(found.as_ref().ok()));
        if found.is_ok() {
            self.metrics.quota_listings.get_or_create(&self.labels()).inc();
        }
        self.ended.send_replace(());
        let is_listed = found.is_ok();
        match found {
            Ok(Found { bytes, .. }) if !was_listed && bytes > limit.bytes => {
                let over = format!("`{}` has {bytes} bytes, more than its quota of {}", limit.name, limit.size);
                (self.note)(&format!("{over}: nothing can be written there until objects are deleted"));
            }
            Ok(_) => {}
            Err(error) => {
                self.metrics.quota_failures.get_or_create(&self.labels()).inc();
                let why = error.message().unwrap_or(error.code().as_str());
                (self.note)(&format!(
                    "the quota of `{}` counts only what was written since its last listing: {why}",
                    limit.name
                ));
            }
        }
        is_listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_parsed_and_name_objects_as_text() -> Result<()> {
        let limits = Limit::parse_all(&["pets=1TB".into(), "pets/c=1.5 GiB".into(), "pets/a=b/=4096".into()], None)?;
        let found: Vec<_> = limits.iter().map(|limit| (limit.name.as_str(), limit.bytes)).collect();
        assert_eq!(found, [("pets", 1_000_000_000_000), ("pets/c", 3 << 29), ("pets/a=b/", 4096)]);
        assert!(limits[0].covers("pets", "x") && !limits[0].covers("pets2", "x"));
        assert!(
            limits[1].covers("pets", "cats/1")
                && !limits[1].covers("pets", "dogs/1")
                && !limits[1].covers("pet", "s/cats")
        );
        Ok(())
    }

    #[test]
    fn other_quotas_are_refused() {
        for text in
            ["", "pets", "pets=", "pets=0", "pets=-1", "pets=1XB", "=1GB", "/a=1GB", "Pets/a=1GB", "s3://pets=1GB"]
        {
            assert_eq!(Limit::parse(text).err().map(|error| error.code()), Some("invalid-argument"), "{text}");
        }
        let both = ["pets=1GB".to_owned(), "pets/=2GB".to_owned()];
        assert!(Limit::parse_all(&both, None).is_err_and(|error| error.message().contains("has two sizes")));
        assert!(
            Limit::parse_all(&both[..1], Some("cats"))
                .is_err_and(|error| error.message().contains("only the bucket `cats`"))
        );
    }
}
