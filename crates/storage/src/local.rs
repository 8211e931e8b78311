//! A folder on a local disk. Create-only is: temporary file, fsync, link to the name, fsync of the folder.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::counters::{Counters, add};
use crate::direct;
use crate::disk::{File, FileSystem};
use crate::{Created, Io, ObjectWriter, RangeRequest, Storage, Then};

/// Temporary files begin so; readers ignore every name that is not the spec's.
const TEMPORARY: &str = "tmp-";

#[derive(Debug)]
pub struct Local {
    root: PathBuf,
    uri: String,
    files: Arc<dyn FileSystem>,
    io: Io,
    counters: Counters,
}

impl Local {
    /// A relative path is made absolute here, so a later change of directory does no harm.
    pub fn open(path: &Path, files: Arc<dyn FileSystem>, io: Io) -> Result<Local> {
        let root = std::path::absolute(path).map_err(|error| failure("open", path, &error))?;
        let uri = root
            .to_str()
            .ok_or_else(|| Error::new("invalid-uri", format!("cannot open `{}`: the path is not UTF-8", root.display())))?
            .to_owned();
        Ok(Local { root, uri, files, io, counters: Counters::default() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn temporary(&self, name: &str) -> Result<PathBuf> {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).map_err(|error| Error::new("internal", format!("no random numbers: {error}")))?;
        let folder = self.path(name).parent().map_or_else(|| self.root.clone(), Path::to_path_buf);
        Ok(folder.join(format!("{TEMPORARY}{:016x}", u64::from_le_bytes(random))))
    }

    /// Create a file; the first one in a folder makes the folder, durably.
    fn create_file(&self, path: &Path) -> Result<Box<dyn File>> {
        match self.files.create(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let folder = path.parent().unwrap_or(&self.root);
                self.make_folders(folder)?;
                self.files.create(path).map_err(|error| failure("write", path, &error))
            }
            other => other.map_err(|error| failure("write", path, &error)),
        }
    }

    /// Make a folder and those above it, each made durable in its parent.
    fn make_folders(&self, folder: &Path) -> Result<()> {
        let fail = |error: io::Error| failure("create folder", folder, &error);
        match self.files.create_folder(folder) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let Some(above) = folder.parent() else { return Err(fail(error)) };
                self.make_folders(above)?;
                match self.files.create_folder(folder) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(fail(error)),
                    _ => {}
                }
            }
            Err(error) => return Err(fail(error)),
        }
        add(&self.counters.syncs, 1);
        folder.parent().map_or(Ok(()), |above| self.files.sync_folder(above)).map_err(fail)
    }

    /// Write a temporary file beside `name`.
    fn write_temporary(&self, name: &str, body: &[u8], durable: bool) -> Result<PathBuf> {
        let path = self.temporary(name)?;
        let mut file = self.create_file(&path)?;
        let written = file.write(body).and_then(|()| if durable { file.sync() } else { Ok(()) });
        if let Err(error) = written {
            let _ = self.files.remove(&path); // The first error is the one to report.
            return Err(failure("write", &path, &error));
        }
        add(&self.counters.syncs, u64::from(durable));
        Ok(path)
    }
}

/// Turn an I/O error into one of ours, by its kind.
fn failure(verb: &str, path: &Path, error: &io::Error) -> Error {
    use io::ErrorKind as K;
    let text = format!("cannot {verb} `{}`: {error}", path.display());
    match error.kind() {
        K::NotFound | K::NotADirectory => Error::new("object-not-found", text),
        K::PermissionDenied => Error::new("permission-denied", text).hint("check the owner and the mode of the folder"),
        K::ReadOnlyFilesystem => Error::new("read-only", text).hint("the file system is mounted read-only; write to a copy elsewhere"),
        K::StorageFull | K::QuotaExceeded => Error::new("no-space", text).hint("free space and try again; nothing was committed"),
        K::FileTooLarge => Error::new("no-space", text).hint("raise the file size limit (ulimit -f); nothing was committed"),
        K::UnexpectedEof => Error::new("object-truncated", text).hint("run `penstock verify`; restore the file from a copy"),
        _ => Error::new("storage-failed", text),
    }
}

/// Whether an error says that nothing was done.
fn refused(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(
        error.kind(),
        K::NotFound | K::NotADirectory | K::PermissionDenied | K::ReadOnlyFilesystem | K::StorageFull | K::QuotaExceeded | K::Unsupported
    ) || matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP | libc::EXDEV | libc::EMLINK))
}

