//! The text that names a cache: `/nvme/penstock:200GB`, or several drives with a comma between them.

use std::path::PathBuf;

use penstock_error::{Error, Result};

/// A cache as the user describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    pub drives: Vec<DriveSpec>,
    /// The most bytes that one dataset may use on each drive, or None for no limit of its own.
    pub dataset_bytes: Option<u64>,
}

/// One folder of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveSpec {
    pub folder: PathBuf,
    /// The most bytes that the folder may hold. None keeps the budget that the folder already has.
    pub budget_bytes: Option<u64>,
    /// Whether the folder is in shared memory, where only its owner may use it.
    pub is_in_memory: bool,
}

impl DriveSpec {
    /// Fail if a folder that does not exist has no size.
    pub fn check_size(&self) -> Result<()> {
        let is_new = self.budget_bytes.is_none() && matches!(self.folder.try_exists(), Ok(false));
        if is_new { Err(self.no_size()) } else { Ok(()) }
    }

    pub fn no_size(&self) -> Error {
        Error::new("invalid-argument", format!("cannot use cache `{}`: it has no size yet", self.folder.display()))
            .hint(format!("specify the size on first use, such as {}:200GB", self.folder.display()))
    }
}

/// The file that marks a folder as a cache.
pub const MARKER_NAME: &str = "penstock-cache";

/// The folder of caches in memory, which all processes of this machine share.
const MEMORY_FOLDER: &str = "/dev/shm/penstock";

impl Spec {
    /// Parse `FOLDER:SIZE[,FOLDER:SIZE…][?dataset=SIZE]`. `memory:SIZE` is a folder in shared memory.
    pub fn parse(text: &str) -> Result<Spec> {
        let refuse = |why: String| {
            Error::new("invalid-argument", format!("cannot use cache `{text}`: {why}"))
                .hint("write a folder and its size, such as /nvme/penstock:200GB, or memory:8GB; separate several folders with commas")
        };
        let (folders, limits) = text.split_once('?').unwrap_or((text, ""));
        let dataset_bytes = match limits.split_once('=') {
            None if limits.is_empty() => None,
            Some(("dataset", size)) => Some(size_bytes(size).ok_or_else(|| refuse(format!("`{size}` is not a size")))?),
            _ => return Err(refuse(format!("`{limits}` is unknown, expected dataset=SIZE"))),
        };
        let mut drives = Vec::new();
        for part in folders.split(',') {
            let (folder, size) = part.rsplit_once(':').map_or((part, None), |(folder, size)| (folder, Some(size)));
            let parse = |size| size_bytes(size).ok_or_else(|| refuse(format!("`{size}` is not a size above 0")));
            let budget_bytes = size.map(parse).transpose()?;
            let is_in_memory = folder == "memory";
            let folder = match folder {
                // SAFETY: the call takes no arguments and cannot fail.
                "memory" => format!("{MEMORY_FOLDER}-{}", unsafe { libc::getuid() }).into(),
                "" => return Err(refuse("a folder name is empty".into())),
                folder if folder.contains('\0') => {
                    return Err(refuse("a folder name contains a null character".into()));
                }
                folder => {
                    let home = std::env::home_dir().filter(|_| folder.starts_with("~/"));
                    let folder = home.map_or_else(|| PathBuf::from(folder), |home| home.join(&folder[2..]));
                    // The working folder may change.
                    std::path::absolute(&folder).unwrap_or(folder)
                }
            };
            drives.push(DriveSpec { folder, budget_bytes, is_in_memory });
        }
        let repeated = drives
            .iter()
            .enumerate()
            .find(|(index, drive)| drives[..*index].iter().any(|other| other.folder == drive.folder));
        match repeated {
            Some((_, drive)) => Err(refuse(format!("`{}` is named twice", drive.folder.display()))),
            None => Ok(Spec { drives, dataset_bytes }),
        }
    }
}

impl Spec {
    /// Return the same cache without its sizes, so that those that it has stay. Fails if a folder is not a cache yet.
    pub fn existing(mut self) -> Result<Spec> {
        for drive in &mut self.drives {
            if !drive.folder.join(MARKER_NAME).exists() {
                return Err(Error::new("not-found", format!("there is no cache at `{}`", drive.folder.display()))
                    .hint("name the folder of a cache; opening a dataset with cache=\"FOLDER:SIZE\" makes one"));
            }
            drive.budget_bytes = None;
        }
        Ok(Spec { dataset_bytes: None, ..self })
    }
}

/// Parse a size such as `200GB`, `1.5TiB` or `4096`. Returns None for another text, and for sizes below 1 or above 2^60.
pub fn size_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit: f64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    let number =
        digits.trim_end().parse::<f64>().ok().filter(|_| digits.starts_with(|digit: char| digit.is_ascii_digit()))?;
    let bytes = number * unit;
    (1.0..=(1u64 << 60) as f64).contains(&bytes).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_folders_are_parsed() -> Result<()> {
        let spec = Spec::parse("/nvme:1/penstock:200GB,/two:1.5TiB?dataset=10MB")?;
        let drive =
            |folder: &str, bytes| DriveSpec { folder: folder.into(), budget_bytes: Some(bytes), is_in_memory: false };
        assert_eq!(spec.drives, [drive("/nvme:1/penstock", 200_000_000_000), drive("/two", 3 << 39)]);
        assert_eq!(spec.dataset_bytes, Some(10_000_000));
        assert_eq!(
            Spec::parse("/nvme")?.drives,
            [DriveSpec { folder: "/nvme".into(), budget_bytes: None, is_in_memory: false }]
        );
        for size in ["", "GB", "-1GB", "0", "1XB", "1e30", "nan", "inf", "1 2", "0x10", "2PB"] {
            assert_eq!(size_bytes(size), None, "{size}");
        }
        assert_eq!(size_bytes("4096"), Some(4096));
        assert_eq!(size_bytes("2 kib"), Some(2048));
        Ok(())
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "", ":1GB", "/a:1GB,", "/a:x", "/a:1GB,/a:2GB", "/a:1GB?x=1", "/a:1GB?dataset=", "/a:1GB?dataset=0",
            "/a\0:1GB",
        ] {
            assert_eq!(Spec::parse(text).err().map(|error| error.code()), Some("invalid-argument"), "{text}");
        }
    }
}
