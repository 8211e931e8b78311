//! The drives of a cache, and which of them holds an object.

use penstock_error::{Error, Result};

use crate::drive::{Drive, Unusable};
use crate::extent::Key;
use crate::place::{WeightedPlace, place};
use crate::room;
use crate::spec::{DriveSpec, Spec};
use crate::upkeep;

pub mod trust;

/// The drives of a cache.
#[derive(Debug)]
pub struct Drives {
    pub drives: Vec<Drive>,
    places: Vec<WeightedPlace>,
    /// Drives that failed when they were opened, and why.
    pub failed: Vec<(std::path::PathBuf, std::io::Error)>,
}

impl Drives {
    /// Return the number of the drive that holds an extent.
    pub(crate) fn number_of(&self, key: &Key) -> usize {
        place(key.place(), &self.places).unwrap_or(0)
    }

    /// Open the drives of a cache. Fails only if a folder must not be used. A drive that fails is listed in `failed`.
    pub fn open(spec: &Spec) -> Result<Drives> {
        let (mut drives, mut failed) = (Vec::new(), Vec::new());
        let mut known = Vec::new();
        for drive in &spec.drives {
            // A link may lead to a folder that is named as well.
            let place = std::fs::canonicalize(&drive.folder).ok();
            if place.is_some() && known.contains(&place) {
                let text = format!("cannot use cache `{}`: the folder is named twice", drive.folder.display());
                return Err(Error::new("invalid-argument", text).hint("name each folder once"));
            }
            known.push(place);
            match open_drive(drive) {
                Ok(drive) => drives.push(drive),
                Err(Unusable::Refused(error)) => return Err(error),
                Err(Unusable::Failed(error)) => failed.push((drive.folder.clone(), error)),
            }
        }
        if drives.is_empty() {
            // Reads then go to the store. The folder is tried again when the store is opened next.
            let why: Vec<String> =
                failed.iter().map(|(folder, error)| format!("`{}`: {error}", folder.display())).collect();
            return Err(Error::new("storage-failed", format!("cannot use cache {}", why.join(", ")))
                .hint("repair the folder, choose another one, or use no cache"));
        }
        Ok(Drives { places: drives.iter().map(|drive| drive.place).collect(), drives, failed })
    }
}

fn open_drive(spec: &DriveSpec) -> std::result::Result<Drive, Unusable> {
    let drive = Drive::open(spec)?;
    upkeep::count_if_needed(&drive)?;
    room::shrink(&drive)?;
    Ok(drive)
}
