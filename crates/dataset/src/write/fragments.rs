//! Write samples as one fragment after another.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::Id;
use penstock_format::files::FilePlace;
use penstock_format::ids::{PROVISIONAL, Run, data_name};
use penstock_format::manifest::Fragment;
use penstock_format::schema::ColumnSpec;

use super::column::Stored;
use super::fragment::FragmentWriter;
use super::tails::TailLimit;
use crate::store::context::Context;

/// Collects samples, and begins a new fragment when the last one is full.
pub struct FragmentsWriter {
    context: Arc<Context>,
    specs: Vec<ColumnSpec>,
    open: Option<FragmentWriter>,
    tails: TailLimit,
    /// Data files of at most this many bytes remain in memory.
    inline: u64,
    /// The closed fragments. Their row ids are provisional and count from 0.
    pub fragments: Vec<Fragment>,
    /// Data files of fragments that others wrote.
    linked: HashSet<Id>,
    /// Feature bits required to read the written files.
    pub features: u64,
    samples: u64,
}

impl FragmentsWriter {
    pub fn new(context: Arc<Context>, specs: Vec<ColumnSpec>) -> FragmentsWriter {
        FragmentsWriter {
            context,
            specs,
            open: None,
            tails: TailLimit::default(),
            inline: 0,
            fragments: Vec::new(),
            linked: HashSet::new(),
            features: 0,
            samples: 0,
        }
    }

    /// Keep data files of at most `inline` bytes in memory, for a commit record.
    pub fn keeping(self, inline: u64) -> FragmentsWriter {
        FragmentsWriter { inline, ..self }
    }

    /// Return the number of samples so far.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Write samples, in several parts if their words need several dictionaries. `columns` has one entry per column, or None for a
    /// column that is entirely null.
    pub fn push(&mut self, mut columns: Vec<Option<Stored>>, mut samples: usize) -> Result<()> {
        while samples > 0 {
            if let Some(writer) = self.open.take_if(|writer| writer.wants_new_fragment(&columns, samples)) {
                self.close(writer)?;
            }
            let mut writer = match self.open.take() {
                Some(writer) => writer,
                None => FragmentWriter::new(self.context.clone(), &self.specs)?,
            };
            let now = writer.fitting(&columns, samples, self.tails.bytes);
            if now == 0 {
                self.close(writer)?;
                continue;
            }
            let later = match now < samples {
                true => columns.iter_mut().map(|column| column.as_mut().map(|stored| stored.split_off(now))).collect(),
                false => Vec::new(),
            };
            writer.push(std::mem::replace(&mut columns, later), now)?;
            self.samples += now as u64;
            samples -= now;
            match writer.is_full() {
                true => self.close(writer)?,
                false => self.open = Some(writer),
            }
        }
        Ok(())
    }

    /// Write other columns from now on. The last fragment must be closed.
    pub fn set_columns(&mut self, specs: Vec<ColumnSpec>) {
        debug_assert!(self.open.is_none());
        self.specs = specs;
    }

    /// Close the last fragment.
    pub fn finish(&mut self) -> Result<()> {
        match self.open.take().filter(|writer| !writer.is_empty()) {
            Some(writer) => self.close(writer),
            None => Ok(()),
        }
    }

    /// Add a fragment whose files exist, and return its row ids. The last fragment must be closed.
    pub fn link(&mut self, fragment: Fragment, features: u64) -> Run {
        debug_assert!(self.open.is_none());
        let run = Run { first: PROVISIONAL | self.samples, count: fragment.samples };
        self.samples += fragment.samples;
        self.features |= features;
        self.linked.extend(fragment.files.iter().map(|file| file.id));
        self.fragments.push(Fragment { is_stage: true, runs: vec![run], ..fragment });
        run
    }

    /// Return the data files of the linked fragments.
    pub fn linked(&self) -> &HashSet<Id> {
        &self.linked
    }

    fn close(&mut self, writer: FragmentWriter) -> Result<()> {
        self.tails.note(&writer.columns);
        let first: u64 = self.fragments.iter().map(|fragment| fragment.samples).sum();
        let (fragment, features) = writer.close(first, self.inline)?;
        self.fragments.push(fragment);
        self.features |= features;
        Ok(())
    }

    /// Return the size of the data files in memory.
    pub fn small_bytes(&self) -> u64 {
        let files = self.fragments.iter().flat_map(|fragment| &fragment.files);
        files.filter(|file| matches!(file.place, FilePlace::Inline(_))).map(|file| file.file_bytes).sum()
    }

    /// Store the data files that are in memory as objects.
    pub fn store_small(&mut self) -> Result<()> {
        for file in self.fragments.iter_mut().flat_map(|fragment| &mut fragment.files) {
            if let FilePlace::Inline(bytes) = &file.place {
                self.context.storage.put(&data_name(file.id), bytes)?;
                file.place = FilePlace::Object;
            }
        }
        Ok(())
    }

    /// Forget the open fragment without deleting its files, because they belong to the parent process.
    pub fn forget(&mut self) {
        std::mem::forget(self.open.take());
    }

    /// Delete the files of all closed fragments, except linked ones. A leftover file is harmless, because no snapshot refers to it.
    pub fn delete(&mut self) {
        for file in self.fragments.drain(..).flat_map(|fragment| fragment.files) {
            if file.is_object() && !self.linked.contains(&file.id) {
                let _ = self.context.delete(&data_name(file.id));
            }
        }
    }
}
