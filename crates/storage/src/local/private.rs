//! Files and folders that only their owner can read: what is cached may be secret where it comes from.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

/// Keys, certificates and the like have less than this.
const MOST_TEXT_BYTES: u64 = 64 << 20;
/// How often and how long a pipe is waited for that sends nothing.
const MOST_WAITS: usize = 500;
const WAIT: Duration = Duration::from_millis(10);

/// Return options to open a file. If it is created, only its owner can read it.
pub fn options() -> OpenOptions {
    let mut options = File::options();
    options.mode(0o600);
    options
}

/// Open a small file of our own for reading and writing, and create it if it is missing. Fails if something else has its name: a link may lead
/// anywhere, and a pipe may never answer.
pub fn open_own(path: &Path) -> io::Result<File> {
    own(options().read(true).write(true).create(true).truncate(false), path)
}

/// Read a small file of our own. Fails as `open_own` does, and if the file has more than `most` bytes.
pub fn read_own(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    own(File::options().read(true), path)?.take(most as u64 + 1).read_to_end(&mut text)?;
    check_size(text, most as u64)
}

fn check_size(text: Vec<u8>, most: u64) -> io::Result<Vec<u8>> {
    match text.len() as u64 <= most {
        true => Ok(text),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has more than {most} bytes"))),
    }
}

fn own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, format!("`{}` is not a file", path.display()))),
    }
}

/// Create a folder that only its owner can read, unless it exists. Those above it are created as usual.
pub fn create_folders(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Read a file with secrets. Fails if others than its owner can write it, or others than its owner and its group can read it.
pub fn read_secret(path: &Path) -> Result<Vec<u8>, String> {
    let file = open_text(path).map_err(|error| error.to_string())?;
    let mode = file.metadata().map_err(|error| error.to_string())?.mode() & 0o777;
    if mode & 0o027 != 0 {
        return Err(format!("its mode {mode:o} lets others use it; run chmod 600 {}", path.display()));
    }
    read_opened(&file).map_err(|error| error.to_string())
}

/// Read a file that an operator wrote. Fails if it is longer than any such file: a name may lead to a device that never ends. A pipe is read to its end, but
/// must send something each few seconds.
pub fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    read_opened(&open_text(path)?)
}

/// Open a file without waiting for somebody who writes into it, as a pipe would.
fn open_text(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

fn read_opened(mut file: &File) -> io::Result<Vec<u8>> {
    let (mut text, mut waits) = (Vec::new(), 0);
    loop {
        let before = text.len();
        match Read::by_ref(&mut file).take(MOST_TEXT_BYTES + 1 - before as u64).read_to_end(&mut text) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && waits < MOST_WAITS => {
                waits = if text.len() > before { 0 } else { waits + 1 };
                std::thread::sleep(WAIT);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it is a pipe without a writer; specify a file"));
            }
            Err(error) => return Err(error),
            Ok(_) => return check_size(text, MOST_TEXT_BYTES),
        }
    }
}

/// Make a folder one that only its owner can read, and create it if it is missing.
pub fn close_folder(path: &Path) -> io::Result<()> {
    create_folders(path)?;
    match std::fs::metadata(path)?.mode() & 0o077 {
        0 => Ok(()),
        _ => std::fs::set_permissions(path, Permissions::from_mode(0o700)),
    }
}
