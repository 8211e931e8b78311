//! The samples that a transaction appends: those in fragments, then a few in memory.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::manifest::Fragment;
use penstock_format::record::Delta;
use penstock_format::schema::Schema;

use crate::commit::manifest::objects::{INLINE_BYTES, write_pages};
use crate::config::Config;
use crate::snapshot::Snapshot;
use crate::snapshot::own::Own;
use crate::store::context::Context;
use crate::write::column::Stored;
use crate::write::fragments::FragmentsWriter;
use crate::write::fresh::Fresh;
use crate::write::vocabulary::Words;

/// Appended samples, oldest first: those that are written, and those in memory.
pub struct AppendedSamples {
    pub writer: FragmentsWriter,
    fresh: Fresh,
    /// The columns in which samples have values.
    pub columns: HashSet<u64>,
    /// The columns with fill values that the last samples gave.
    filled: Vec<u64>,
}

impl AppendedSamples {
    pub fn new(base: &Snapshot) -> AppendedSamples {
        let writer =
            FragmentsWriter::new(base.context.clone(), base.schema.columns.clone()).keeping(Config::inline_bytes());
        AppendedSamples { writer, fresh: Fresh::default(), columns: HashSet::new(), filled: Vec::new() }
    }

    /// Return the number of samples.
    pub fn samples(&self) -> u64 {
        self.writer.samples() + self.fresh.samples()
    }

    /// Add samples. A few stay in memory. Many are written at once.
    pub fn push(&mut self, schema: &Schema, words: &Words, columns: Vec<Option<Stored>>, samples: usize) -> Result<()> {
        self.begin_fragment(schema, words, &columns)?;
        self.columns.extend(
            schema.columns.iter().zip(&columns).filter(|(_, column)| column.is_some()).map(|(spec, _)| spec.id),
        );
        match self.fresh.bytes_with(&columns).filter(|bytes| *bytes as u64 <= Config::memory_bytes() / 32) {
            Some(_) => self.fresh.push(self.samples(), columns, samples),
            None => {
                self.write_fresh(schema, words)?;
                self.writer.push(columns, samples)?;
            }
        }
        Ok(())
    }

    /// Begin a new fragment if these new samples and those before give values for different columns with fill values. A fragment lists a
    /// column for all of its samples or for none.
    fn begin_fragment(&mut self, schema: &Schema, words: &Words, columns: &[Option<Stored>]) -> Result<()> {
        let with_fill = schema.columns.iter().zip(columns).filter(|(spec, _)| spec.fill.is_some());
        let given: Vec<u64> = with_fill.filter(|(_, column)| column.is_some()).map(|(spec, _)| spec.id).collect();
        if given == self.filled {
            return Ok(());
        }
        self.filled = given;
        self.close_fragment(schema, words)
    }

    /// Write all samples so far. Those that follow are in another fragment.
    pub fn close_fragment(&mut self, schema: &Schema, words: &Words) -> Result<()> {
        self.write_fresh(schema, words)?;
        self.writer.finish()
    }

    /// Write the samples in memory.
    pub fn write_fresh(&mut self, schema: &Schema, words: &Words) -> Result<()> {
        self.fresh.write(&mut self.writer, schema, words)
    }

    /// Return the fragments that reads see. Values of the last one may be in memory; `own` has them.
    pub fn fragments(&self) -> Vec<Fragment> {
        self.writer.fragments.iter().cloned().chain(self.fresh.fragment()).collect()
    }

    /// Return the values in memory, for reads. None without samples.
    pub fn own(&self, schema: &Arc<Schema>) -> Option<Own> {
        self.fresh.own(schema.clone())
    }

    /// Return the deltas of the samples, all of which are written. Cost: one put per manifest page, unless the fragments fit into the record.
    pub fn write_fragments(&self, context: &Context, puts: &mut Vec<String>) -> Result<Vec<Delta>> {
        let fragments = &self.writer.fragments;
        let without_data =
            fragments.iter().map(Fragment::encoded_bytes).sum::<usize>() as u64 - self.writer.small_bytes();
        if without_data <= INLINE_BYTES as u64 {
            return Ok(fragments.iter().cloned().map(Arc::new).map(Delta::Fragment).collect());
        }
        Ok(write_pages(context, fragments, puts)?.into_iter().map(Delta::Page).collect())
    }
}
