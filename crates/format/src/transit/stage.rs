//! A stage: samples that were written to data files, but belong to no snapshot yet (spec section 7). It passes between processes and is never
//! stored by Penstock.

use bytes::Bytes;
use penstock_error::Result;

use crate::cursor::{Magic, malformed, seal, unseal};
use crate::files::FileRef;
use crate::id::Id;
use crate::ids::PROVISIONAL;
use crate::manifest::Fragment;

/// Samples of a dataset in data files that are objects of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub dataset: Id,
    /// The GC epoch of the snapshot at which it was made.
    pub gc_epoch: u64,
    /// Feature bits required to read the files.
    pub features: u64,
    /// Their row ids are provisional and count from 0.
    pub fragments: Vec<Fragment>,
}

impl Stage {
    pub fn samples(&self) -> u64 {
        self.fragments.iter().fold(0, |sum, fragment| sum.saturating_add(fragment.samples))
    }

    pub fn encode(&self) -> Vec<u8> {
        seal(Magic::Stage, |writer| {
            writer.id(self.dataset);
            writer.varint(self.gc_epoch);
            writer.u64(self.features);
            writer.list(&self.fragments, |writer, fragment| fragment.write(writer));
        })
    }

    pub fn parse(bytes: &Bytes) -> Result<Stage> {
        let stage = unseal(Magic::Stage, bytes, |cursor| {
            Ok(Stage {
                dataset: cursor.id()?,
                gc_epoch: cursor.varint()?,
                features: cursor.u64()?,
                fragments: cursor.list(3, Fragment::parse)?,
            })
        })?;
        let mut next = PROVISIONAL;
        let mut runs = stage.fragments.iter().flat_map(|fragment| &fragment.runs);
        let follows = runs.all(|run| std::mem::replace(&mut next, run.end()) == run.first);
        let files = |fragment: &Fragment| !fragment.files.is_empty() && fragment.files.iter().all(FileRef::is_object);
        match follows && stage.fragments.iter().all(files) {
            true => Ok(stage),
            false => Err(malformed("a stage has a fragment with other row ids or without data files of its own")),
        }
    }
}
