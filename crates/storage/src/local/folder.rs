//! A store in a local folder: its root, file names, errors and writers. `verbs` implements its operations.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use penstock_error::{Error, Result};

use super::file_system::{File, FileSystem, HeldFolder};
use crate::counters::{Counters, add};
use crate::options::Io;
use crate::process::PerProcess;
use crate::store::{ObjectWriter, Store as _};

/// Prefix of temporary files. Readers ignore every name that the spec does not define.
pub(super) const TEMPORARY: &str = "tmp-";

#[derive(Debug, Clone)]
pub struct Local {
    /// The folder that file system calls use: the user's path, or the path of the held folder.
    pub(super) root: PathBuf,
    /// The user's path, made absolute.
    pub(super) path: PathBuf,
    pub(super) held: Option<Arc<HeldFolder>>,
    pub(super) uri: String,
    pub(super) files: Arc<dyn FileSystem>,
    pub(super) io: Io,
    pub(super) counters: Arc<Counters>,
    pub(super) kept: Arc<PerProcess<Kept>>,
}

/// The state of an opened folder in one process.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Folders whose names this store has made durable, keyed by root. Other stores may not have synced the folders they created.
    pub(super) named: Mutex<HashSet<(Option<u64>, PathBuf)>>,
    /// Whether `prove` has succeeded.
    pub(super) proven: Mutex<bool>,
    /// The time until which turns are not waited for, because a process did not end its turn.
    pub(super) impatient: Mutex<Option<Instant>>,
}

impl Local {
    /// Open a folder. A relative path is made absolute, so a later change of directory has no effect.
    pub fn open(path: &Path, files: Arc<dyn FileSystem>, io: Io) -> Result<Local> {
        let root = std::path::absolute(path).map_err(|error| failure("open", path, &error))?;
        let uri = root
            .to_str()
            .ok_or_else(|| {
                Error::new("invalid-uri", format!("cannot open `{}`: the path is not UTF-8", root.display()))
            })?
            .to_owned();
        let kept = Arc::new(PerProcess::new(Kept::default as fn() -> Kept));
        Ok(Local { path: root.clone(), root, held: None, uri, files, io, counters: Arc::default(), kept })
    }

    /// Convert an I/O error into an [`Error`] that names the user's path.
    pub(super) fn failure(&self, verb: &str, path: &Path, error: &io::Error) -> Error {
        failure(verb, &self.shown(path), error)
    }

    pub(super) fn shown(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.root) {
            Ok(rest) if rest.as_os_str().is_empty() => self.path.clone(),
            Ok(rest) => self.path.join(rest),
            Err(_) => path.to_owned(),
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    pub(super) fn temporary(&self, name: &str) -> Result<PathBuf> {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random)
            .map_err(|error| Error::new("internal", format!("cannot get random numbers: {error}")))?;
        let folder = self.path(name).parent().map_or_else(|| self.root.clone(), Path::to_path_buf);
        Ok(folder.join(format!("{TEMPORARY}{:016x}", u64::from_le_bytes(random))))
    }

