//! System calls that only some kernels support. On other kernels, each function does nothing or reports that the call is
//! missing, so that its caller can use a fallback.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Ask the kernel for huge pages. A refusal affects only speed.
///
/// # Safety
/// The caller owns the memory in the range. The advice does not change any data.
pub unsafe fn advise_huge_pages(memory: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the caller upholds the contract above.
    unsafe {
        libc::madvise(memory.cast(), bytes, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (memory, bytes);
}

/// Resize a mapping, and move it if needed. Returns null if the kernel is out of memory, or None if it cannot resize mappings.
///
/// # Safety
/// The caller mapped the range in whole pages, and nothing refers to it any more.
pub unsafe fn resize_map(memory: *mut u8, bytes: usize, new_bytes: usize) -> Option<*mut u8> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the caller upholds the contract above.
        let moved = unsafe { libc::mremap(memory.cast(), bytes, new_bytes, libc::MREMAP_MAYMOVE) };
        Some(if moved == libc::MAP_FAILED { std::ptr::null_mut() } else { moved.cast() })
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (memory, bytes, new_bytes);
        None
    }
}

/// Start writing a file's dirty pages to the device, without waiting. Failures are ignored.
pub fn start_write_back(file: &fs::File, begin: u64, bytes: u64) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd as _;
        // SAFETY: the descriptor is open; the call only starts write-back.
        unsafe { libc::sync_file_range(file.as_raw_fd(), begin as i64, bytes as i64, libc::SYNC_FILE_RANGE_WRITE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, begin, bytes);
}

/// Lock an open file or folder against other processes, or unlock it. Fails with `WouldBlock` if another process has locked it. A child that
/// is forked in the meantime shares the lock, and the end of the process releases it.
pub fn flock(file: &fs::File, lock: bool) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;
    let operation = if lock { libc::LOCK_EX | libc::LOCK_NB } else { libc::LOCK_UN };
    // SAFETY: the call takes no pointers, and the file is open.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Rename a file. Fails with `AlreadyExists` if the new name is taken.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let text = |path: &Path| std::ffi::CString::new(path.as_os_str().as_bytes());
    let (from, to) = (text(from)?, text(to)?);
    // SAFETY: both paths are C strings that outlive the call.
    #[cfg(target_os = "linux")]
    let code =
        unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::RENAME_NOREPLACE) };
    // SAFETY: both paths are C strings that outlive the call.
    #[cfg(target_vendor = "apple")]
    let code = unsafe { libc::renamex_np(from.as_ptr(), to.as_ptr(), libc::RENAME_EXCL) };
    #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
    let code = {
        let _ = (from, to);
        return Err(io::Error::from(io::ErrorKind::Unsupported));
    };
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Open a folder, and return it with a path that survives renames. Returns None if the kernel does not support such paths.
pub fn hold_folder(folder: &Path) -> io::Result<Option<(fs::File, PathBuf)>> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd as _;
        use std::os::unix::fs::OpenOptionsExt as _;
        let folder = fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(folder)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()));
        Ok(Some((folder, path)))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = folder;
        Ok(None)
    }
}