/// The pieces of a range.
type Answer = io::Result<Vec<Bytes>>;

struct LocalWriter {
    path: PathBuf,
    files: Arc<dyn FileSystem>,
    file: Option<Box<dyn File>>,
}

impl ObjectWriter for LocalWriter {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let file = self.file.as_mut().ok_or_else(|| Error::new("internal", "write after finish"))?;
        file.write(bytes).map_err(|error| failure("write", &self.path, &error))
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        let file = self.file.as_mut().ok_or_else(|| Error::new("internal", "finish twice"))?;
        file.sync().map_err(|error| failure("write", &self.path, &error))?;
        self.file = None;
        Ok(())
    }
}

impl Drop for LocalWriter {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = self.files.remove(&self.path); // An orphan is harmless; the collector finds it.
        }
    }
}

impl Storage for Local {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn read(&self, name: &str) -> Result<Bytes> {
        let path = self.path(name);
        let body = self.files.read(&path).map_err(|error| failure("read", &path, &error))?;
        add(&self.counters.reads, 1);
        add(&self.counters.read_bytes, body.len() as u64);
        Ok(body)
    }

    fn map(&self, name: &str, bytes: u64) -> Result<Bytes> {
        let path = self.path(name);
        add(&self.counters.maps, 1);
        add(&self.counters.mapped_bytes, bytes);
        self.files.map(&path, bytes).map_err(|error| failure("read", &path, &error))
    }

