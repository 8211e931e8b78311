//! One folder of a cache: its extents, its counts, and how it fares. A failing drive is left alone for a while; reads then go to the store.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use penstock_error::Error;
use penstock_storage::private;
use penstock_storage::process::PerProcess;
use quick_cache::sync::Cache;

use crate::extent::{self, Extent, Key};
use crate::flight::Flight;
use crate::place::{WeightedPlace, mix};
use crate::registry;
use crate::spec::{DriveSpec, MARKER_NAME};
use crate::usage::{NowCounts, Usage, UsageRecord, cut};

/// The file that marks a folder as a cache, and the version of the files in it, three times.
const MARKER: &str = "penstock cache, format 1 1 1\n";
/// A marker is shorter than this.
const MARKER_BYTES: usize = 4096;
/// The folder of the extents of all stores.
pub const STORES: &str = "stores";
/// The file with the counts.
const USAGE: &str = "usage";
/// The file with the locks of operations that change what the drive holds.
pub const LOCKS: &str = "fetching";
/// The folder of marks of such operations. A mark without a process shows that counts may be too high.
pub const PENDING: &str = "pending";
/// The folder of files that the running servers of each store have locked. They have the server's token.
pub const SERVERS: &str = "servers";
/// The folder of running plans.
pub const PLANS: &str = "plans";
/// The folder in which plans of one order find each other, and the file with a lock for each order, which its leading plan holds.
pub const ORDERS: &str = "orders";
pub const LEADERS: &str = "leaders";
/// Backup programs skip a folder with this file. Source: https://bford.info/cachedir/
const TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55\n";
/// Maximum number of extents that a process keeps open on each drive.
const OPEN_EXTENTS: usize = 128;
/// A drive is left alone for the first of these times after a failure. Each further failure doubles the time, up to the second.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// After a write failed for lack of space, nothing is written for this long.
const FULL_PAUSE: Duration = Duration::from_secs(10);

/// A folder of a cache, open in this process.
#[derive(Debug)]
pub struct Drive {
    folder: PathBuf,
    pub place: WeightedPlace,
    pub usage: Usage,
    pub now: NowCounts,
    /// Whether the counts were sound when the drive was opened.
    pub was_sound: bool,
    open: PerProcess<Cache<Key, Arc<Extent>>>,
    began: Instant,
    /// Milliseconds since `began` until which the drive is left alone, and until which nothing is written.
    alone_until: AtomicU64,
    full_until: AtomicU64,
    /// Until then, nobody waits for other processes.
    impatient_until: AtomicU64,
    /// Number of failures since the last success.
    failures: AtomicU64,
}

/// Why a folder cannot be used as a cache.
#[derive(Debug)]
pub enum Unusable {
    /// The user must choose another folder.
    Refused(Error),
    /// The drive fails. Reads go to the store.
    Failed(io::Error),
}

impl Unusable {
    fn refused(folder: &Path, why: impl Display, hint: &str) -> Unusable {
        let text = format!("cannot use cache `{}`: {why}", folder.display());
        Unusable::Refused(Error::new("invalid-argument", text).hint(hint))
    }
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Unusable {
        Unusable::Failed(error)
    }
}

