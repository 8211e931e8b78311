//! The store operations of a local folder. A create-only put writes and syncs a temporary file, gives it its name, and syncs
//! the folder.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_error::{Error, Result};

use super::folder::{Durability, Local, LocalWriter, refused};
use super::ring;
use crate::counters::{Counters, add};
use crate::kernel;
use crate::listing::Listing;
use crate::options::Io;
use crate::ranges::{RangeRequest, Then};
use crate::read::{Access, Features, Pattern, Read};
use crate::store::{Created, ObjectWriter, Store, Turn};

/// A process waits this long for its turn. Eight writers take their turns in a tenth of this time.
const TURN_PATIENCE: Duration = Duration::from_millis(200);
/// After a process has waited in vain, it does not wait for this long.
const IMPATIENCE: Duration = Duration::from_secs(10);
const LEAST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_micros(400);

/// The pieces of a range, or the reason why they cannot be read.
type Answer = io::Result<Vec<Bytes>>;

impl Read for Local {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn features(&self) -> Features {
        let stream_bytes =
            if self.io == Io::Direct && self.files.is_real() && ring::is_there() { ring::STREAM_BYTES } else { 0 };
        let access = match self.io {
            Io::Auto | Io::Mapped => Access::Mapped,
            _ if stream_bytes > 0 => Access::Streamed,
            Io::Buffered | Io::Direct => Access::Ranged,
        };
        Features { access: Some(access), stream_bytes, ..Features::default() }
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn read(&self, name: &str) -> Result<Bytes> {
        let path = self.path(name);
        let body = self.files.read(&path).map_err(|error| self.failure("read", &path, &error))?;
        add(&self.counters.reads, 1);
        add(&self.counters.read_bytes, body.len() as u64);
        Ok(body)
    }

    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        add(&self.counters.ranges, ranges.len() as u64);
        add(&self.counters.range_bytes, ranges.iter().map(|range| range.end() - range.begin).sum());
        let mut answers: Vec<Option<Answer>> = ranges.iter().map(|_| None).collect();
        if self.io == Io::Direct && self.files.is_real() && ring::is_there() {
            let requests: Vec<_> = ranges.iter().map(|range| (self.path(&range.name), range)).collect();
            for (place, answer) in answers.iter_mut().zip(ring::fetch(&requests)) {
                // If the file system does not support O_DIRECT, read through the page cache.
                *place = Some(answer)
                    .filter(|answer| !answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Unsupported));
            }
            let direct = ranges.iter().zip(&answers).filter(|(_, answer)| matches!(answer, Some(Ok(_))));
            add(&self.counters.direct_bytes, direct.map(|(range, _)| range.end() - range.begin).sum());
        }
        let finish = |(index, (range, answer)): (usize, (&RangeRequest, Option<Answer>))| {
            let path = self.path(&range.name);
            let pieces = answer
                .unwrap_or_else(|| self.files.read_range(&path, range))
                .map_err(|error| self.failure("read", &path, &error))?;
            pieces.iter().enumerate().for_each(|(number, piece)| then(index, number, piece));
            Ok(pieces)
        };
        ranges.iter().zip(answers).enumerate().map(finish).collect()
    }

    fn stream(
        &self,
        ranges: &[RangeRequest],
        mut targets: Option<&mut [&mut [u8]]>,
        see: &mut dyn FnMut(usize, &[u8]),
    ) -> Vec<Result<()>> {
        let requests: Vec<_> = ranges.iter().map(|range| (self.path(&range.name), range)).collect();
        let bytes = |range: &RangeRequest| range.end() - range.begin;
        add(&self.counters.ranges, ranges.len() as u64);
        add(&self.counters.range_bytes, ranges.iter().map(bytes).sum());
        let answers = ring::stream(&requests, targets.as_deref_mut(), see);
        add(
            &self.counters.direct_bytes,
            ranges.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()).map(|(range, _)| bytes(range)).sum(),
        );
        let finish =
            |(index, ((path, range), answer)): (usize, (&(PathBuf, &RangeRequest), io::Result<()>))| match answer {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    // If the file system does not support O_DIRECT, read through the page cache.
                    let whole = RangeRequest::plain(&range.name, range.begin, bytes(range), range.object_bytes);
                    let pieces =
                        self.files.read_range(path, &whole).map_err(|error| self.failure("read", path, &error))?;
                    for piece in pieces {
                        if let Some(targets) = &mut targets {
                            targets[index].copy_from_slice(&piece);
                        }
                        see(index, &piece);
                    }
                    Ok(())
                }
                other => other.map_err(|error| self.failure("read", path, &error)),
            };
        requests.iter().zip(answers).enumerate().map(finish).collect()
    }

    fn map(&self, name: &str, bytes: u64) -> Result<Bytes> {
        let path = self.path(name);
        add(&self.counters.maps, 1);
        add(&self.counters.mapped_bytes, bytes);
        self.files.map(&path, bytes).map_err(|error| self.failure("read", &path, &error))
    }

    fn will_need(&self, part: &[u8]) {
        self.files.will_need(part);
    }

    fn is_resident(&self, part: &[u8]) -> bool {
        self.files.is_resident(part)
    }

    fn will_read(&self, whole: &[u8], pattern: Pattern) {
        self.files.will_read(whole, pattern);
    }
}

