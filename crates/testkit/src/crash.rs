//! A simulated disk that loses unsynced data: everything fsynced survives a crash, as does a random part of the rest.
//!
//! An fsync of a file makes its content durable; an fsync of a folder makes its names durable. Unsynced content may survive
//! completely, partly (with zeros or old bytes in the gaps), or not at all. An unsynced name may point to the old file, the new
//! file, or nothing. `Local` runs unchanged on this disk.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use penstock_storage::{File, FileSystem, Piece, RangeRequest, check_length};

use crate::random::Random;

/// Unsynced content is lost in pieces of this size.
const SECTOR_BYTES: usize = 512;

#[derive(Debug, Clone, Default)]
struct Inode {
    written: Vec<u8>,
    durable: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    File(usize),
    Folder,
}

#[derive(Debug, Clone, Default)]
struct DiskState {
    inodes: Vec<Inode>,
    names: BTreeMap<PathBuf, Node>,
    durable_names: BTreeMap<PathBuf, Node>,
    /// The number of operations left until the power fails; `None` if it never fails.
    left: Option<u64>,
    /// The first and last operations that fail, and whether the first one takes effect although it returns an error.
    fault: Option<(u64, u64, bool)>,
    /// A folder whose syncs fail with this error number.
    unsynced: Option<(PathBuf, i32)>,
    operations: u64,
}

/// The simulated disk. Clones share its state.
#[derive(Debug, Clone, Default)]
pub struct CrashDisk(Arc<Mutex<DiskState>>);

impl CrashDisk {
    pub fn new() -> CrashDisk {
        let root = BTreeMap::from([("/".into(), Node::Folder)]);
        CrashDisk(Arc::new(Mutex::new(DiskState { names: root.clone(), durable_names: root, ..DiskState::default() })))
    }

    /// Cut the power after `operations` more operations: all later ones fail and change nothing.
    pub fn fail_after(&self, operations: u64) {
        self.lock().left = Some(operations);
    }

    /// Make the operations from `first` to `last` fail. If `done`, the first of them still takes effect, as if only its reply were lost.
    pub fn fail_for_a_while(&self, first: u64, last: u64, done: bool) {
        self.lock().fault = Some((first, last, done));
    }

    /// Make syncs of a folder fail with this error number.
    pub fn fail_sync(&self, folder: &Path, errno: i32) {
        self.lock().unsynced = Some((folder.to_owned(), errno));
    }

    /// Return the number of operations so far.
    pub fn operations(&self) -> u64 {
        self.lock().operations
    }

    /// Return a disk with the data that would survive a power loss now.
    pub fn after_crash(&self, seed: u64) -> CrashDisk {
        let mut random = Random(seed);
        let state = self.lock();
        let mut names = state.durable_names.clone();
        let changed: Vec<PathBuf> = state.names.keys().chain(state.durable_names.keys()).cloned().collect();
        for path in changed {
            let (now, then) = (state.names.get(&path), state.durable_names.get(&path));
            if now != then && random.chance(2) {
                match now {
                    Some(entry) => names.insert(path, *entry),
                    None => names.remove(&path),
                };
            }
        }
        // A name survives only if all folders above it survive.
        let whole: BTreeMap<PathBuf, Node> = names
            .iter()
            .filter(|(path, _)| path.ancestors().skip(1).all(|above| names.get(above) == Some(&Node::Folder)))
            .map(|(path, entry)| (path.clone(), *entry))
            .collect();
        let inodes = state.inodes.iter().map(|inode| survive(inode, &mut random)).collect();
        CrashDisk(Arc::new(Mutex::new(DiskState {
            inodes,
            names: whole.clone(),
            durable_names: whole,
            ..DiskState::default()
        })))
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begin an operation; fail if the power is off or a fault is due.
    fn operate(&self) -> io::Result<MutexGuard<'_, DiskState>> {
        let mut state = self.lock();
        state.operations += 1;
        match &mut state.left {
            Some(0) => return Err(io::Error::other("the power is off")),
            Some(left) => *left -= 1,
            None => {}
        }
        let operation = state.operations;
        let fails = |(first, last, done): (u64, u64, bool)| {
            (first..=last).contains(&operation) && !(done && operation == first)
        };
        if state.fault.is_some_and(fails) {
            return Err(io::Error::other("a transient fault"));
        }
        Ok(state)
    }
}

/// Return the part of a file that survives a crash.
fn survive(inode: &Inode, random: &mut Random) -> Inode {
    let mut content = inode.durable.clone();
    if inode.written != inode.durable {
        let length = match random.below(3) {
            0 => inode.durable.len(),
            1 => inode.written.len(),
            _ => random.below(inode.written.len() as u64 + 1) as usize,
        };
        content.resize(length.max(inode.durable.len().min(inode.written.len())), 0);
        for start in (0..content.len().min(inode.written.len())).step_by(SECTOR_BYTES) {
            let end = (start + SECTOR_BYTES).min(content.len()).min(inode.written.len());
            if random.chance(2) {
                content[start..end].copy_from_slice(&inode.written[start..end]);
            }
        }
    }
    Inode { written: content.clone(), durable: content }
}