impl Drive {
    /// Open a folder as a cache, and create it if it is missing. Cost: a few calls, whatever the folder holds.
    pub fn open(spec: &DriveSpec) -> std::result::Result<Drive, Unusable> {
        let folder = &spec.folder;
        spec.check_size().map_err(Unusable::Refused)?;
        check_marker(folder)?;
        if spec.is_in_memory && !is_mine(folder)? {
            return Err(Unusable::refused(
                folder, "the folder belongs to another user", "name another folder in /dev/shm",
            ));
        }
        private::close_folder(&folder.join(STORES))?;
        let usage = Usage::open(&folder.join(USAGE))?;
        let was_sound = usage.is_sound()?;
        if !can_punch(folder)? {
            let why = "its file system cannot free part of a file";
            return Err(Unusable::refused(folder, why, "choose a folder on ext4, XFS, Btrfs or tmpfs"));
        }
        if let Some(bytes) = spec.budget_bytes {
            usage.set_budget(None, bytes)?;
        }
        let budget = usage.total()?.budget_bytes;
        if budget == 0 {
            return Err(Unusable::Refused(spec.no_size()));
        }
        let name = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, folder.as_os_str().as_encoded_bytes());
        Ok(Drive {
            folder: folder.clone(),
            place: WeightedPlace { name, weight: budget as f64 },
            usage,
            now: NowCounts::default(),
            was_sound,
            open: PerProcess::new(|| Cache::new(OPEN_EXTENTS)),
            began: Instant::now(),
            alone_until: AtomicU64::new(0),
            full_until: AtomicU64::new(0),
            impatient_until: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Return a file or a folder of the drive, such as `LOCKS`.
    pub fn part(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Return the folder with the extents of a store.
    pub fn store_folder(&self, store: &str) -> PathBuf {
        self.part(STORES).join(store_name(store))
    }

    pub fn path(&self, key: &Key) -> PathBuf {
        let name = format!("{:016x}", mix(key.place()));
        // 4,096 folders, so that ten million extents make folders of a few thousand.
        self.store_folder(key.store()).join(&name[..3]).join(&name[3..])
    }

    /// Begin an operation that changes what the drive holds. Returns None while another process counts again.
    pub fn flight(&self) -> io::Result<Option<Flight>> {
        Flight::enter(&self.part(LOCKS))
    }

    /// Return which stores are not evicted by age: pinned ones, and those that a running plan reads.
    pub fn guarded(&self) -> io::Result<impl Fn(&UsageRecord) -> bool> {
        let running = registry::running(&self.part(PLANS))?;
        Ok(move |record: &UsageRecord| {
            record.counts.pinned != 0 || running.iter().any(|store| cut(store) == record.store)
        })
    }

    /// Return the bytes that a store may use while a plan reads it: those that pinned stores and other running plans leave.
    pub fn room_bytes(&self, store: &str) -> io::Result<u64> {
        let is_guarded = self.guarded()?;
        let (mut others_bytes, mut limit_bytes) = (0, u64::MAX);
        for record in self.usage.stores()? {
            if record.store == cut(store) {
                limit_bytes = if record.counts.budget_bytes == 0 { u64::MAX } else { record.counts.budget_bytes };
            } else if is_guarded(&record) {
                others_bytes += record.counts.bytes;
            }
        }
        Ok(self.usage.total()?.budget_bytes.saturating_sub(others_bytes).min(limit_bytes))
    }

    /// Return the bytes that a store uses.
    pub fn store_bytes(&self, store: &str) -> io::Result<u64> {
        Ok(self
            .usage
            .stores()?
            .iter()
            .find(|record| record.store == cut(store))
            .map_or(0, |record| record.counts.bytes))
    }

    /// Return an extent if it exists. Cost: two calls the first time.
    pub fn find(&self, key: &Key, object_bytes: Option<u64>) -> io::Result<Option<Arc<Extent>>> {
        if let Some(extent) = self.open.get().get(key)
            && object_bytes.is_none_or(|bytes| bytes == extent.object_bytes)
        {
            return Ok(Some(extent));
        }
        let found = Extent::open(&self.path(key), key, object_bytes)?.map(Arc::new);
        if let Some(extent) = &found {
            self.keep_open(extent);
        }
        Ok(found)
    }

    /// Return an extent if it exists and the drive may be read now.
    pub fn find_usable(&self, key: &Key, object_bytes: Option<u64>) -> io::Result<Option<Arc<Extent>>> {
        if self.is_usable() { self.find(key, object_bytes) } else { Ok(None) }
    }

    /// Return the extent at the place of a key, of whatever version of the object, and its note. Cost: four calls.
    pub fn find_any(&self, key: &Key) -> io::Result<Option<(Arc<Extent>, Vec<u8>)>> {
        let Some((extent, note)) = Extent::open_noted(&self.path(key))? else { return Ok(None) };
        let extent = Arc::new(extent);
        self.keep_open(&extent);
        Ok(Some((extent, note)))
    }

    /// Remove what is at the place of an extent and cannot be read as one. It might be read again later, with the note that it has.
    pub fn remove_unreadable(&self, key: &Key) -> io::Result<()> {
        remove_if_there(&self.path(key))
    }

    /// Remove an extent's file and free its space, also if other processes have the file open. The caller holds its locks.
    pub fn unlink(&self, extent: &Extent) -> io::Result<()> {
        extent.empty()?;
        self.forget(&extent.key);
        let path = self.path(&extent.key);
        std::fs::remove_file(&path)?;
        // The folder may have other extents.
        let _ = path.parent().map(std::fs::remove_dir);
        Ok(())
    }

    /// Keep an extent open.
    pub fn keep_open(&self, extent: &Arc<Extent>) {
        self.open.get().insert(extent.key.clone(), extent.clone());
    }

    /// Forget an open extent, because its file is damaged or gone.
    pub fn forget(&self, key: &Key) {
        self.open.get().remove(key);
    }

    /// Return whether the drive may be read now.
    pub fn is_usable(&self) -> bool {
        self.now_ms() >= self.alone_until.load(Relaxed)
    }

    /// Return whether the drive's folder is still a cache. It may have been deleted, or not be mounted. Cost: a call.
    pub fn is_there(&self) -> bool {
        self.folder.join(MARKER_NAME).exists()
    }

    pub fn is_writable(&self) -> bool {
        self.is_usable() && self.now_ms() >= self.full_until.load(Relaxed)
    }

    /// Return the milliseconds since the drive was opened.
    pub fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Return whether to wait for other processes, none of which has let this one wait in vain lately.
    pub fn is_patient(&self) -> bool {
        self.now_ms() >= self.impatient_until.load(Relaxed)
    }

    /// Note that another process did not finish in time.
    pub fn was_in_vain(&self) {
        self.impatient_until.store(self.now_ms() + PAUSES.1.as_millis() as u64, Relaxed);
    }

    /// Note that the drive works.
    pub fn worked(&self) {
        if self.failures.load(Relaxed) > 0 {
            self.failures.store(0, Relaxed);
        }
    }

    /// Return the outcome of an operation, or note its failure and return None.
    pub fn succeeded<T>(&self, outcome: io::Result<T>) -> Option<T> {
        outcome.inspect_err(|error| self.failed(error)).ok()
    }

    /// Note a failure. The drive is left alone for a while, but only for writes if it is full.
    pub fn failed(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::Interrupted {
            return; // The user stopped this thread.
        }
        if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EROFS)) {
            self.full_until.store(self.now_ms() + FULL_PAUSE.as_millis() as u64, Relaxed);
            return;
        }
        let failures = self.failures.fetch_add(1, Relaxed).min(16) as u32;
        let pause = PAUSES.0.saturating_mul(1 << failures).min(PAUSES.1);
        self.alone_until.store(self.now_ms() + pause.as_millis() as u64, Relaxed);
    }
}

/// Remove a file, unless it is gone already.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Return a name for a store that a file can have.
pub fn store_name(store: &str) -> String {
    format!("{:016x}", mix(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, cut(store).as_bytes())))
}