    /// Create a file, and also its folder if the folder is missing. `sync_folder` later makes the folder's name durable.
    pub(super) fn create_file(&self, path: &Path) -> Result<Box<dyn File>> {
        match self.files.create(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_folders(path.parent().unwrap_or(&self.root), &self.root)?;
                self.files.create(path).map_err(|error| self.failure("write", path, &error))
            }
            other => other.map_err(|error| self.failure("write", path, &error)),
        }
    }

    /// Create a folder and its missing parents below `end`. `end` must exist, so that a moved dataset is not recreated.
    pub(super) fn make_folders(&self, folder: &Path, end: &Path) -> Result<()> {
        let create = || match self.files.create_folder(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        };
        if folder == end {
            return Err(self.gone());
        }
        let created = match (create(), folder.parent()) {
            (Err(error), Some(above)) if error.kind() == io::ErrorKind::NotFound => {
                self.make_folders(above, end)?;
                create()
            }
            (created, _) => created,
        };
        created.map_err(|error| self.failure("create folder", folder, &error))
    }

    /// Build the error for a root that does not exist or no longer exists.
    pub(super) fn gone(&self) -> Error {
        let hint = match self.path.is_symlink() {
            true => "it is a broken symbolic link: create its target folder, or remove the link",
            false => "the dataset's folder was moved or removed: open it at its new path",
        };
        self.failure("write to", &self.root, &io::Error::from_raw_os_error(libc::ENOENT)).hint(hint)
    }

    /// Make the names in a folder durable. The first call also makes the names of the folder and its parents durable.
    pub(super) fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        let named = || self.kept.get().named.lock().unwrap_or_else(PoisonError::into_inner);
        add(&self.counters.syncs, 1);
        self.files.sync_folder(folder)?;
        let place = self.place();
        let mut at = folder;
        let mut synced = Vec::new();
        // The parent of a held root is taken from the user's path.
        while let Some(above) = if at == self.root { self.path.parent() } else { at.parent() } {
            let name = (place, self.shown(at));
            if named().contains(&name) {
                break;
            }
            add(&self.counters.syncs, 1);
            match self.files.sync_folder(above) {
                // Folders above the dataset may be inaccessible. If this process had created them, it could also sync them.
                Err(error) if !above.starts_with(&self.root) && inaccessible(&error) => {}
                other => other?,
            }
            synced.push(name);
            at = above;
        }
        named().extend(synced);
        Ok(())
    }

    /// Write a temporary file in the folder of `name`.
    pub(super) fn write_temporary(&self, name: &str, body: &[u8], durability: Durability) -> Result<PathBuf> {
        let path = self.temporary(name)?;
        let mut file = self.create_file(&path)?;
        let written = file.write(body.to_vec()).and_then(|()| match durability {
            Durability::Synced => file.sync(),
            Durability::Cached => Ok(()),
        });
        if let Err(error) = written {
            let _ = self.files.remove(&path); // The first error is the one to report.
            return Err(self.failure("write", &path, &error));
        }
        add(&self.counters.syncs, u64::from(durability == Durability::Synced));
        Ok(path)
    }
}

/// Whether a file must reach the device before it gets its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Durability {
    Synced,
    /// The file is only written to the page cache. Hints and probes use this.
    Cached,
}

/// Convert an I/O error into an [`Error`] according to its kind.
pub(super) fn failure(verb: &str, path: &Path, error: &io::Error) -> Error {
    use io::ErrorKind as K;
    let text = format!("cannot {verb} `{}`: {error}", path.display());
    match error.kind() {
        K::NotFound | K::NotADirectory => Error::new("object-not-found", text),
        K::PermissionDenied => Error::new("permission-denied", text).hint("check the folder's owner and mode"),
        K::ReadOnlyFilesystem => {
            Error::new("read-only", text).hint("the file system is mounted read-only; write to a copy elsewhere")
        }
        K::StorageFull | K::QuotaExceeded => {
            Error::new("no-space", text).hint("free space and try again; nothing was committed")
        }
        K::FileTooLarge => {
            Error::new("no-space", text).hint("raise the file size limit (ulimit -f); nothing was committed")
        }
        K::UnexpectedEof => {
            Error::new("object-truncated", text).hint("run `penstock verify`; restore the file from a copy")
        }
        _ => Error::new("storage-failed", text),
    }
}

/// Return whether an error guarantees that nothing has changed.
pub(super) fn refused(error: &io::Error) -> bool {
    inaccessible(error)
        || matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        || matches!(error.raw_os_error(), Some(libc::EXDEV | libc::EMLINK))
}

/// Return whether an error means that this process, or this file system, cannot do what was asked.
fn inaccessible(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(
        error.kind(),
        K::NotFound | K::NotADirectory | K::PermissionDenied | K::ReadOnlyFilesystem | K::Unsupported
    ) || matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP))
}

pub(super) struct LocalWriter {
    pub(super) path: PathBuf,
    /// The user's path, for messages.
    pub(super) shown: PathBuf,
    pub(super) _held: Option<Arc<HeldFolder>>,
    pub(super) files: Arc<dyn FileSystem>,
    pub(super) file: Option<Box<dyn File>>,
}

impl ObjectWriter for LocalWriter {
    fn write(&mut self, bytes: Vec<u8>) -> Result<()> {
        let file = self.file.as_mut().ok_or_else(|| Error::new("internal", "a file was written to after `finish`"))?;
        file.write(bytes).map_err(|error| failure("write", &self.shown, &error))
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        let file = self.file.as_mut().ok_or_else(|| Error::new("internal", "`finish` was called twice"))?;
        file.sync().map_err(|error| failure("write", &self.shown, &error))?;
        self.file = None;
        Ok(())
    }
}

impl Drop for LocalWriter {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = self.files.remove(&self.path); // An orphaned file is harmless.
        }
    }
}