    fn mapped(&self) -> bool {
        matches!(self.io, Io::Auto | Io::Mapped)
    }

    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        add(&self.counters.ranges, ranges.len() as u64);
        add(&self.counters.range_bytes, ranges.iter().map(|range| range.end() - range.begin).sum());
        let mut answers: Vec<Option<Answer>> = ranges.iter().map(|_| None).collect();
        if self.io == Io::Direct && self.files.is_real() && direct::is_there() {
            let jobs: Vec<_> = ranges.iter().map(|range| (self.path(&range.name), range)).collect();
            for (place, answer) in answers.iter_mut().zip(direct::fetch(&jobs)) {
                // A file system that refuses O_DIRECT is read through the page cache.
                *place = Some(answer).filter(|answer| !answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Unsupported));
            }
            let direct = ranges.iter().zip(&answers).filter(|(_, answer)| matches!(answer, Some(Ok(_))));
            add(&self.counters.direct_bytes, direct.map(|(range, _)| range.end() - range.begin).sum());
        }
        let finish = |(index, (range, answer)): (usize, (&RangeRequest, Option<Answer>))| {
            let path = self.path(&range.name);
            let pieces = answer.unwrap_or_else(|| self.files.read_range(&path, range)).map_err(|error| failure("read", &path, &error))?;
            pieces.iter().enumerate().for_each(|(number, piece)| then(index, number, piece));
            Ok(pieces)
        };
        ranges.iter().zip(answers).enumerate().map(finish).collect()
    }

    fn stream_bytes(&self) -> u64 {
        if self.io == Io::Direct && self.files.is_real() && direct::is_there() { direct::STREAM_BYTES } else { 0 }
    }

    fn stream(&self, ranges: &[RangeRequest], mut targets: Option<&mut [&mut [u8]]>, see: &mut dyn FnMut(usize, &[u8])) -> Vec<Result<()>> {
        let jobs: Vec<_> = ranges.iter().map(|range| (self.path(&range.name), range)).collect();
        let bytes = |range: &RangeRequest| range.end() - range.begin;
        add(&self.counters.ranges, ranges.len() as u64);
        add(&self.counters.range_bytes, ranges.iter().map(bytes).sum());
        let answers = direct::stream(&jobs, targets.as_deref_mut(), see);
        add(
            &self.counters.direct_bytes,
            ranges.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()).map(|(range, _)| bytes(range)).sum(),
        );
        let finish = |(index, ((path, range), answer)): (usize, (&(PathBuf, &RangeRequest), io::Result<()>))| match answer {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                // A file system that refuses O_DIRECT is read through the page cache.
                let whole = RangeRequest::plain(&range.name, range.begin, bytes(range), range.object_bytes);
                let pieces = self.files.read_range(path, &whole).map_err(|error| failure("read", path, &error))?;
                for piece in pieces {
                    if let Some(targets) = &mut targets {
                        targets[index].copy_from_slice(&piece);
                    }
                    see(index, &piece);
                }
                Ok(())
            }
            other => other.map_err(|error| failure("read", path, &error)),
        };
        jobs.iter().zip(answers).enumerate().map(finish).collect()
    }

    fn will_need(&self, part: &[u8]) {
        self.files.will_need(part);
    }

    fn will_read(&self, whole: &[u8], in_order: bool) {
        self.files.will_read(whole, in_order);
    }

    fn exists(&self, name: &str) -> Result<bool> {
        let path = self.path(name);
        add(&self.counters.lookups, 1);
        match self.files.exists(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(false),
            other => other.map_err(|error| failure("read", &path, &error)),
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<(String, u64)>> {
        let path = self.path(folder);
        add(&self.counters.lists, 1);
        match self.files.list(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other.map_err(|error| failure("list", &path, &error)),
        }
    }

    fn put(&self, name: &str, body: &[u8]) -> Result<()> {
        let mut writer = self.writer(name)?;
        add(&self.counters.put_bytes, body.len() as u64);
        writer.write(body)?;
        writer.finish()
    }

    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>> {
        let path = self.path(name);
        add(&self.counters.puts, 1);
        add(&self.counters.syncs, 1);
        let file = Some(self.create_file(&path)?);
        Ok(Box::new(LocalWriter { path, files: self.files.clone(), file }))
    }

    fn sync(&self, folders: &[&str]) -> Result<()> {
        for folder in folders {
            let path = self.path(folder);
            add(&self.counters.syncs, 1);
            self.files.sync_folder(&path).map_err(|error| failure("sync", &path, &error))?;
        }
        Ok(())
    }

    fn create(&self, name: &str, body: &[u8]) -> Result<Created> {
        add(&self.counters.creates, 1);
        let path = self.path(name);
        let temporary = self.write_temporary(name, body, true)?;
        let linked = self.files.link(&temporary, &path);
        let _ = self.files.remove(&temporary); // After a rename it is gone; after a link it is a spare name.
        match linked {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(Created::Exists),
            Err(error) if refused(&error) => return Err(failure("create", &path, &error)),
            // An I/O error does not tell whether the name was made.
            Err(_) => return Ok(Created::Unknown),
        }
        add(&self.counters.syncs, 1);
        let folder = path.parent().unwrap_or(&self.root);
        match self.files.sync_folder(folder) {
            Ok(()) => Ok(Created::Created),
            // The name is there for every reader, but a power loss may take it: the caller must not take it for granted.
            Err(_) => Ok(Created::Unknown),
        }
    }

    fn overwrite(&self, name: &str, body: &[u8]) -> Result<()> {
        let path = self.path(name);
        let temporary = self.write_temporary(name, body, false)?;
        self.files.rename(&temporary, &path).map_err(|error| {
            let _ = self.files.remove(&temporary); // The first error is the one to report.
            failure("write", &path, &error)
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        add(&self.counters.deletes, 1);
        match self.files.remove(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|error| failure("delete", &path, &error)),
        }
    }

    fn initialise(&self) -> Result<()> {
        let found = self.files.is_empty(&self.root);
        let made = self.files.is_real() && found.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        match found {
            Ok(true) => {}
            Ok(false) => {
                return Err(Error::new("folder-not-empty", format!("cannot create dataset `{}`: the folder is not empty", self.uri))
                    .hint("choose a new folder"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.make_folders(&self.root)?,
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(Error::new("folder-not-empty", format!("cannot create dataset `{}`: it is a file", self.uri))
                    .hint("choose a new folder"));
            }
            Err(error) => return Err(failure("create dataset", &self.root, &error)),
        }
        // A disk that cannot create without overwriting cannot hold a dataset.
        let refused = |why: String| {
            if made {
                let _ = std::fs::remove_dir(&self.root); // The error is what there is to report.
            }
            Error::new("unsupported-storage", format!("cannot create dataset `{}`: {why}", self.uri))
                .hint("choose a file system with hard links or renameat2")
        };
        let probe = "probe";
        let first = self.create(probe, b"").map_err(|error| match error.code() {
            "storage-failed" => refused(error.message().to_owned()),
            _ => error,
        })?;
        let second = self.create(probe, b"")?;
        self.delete(probe)?;
        if (first, second) != (Created::Created, Created::Exists) {
            return Err(refused("a create-only put did not refuse to overwrite".into()));
        }
        Ok(())
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}
