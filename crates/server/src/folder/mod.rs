//! A local folder as a cold store: a folder for each bucket, and a file for each object (`names`), with its metadata in an attribute (`record`).
//!
//! Files appear whole: they are written elsewhere, made durable, and then renamed. One server at a time uses a folder.

mod buckets;
mod compared;
mod completion;
mod left_out;
mod listing;
mod names;
mod objects;
mod pages;
pub mod record;
mod uploads;
mod write;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use penstock_error::{Error, Result};
use penstock_storage::private;
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::metrics::Metrics;
use crate::operations::each_operation;
use compared::Unsettled;
use left_out::LeftOut;
use names::SELF;

/// Requests that wait for large files to be compared. More are refused, so that others are answered.
static WAITING: Semaphore = Semaphore::const_new(64);
/// How long a request waits. It is less than a cache waits for a store.
const PATIENCE: Duration = Duration::from_secs(4);

/// The folder with what is not an object. No bucket can have its name.
const OWN: &str = ".penstock-serve";
/// Number of locks that writers of objects share.
const LOCKS: usize = 256;

/// A folder that is served.
pub struct Folder {
    root: PathBuf,
    /// Writers of one object follow each other.
    writers: Vec<Mutex<()>>,
    /// Held alone while a file becomes a folder.
    shape: RwLock<()>,
    /// The folder itself, for paths that must not lead out of it.
    handle: File,
    left_out: LeftOut,
    _lock: File,
}

impl Folder {
    /// Open a folder to serve it. Fails if another server does, or if its file system has no extended attributes. Calls `note` with what it cannot serve.
    pub fn open(root: &Path, metrics: &Metrics, note: fn(&str)) -> Result<Folder> {
        let refused = |why: String, hint: &str| {
            Error::new("storage-failed", format!("cannot serve folder `{}`: {why}", root.display()))
                .hint(hint.to_owned())
        };
        let failed = |error: io::Error| refused(error.to_string(), "choose a writable folder");
        let own = root.join(OWN);
        // A mistyped name would otherwise become an empty store.
        if !root.is_dir() {
            return Err(refused("it does not exist".into(), "create it first"));
        }
        private::close_folder(&own).map_err(failed)?;
        for name in ["temporary", "uploads"] {
            private::create_folders(&own.join(name)).map_err(failed)?;
        }
        let lock = File::create(own.join("lock")).map_err(failed)?;
        if rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(refused("another server serves it".into(), "stop the other server, or choose another folder"));
        }
        record::is_supported(&lock).map_err(|error| {
            refused(
                format!("its file system does not support extended attributes: {error}"),
                "choose a folder on ext4, XFS or Btrfs",
            )
        })?;
        // Files that an earlier server did not complete.
        for entry in std::fs::read_dir(own.join("temporary")).map_err(failed)?.flatten() {
            let _ = std::fs::remove_file(entry.path()).or_else(|_| std::fs::remove_dir_all(entry.path()));
        }
        let writers = (0..LOCKS).map(|_| Mutex::default()).collect();
        let (root, handle) = (std::path::absolute(root).map_err(failed)?, File::open(root).map_err(failed)?);
        let left_out = LeftOut::new(note, metrics.left_out_files.clone());
        Ok(Folder { root, writers, shape: RwLock::default(), handle, left_out, _lock: lock })
    }

    /// Return the folder of a bucket that exists.
    fn bucket(&self, bucket: &str) -> S3Result<PathBuf> {
        let path = self.root.join(bucket);
        // Names from requests were checked before. This one becomes a path.
        if s3s::path::check_bucket_name(bucket) && is_folder(&path).map_err(record::failed)? {
            Ok(path)
        } else {
            Err(s3_error!(NoSuchBucket, "the bucket `{bucket}` does not exist"))
        }
    }

    /// Open the file of an object.
    fn find(&self, bucket: &str, key: &str) -> S3Result<(File, PathBuf)> {
        self.bucket(bucket)?;
        // The middleware refuses it in paths, but not in the source of a copy.
        if key.contains('\0') {
            return Err(s3_error!(NoSuchKey, "object names cannot contain the character U+0000"));
        }
        let below = Path::new(bucket).join(names::path_of(key));
        for below in [below.clone(), below.join(SELF)] {
            match open_below(&self.handle, &below) {
                Ok(file) if file.metadata().map_err(record::failed)?.is_file() => {
                    return Ok((file, self.root.join(below)));
                }
                Ok(_) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => break,
                Err(error) => return Err(record::failed(error)),
            }
        }
        Err(s3_error!(NoSuchKey, "the object `{key}` does not exist"))
    }

    /// Wait until no other request writes this object.
    fn write_lock(&self, bucket: &str, key: &str) -> MutexGuard<'_, ()> {
        let hash = bucket
            .bytes()
            .chain(key.bytes())
            .fold(0usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        self.writers[hash % LOCKS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the path of a file that is not an object.
    pub fn own(&self, name: &str) -> PathBuf {
        self.root.join(OWN).join(name)
    }

    fn temporary(&self) -> PathBuf {
        self.root.join(OWN).join("temporary").join(unique())
    }
}

/// Open a file below a folder. A link in the path is like a missing file, because it may lead out of the folder.
fn open_below(folder: &File, path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
        let links = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        match openat2(folder, path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty(), links) {
            Ok(file) => Ok(file.into()),
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::XDEV | rustix::io::Errno::NAMETOOLONG) => {
                Err(io::ErrorKind::NotFound.into())
            }
            Err(error) => Err(error.into()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
}

/// Return a new random name.
fn unique() -> String {
    let mut bytes = [0; 16];
    // Without random bytes, names repeat, and files are then created with O_EXCL.
    let _ = getrandom::fill(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Return whether a path is a folder, and not a link to one. Fails if the drive does: what cannot be read may exist.
fn is_folder(path: &Path) -> io::Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(found) => Ok(found.is_dir()),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename
            ) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Make the names in a folder durable.
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Run a function that waits for the disk.
fn on_disk<T>(function: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(function)
}

/// Read records. If a large file must be compared for that, the request waits without a thread, and reads them again. So `read` must change nothing before
/// it has read its records, or nothing that matters.
pub async fn settled<T>(mut read: impl FnMut() -> S3Result<T>) -> S3Result<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        let error = match on_disk(&mut read) {
            Err(error) => error,
            done => return done,
        };
        let Some(unsettled) = error.source().and_then(|source| Unsettled::of(source)) else { return Err(error) };
        let Ok(waiting) = WAITING.try_acquire() else { return Err(error) };
        match timeout_at(until, unsettled.compare(waiting)).await {
            Ok(compared) => compared.map_err(record::failed)?,
            Err(_) => return Err(error),
        }
    }
}

/// Pass each operation to its method.
macro_rules! operations {
    ($($group:ident { $($operation:ident($input:ident) -> $output:ident $row:tt;)* })*) => {
        #[async_trait::async_trait]
        impl S3 for Folder {
            $($(async fn $operation(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                Ok(S3Response::new(self.$operation(request.input).await?))
            })*)*
        }
    };
}

each_operation!(operations);
