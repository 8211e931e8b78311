//! Which notes on the drives are believed without a question.
//!
//! A server removes the note of an object before it writes the object. So notes stay true as long as each removal reaches its drive. Each note begins
//! with a token, and a process believes only notes with its own token. Every server has a token of its own, so notes of another one on the same
//! drives do not count.
//!
//! After a removal that may have missed its drive, the token is another one.
//!
//! The next server takes the token over if it finds the same drives at the same places. No other server of the store may have run in the meantime. The
//! drives have the token, and so has a mark in shared memory. All servers of the store lock the mark, also those without a cache. The mark is
//! emptied when a removal was missed, because a drive that is away cannot be written to. It is gone when the machine starts again, which
//! may have lost the last removals.
//!
//! A write whose outcome is not known may change its object later. The mark and the drives then say until when, instead of a token. Nothing but its time
//! ends this: what is missed meanwhile does not.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use penstock_error::{Error, Result};
use penstock_storage::private;

use crate::drive::{Drive, is_mine, store_name};
use crate::extent::store_key;
use crate::flight::Flight;

/// Bytes of a token, which is a text.
const TOKEN_BYTES: usize = 32;
/// How a mark begins that says until when objects may change. The seconds since 1970 follow.
const UNCERTAIN: &str = "until ";
const MOST_UNCERTAIN: Duration = Duration::from_secs(3600);
/// Drives are written to at most once in this time to say so. It is added to what they say.
const NOTED_EACH: Duration = Duration::from_secs(1);
/// A mark is shorter than this: it has a line for each drive.
const MOST_BYTES: usize = 1 << 20;
/// A server that starts waits this long for another one that starts: for a drive, which may hang, and for the mark.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));

/// The token of this process, and where the next one finds it.
#[derive(Debug)]
pub struct Trust {
    token: Mutex<String>,
    /// The file in shared memory. Without it, the token ends with this process.
    mark: Option<Presence>,
    /// The files on the drives. One that fails has none.
    drives: Vec<Option<Presence>>,
    /// Held while a file of these says something else: the mark, and the files on the drives, for which only threads wait that may. Until then, objects
    /// are uncertain by the drives.
    saying: (Mutex<()>, Mutex<SystemTime>),
    /// Until then, the store may carry out a write whose outcome an earlier server did not learn.
    pub uncertain_until: SystemTime,
}

/// A file that all servers of a store have locked.
#[derive(Debug)]
struct Presence {
    /// The file, and then the folder of the extents, with their numbers.
    places: Vec<(PathBuf, [u64; 2])>,
    is_alone: bool,
    lock: Flight,
}

impl Trust {
    /// Note that a server of a store runs that has no cache. Its writes remove no notes. Fails as `open` does.
    pub fn without_drives(store: &str) -> Result<Trust> {
        Trust::open(&[], true, &store_key(store))
    }

