//! Which notes on the drives are believed without a question.
//!
//! A server removes the note of an object before it writes the object. So notes stay true as long as each removal reaches its drive. Each note begins
//! with a token, and a process believes only notes with its own token. Every server has a token of its own, so notes of another one on the same
//! drives do not count.
//!
//! After a removal that may have missed its drive, the token is another one.
//!
//! The next server takes the token over if it finds the same drives and no other server used them in the meantime. The drives have the token. A mark
//! in shared memory says that no removal was missed. It is not on the drives, because a drive that is away cannot be written to. The mark is
//! gone when the machine starts again, which may have lost the last removals.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_storage::private;

use super::Drives;
use crate::drive::{Drive, is_mine};
use crate::flight::Flight;

/// Bytes of a token, which is a text.
const TOKEN_BYTES: usize = 32;
/// A server that starts waits this long for another one that starts.
const PATIENCE: Duration = Duration::from_secs(2);

/// The token of this process, and where the next one finds it.
#[derive(Debug)]
pub struct Trust {
    token: Mutex<String>,
    /// The file in shared memory without which the token ends with this process.
    mark: PathBuf,
    presences: Vec<Option<Presence>>,
}

/// A file on a drive that this process has locked with others that use it. It has the token.
#[derive(Debug)]
struct Presence {
    path: PathBuf,
    file: (u64, u64),
    is_alone: bool,
    lock: Flight,
}

impl Trust {
    /// Take over the token of the last server of a store, or begin with another one. Drives that fail only make tokens end. Cost: a few calls for each
    /// drive.
    pub fn open(drives: &Drives, store: &str) -> Trust {
        let presences: Vec<Option<Presence>> = drives.drives.iter().map(|drive| Presence::begin(drive, store).ok().flatten()).collect();
        // A drive that fails now has notes with the old token.
        let is_alone = drives.failed.is_empty() && presences.iter().all(|presence| presence.as_ref().is_some_and(|found| found.is_alone));
        let told: Vec<Option<String>> = presences.iter().flatten().map(Presence::token).collect();
        let last = told.first().cloned().flatten().filter(|token| told.iter().all(|other| other.as_ref() == Some(token)));
        let (mark, setting) = (mark_of(drives, store), setting(drives));
        let is_kept = |token: &String| setting.as_ref().is_some_and(|setting| is_marked(&mark, &format!("{token}\n{setting}")));
        let token = last.filter(|token| is_alone && is_kept(token)).unwrap_or_else(|| {
            let token = new_token();
            let written = presences.iter().flatten().try_for_each(|presence| presence.write(&token));
            if let Some(setting) = setting.as_ref().filter(|_| is_alone && written.is_ok()) {
                let _ = write_mark(&mark, &format!("{token}\n{setting}")); // Without it, the token ends with this process.
            }
            token
        });
        presences.iter().flatten().for_each(|presence| presence.lock.stay());
        Trust { mark, token: Mutex::new(token), presences }
    }

    fn token(&self) -> MutexGuard<'_, String> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return a note as it is written to a drive.
    pub fn sign(&self, note: &[u8]) -> Vec<u8> {
        [self.token().as_bytes(), note].concat()
    }

    /// Return a note as it was before `sign`, and whether it is believed. Returns None if it never was a note.
    pub fn check<'a>(&self, drive: usize, note: &'a [u8]) -> Option<(&'a [u8], bool)> {
        let (token, note) = note.split_at_checked(TOKEN_BYTES)?;
        // A drive that hangs must not hold up those that need the token.
        let is_own = *token == *self.token().as_bytes();
        Some((note, is_own && self.is_there(drive)))
    }

    /// Remove notes from a drive. If the drive is another one, or `remove` fails, no note that was written until now is believed any more, and the error is
    /// returned.
    pub fn removing<T>(&self, drive: usize, remove: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let was_there = self.is_there(drive);
        let removed = remove();
        // Before and after: it may have come back in between.
        let is_there = was_there && self.is_there(drive);
        let removed = if is_there { removed } else { removed.and(Err(io::Error::other("the drive is not the one that was opened"))) };
        removed.inspect_err(|_| self.renew())
    }

    fn is_there(&self, drive: usize) -> bool {
        let presence = self.presences.get(drive).and_then(Option::as_ref);
        presence.is_some_and(|presence| file_of(&presence.path).is_ok_and(|file| file == presence.file))
    }

    fn renew(&self) {
        let token = new_token();
        self.token().clone_from(&token);
        let removed = std::fs::remove_file(&self.mark);
        if removed.is_err_and(|error| error.kind() != io::ErrorKind::NotFound) {
            // Drives that are there make the mark useless as well.
            self.presences.iter().flatten().for_each(|presence| drop(presence.write(&token)));
        }
    }
}

