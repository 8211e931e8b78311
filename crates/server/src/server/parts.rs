//! What a server consists of: its stores, its cache, its limits, its keys, and the service that answers requests with them.

use std::sync::Arc;

use penstock_cache::{Drives, Spec, Trust};
use penstock_error::Result;
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::{S3Service, S3ServiceBuilder};

use super::config::{Config, failed, not_served, only_bucket, pending_folder, quotas};
use crate::access_keys::Keys;
use crate::authentication::Taken;
use crate::back::WriteBack;
use crate::batch::Batch;
use crate::cold::remote::Remote;
use crate::folder::Folder;
use crate::hosts::{BucketNames, Domains, Hosts};
use crate::limits::quota::Quotas;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::middleware::{Gate, LIST_BYTES, Limits, Middleware};
use crate::ops::dispatch::Dispatch;
use crate::ops::tier::Tier;
use crate::read::arena::Arena;
use crate::read::cached_objects::{CachedObjects, Reading};
use crate::read::immutable::{Immutable, MarkerOf};
use crate::read::memory_cache::MemoryCache;
use crate::tls::Certificates;
use crate::watch::access_log::AccessLog;
use crate::watch::sampler::Sampler;

/// What is read again on SIGHUP, or serves all connections.
pub struct Parts {
    pub middleware: Arc<Middleware>,
    pub keys: Option<Keys>,
    pub certificates: Option<Arc<Certificates>>,
    pub sampler: Arc<Sampler>,
    pub cached_objects: Option<Arc<CachedObjects>>,
    pub back: Option<Arc<WriteBack>>,
    pub arena: Option<Arc<Arena>>,
}

impl Parts {
    /// Open all that the configuration names.
    pub async fn open(config: &Config, marker_of: MarkerOf, metrics: &Arc<Metrics>, note: fn(&str)) -> Result<Parts> {
        let limits = quotas(config)?;
        let (mut cold, identity) = open_cold(config, metrics, note).await?;
        let back = match &config.write_back {
            None => None,
            Some(text) => {
                let (folder, bytes) = pending_folder(text)?;
                let back = WriteBack::open((cold, &identity), &folder, bytes, metrics.clone(), note).await?;
                cold = back.clone();
                let objects = back.pending_objects();
                note(&format!(
                    "puts are acknowledged before the cold store has them: {} may have the only copy",
                    folder.display()
                ));
                if objects > 0 {
                    note(&format!("sending {objects} objects from an earlier run"));
                }
                Some(back)
            }
        };
        let (memory, memory_cache) = memory(config, note);
        let arena = memory_cache.as_ref().map(|memory_cache| memory_cache.arena().clone());
        let is_folder = !config.cold.starts_with("s3://");
        let (cached_objects, trust) = match &config.cache {
            // It lets other servers of the store know that this one writes.
            None => (None, Arc::new(Trust::without_drives(&identity)?)),
            Some(spec) => {
                let drives = Drives::open(&Spec::parse(spec)?)?;
                for (folder, error) in &drives.failed {
                    note(&format!("the cache {} is not used: {error}", folder.display()));
                }
                let immutable = Immutable::new(cold.clone(), marker_of, config.immutable.clone(), metrics.clone());
                let (revalidate, stale_if_error, states_bytes) =
                    (config.revalidate()?, config.stale_if_error, config.memory_bytes / 8);
                let reading = Reading {
                    memory: memory.clone(),
                    memory_cache,
                    states_bytes,
                    revalidate,
                    stale_if_error,
                    immutable,
                };
                let cached_objects = CachedObjects::new(cold.clone(), identity, drives, reading, metrics.clone())?;
                // What was acknowledged earlier is sent now. A server without the folder may have run meanwhile, and knows nothing of it.
                if back.as_ref().is_some_and(|back| back.pending_objects() > 0) {
                    cached_objects.cached.distrust_notes();
                }
                let trust = cached_objects
                    .cached
                    .trust()
                    .ok_or_else(|| failed(&config.cold, "its cache stores no notes"))?
                    .clone();
                (Some(Arc::new(cached_objects)), trust)
            }
        };
        let waiting =
            |bucket: &str, prefix: &str| back.as_ref().map_or(0, |back| back.pending_bytes_of(bucket, prefix));
        let quotas = Quotas::open(limits, cold.clone(), waiting, metrics, note);
        let sampler = Arc::new(Sampler::new(metrics.clone(), cached_objects.clone(), quotas.clone()));
        let keys = config.keys.as_deref().map(|path| Keys::open(path, only_bucket(config)?)).transpose()?;
        let certificates =
            config.tls.as_ref().map(|(chain, key)| Certificates::open(chain, key)).transpose()?.map(Arc::new);
        let log = config.access_log.as_deref().map(|path| AccessLog::open(path, metrics.clone())).transpose()?;
        let domains = Arc::new(Domains::new(&config.domain)?);
        let service = service(
            Tier { cold, is_folder, cached_objects: cached_objects.clone(), trust, memory: memory.clone(), quotas },
            keys.clone(),
            &domains,
        );
        let limits = Limits { requests: config.requests, idle: config.idle_seconds, memory };
        let taken = match (&keys, config.signature_v2) {
            (None, _) => Taken::Unverified,
            (Some(_), false) => Taken::Version4,
            (Some(_), true) => Taken::Both,
        };
        let gate = Gate { domains, taken, keys: keys.clone() };
        let middleware = Arc::new(Middleware::new(service, metrics.clone(), log, limits, gate));
        Ok(Parts { middleware, keys, certificates, sampler, cached_objects, back, arena })
    }
}