    /// Take over the token of the last server of a store, or begin with another one. `is_whole` says that no drive fails. Fails if another server of
    /// the store has been starting for too long: it would not know of this one. Cost: a few calls for each drive.
    pub(crate) fn open(drives: &[Drive], is_whole: bool, store: &str) -> Result<Trust> {
        let on_drive_of =
            |drive: &Drive| Presence::begin(drive.servers_file(store), Some(drive.store_folder(store)), PATIENCE.0).ok().flatten();
        let found: Vec<Option<Presence>> = drives.iter().map(on_drive_of).collect();
        let mark = match marks_folder().and_then(|folder| Presence::begin(folder.join(store_name(store)), None, PATIENCE.1)) {
            Ok(None) => {
                let text = format!("cannot serve: another server of the same store has been starting for {} s", PATIENCE.1.as_secs());
                return Err(Error::new("storage-failed", text).hint("end that server, or wait until it answers"));
            }
            other => other.ok().flatten(),
        };
        let is_alone = is_whole && [&mark].into_iter().chain(&found).all(|file| file.as_ref().is_some_and(|file| file.is_alone));
        let marked = |token: &str| setting(drives, &found).map(|setting| format!("{token}\n{setting}"));
        let is_kept = |token: &String| {
            let is_same = |(drive, file): (&Drive, &Option<Presence>)| file.as_ref().is_some_and(|file| file.says(&on_drive(token, drive)));
            let is_marked = mark.as_ref().is_some_and(|mark| marked(token).is_some_and(|text| mark.says(&text)));
            is_alone && is_marked && drives.iter().zip(&found).all(is_same)
        };
        let until = [&mark].into_iter().chain(&found).flatten().filter_map(|file| file.text()?.strip_prefix(UNCERTAIN)?.parse().ok());
        let until = until.max().unwrap_or(0);
        // A clock that went back must not hold it up for long.
        let uncertain_until =
            (SystemTime::UNIX_EPOCH + Duration::from_secs(until.min(u32::MAX.into()))).min(SystemTime::now() + MOST_UNCERTAIN);
        let last = mark.as_ref().and_then(|mark| mark.text()?.get(..TOKEN_BYTES).map(str::to_owned));
        let token = last.filter(is_kept).unwrap_or_else(|| {
            let token = new_token();
            if uncertain_until > SystemTime::now() {
                // The files keep saying so for later servers. None of them believes a note of this one.
                return token;
            }
            let write =
                |(drive, file): (&Drive, &Option<Presence>)| file.as_ref().map_or(Ok(()), |file| file.lock.write(&on_drive(&token, drive)));
            let written = drives.iter().zip(&found).map(write).fold(Ok(()), io::Result::and);
            let text = marked(&token).filter(|_| is_alone && written.is_ok()).unwrap_or_default();
            // A mark that cannot be written has another token.
            let _ = mark.as_ref().map(|mark| mark.lock.write(&text));
            token
        });
        [&mark].into_iter().chain(&found).flatten().for_each(|file| file.lock.stay());
        Ok(Trust {
            token: Mutex::new(token),
            mark,
            drives: found,
            saying: (Mutex::default(), Mutex::new(SystemTime::UNIX_EPOCH)),
            uncertain_until,
        })
    }

    fn token(&self) -> MutexGuard<'_, String> {
        held(&self.token)
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

    /// Remove notes from a drive. If the drive is another one, or `remove` fails, no note that was written until now is believed any more, and the
    /// error is returned.
    pub fn removing<T>(&self, drive: usize, remove: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let was_there = self.is_there(drive);
        let removed = remove();
        // Before and after: it may have come back in between.
        let is_there = was_there && self.is_there(drive);
        let removed = if is_there { removed } else { removed.and(Err(io::Error::other("the drive is not the one that was opened"))) };
        removed.inspect_err(|_| self.renew())
    }

    fn is_there(&self, drive: usize) -> bool {
        let file = self.drives.get(drive).and_then(Option::as_ref);
        let is_same = |(path, number): &(PathBuf, [u64; 2])| number_of(path).is_ok_and(|found| found == *number);
        file.is_some_and(|file| file.places.iter().all(is_same))
    }

    /// Let servers that start later believe nothing, and learn that objects may change until then. This one knows which, and believes what it believed.
    /// Does not wait for drives: `note_on_drives` does.
    pub fn note_uncertain(&self, until: SystemTime) {
        let _alone = held(&self.saying.0);
        self.mark.iter().for_each(|mark| drop(mark.lock.write(&uncertain(until))));
    }

    /// Note the same on the drives, for servers that do not find the mark: it ends with the run of the machine, or the container. Waits for drives.
    pub fn note_on_drives(&self, until: SystemTime) {
        let mut said = held(&self.saying.1);
        // Many writes fail together.
        if *said < until {
            *said = until + NOTED_EACH;
            self.drives.iter().flatten().for_each(|file| drop(file.lock.write_durably(&uncertain(*said))));
        }
    }

