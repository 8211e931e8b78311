//! The running plans of a drive: a locked file for each, with the store that the plan reads. The kernel releases the lock of a process that dies.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use penstock_storage::private;

use crate::flight::{Flight, WHOLE};

/// Return a file name that no other thread or process of this machine uses now.
pub fn unique_name() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}", std::process::id(), NUMBER.fetch_add(1, Relaxed))
}

/// A plan that is registered until this is dropped.
#[derive(Debug)]
pub struct Registered {
    pub path: PathBuf,
    pub lock: Flight,
}

impl Registered {
    /// Register a plan, with what others may read about it, such as its store.
    pub fn new(folder: &Path, text: &[u8]) -> io::Result<Registered> {
        let path = folder.join(unique_name());
        let lock = match Flight::new(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                private::create_folders(folder)?;
                Flight::new(&path)?
            }
            other => other?,
        };
        // A process that looks for dead ones may hold the lock for a moment, and then removes the file.
        if !lock.try_lock(0, WHOLE)? || !path.exists() {
            return Registered::new(folder, text);
        }
        lock.file.write_all_at(text, 0)?;
        Ok(Registered { path, lock })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path); // A file that remains is not locked.
    }
}

/// Remove the files of dead processes, and return whether there were any.
pub fn remove_dead(folder: &Path) -> io::Result<bool> {
    let before = std::fs::read_dir(folder).map_or(0, Iterator::count);
    let live = live(folder)?.len();
    Ok(live < before)
}

/// Return the stores that running plans read, and remove the files of dead processes.
pub fn running(folder: &Path) -> io::Result<HashSet<String>> {
    Ok(live(folder)?.into_iter().map(|(_, store)| String::from_utf8_lossy(&store).into_owned()).collect())
}

/// Return the locked files of a folder and what they say, and remove the others.
pub fn live(folder: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let Ok(mut file) = File::options().read(true).write(true).open(&path) else { continue };
        if Flight::new(&path)?.try_lock(0, WHOLE)? {
            let _ = std::fs::remove_file(&path); // Another process may have removed it.
            continue;
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        files.push((path, text));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_running_jobs_count() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let plans = folder.path().join("plans");
        assert!(running(&plans)?.is_empty());
        let (one, _two) = (Registered::new(&plans, b"s3://one")?, Registered::new(&plans, b"s3://two")?);
        // What a process that was killed leaves behind.
        std::fs::write(plans.join("1.0"), "s3://dead")?;
        assert_eq!(running(&plans)?, ["s3://one", "s3://two"].map(str::to_owned).into());
        assert!(!plans.join("1.0").exists());
        drop(one);
        assert_eq!(running(&plans)?, ["s3://two".to_owned()].into());
        Ok(())
    }
}
