//! A folder on a local disk. Its files are mapped, read through the page cache, or read directly from the device.

mod disk;
mod file_system;
mod folder;
mod journal;
pub mod private;
#[cfg_attr(not(target_os = "linux"), path = "no_ring.rs")]
mod ring;
mod uri;
mod verbs;
mod write_behind;

pub use disk::{Disk, check_length};
pub use file_system::{File, FileSystem};
pub use folder::Local;
pub use journal::Journal;
pub use uri::local_path;