    /// Believe no note that was written until now.
    pub(crate) fn renew(&self) {
        let token = new_token();
        self.token().clone_from(&token);
        // One of them is enough.
        let marking = held(&self.saying.0);
        self.mark.iter().for_each(Presence::disown);
        drop(marking);
        let _alone = held(&self.saying.1);
        self.drives.iter().flatten().for_each(Presence::disown);
    }
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Return what a file says while objects may change until then.
fn uncertain(until: SystemTime) -> String {
    format!("{UNCERTAIN}{}", until.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs())
}

impl Presence {
    /// Lock a file with other servers. Returns None if another one that starts has it for too long.
    fn begin(path: PathBuf, beside: Option<PathBuf>, patience: Duration) -> io::Result<Option<Presence>> {
        path.parent().into_iter().chain(beside.as_deref()).try_for_each(private::create_folders)?;
        let Some((lock, is_alone)) = Flight::join(&path, patience)? else { return Ok(None) };
        let number = |path: PathBuf| number_of(&path).map(|number| (path, number));
        let places = [path].into_iter().chain(beside).map(number).collect::<io::Result<_>>()?;
        Ok(Some(Presence { places, is_alone, lock }))
    }

    fn path(&self) -> &Path {
        &self.places[0].0
    }

    fn text(&self) -> Option<String> {
        String::from_utf8(private::read_own(self.path(), MOST_BYTES).ok()?).ok()
    }

    /// Let the file say no token. How long objects are uncertain stays: this server or another one may have noted it.
    fn disown(&self) {
        if !self.lock.begins_with(UNCERTAIN) {
            // If this fails, the other files say it.
            let _ = self.lock.write("");
        }
    }

