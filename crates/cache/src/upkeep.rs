//! Upkeep of a drive: walk its extents, verify each page, remove what nobody can use, and count again.

use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use penstock_storage::private;

use crate::drive::{Drive, LOCKS, PENDING, STORES, remove_if_there};
use crate::evict;
use crate::extent::pages::stored_bytes;
use crate::extent::{Extent, Key, PAGE_BYTES};
use crate::flight::Flight;
use crate::registry;
use crate::room;
use crate::spec::DriveSpec;
use crate::usage::{Counts, cut};

/// Counting again waits this long for reads that are storing pages.
const PATIENCE: Duration = Duration::from_secs(60);
/// Opening a drive waits this long for others when it should count again.
const SHORT_PATIENCE: Duration = Duration::from_millis(300);
/// A mark of no process: the bytes must be counted.
const AGAIN: &str = "again";
/// To open a cache takes no longer than this, however much must be counted.
const A_MOMENT: Duration = Duration::from_millis(300);

/// What `verify` found on a drive.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checked {
    pub extents: u64,
    pub pages: u64,
    /// Pages whose checksums do not match. They are removed.
    pub corrupt_pages: u64,
    /// Files that are damaged or not of a cache. They are removed.
    pub other_files: u64,
    /// Bytes counted before, and bytes found. The difference is what processes that were killed had reserved.
    pub counted_bytes: u64,
    pub bytes: u64,
}

/// Return the path of each file in the stores' folders.
fn files(drive: &Drive) -> impl Iterator<Item = io::Result<PathBuf>> {
    let mut folders = vec![drive.part(STORES)];
    let mut entries = None;
    std::iter::from_fn(move || {
        loop {
            let Some(entry) = entries.as_mut().and_then(std::fs::ReadDir::next) else {
                match std::fs::read_dir(folders.pop()?) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Some(Err(error)),
                    found => entries = found.ok(),
                }
                continue;
            };
            match entry.and_then(|entry| Ok((entry.path(), entry.file_type()?.is_dir()))) {
                Ok((folder, true)) => folders.push(folder),
                found => return Some(found.map(|(path, _)| path)),
            }
        }
    })
}

/// Verify each page of a drive, remove damaged ones, and count the bytes again. `see` gets the counts so far after each extent. If it breaks,
/// the rest is not verified, and nothing is counted.
pub fn verify(drive: &Drive, see: &mut dyn FnMut(&Checked) -> ControlFlow<()>) -> io::Result<Checked> {
    let mut checked = Checked { counted_bytes: drive.usage.total()?.bytes, ..Checked::default() };
    for path in files(drive) {
        let path = path?;
        match Extent::open_any(&path)? {
            None => {
                // Another process may have removed it, or be about to write its footer.
                checked.other_files += u64::from(is_old(&path) && std::fs::remove_file(&path).is_ok());
            }
            Some(extent) => {
                checked.extents += 1;
                verify_extent(drive, &extent, &mut checked)?;
            }
        }
        if see(&checked).is_break() {
            return Ok(checked);
        }
    }
    if let Some(_alone) = Flight::alone(&drive.part(LOCKS), PATIENCE)? {
        checked.bytes = recount(drive)?;
    }
    Ok(checked)
}

fn is_old(path: &std::path::Path) -> bool {
    let age = std::fs::metadata(path).and_then(|found| found.modified()).ok().and_then(|time| time.elapsed().ok());
    age.is_some_and(|age| age > Duration::from_secs(60))
}

fn verify_extent(drive: &Drive, extent: &Extent, checked: &mut Checked) -> io::Result<()> {
    checked.pages += stored_bytes(&extent.whole_table()?) / PAGE_BYTES;
    let corrupt = extent.corrupt(0..extent.pages())?;
    if !corrupt.is_empty() {
        drive.usage.note(extent.key.store(), &Counts { corrupt_pages: corrupt.len() as u64, ..Counts::default() })?;
    }
    for page in corrupt {
        checked.corrupt_pages += 1;
        evict::clear(drive, extent, page..page + 1, Duration::ZERO)?;
    }
    Ok(())
}

/// Count again if a process died while it changed what the drive holds, or if the counts are damaged. If other processes are changing it now,
/// the next one that opens the drive tries again. Cost: a few calls, or reads the checksums of all extents. What takes longer than a moment
/// continues in the background: until it ends, reads find what is cached, and nothing is added.
pub fn count_if_needed(drive: &Drive) -> io::Result<()> {
    let has_extents = || std::fs::read_dir(drive.part(STORES)).is_ok_and(|mut entries| entries.next().is_some());
    let is_damaged = !drive.was_sound && has_extents();
    let has_dead = registry::remove_dead(&drive.part(PENDING))?;
    if !((is_damaged || has_dead) && has_extents()) {
        return Ok(());
    }
    // A process that dies before the end leaves this mark to the next one.
    private::create_folders(&drive.part(PENDING))?;
    let again = drive.part(PENDING).join(AGAIN);
    std::fs::write(&again, "")?;
    let Some(alone) = Flight::alone(&drive.part(LOCKS), SHORT_PATIENCE)? else { return Ok(()) };
    let spec = DriveSpec { folder: drive.folder().into(), budget_bytes: None, is_in_memory: false };
    let (done, ended) = mpsc::channel();
    let count = move || {
        let drive = Drive::open(&spec).map_err(|_| io::Error::other("the drive cannot be opened"));
        // Another one that opens the drive may have taken the mark, and counts again, too.
        let counted = drive.and_then(|drive| recount(&drive)).and_then(|_| remove_if_there(&again));
        drop(alone);
        let _ = done.send(counted); // Nobody waits any more.
    };
    std::thread::Builder::new().name("penstock-count".into()).spawn(count)?;
    ended.recv_timeout(A_MOMENT).unwrap_or(Ok(()))
}

/// Count the bytes of all extents. The caller keeps other operations out. Returns the total.
pub fn recount(drive: &Drive) -> io::Result<u64> {
    let mut bytes: HashMap<String, u64> = HashMap::new();
    for path in files(drive) {
        if let Some(extent) = Extent::open_any(&path?)? {
            let table = extent.whole_table()?;
            // A process may have died after it wrote pages and before it wrote their checksums.
            extent.free_rest(&table)?;
            let all = stored_bytes(&table) + extent.overhead_now()?;
            *bytes.entry(cut(extent.key.store()).to_owned()).or_default() += all;
        }
    }
    drive.usage.recount(bytes)
}

/// Remove an extent, and return the bytes that were freed. One that another operation uses remains, without its note. Fails if it may have its note.
pub fn remove(drive: &Drive, extent: &Extent) -> io::Result<u64> {
    let freed = evict::remove(drive, extent, |_| true)?;
    if freed == 0 && extent.is_linked() && !room::annotate(drive, extent, b" ")? && extent.is_linked() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok(freed)
}

/// Remove the extents that are meant. Returns the bytes that were freed. Those that another operation uses remain, without their notes.
pub fn clear(drive: &Drive, is_meant: &dyn Fn(&Key) -> bool) -> io::Result<u64> {
    let mut freed = 0;
    for path in files(drive) {
        let path = path?;
        match Extent::open_any(&path)? {
            Some(extent) if is_meant(&extent.key) => freed += remove(drive, &extent)?,
            Some(_) => {}
            // It might be read again later, and may be one that is meant.
            None if is_old(&path) => std::fs::remove_file(&path)?,
            // It may be one that is being written now.
            None => return Err(io::ErrorKind::WouldBlock.into()),
        }
    }
    Ok(freed)
}