impl Presence {
    /// Lock the file of a store's servers on a drive. Returns None if another server that starts has it for too long.
    fn begin(drive: &Drive, store: &str) -> io::Result<Option<Presence>> {
        let path = drive.servers_file(store);
        path.parent().map_or(Ok(()), private::create_folders)?;
        let Some((lock, is_alone)) = Flight::join(&path, PATIENCE)? else { return Ok(None) };
        let file = file_of(&path)?;
        Ok(Some(Presence { path, file, is_alone, lock }))
    }

    fn token(&self) -> Option<String> {
        let is_token = |text: &String| text.len() == TOKEN_BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        std::fs::read_to_string(&self.path).ok().filter(is_token)
    }

    fn write(&self, token: &str) -> io::Result<()> {
        std::fs::write(&self.path, token)
    }
}

fn file_of(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

fn new_token() -> String {
    let mut random = [0; TOKEN_BYTES / 2];
    // Without random bytes, a token is as good as the time.
    if getrandom::fill(&mut random).is_err() {
        let time = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        random = time.as_nanos().to_le_bytes();
    }
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Return what must be the same for a token to be taken over: the run of the machine, and which drive has which object. Returns None if the run of the
/// machine is not known.
fn setting(drives: &Drives) -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // The size of an only drive does not matter.
    let weight = |drive: &Drive| if drives.drives.len() > 1 { drive.place.weight } else { 1.0 };
    let places: Vec<String> = drives.drives.iter().map(|drive| format!("{:016x} {}", drive.place.name, weight(drive))).collect();
    Some(format!("{}\n{}\n", boot.trim(), places.join("\n")))
}

fn marks_folder() -> PathBuf {
    // SAFETY: the call takes no arguments and cannot fail.
    PathBuf::from(format!("/dev/shm/penstock-servers-{}", unsafe { libc::getuid() }))
}

/// Return the mark of the servers of a store whose first drive is this one's.
fn mark_of(drives: &Drives, store: &str) -> PathBuf {
    let file = drives.drives.first().map(|drive| drive.servers_file(store)).unwrap_or_default();
    let name = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, file.as_os_str().as_encoded_bytes());
    marks_folder().join(format!("{name:016x}"))
}

fn is_marked(mark: &Path, text: &str) -> bool {
    // Anybody may make folders in shared memory.
    is_mine(&marks_folder()).unwrap_or(false) && std::fs::read_to_string(mark).is_ok_and(|found| found == text)
}

