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
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use penstock_error::{Error, Result};
use penstock_storage::private;

use crate::drive::{Drive, SERVERS, is_mine, store_name};
use crate::extent::store_key;

mod server_lock;

use server_lock::ServerLock;

/// Bytes of a token, which is a text.
const TOKEN_BYTES: usize = 32;
const MOST_UNCERTAIN: Duration = Duration::from_secs(3600);
/// Drives are written to at most once in this time to say so. It is added to what they say.
const NOTED_EACH: Duration = Duration::from_secs(1);
/// A server that starts waits this long for another one that starts: for a drive, which may hang, and for the mark.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));

/// The token of this process, and where the next one finds it.
#[derive(Debug)]
pub struct Trust {
    token: Mutex<String>,
    /// The file in shared memory. Without it, the token ends with this process.
    mark: Option<ServerLock>,
    /// The files on the drives. One that fails has none.
    drives: Vec<Option<ServerLock>>,
    /// Held while a file of these says something else: the mark, and the files on the drives, for which only threads wait that may. Until then, objects
    /// are uncertain by the drives.
    saying: (Mutex<()>, Mutex<SystemTime>),
    /// Until then, the store may carry out a write whose outcome an earlier server did not learn.
    pub uncertain_until: SystemTime,
}

impl Trust {
    /// Note that a server of a store runs that has no cache. Its writes remove no notes. Fails as `open` does.
    pub fn without_drives(store: &str) -> Result<Trust> {
        Trust::open(&[], true, &store_key(store))
    }

    /// Take over the token of the last server of a store, or begin with another one. `is_whole` says that no drive fails. Fails if another server of
    /// the store has been starting for too long: it would not know of this one. Cost: a few calls for each drive.
    pub(crate) fn open(drives: &[Drive], is_whole: bool, store: &str) -> Result<Trust> {
        let begin = |drive: &Drive| {
            ServerLock::begin(drive.part(SERVERS).join(store_name(store)), Some(drive.store_folder(store)), PATIENCE.0)
                .ok()
                .flatten()
        };
        let found: Vec<Option<ServerLock>> = drives.iter().map(begin).collect();
        let mark = match marks_folder()
            .and_then(|folder| ServerLock::begin(folder.join(store_name(store)), None, PATIENCE.1))
        {
            Ok(None) => {
                let text = format!(
                    "cannot serve: another server for the same store has been starting for {} s",
                    PATIENCE.1.as_secs()
                );
                return Err(Error::new("storage-failed", text).hint("stop that server, or wait until it responds"));
            }
            other => other.ok().flatten(),
        };
        let server_locks = || [&mark].into_iter().chain(&found).flatten();
        let is_alone =
            is_whole && server_locks().count() == 1 + drives.len() && server_locks().all(|file| file.is_alone);
        let until = server_locks().filter_map(ServerLock::uncertain_seconds).max().unwrap_or(0);
        // A clock that went back must not hold it up for long.
        let uncertain_until = (SystemTime::UNIX_EPOCH + Duration::from_secs(until.min(u32::MAX.into())))
            .min(SystemTime::now() + MOST_UNCERTAIN);
        let last = mark.as_ref().and_then(|mark| mark.text()?.get(..TOKEN_BYTES).map(str::to_owned));
        let token =
            last.filter(|last| is_alone && mark.as_ref().is_some_and(|mark| is_said(last, mark, drives, &found)));
        let token = token.unwrap_or_else(|| {
            let token = new_token();
            // While objects may change, the files keep saying so for later servers. None of them believes a note of this one.
            if uncertain_until <= SystemTime::now() {
                say(&token, is_alone, mark.as_ref(), drives, &found);
            }
            token
        });
        server_locks().for_each(|file| file.lock.stay());
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
        let removed = if is_there {
            removed
        } else {
            removed.and(Err(io::Error::other("the drive is not the one that was opened")))
        };
        removed.inspect_err(|_| self.renew())
    }

    fn is_there(&self, drive: usize) -> bool {
        self.drives.get(drive).and_then(Option::as_ref).is_some_and(ServerLock::is_there)
    }

    /// Let servers that start later believe nothing, and learn that objects may change until then. This one knows which, and believes what it believed.
    /// Does not wait for drives: `note_on_drives` does.
    pub fn note_uncertain(&self, until: SystemTime) {
        let _alone = held(&self.saying.0);
        self.mark.iter().for_each(|mark| mark.write_uncertain(until, false));
    }

    /// Note the same on the drives, for servers that do not find the mark: it ends with the run of the machine, or the container. Waits for drives.
    pub fn note_on_drives(&self, until: SystemTime) {
        let mut said = held(&self.saying.1);
        // Many writes fail together.
        if *said < until {
            *said = until + NOTED_EACH;
            self.drives.iter().flatten().for_each(|file| file.write_uncertain(*said, true));
        }
    }

    /// Believe no note that was written until now.
    pub(crate) fn renew(&self) {
        let token = new_token();
        self.token().clone_from(&token);
        // One of them is enough.
        let marking = held(&self.saying.0);
        self.mark.iter().for_each(ServerLock::disown);
        drop(marking);
        let _alone = held(&self.saying.1);
        self.drives.iter().flatten().for_each(ServerLock::disown);
    }
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Return whether the mark and the drives say a token, and that it may be taken over.
fn is_said(token: &str, mark: &ServerLock, drives: &[Drive], found: &[Option<ServerLock>]) -> bool {
    let is_on = |(drive, file): (&Drive, &Option<ServerLock>)| {
        file.as_ref().is_some_and(|file| file.says(&on_drive(token, drive)))
    };
    on_mark(token, drives, found).is_some_and(|text| mark.says(&text)) && drives.iter().zip(found).all(is_on)
}

/// Write a token to the drives, and to the mark if the next server may take it over.
fn say(token: &str, is_alone: bool, mark: Option<&ServerLock>, drives: &[Drive], found: &[Option<ServerLock>]) {
    let mut may_be_kept = is_alone;
    for (drive, file) in drives.iter().zip(found) {
        may_be_kept &= file.as_ref().is_none_or(|file| file.write(&on_drive(token, drive)).is_ok());
    }
    let text = if may_be_kept { on_mark(token, drives, found) } else { None };
    // A mark that cannot be written has another token.
    let _ = mark.map(|mark| mark.write(&text.unwrap_or_default()));
}

/// Return what the file on a drive says. Drives that change places have the names of each other.
fn on_drive(token: &str, drive: &Drive) -> String {
    format!("{token}\n{:016x}\n", drive.place.name)
}

/// Return what the mark says: a token, and what must be the same for it to be taken over. That is the run of the machine, and which drive has which
/// object. A copy of a drive is another one. Returns None if the run of the machine is not known.
fn on_mark(token: &str, drives: &[Drive], found: &[Option<ServerLock>]) -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let mut text = format!("{token}\n{}\n", boot.trim());
    for (drive, file) in drives.iter().zip(found) {
        // The size of an only drive does not matter.
        let weight = if drives.len() > 1 { drive.place.weight } else { 1.0 };
        let past = file.as_ref().and_then(|file| file.past().ok());
        text += &format!("{:016x} {weight} {past:?}\n", drive.place.name);
    }
    Some(text)
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
mod tests;