/// Return whether this user owns a folder. Anybody may make folders in shared memory.
pub fn is_mine(folder: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    // SAFETY: the call takes no arguments and cannot fail.
    Ok(std::fs::symlink_metadata(folder)?.uid() == unsafe { libc::getuid() })
}

/// Return whether a part of a file can be freed. Without this, evicted pages would use space.
fn can_punch(folder: &Path) -> io::Result<bool> {
    let path = folder.join(format!("{MARKER_NAME}.probe.{}", registry::unique_name()));
    std::fs::write(&path, [1; 2 * extent::PAGE_BYTES as usize])?;
    let punched = extent::punch(&std::fs::File::options().write(true).open(&path)?, 0, extent::PAGE_BYTES);
    std::fs::remove_file(&path)?;
    match punched {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Return the time in seconds since 1970, as stamps have it.
pub fn now_seconds() -> u32 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs() as u32)
}

/// Check that a folder is a cache of this version, or make an empty or missing folder one.
fn check_marker(folder: &Path) -> std::result::Result<(), Unusable> {
    const HINT: &str = "choose an empty folder, or delete this one if it is an old cache";
    match private::read_own(&folder.join(MARKER_NAME), MARKER_BYTES) {
        Ok(found) if found == MARKER.as_bytes() => return Ok(()),
        Ok(found) if is_damaged_marker(&found) => return Ok(write_marker(folder)?),
        Ok(found) => {
            let found = String::from_utf8_lossy(&found[..found.len().min(MARKER.len())]);
            let why =
                format!("the folder has a different format version: `{}`", found.lines().next().unwrap_or_default());
            return Err(Unusable::refused(folder, why, HINT));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    if make_folder(folder)? { Ok(()) } else { Err(Unusable::refused(folder, "the folder contains other files", HINT)) }
}

/// Make an empty or missing folder a cache. Returns false if the folder contains other files.
fn make_folder(folder: &Path) -> io::Result<bool> {
    private::create_folders(folder)?;
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        // Parts of a cache that somebody deleted while it was used are made anew by those who use it.
        let ours = ["CACHEDIR.TAG", "lost+found", USAGE, LOCKS, PLANS, ORDERS, LEADERS, STORES, PENDING, SERVERS];
        if !name.to_string_lossy().starts_with(MARKER_NAME) && !ours.iter().any(|known| name == *known) {
            // Another process may be making the same folder a cache.
            return Ok(private::read_own(&folder.join(MARKER_NAME), MARKER_BYTES)
                .is_ok_and(|found| found == MARKER.as_bytes()));
        }
    }
    std::fs::write(folder.join("CACHEDIR.TAG"), TAG)?;
    write_marker(folder)?;
    Ok(true)
}

fn write_marker(folder: &Path) -> io::Result<()> {
    // Other processes must not see a part of the marker.
    let new = folder.join(format!("{MARKER_NAME}.{}", registry::unique_name()));
    std::fs::write(&new, MARKER)?;
    std::fs::rename(&new, folder.join(MARKER_NAME))
}

/// Return whether a marker is this version's with damaged bits: most of its bytes and of its version numbers are right.
fn is_damaged_marker(found: &[u8]) -> bool {
    let same: Vec<u8> = found
        .iter()
        .copied()
        .zip(MARKER.bytes())
        .filter(|(found, expected)| found == expected)
        .map(|(byte, _)| byte)
        .collect();
    let versions = same.iter().filter(|byte| byte.is_ascii_digit()).count();
    found.len() == MARKER.len() && 2 * same.len() >= MARKER.len() && versions >= 2
}