fn write_mark(mark: &Path, text: &str) -> io::Result<()> {
    use std::io::Write as _;
    private::create_folders(&marks_folder())?;
    if !is_mine(&marks_folder())? {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    private::options().write(true).create(true).truncate(true).open(mark)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Spec;

    struct Set(tempfile::TempDir);

    impl Set {
        fn new() -> io::Result<Set> {
            tempfile::tempdir().map(Set)
        }

        fn drives(&self, spec: &str) -> Drives {
            let named = spec.split(',').map(|drive| format!("{}/{drive}", self.0.path().display())).collect::<Vec<String>>();
            Drives::open(&Spec::parse(&named.join(",")).unwrap()).unwrap()
        }

        fn open(&self, spec: &str) -> Trust {
            Trust::open(&self.drives(spec), "s3://store")
        }
    }

    fn is_believed(trust: &Trust, note: &[u8]) -> bool {
        trust.check(0, note).is_some_and(|(_, is_believed)| is_believed)
    }

    #[test]
    fn the_next_server_believes_what_the_last_one_wrote() -> io::Result<()> {
        let set = Set::new()?;
        let note = set.open("a:1GB").sign(b"note");
        let next = set.open("a:2GB");
        assert_eq!(next.check(0, &note), Some((&b"note"[..], true)));
        assert!(next.check(0, b"short").is_none() && !is_believed(&next, &[b'0'; 40]));
        assert!(!is_believed(&Trust::open(&set.drives("b:1GB"), "s3://store"), &note));
        drop(next);
        assert!(!is_believed(&Trust::open(&set.drives("a:1GB"), "s3://other"), &note));
        assert!(is_believed(&set.open("a:1GB"), &note));
        Ok(())
    }

    #[test]
    fn servers_that_share_a_drive_do_not_believe_each_other() -> io::Result<()> {
        let set = Set::new()?;
        let one = set.open("a:1GB");
        let two = set.open("a:1GB");
        let notes = (one.sign(b"one"), two.sign(b"two"));
        assert!(is_believed(&one, &notes.0) && !is_believed(&one, &notes.1));
        assert!(is_believed(&two, &notes.1) && !is_believed(&two, &notes.0));
        // The one that follows while the other runs, and the one after both.
        drop(one);
        let three = set.open("a:1GB");
        assert!(!is_believed(&three, &notes.0) && !is_believed(&three, &notes.1));
        let note = three.sign(b"three");
        drop((two, three));
        let last = set.open("a:1GB");
        assert!(!is_believed(&last, &notes.0) && !is_believed(&last, &notes.1) && !is_believed(&last, &note));
        Ok(())
    }

    #[test]
    fn a_removal_that_misses_its_drive_ends_the_token() -> io::Result<()> {
        let set = Set::new()?;
        let path = |name: &str| set.0.path().join(name);
        let trust = set.open("a:1GB");
        let note = trust.sign(b"note");
        trust.removing(0, || Ok(()))?;
        assert!(is_believed(&trust, &note));
        std::fs::rename(path("a"), path("away"))?;
        assert!(!is_believed(&trust, &note), "another folder may be there now");
        assert!(trust.removing(0, || Ok(())).is_err());
        std::fs::rename(path("away"), path("a"))?;
        assert!(!is_believed(&trust, &note) && is_believed(&trust, &trust.sign(b"new")));
        drop(trust);
        let trust = set.open("a:1GB");
        assert!(!is_believed(&trust, &note));
        let note = trust.sign(b"note");
        // It is away only while the note is removed.
        let away = || std::fs::rename(path("a"), path("away")).and_then(|()| std::fs::create_dir(path("a")));
        assert!(trust.removing(0, away).is_err() && !is_believed(&trust, &trust.sign(b"")));
        std::fs::remove_dir(path("a"))?;
        std::fs::rename(path("away"), path("a"))?;
        assert!(!is_believed(&trust, &note));
        let note = trust.sign(b"note");
        assert!(trust.removing(0, || Err::<(), _>(io::ErrorKind::ReadOnlyFilesystem.into())).is_err());
        assert!(!is_believed(&trust, &note));
        Ok(())
    }

    #[test]
    fn drives_that_were_left_out_for_a_while_end_the_token() -> io::Result<()> {
        let set = Set::new()?;
        for (first, between, believed) in [
            ("a:1GB,b:1GB", "a:1GB,b:1GB", true),
            ("a:1GB,b:1GB", "a:1GB", false),
            ("a:1GB,b:1GB", "b:1GB", false),
            ("a:1GB,b:1GB", "a:2GB,b:1GB", false),
            ("a:1GB", "a:1GB,b:1GB", false),
        ] {
            let note = set.open(first).sign(b"note");
            drop(set.open(between));
            assert_eq!(is_believed(&set.open(first), &note), believed, "{first} {between}");
        }
        // A drive that fails when the server starts.
        let note = set.open("a:1GB,b:1GB").sign(b"note");
        std::fs::rename(set.0.path().join("b"), set.0.path().join("away"))?;
        std::os::unix::fs::symlink("/proc/none", set.0.path().join("b"))?;
        let drives = set.drives("a:1GB,b:1GB");
        assert_eq!(drives.failed.len(), 1);
        drop(Trust::open(&drives, "s3://store"));
        std::fs::remove_file(set.0.path().join("b"))?;
        std::fs::rename(set.0.path().join("away"), set.0.path().join("b"))?;
        assert!(!is_believed(&set.open("a:1GB,b:1GB"), &note));
        Ok(())
    }

    #[test]
    fn without_its_mark_a_token_ends() -> io::Result<()> {
        let set = Set::new()?;
        let trust = set.open("a:1GB");
        let note = trust.sign(b"note");
        std::fs::write(&trust.mark, "another run of the machine\n")?;
        drop(trust);
        let trust = set.open("a:1GB");
        assert!(!is_believed(&trust, &note));
        let note = trust.sign(b"note");
        std::fs::remove_file(&trust.mark)?;
        drop(trust);
        assert!(!is_believed(&set.open("a:1GB"), &note));
        Ok(())
    }
}
