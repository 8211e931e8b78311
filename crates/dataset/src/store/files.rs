//! Open many data files at once: read small files whole, and only the tails of larger files.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::Id;
use penstock_format::cursor::malformed;
use penstock_format::datafile::FOOTER_BYTES;
use penstock_format::files::{FORWARDINGS, FilePlace, FileRef, parse_forwarding};
use penstock_format::ids::{data_name, forwarding_name};
use penstock_format::record::Record;
use penstock_storage::{Access, RangeRequest};
use quick_cache::sync::GuardResult;

use super::context::{Context, FileDuty, file_cache_bytes};
use super::datafile::DataFile;

/// Data files up to this size are read whole, in the same request as their tail.
const WHOLE_FILE_BYTES: u64 = 256 << 10;

impl Context {
    /// Return a data file from the cache, or open the file and verify its tail.
    pub fn file(&self, file: &FileRef, samples: u64) -> Result<Arc<DataFile>> {
        let found =
            self.caches.get().files.get_or_insert_with(&file.id, || Ok(Arc::new(self.open_file(file, samples)?)))?;
        if found.is(file, samples) { Ok(found) } else { self.open_file(file, samples).map(Arc::new) }
    }

    /// Open a data file, bypassing the cache.
    pub fn open_file(&self, file: &FileRef, samples: u64) -> Result<DataFile> {
        let opened = match self.try_open_file(file, samples) {
            Err(error) if error.kind() == Kind::NotFound && file.is_object() => self.open_instead(file, samples, error),
            other => other,
        };
        opened.map_err(|error| self.or_replaced(error.object(file.place.shown(file.id))))
    }

    /// Open the file that takes the place of one that does not exist, or return `error` if there is none. Cost: one request for each forwarding object.
    fn open_instead(&self, file: &FileRef, samples: u64, error: Error) -> Result<DataFile> {
        let mut current = file.clone();
        for _ in 0..FORWARDINGS {
            let name = forwarding_name(current.id);
            let body = match self.reads().read(&name) {
                Err(absent) if absent.kind() == Kind::NotFound => return Err(error),
                other => other?,
            };
            current = parse_forwarding(&body, &current).context(|| format!("cannot read `{name}`"))?;
            match self.try_open_file(&current, samples) {
                Err(error) if error.kind() == Kind::NotFound => {}
                opened => return opened.map(|opened| opened.instead_of(file)),
            }
        }
        Err(malformed(format!(
            "more than {FORWARDINGS} forwarding objects lead from data file `{}` to others, none of which exists",
            file.id
        )))
    }

    fn try_open_file(&self, file: &FileRef, samples: u64) -> Result<DataFile> {
        let storage = self.reads();
        if let FilePlace::Inline(bytes) = &file.place {
            return DataFile::whole(bytes.clone(), Access::Ranged, file, samples);
        }
        let access = self.access(file);
        if access.is_mapped() {
            return DataFile::open(storage, file, samples);
        }
        let pieces = storage.fetch(vec![tail_range(file)]).into_iter().next().unwrap_or_else(|| Ok(Vec::new()))?;
        open(file, samples, access, pieces).inspect_err(|error| self.distrust_tail(file, error))
    }

    /// Make the next read of a damaged tail ask the store, because the network may have damaged a cached one.
    fn distrust_tail(&self, file: &FileRef, error: &Error) {
        if error.kind() == Kind::Corrupt && file.is_object() {
            let range = tail_range(file);
            self.reads().distrust(&range.name, range.begin, range.end() - range.begin);
        }
    }

    /// Cache the data files that a record has, so that reading them costs no request.
    pub fn keep_files(&self, record: &Record) {
        for delta in &record.deltas {
            for (file, bytes) in delta.files().iter().filter_map(|file| Some((file, record.data_of(file)?))) {
                if let Ok(opened) = DataFile::whole(bytes, Access::Ranged, file, delta.samples_in_files()) {
                    self.caches.get().files.insert(file.id, Arc::new(opened));
                }
            }
        }
    }

    /// Return how to read a data file. Those in records are read whole. A file that a cache holds completely becomes mapped.
    fn access(&self, file: &FileRef) -> Access {
        if !file.is_object() {
            return Access::Ranged;
        }
        if let Some(access) = self.reads().features().access {
            return access;
        }
        let files = &self.caches.get().files;
        let known = files.peek(&file.id).map(|open| open.access);
        if known == Some(Access::Mapped) {
            return Access::Mapped;
        }
        let access = self.reads().access(&data_name(file.id));
        if known.is_some() && access.is_mapped() {
            files.remove(&file.id);
        }
        access
    }

    /// Return whether the cache has a data file with this id.
    pub fn is_open(&self, file: Id) -> bool {
        self.caches.get().files.peek(&file).is_some()
    }