/// Return the memory for bodies. Before a cache, a quarter of it holds what is read often, and an eighth what is known of objects.
fn memory(config: &Config, note: fn(&str)) -> (Memory, Option<MemoryCache>) {
    if config.cache.is_none() {
        return (Memory::new(config.memory_bytes), None);
    }
    let bytes = config.memory_bytes - config.memory_bytes / 8;
    match MemoryCache::new(config.memory_bytes / 4) {
        Ok(memory_cache) => (Memory::new(bytes - config.memory_bytes / 4), Some(memory_cache)),
        Err(error) => {
            note(&format!("frequently read data is not kept in memory: {error}"));
            (Memory::new(bytes), None)
        }
    }
}

/// Open the cold store. Returns it, and a text that identifies it in the keys of the cache.
async fn open_cold(config: &Config, metrics: &Metrics, note: fn(&str)) -> Result<(Arc<dyn s3s::S3>, String)> {
    if config.cold.starts_with("s3://") {
        let (remote, identity) = Remote::open(&config.cold, &config.options()?, metrics.cold_running.clone()).await?;
        let remote = Arc::new(remote);
        let (tried, cold) = (remote.clone(), config.cold.clone());
        tokio::spawn(async move {
            // It may be reached later, and what is cached can be read meanwhile.
            if let Err(error) = tried.try_out().await {
                let why = error.message().unwrap_or(error.code().as_str());
                note(&format!(
                    "the cold store {cold} does not respond as expected: {why}; check the bucket, the endpoint and the credentials"
                ));
            }
        });
        return Ok((remote, identity));
    }
    let path = penstock_storage::local_path(&config.cold)?.ok_or_else(|| not_served(&config.cold))?;
    let folder = Folder::open(&path, metrics, note)?;
    let identity =
        format!("serve {}", std::fs::canonicalize(&path).map_err(|error| failed(&config.cold, error))?.display());
    Ok((Arc::new(folder), identity))
}

fn service(tier: Tier, keys: Option<Keys>, domains: &Arc<Domains>) -> S3Service {
    let tier = Arc::new(tier);
    let mut builder = S3ServiceBuilder::new(Dispatch(tier.clone()));
    builder.set_validation(BucketNames);
    builder.set_route(Batch { tier, keys: keys.clone(), domains: domains.clone() });
    builder.set_config(Arc::new(StaticConfigProvider::new(Arc::new(limits()))));
    if let Some(keys) = keys {
        builder.set_auth(keys.clone());
        builder.set_access(keys);
    }
    if domains.is_some() {
        builder.set_host(Hosts(domains.clone()));
    }
    builder.build()
}

/// Limits of what is held in memory before a request is understood.
fn limits() -> S3Config {
    let mut limits = S3Config::default();
    limits.xml_max_body_size = LIST_BYTES as usize;
    limits
}
