//! A file that all running servers of a store have locked: one on each drive, and one in shared memory (the mark). It has the token of the last
//! server, or says until when objects may change. What a token is for is explained in `trust`.

use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use penstock_storage::private;

use crate::flight::Flight;

/// How a file begins that says until when objects may change. The seconds since 1970 follow.
const UNCERTAIN: &str = "until ";
/// A file is shorter than this: the mark has a line for each drive.
const MOST_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub struct ServerLock {
    /// The file, and then the folder of the extents, with their numbers.
    places: Vec<(PathBuf, [u64; 2])>,
    /// Whether no other server had the file locked at first.
    pub is_alone: bool,
    pub lock: Flight,
}

impl ServerLock {
    /// Lock a file with other servers, which can begin after `lock.stay()`. Returns None if another one that starts has it for too long.
    pub fn begin(path: PathBuf, beside: Option<PathBuf>, patience: Duration) -> io::Result<Option<ServerLock>> {
        path.parent().into_iter().chain(beside.as_deref()).try_for_each(private::create_folders)?;
        let Some((lock, is_alone)) = Flight::join(&path, patience)? else { return Ok(None) };
        let mut places = Vec::new();
        for path in [path].into_iter().chain(beside) {
            let number = number_of(&path)?;
            places.push((path, number));
        }
        Ok(Some(ServerLock { places, is_alone, lock }))
    }

    pub fn path(&self) -> &Path {
        &self.places[0].0
    }

    /// Return whether the file and the folder are still those that were there when this began.
    pub fn is_there(&self) -> bool {
        self.places.iter().all(|(path, number)| number_of(path).is_ok_and(|found| found == *number))
    }

    pub fn text(&self) -> Option<String> {
        String::from_utf8(private::read_own(self.path(), MOST_BYTES).ok()?).ok()
    }

    pub fn says(&self, text: &str) -> bool {
        self.text().is_some_and(|found| found == text)
    }

    /// Replace what the file says. It stays the same file, wherever it is now.
    pub fn write(&self, text: &str) -> io::Result<()> {
        self.lock.file.set_len(0)?;
        self.lock.file.write_all_at(text.as_bytes(), 0)
    }

    /// Return until when objects may change, in seconds since 1970, if the file says so.
    pub fn uncertain_seconds(&self) -> Option<u64> {
        self.text()?.strip_prefix(UNCERTAIN)?.parse().ok()
    }

    /// Say that objects may change until then. With `durably`, wait until the drive has it.
    pub fn write_uncertain(&self, until: SystemTime, durably: bool) {
        let text = format!("{UNCERTAIN}{}", until.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs());
        // If this fails, the other files say it.
        let _ = self.write(&text).and_then(|()| if durably { self.lock.file.sync_all() } else { Ok(()) });
    }

    /// Let the file say no token. How long objects are uncertain stays: this server or another one may have noted it.
    pub fn disown(&self) {
        let mut begin = [0; UNCERTAIN.len()];
        if self.lock.file.read_exact_at(&mut begin, 0).is_err() || begin != *UNCERTAIN.as_bytes() {
            // If this fails, the other files say it.
            let _ = self.write("");
        }
    }

    /// Return what changes if the file is put back from a copy, or if its drive was pulled out: it may have lost what was written last. Mounts are not
    /// compared, because each container and each start of a service has other ones. File systems without a device of their own have no number of it.
    pub fn past(&self) -> io::Result<String> {
        let found = std::fs::metadata(self.path())?;
        let device = format!("/sys/dev/block/{}:{}", libc::major(found.dev()), libc::minor(found.dev()));
        // A partition has the number of its disk.
        let numbers = [format!("{device}/diskseq"), format!("{device}/../diskseq")].map(std::fs::read_to_string);
        let disk = numbers.into_iter().find_map(io::Result::ok).unwrap_or_default();
        Ok(format!("{:?} {}.{} {}", number_of(self.path())?, found.ctime(), found.ctime_nsec(), disk.trim()))
    }
}

/// Return the numbers of a file: of its file system, and its own.
fn number_of(path: &Path) -> io::Result<[u64; 2]> {
    std::fs::metadata(path).map(|found| [found.dev(), found.ino()])
}