    fn says(&self, text: &str) -> bool {
        self.text().is_some_and(|found| found == text)
    }
}

/// Return the numbers of a file: of its file system, and its own.
fn number_of(path: &Path) -> io::Result<[u64; 2]> {
    std::fs::metadata(path).map(|found| [found.dev(), found.ino()])
}

/// Return what changes if a file is put back from a copy, or if its drive was pulled out: it may have lost what was written last. Mounts are not compared,
/// because each container and each start of a service has other ones. File systems without a device of their own have no number of it.
fn past_of(path: &Path) -> io::Result<String> {
    let found = std::fs::metadata(path)?;
    let device = format!("/sys/dev/block/{}:{}", libc::major(found.dev()), libc::minor(found.dev()));
    // A partition has the number of its disk.
    let numbers = [format!("{device}/diskseq"), format!("{device}/../diskseq")].map(std::fs::read_to_string);
    let disk = numbers.into_iter().find_map(io::Result::ok).unwrap_or_default();
    Ok(format!("{:?} {}.{} {}", number_of(path)?, found.ctime(), found.ctime_nsec(), disk.trim()))
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

/// Return what the file on a drive says. Drives that change places have the names of each other.
fn on_drive(token: &str, drive: &Drive) -> String {
    format!("{token}\n{:016x}\n", drive.place.name)
}

/// Return what must be the same for a token to be taken over: the run of the machine, and which drive has which object. A copy of a drive is another one.
/// Returns None if the run of the machine is not known.
fn setting(drives: &[Drive], found: &[Option<Presence>]) -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    // The size of an only drive does not matter.
    let weight = |drive: &Drive| if drives.len() > 1 { drive.place.weight } else { 1.0 };
    let place = |(drive, file): (&Drive, &Option<Presence>)| {
        let past = file.as_ref().and_then(|file| past_of(file.path()).ok());
        format!("{:016x} {} {past:?}\n", drive.place.name, weight(drive))
    };
    Some(format!("{}\n{}", boot.trim(), drives.iter().zip(found).map(place).collect::<String>()))
}

/// Return the folder of marks in shared memory.
fn marks_folder() -> io::Result<PathBuf> {
    // SAFETY: the call takes no arguments and cannot fail.
    let folder = PathBuf::from(format!("/dev/shm/penstock-servers-{}", unsafe { libc::getuid() }));
    private::create_folders(&folder)?;
    // Anybody may make folders in shared memory.
    if is_mine(&folder)? { Ok(folder) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drives::Drives;
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
            self.open_for(spec, "one")
        }

        /// Other tests have other stores.
        fn open_for(&self, spec: &str, store: &str) -> Trust {
            let drives = self.drives(spec);
            Trust::open(&drives.drives, drives.failed.is_empty(), &self.store(store)).unwrap()
        }

        fn store(&self, name: &str) -> String {
            format!("{} {name}", self.0.path().display())
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
        drop(next);
        assert!(!is_believed(&set.open_for("a:1GB", "other"), &note));
        assert!(is_believed(&set.open("a:1GB"), &note));
        assert!(!is_believed(&set.open("b:1GB"), &note) && !is_believed(&set.open("a:1GB"), &note));
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
        assert_eq!(set.drives("a:1GB,b:1GB").failed.len(), 1);
        drop(set.open("a:1GB,b:1GB"));
        std::fs::remove_file(set.0.path().join("b"))?;
        std::fs::rename(set.0.path().join("away"), set.0.path().join("b"))?;
        assert!(!is_believed(&set.open("a:1GB,b:1GB"), &note));
        Ok(())
    }

    #[test]
    fn what_is_uncertain_is_known_to_later_servers() -> io::Result<()> {
        let set = Set::new()?;
        let trust = set.open("a:1GB");
        let note = trust.sign(b"note");
        let until = SystemTime::now() + Duration::from_secs(60);
        trust.note_uncertain(until);
        assert!(is_believed(&trust, &note) && is_believed(&trust, &trust.sign(b"later")) && trust.uncertain_until < until);
        drop(trust);
        for _ in 0..2 {
            let next = set.open("a:1GB");
            assert!(!is_believed(&next, &note) && next.uncertain_until > SystemTime::now() + Duration::from_secs(50));
        }
        set.open("a:1GB").note_uncertain(SystemTime::now() - Duration::from_secs(1));
        let next = set.open("a:1GB");
        let note = next.sign(b"note");
        assert!(next.uncertain_until < SystemTime::now());
        drop(next);
        assert!(is_believed(&set.open("a:1GB"), &note));
        Ok(())
    }

    #[test]
    fn what_is_uncertain_outlives_its_mark_and_what_is_missed() -> io::Result<()> {
        let set = Set::new()?;
        let is_uncertain = |trust: &Trust| trust.uncertain_until > SystemTime::now() + Duration::from_secs(50);
        let trust = set.open("a:1GB,b:1GB");
        let until = SystemTime::now() + Duration::from_secs(60);
        trust.note_uncertain(until);
        trust.note_on_drives(until);
        trust.renew();
        let mark = trust.mark.as_ref().unwrap().path().to_owned();
        drop(trust);
        std::fs::remove_file(&mark)?;
        for _ in 0..2 {
            let next = set.open("a:1GB,b:1GB");
            assert!(is_uncertain(&next));
            next.renew();
        }
        // One drive that says it is enough, and so is the mark.
        std::fs::rename(set.0.path().join("a"), set.0.path().join("away"))?;
        assert!(is_uncertain(&set.open("a:1GB,b:1GB")));
        let set = Set::new()?;
        let trust = set.open("a:1GB");
        Trust::without_drives(&set.store("one")).unwrap().note_uncertain(until);
        trust.renew();
        drop(trust);
        assert!(is_uncertain(&set.open("a:1GB")));
        Ok(())
    }

    #[test]
    fn without_its_mark_a_token_ends() -> io::Result<()> {
        let set = Set::new()?;
        let trust = set.open("a:1GB");
        let note = trust.sign(b"note");
        let mark = trust.mark.as_ref().unwrap().path().to_owned();
        let text = std::fs::read_to_string(&mark)?;
        let (token, rest) = text.split_once('\n').unwrap();
        std::fs::write(&mark, format!("{token}\nanother run of the machine\n{}", rest.split_once('\n').unwrap().1))?;
        drop(trust);
        let trust = set.open("a:1GB");
        assert!(!is_believed(&trust, &note));
        let note = trust.sign(b"note");
        std::fs::remove_file(&mark)?;
        drop(trust);
        assert!(!is_believed(&set.open("a:1GB"), &note));
        Ok(())
    }

    #[test]
    fn servers_that_do_not_use_the_drives_end_the_token() -> io::Result<()> {
        let set = Set::new()?;
        for other in ["", "b:1GB"] {
            let begin = || if other.is_empty() { Trust::without_drives(&set.store("one")).unwrap() } else { set.open(other) };
            let note = set.open("a:1GB").sign(b"note");
            drop(begin());
            assert!(!is_believed(&set.open("a:1GB"), &note), "`{other}` ran between");
            let trust = set.open("a:1GB");
            let note = trust.sign(b"note");
            let beside = begin();
            assert!(is_believed(&trust, &note), "`{other}` is another writer");
            drop(trust);
            let trust = set.open("a:1GB");
            assert!(!is_believed(&trust, &note), "`{other}` runs beside");
            let note = trust.sign(b"note");
            drop((beside, trust));
            assert!(!is_believed(&set.open("a:1GB"), &note), "`{other}` ran beside");
        }
        Ok(())
    }

    #[test]
    fn drives_that_change_places_and_copies_end_the_token() -> io::Result<()> {
        let set = Set::new()?;
        let path = |name: &str| set.0.path().join(name);
        let swap = || {
            std::fs::rename(path("a"), path("c"))?;
            std::fs::rename(path("b"), path("a"))?;
            std::fs::rename(path("c"), path("b"))
        };
        let note = set.open("a:1GB,b:1GB").sign(b"note");
        swap()?;
        drop(set.open("a:1GB,b:1GB"));
        swap()?;
        assert!(!is_believed(&set.open("a:1GB,b:1GB"), &note));
        let note = set.open("d:1GB").sign(b"note");
        let copied = std::process::Command::new("cp").arg("-a").args([path("d"), path("e")]).status()?;
        assert!(copied.success() && is_believed(&set.open("d:1GB"), &note));
        std::fs::rename(path("d"), path("f"))?;
        std::fs::rename(path("e"), path("d"))?;
        assert!(!is_believed(&set.open("d:1GB"), &note));
        // A file that is put back where it was.
        let trust = set.open("d:1GB");
        let (note, path) = (trust.sign(b"note"), trust.drives[0].as_ref().unwrap().path().to_owned());
        drop(trust);
        let text = std::fs::read(&path)?;
        std::fs::write(&path, text)?;
        assert!(!is_believed(&set.open("d:1GB"), &note));
        Ok(())
    }

    #[test]
    fn a_folder_of_extents_that_is_away_ends_the_token() -> io::Result<()> {
        let set = Set::new()?;
        for part in ["a/stores", "a/stores/*"] {
            let trust = set.open("a:1GB");
            let note = trust.sign(b"note");
            let stores = set.0.path().join("a/stores");
            let part = if part.ends_with('*') { std::fs::read_dir(&stores)?.next().unwrap()?.path() } else { stores };
            let away = set.0.path().join("away");
            std::fs::rename(&part, &away)?;
            assert!(trust.removing(0, || Ok(())).is_err());
            std::fs::rename(&away, &part)?;
            assert!(!is_believed(&trust, &note));
            drop(trust);
            assert!(!is_believed(&set.open("a:1GB"), &note));
        }
        Ok(())
    }
}