impl DiskState {
    /// Return an error if the current operation must lose its reply after taking effect.
    fn lose_answer(&mut self) -> io::Result<()> {
        let operation = self.operations;
        match self.fault {
            Some((first, _, true)) if first == operation => Err(io::Error::other("a lost reply")),
            _ => Ok(()),
        }
    }

    fn inode(&self, path: &Path) -> io::Result<usize> {
        match self.names.get(path) {
            Some(Node::File(inode)) => Ok(*inode),
            Some(Node::Folder) => Err(io::ErrorKind::IsADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn folder(&self, path: &Path) -> io::Result<()> {
        match self.names.get(path) {
            Some(Node::Folder) => Ok(()),
            Some(Node::File(_)) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn add(&mut self, path: &Path, entry: Node) -> io::Result<()> {
        self.folder(path.parent().unwrap_or(Path::new("/")))?;
        if self.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.names.insert(path.to_owned(), entry);
        Ok(())
    }
}

struct CrashFile {
    disk: CrashDisk,
    inode: usize,
}

impl File for CrashFile {
    fn write(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        let mut state = self.disk.operate()?;
        state.inodes[self.inode].written.extend_from_slice(&bytes);
        state.lose_answer()
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.operate()?;
        let inode = &mut state.inodes[self.inode];
        inode.durable = inode.written.clone();
        state.lose_answer()
    }
}

impl FileSystem for CrashDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn File>> {
        let mut state = self.operate()?;
        let inode = state.inodes.len();
        state.add(path, Node::File(inode))?;
        state.inodes.push(Inode::default());
        state.lose_answer()?;
        Ok(Box::new(CrashFile { disk: self.clone(), inode }))
    }

    fn read(&self, path: &Path) -> io::Result<Bytes> {
        let state = self.operate()?;
        Ok(state.inodes[state.inode(path)?].written.clone().into())
    }

    fn read_range(&self, path: &Path, range: &RangeRequest) -> io::Result<Vec<Bytes>> {
        let content = self.read(path)?;
        check_length(content.len() as u64, range)?;
        let mut at = range.begin as usize;
        let cut = |piece: &Piece| {
            let begin = at + piece.skip as usize;
            at = begin + piece.bytes;
            if at > content.len() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(content.slice(begin..at)) }
        };
        range.pieces.iter().map(cut).collect()
    }

    fn map(&self, path: &Path, bytes: u64) -> io::Result<Bytes> {
        let content = self.read(path)?;
        if content.len() as u64 != bytes {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{} bytes, expected {bytes}", content.len()),
            ));
        }
        Ok(content)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        Ok(self.operate()?.names.contains_key(path))
    }

    fn publish(&self, from: &Path, to: &Path) -> io::Result<bool> {
        let mut state = self.operate()?;
        let inode = state.inode(from)?;
        state.add(to, Node::File(inode))?;
        // Some file systems rename, and others link.
        let renames = state.operations.is_multiple_of(2);
        if renames {
            state.names.remove(from);
        }
        state.lose_answer().map(|()| !renames)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.operate()?;
        let inode = state.inode(from)?;
        state.names.remove(from);
        state.names.insert(to.to_owned(), Node::File(inode));
        state.lose_answer()
    }

    fn overwrite(&self, path: &Path, body: &[u8]) -> io::Result<bool> {
        let mut state = self.operate()?;
        let inode = state.inode(path)?;
        let written = &mut state.inodes[inode].written;
        if written.len() != body.len() {
            return Ok(false);
        }
        written.copy_from_slice(body);
        state.lose_answer()?;
        Ok(true)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.operate()?;
        state.inode(path)?;
        state.names.remove(path);
        state.lose_answer()
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.operate()?;
        state.add(path, Node::Folder)?;
        state.lose_answer()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.operate()?;
        state.folder(path)?;
        if let Some((_, errno)) = state.unsynced.as_ref().filter(|(folder, _)| folder == path) {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        let mut now = state.names.clone();
        now.retain(|name, _| name.parent() == Some(path));
        state.durable_names.retain(|name, _| name.parent() != Some(path));
        state.durable_names.extend(now);
        state.lose_answer()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<penstock_storage::ListedObject>> {
        let state = self.operate()?;
        state.folder(path)?;
        let mut found = Vec::new();
        for (name, entry) in state.names.iter().filter(|(name, _)| name.parent() == Some(path)) {
            if let (Node::File(inode), Some(name)) = (entry, name.file_name().and_then(|name| name.to_str())) {
                let bytes = state.inodes[*inode].written.len() as u64;
                found.push(penstock_storage::ListedObject { name: name.to_owned(), bytes, modified: None });
            }
        }
        Ok(found)
    }

    fn entries(&self, path: &Path) -> io::Result<Vec<(String, bool)>> {
        let state = self.operate()?;
        state.folder(path)?;
        let inside = state.names.iter().filter(|(name, _)| name.parent() == Some(path));
        Ok(inside
            .filter_map(|(name, entry)| Some((name.file_name()?.to_str()?.to_owned(), *entry == Node::Folder)))
            .collect())
    }

    fn links(&self, path: &Path) -> io::Result<u64> {
        let state = self.operate()?;
        let inode = state.inode(path)?;
        Ok(state.names.values().filter(|entry| **entry == Node::File(inode)).count() as u64)
    }
}
