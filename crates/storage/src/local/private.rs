//! Files and folders that only their owner can read: what is cached may be secret where it comes from.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Return options to open a file. If it is created, only its owner can read it.
pub fn options() -> OpenOptions {
    let mut options = File::options();
    options.mode(0o600);
    options
}

/// Create a folder that only its owner can read, unless it exists. Those above it are created as usual.
pub fn create_folders(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Read a file with secrets. Fails if others than its owner can write it, or others than its owner and its group can read it.
pub fn read_secret(path: &Path) -> Result<Vec<u8>, String> {
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    let mode = file.metadata().map_err(|error| error.to_string())?.mode() & 0o777;
    if mode & 0o027 != 0 {
        return Err(format!("its mode {mode:o} lets others use it; run chmod 600 {}", path.display()));
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

/// Make a folder one that only its owner can read, and create it if it is missing.
pub fn close_folder(path: &Path) -> io::Result<()> {
    create_folders(path)?;
    match std::fs::metadata(path)?.mode() & 0o077 {
        0 => Ok(()),
        _ => std::fs::set_permissions(path, Permissions::from_mode(0o700)),
    }
}
