//! How files get into place: written elsewhere, made durable, and renamed.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use futures::StreamExt as _;
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::{ETag, StreamingBlob};
use s3s::{S3Result, s3_error};

use super::names::{SELF, path_of};
use super::record::{Record, failed};
use super::{Folder, is_folder, on_disk, sync_folder};
use crate::read::conditions::Conditions;
use crate::upload::hex;

/// How often a folder that another request removes is created again.
const TRIES: usize = 100;

/// A file that is not in place yet. It is removed if it is dropped before.
pub struct Draft {
    pub file: File,
    path: PathBuf,
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After `place`, there is nothing at this path.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Draft {
    /// Move the file to its place, with its record. From then on, others may change it.
    pub fn rename(&self, record: &mut Record, to: &Path) -> io::Result<()> {
        record.renew(&self.file);
        std::fs::rename(&self.path, to)
    }

    /// Write a body, and return its MD5 in hexadecimal.
    pub async fn receive(&mut self, body: Option<StreamingBlob>) -> S3Result<String> {
        let mut md5 = Md5::new();
        if let Some(mut body) = body {
            while let Some(part) = body.next().await {
                let part =
                    part.map_err(|error| s3_error!(IncompleteBody, "the body could not be received: {error}"))?;
                on_disk(|| {
                    md5.update(&part);
                    self.file.write_all(&part).map_err(failed)
                })?;
            }
        }
        Ok(hex(md5.finalize().as_ref()))
    }
}

impl Folder {
    /// Begin a file.
    pub fn draft(&self) -> S3Result<Draft> {
        let path = self.temporary();
        let file = on_disk(|| File::options().read(true).write(true).create_new(true).open(&path)).map_err(failed)?;
        Ok(Draft { file, path })
    }

    /// Make a file durable, and the object of this key, if the present object meets the conditions.
    pub fn place(
        &self,
        bucket: &str,
        key: &str,
        draft: &Draft,
        record: Record,
        conditions: Conditions<'_>,
    ) -> S3Result<Record> {
        let folder = self.bucket(bucket)?;
        let mut record = record.write(&draft.file)?;
        draft.file.sync_all().map_err(failed)?;
        let _turn = self.write_lock(bucket, key);
        if conditions.of_write() {
            conditions.check_write(self.present(bucket, key)?.as_ref())?;
        }
        let path = folder.join(path_of(key));
        for _ in 0..TRIES {
            match self.rename(&folder, draft, &mut record, &path) {
                Ok(()) => return Ok(record),
                // Another request removed the folder, or made one of the file.
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    if !is_folder(&folder).map_err(failed)? {
                        return Err(s3_error!(NoSuchBucket, "the bucket `{bucket}` does not exist"));
                    }
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Err(s3_error!(ServiceUnavailable, "the folder of `{key}` is changing too quickly; try again"))
    }

    /// Return the ETag of the present object.
    fn present(&self, bucket: &str, key: &str) -> S3Result<Option<ETag>> {
        match self.find(bucket, key) {
            Ok((file, _)) => Ok(Some(Record::read(&file).map_err(failed)?.etag())),
            Err(error) if *error.code() == s3s::S3ErrorCode::NoSuchKey => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn rename(&self, bucket: &Path, draft: &Draft, record: &mut Record, to: &Path) -> io::Result<()> {
        let parent = to.parent().ok_or(io::ErrorKind::InvalidInput)?;
        self.create_folders(bucket, parent)?;
        let shape = self.shape.read().unwrap_or_else(PoisonError::into_inner);
        let to = if is_folder(to)? { to.join(SELF) } else { to.to_owned() };
        draft.rename(record, &to)?;
        drop(shape);
        sync_folder(to.parent().unwrap_or(parent))
    }

    /// Create the folders above a file, durably. Files in their places become the objects of these folders.
    fn create_folders(&self, bucket: &Path, folder: &Path) -> io::Result<()> {
        if folder == bucket {
            return if is_folder(bucket)? { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) };
        }
        let above = folder.parent().filter(|above| above.starts_with(bucket)).ok_or(io::ErrorKind::NotFound)?;
        self.create_folders(bucket, above)?;
        if is_folder(folder)? {
            return Ok(());
        }
        if folder.is_symlink() {
            // It may lead out of the served folder.
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a folder in the key is a link"));
        }
        // Nobody else moves or removes files meanwhile, and nobody uses the folder before its name is durable.
        let _alone = self.shape.write().unwrap_or_else(PoisonError::into_inner);
        match std::fs::create_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        if std::fs::metadata(folder)?.is_file() {
            self.make_folder_of(folder)?;
        }
        sync_folder(above)
    }

    /// Make a folder of a file, which becomes the object of the folder. They change places at once, so that the object is always there.
    fn make_folder_of(&self, path: &Path) -> io::Result<()> {
        let twin = self.temporary();
        std::fs::create_dir(&twin)?;
        let abandon = |twin: &Path| {
            let _ = std::fs::remove_file(twin.join(SELF));
            std::fs::remove_dir(twin)
        };
        let linked = std::fs::hard_link(path, twin.join(SELF)).and_then(|()| sync_folder(&twin));
        if let Err(error) = linked.and_then(|()| exchange(&twin, path)) {
            abandon(&twin)?;
            return if is_folder(path)? { Ok(()) } else { Err(error) };
        }
        // Another program may have moved something else there meanwhile.
        let (before, object) = (std::fs::symlink_metadata(&twin)?, path.join(SELF));
        let known = std::fs::symlink_metadata(&object)?;
        if (before.dev(), before.ino()) == (known.dev(), known.ino()) {
            return std::fs::remove_file(&twin);
        }
        if before.is_file() {
            return std::fs::rename(&twin, &object);
        }
        exchange(&twin, path)?;
        abandon(&twin)?;
        if is_folder(path)? { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
    }

    /// Remove the file of an object, and the folders above it that are empty then. Returns whether there was one.
    pub fn remove(&self, bucket: &str, key: &str) -> S3Result<bool> {
        let folder = self.bucket(bucket)?;
        let _shape = self.shape.read().unwrap_or_else(PoisonError::into_inner);
        let path = match self.find(bucket, key) {
            Ok((_, path)) => path,
            Err(error) if *error.code() == s3s::S3ErrorCode::NoSuchKey => return Ok(false),
            Err(error) => return Err(error),
        };
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other.map_err(failed)?,
        }
        let mut above = path.parent();
        while let Some(parent) = above.filter(|parent| parent.starts_with(&folder)) {
            // The name is gone for good before the response, even if the folder stays.
            match sync_folder(parent) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
            if parent == folder || std::fs::remove_dir(parent).is_err() {
                break;
            }
            above = parent.parent();
        }
        Ok(true)
    }
}

/// Let two paths change places.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).map_err(Into::into)
}