impl Store for Local {
    fn place(&self) -> Option<u64> {
        self.held.as_ref().map(|held| held.place).or_else(|| self.files.place(&self.root))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        let path = self.path(name);
        add(&self.counters.lookups, 1);
        match self.files.exists(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(false),
            other => other.map_err(|error| self.failure("read", &path, &error)),
        }
    }

    fn list_page(&self, folder: &str, _after: Option<&str>) -> Result<Listing> {
        let path = self.path(folder);
        add(&self.counters.lists, 1);
        match self.files.list(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Listing::default()),
            other => Ok(Listing { entries: other.map_err(|error| self.failure("list", &path, &error))?, next: None }),
        }
    }

    fn put(&self, name: &str, body: &[u8]) -> Result<()> {
        let mut writer = self.writer(name)?;
        add(&self.counters.put_bytes, body.len() as u64);
        writer.write(body.to_vec())?;
        writer.finish()
    }

    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>> {
        let path = self.path(name);
        add(&self.counters.puts, 1);
        add(&self.counters.syncs, 1);
        let file = Some(self.create_file(&path)?);
        Ok(Box::new(LocalWriter {
            shown: self.shown(&path),
            path,
            _held: self.held.clone(),
            files: self.files.clone(),
            file,
        }))
    }

    fn sync(&self, folders: &[&str]) -> Result<()> {
        folders.iter().try_for_each(|folder| {
            let path = self.path(folder);
            self.sync_folder(&path).map_err(|error| self.failure("sync", &path, &error))
        })
    }

    fn turn(&self, folder: &str) -> Turn {
        let impatient = || self.kept.get().impatient.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.files.is_real() || impatient().is_some_and(|until| Instant::now() < until) {
            return Turn::default();
        }
        let Ok(file) = File::open(self.path(folder)) else { return Turn::default() };
        let began = Instant::now();
        let mut pause = LEAST_PAUSE;
        loop {
            match kernel::flock(&file, true) {
                Ok(()) => return Turn { lock: Some(file) },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && began.elapsed() < TURN_PATIENCE => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    *impatient() = Some(Instant::now() + IMPATIENCE);
                    return Turn::default();
                }
                Err(_) => return Turn::default(),
            }
        }
    }

    fn create(&self, name: &str, body: &[u8]) -> Result<Created> {
        add(&self.counters.creates, 1);
        let path = self.path(name);
        let temporary = self.write_temporary(name, body, Durability::Synced)?;
        let linked = self.files.publish(&temporary, &path).or_else(|error| match self.files.links(&temporary) {
            Ok(2..) => Ok(true), // The errno can be wrong, but the number of links is reliable.
            Ok(_) => Err(Some(error)),
            Err(_) => Err(None), // The temporary file may have been renamed instead of linked, or its folder renamed.
        });
        if !matches!(linked, Ok(false)) {
            let _ = self.files.remove(&temporary); // A leftover temporary file is harmless.
        }
        let answer = match linked {
            Ok(_) => Created::Created,
            Err(Some(error)) if error.kind() == io::ErrorKind::AlreadyExists => Created::Exists,
            Err(Some(error)) if refused(&error) => return Err(self.failure("create", &path, &error)),
            // After any other error, the name may or may not exist.
            Err(_) => return Ok(Created::Unknown),
        };
        // A power loss may still remove an existing name that readers see: its creator may not have synced the folder yet.
        // A retry after `Unknown` syncs again. If it succeeds, the name is durable: Linux rejects all writes after losing a folder's write.
        match self.sync_folder(path.parent().unwrap_or(&self.root)) {
            Ok(()) => Ok(answer),
            Err(_) => Ok(Created::Unknown),
        }
    }

    fn overwrite(&self, name: &str, body: &[u8]) -> Result<()> {
        let path = self.path(name);
        // Replacing the file would free its block, which takes as long as a sync on a file system that discards.
        if let Ok(true) = self.files.overwrite(&path, body) {
            return Ok(());
        }
        let temporary = self.write_temporary(name, body, Durability::Cached)?;
        self.files.rename(&temporary, &path).map_err(|error| {
            let _ = self.files.remove(&temporary); // The first error is the one to report.
            self.failure("write", &path, &error)
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        add(&self.counters.deletes, 1);
        match self.files.remove(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|error| self.failure("delete", &path, &error)),
        }
    }

    fn survey(&self, see: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()> {
        let mut waiting = vec![String::new()];
        while let Some(folder) = waiting.pop() {
            let path = self.path(&folder);
            let entries = match self.files.entries(&path) {
                // The folder does not exist, or has just been removed.
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    continue;
                }
                other => other.map_err(|error| self.failure("list", &path, &error))?,
            };
            for (name, is_folder) in entries {
                let name = format!("{folder}{name}{}", if is_folder { "/" } else { "" });
                if see(&name).is_break() {
                    return Ok(());
                }
                waiting.extend(is_folder.then_some(name));
            }
        }
        Ok(())
    }

    fn initialise(&self) -> Result<()> {
        let made = match self.files.entries(&self.root) {
            Ok(_) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_folders(&self.root, Path::new("/"))?;
                true
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(Error::new(
                    "folder-not-empty",
                    format!("cannot create dataset `{}`: it is a file", self.uri),
                )
                .hint("choose a new folder"));
            }
            Err(error) => return Err(self.failure("create dataset", &self.root, &error)),
        };
        self.prove().inspect_err(|_| {
            if made && self.files.is_real() {
                let _ = std::fs::remove_dir(&self.root); // The first error is the one to report. A folder with files in it is kept.
            }
        })
    }

    fn moves(&self) -> bool {
        self.held.is_none()
    }

    fn held(&self) -> Result<Option<Arc<dyn Store>>> {
        let held = match self.files.hold(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(self.gone()),
            other => other.map_err(|error| self.failure("open", &self.root, &error))?,
        };
        Ok(held.map(|held| {
            let local = Local { root: held.path.clone(), held: Some(Arc::new(held)), ..self.clone() };
            Arc::new(local) as Arc<dyn Store>
        }))
    }

    fn in_place(&self) -> bool {
        self.held.as_ref().is_none_or(|held| self.files.place(&self.path) == Some(held.place))
    }

    /// Give two files one name in sequence. The kernel locks the folder each time, so racing threads would not prove more.
    fn prove(&self) -> Result<()> {
        let mut proven = self.kept.get().proven.lock().unwrap_or_else(PoisonError::into_inner);
        if *proven {
            return Ok(());
        }
        let refused = |why: String| {
            Error::new("unsupported-storage", format!("cannot write to dataset `{}`: {why}", self.uri))
                .hint("choose a file system with hard links or renameat2")
        };
        let probe = self.temporary("probe")?;
        let (first, second) = (
            self.write_temporary("probe", b"1", Durability::Cached)?,
            self.write_temporary("probe", b"2", Durability::Cached)?,
        );
        let tried = self
            .files
            .publish(&first, &probe)
            .and_then(|_| Ok((self.files.publish(&second, &probe), self.files.read(&probe)?)));
        for path in [&first, &second, &probe] {
            let _ = self.files.remove(path); // A leftover probe is harmless.
        }
        match tried {
            Ok((Err(error), kept)) if error.kind() == io::ErrorKind::AlreadyExists && kept[..] == b"1"[..] => {
                *proven = true;
                Ok(())
            }
            Ok((Ok(_), _)) => Err(refused("a create-only put of an existing name was not rejected".into())),
            Ok((Err(error), kept)) if error.kind() == io::ErrorKind::AlreadyExists => Err(refused(format!(
                "after a rejected put, the object has {} bytes that differ from those of the first put",
                kept.len()
            ))),
            Ok((Err(error), _)) | Err(error) => {
                let failure = self.failure("create", &probe, &error);
                match error.raw_os_error() {
                    Some(libc::EPERM | libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP | libc::EXDEV | libc::EMLINK) => {
                        Err(refused(failure.message().to_owned()))
                    }
                    _ => Err(failure), // The fault may be transient.
                }
            }
        }
    }
}