    /// Return a cached data file, or the duty to open it. Returns None if another thread still has that duty after `patience`.
    pub fn file_or_duty(
        &self,
        file: Id,
        patience: Duration,
    ) -> Option<std::result::Result<Arc<DataFile>, FileDuty<'_>>> {
        match self.caches.get().files.get_value_or_guard(&file, Some(patience)) {
            GuardResult::Value(file) => Some(Ok(file)),
            GuardResult::Guard(duty) => Some(Err(duty)),
            GuardResult::Timeout => None,
        }
    }

    /// Return whether any of these data files is unmapped, in which case its content must be fetched.
    pub fn any_ranged<'a>(&self, mut files: impl Iterator<Item = &'a FileRef>) -> bool {
        match self.reads().features().access {
            Some(access) => !access.is_mapped(),
            None => files.any(|file| !self.access(file).is_mapped()),
        }
    }

    /// Open data files, each given with its number of samples. Damaged files are left out. Cost: one concurrent request per file,
    /// except for files that are mapped or cached, or that another thread is reading.
    pub fn open_tails<'a>(&self, files: impl Iterator<Item = (&'a FileRef, u64)>) -> Result<Vec<Arc<DataFile>>> {
        let (mut seen, mut opened) = (HashSet::new(), Vec::new());
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for (file, samples) in files.filter(|(file, _)| seen.insert(file.id)) {
            match self.file_or_duty(file.id, Duration::ZERO) {
                Some(Ok(known)) if known.is(file, samples) => opened.push(known),
                Some(Ok(_)) => {} // The cached file does not match this reference. Reading the column reports the mismatch.
                Some(Err(duty)) => ours.push((file, samples, self.access(file), duty)),
                None => others.push((file, samples)),
            }
        }
        let passable = |error: Error| if error.kind() == Kind::Corrupt { Ok(()) } else { Err(error) };
        // Read small files whole, unless their total size exceeds that of the file cache.
        let here = |file: &FileRef, access: &Access| access.is_mapped() || matches!(file.place, FilePlace::Inline(_));
        let (mapped, ours): (Vec<_>, Vec<_>) = ours.into_iter().partition(|(file, _, access, _)| here(file, access));
        others.extend(mapped.into_iter().map(|(file, samples, _, duty)| {
            drop(duty); // The call to `file` below takes on this duty again.
            (file, samples)
        }));
        let whole = ours.iter().map(|(file, ..)| whole_bytes(file)).sum::<u64>() <= file_cache_bytes();
        // The blocks of a file in a record cannot be fetched later.
        let range = |file: &FileRef| if whole || !file.is_object() { tail_range(file) } else { bare_tail(file) };
        let ranges = ours.iter().map(|(file, ..)| range(file)).collect();
        for ((file, samples, access, duty), answer) in ours.into_iter().zip(self.reads().fetch(ranges)) {
            match answer.and_then(|pieces| open(file, samples, access, pieces)).map(Arc::new) {
                Ok(file) => {
                    let _ = duty.insert(file.clone());
                    opened.push(file);
                }
                Err(error) if error.kind() == Kind::NotFound => {
                    drop(duty);
                    others.push((file, samples));
                }
                Err(error) => {
                    self.distrust_tail(file, &error);
                    passable(error)?;
                }
            }
        }
        for (file, samples) in others {
            match self.file(file, samples) {
                Ok(file) => opened.push(file),
                Err(error) => passable(error)?,
            }
        }
        Ok(opened)
    }
}

/// Return the range of a data file's tail, or of the whole file if it is small.
fn tail_range(file: &FileRef) -> RangeRequest {
    match whole_bytes(file) {
        0 => bare_tail(file),
        whole => {
            let (name, offset) = file.object();
            RangeRequest::plain(&name, offset, whole, file.is_object().then_some(whole))
        }
    }
}

fn bare_tail(file: &FileRef) -> RangeRequest {
    let begin = file.file_bytes.saturating_sub(FOOTER_BYTES).saturating_sub(file.tail_bytes);
    RangeRequest::plain(&data_name(file.id), begin, file.tail_bytes.min(file.file_bytes), Some(file.file_bytes))
}

/// Return a data file's size in bytes if the file is small enough to be read whole, otherwise 0.
pub fn whole_bytes(file: &FileRef) -> u64 {
    if file.file_bytes <= WHOLE_FILE_BYTES { file.file_bytes } else { 0 }
}

/// Open a data file from the bytes of `tail_range` or `bare_tail`.
fn open(file: &FileRef, samples: u64, access: Access, pieces: Vec<Bytes>) -> Result<DataFile> {
    let body = pieces.into_iter().next().unwrap_or_default();
    match body.len() as u64 == file.file_bytes {
        true => DataFile::whole(body, access, file, samples),
        false => DataFile::ranged(body, access, file, samples),
    }
}
