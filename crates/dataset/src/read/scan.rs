//! Divide a scan into batches that fit into the memory budget. If files are not mapped, batches are joined into groups, which are
//! read ahead. The caller reads each group and reports the group's size.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::schema::{ColumnKind, ColumnSpec};

use super::reader::{OnCorrupt, Reader};
use crate::config::Config;
use crate::selection::{Selection, Stride};
use crate::snapshot::Snapshot;

/// The first group has at most this many bytes, and each later group may be twice as large as its predecessor. Groups grow up to
/// this size or `1 / GROUP_PART` of the memory budget, whichever is larger.
const GROUP_BYTES: u64 = 8 << 20;
const GROUP_PART: u64 = 32;
const GROUP_ROWS: u64 = 1 << 17;
/// This many groups are read ahead, or up to `MOST_GROUPS` if they fit into `1 / AHEAD_PART` of the memory budget. The requests of a group
/// end at different times, so two groups leave a slow network idle.
const GROUPS: u64 = 2;
const MOST_GROUPS: u64 = 4;
const AHEAD_PART: u64 = 8;
/// A batch uses at most `1 / BATCHES` of the budget, because the consumer holds one batch while others are being built and read.
const BATCHES: u64 = 8;
/// Size of a label or category value, which is an int64 code while a batch is built.
const CODE_BYTES: u64 = 8;

/// Rows to read together: one batch if files are mapped, otherwise one or more whole batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanRange {
    /// Positions in the view.
    pub rows: Range<u64>,
    /// Whether the block cache keeps the rows' blocks.
    pub keep: bool,
}

/// A scan's current position and its estimates of row sizes.
pub struct Scan {
    snapshot: Arc<Snapshot>,
    selection: Selection,
    /// Indices of the columns in the schema.
    columns: Vec<usize>,
    /// Indices of the columns whose values differ in size.
    uneven: Vec<usize>,
    batch_rows: u64,
    budget: u64,
    /// Total decoded size of the uneven columns, in bytes.
    decoded: u64,
    /// Mean size of a row in bytes, computed from the columns' total sizes.
    mean_bytes: f64,
    /// Mean size of a row in the group that was read last, in bytes.
    row_bytes: f64,
    group_bytes: u64,
    next: u64,
}

impl Scan {
    /// Begin a scan of a snapshot, or of selected positions in it. Costs the same as `Snapshot::column_bytes`. If files are not
    /// mapped, the tails for the first batch are also read.
    pub fn new(
        snapshot: Arc<Snapshot>,
        selection: Selection,
        columns: &[&ColumnSpec],
        batch_rows: u64,
    ) -> Result<Scan> {
        let ids: HashSet<u64> = columns.iter().map(|column| column.id).collect();
        let known = snapshot.schema.columns.iter().enumerate();
        let columns: Vec<usize> =
            known.filter(|(_, column)| ids.contains(&column.id)).map(|(index, _)| index).collect();
        let kind = |index: &usize| &snapshot.schema.columns[*index].kind;
        let (mut uneven, mut even_bytes) = (Vec::new(), 0);
        for column in &columns {
            match bytes_of_each(kind(column))? {
                Some(bytes) => even_bytes += bytes,
                None => uneven.push(*column),
            }
        }
        let ids: Vec<u64> = uneven.iter().map(|index| snapshot.schema.columns[*index].id).collect();
        let decoded = if ids.is_empty() { 0 } else { snapshot.column_bytes(&ids)?.decoded };
        let mean_bytes = decoded as f64 / snapshot.record().samples.max(1) as f64 + even_bytes as f64;
        let budget = Config::memory_bytes();
        let mut scan = Scan {
            snapshot,
            selection,
            columns,
            uneven,
            batch_rows: batch_rows.max(1),
            budget,
            decoded,
            mean_bytes,
            row_bytes: 0.0,
            group_bytes: GROUP_BYTES,
            next: 0,
        };
        if !scan.snapshot.is_mapped() && scan.next < scan.len() {
            let rows = scan.rows_of_batch()?;
            scan.row_bytes = scan.requested_bytes(rows)? as f64 / rows.min(scan.len()) as f64;
        }
        Ok(scan)
    }

    fn len(&self) -> u64 {
        self.selection.len()
    }

    /// Return the rows to read next. Returns None at the end, or if the caller already has enough groups.
    pub fn next(&mut self, held: usize) -> Result<Option<ScanRange>> {
        if self.next >= self.len() {
            return Ok(None);
        }
        let mapped = self.snapshot.is_mapped();
        let batch = self.rows_of_batch()?;
        // If batches are larger than a group, only one batch is read ahead.
        let groups = (self.budget / AHEAD_PART / self.group_bytes).clamp(GROUPS, MOST_GROUPS);
        let most = if self.row_bytes * batch as f64 <= self.group_bytes as f64 { groups } else { 1 };
        if !mapped && held as u64 >= most {
            return Ok(None);
        }
        let rows = if mapped { batch } else { self.rows_of_group(batch)? };
        let end = (self.next + rows).min(self.len());
        // If a scan would fill more than half of the block cache, its blocks are not cached.
        let keep = mapped || self.row_bytes * self.len() as f64 <= (self.budget / 4) as f64;
        let stretch = ScanRange { rows: self.next..end, keep };
        self.next = end;
        self.group_bytes = (2 * self.group_bytes).min(GROUP_BYTES.max(self.budget / GROUP_PART));
        Ok(Some(stretch))
    }

    /// Report the size of the group that was read last. Returns how many of its rows fit into one batch, given their mean size.
    pub fn took(&mut self, rows: u64, bytes: u64) -> u64 {
        self.row_bytes = bytes as f64 / rows.max(1) as f64;
        self.rows_that_fit(self.row_bytes)
    }

    /// Return how many bytes a batch may use.
    pub fn batch_bytes(&self) -> u64 {
        self.budget / BATCHES
    }

    fn rows_that_fit(&self, row_bytes: f64) -> u64 {
        ((self.batch_bytes() as f64 / row_bytes.max(1.0)) as u64).clamp(1, self.batch_rows)
    }

    /// Return how many of the next rows fit into one batch, estimated from earlier rows, column means, and those rows themselves.
    fn rows_of_batch(&self) -> Result<u64> {
        let mut rows = self.rows_that_fit(self.row_bytes.max(self.mean_bytes));
        while rows > 1 && self.decoded_bytes(rows)? > self.batch_bytes() {
            rows /= 2;
        }
        Ok(rows)
    }

    /// Return the number of rows in a group: as many whole batches as fit, but at least one.
    fn rows_of_group(&self, batch: u64) -> Result<u64> {
        let most = if self.row_bytes > 0.0 { (self.group_bytes as f64 / self.row_bytes) as u64 } else { 0 };
        let mut rows = most.min(GROUP_ROWS) / batch * batch;
        let fits_in_group = |rows: u64| {
            Ok::<_, penstock_error::Error>(
                self.requested_bytes(rows)?.max(self.decoded_bytes(rows)?) <= self.group_bytes / 4 * 5,
            )
        };
        while rows > batch && !fits_in_group(rows)? {
            rows = rows / 2 / batch * batch;
        }
        Ok(rows.max(batch))
    }

    /// Return the decoded size of the next rows in the uneven columns, in bytes. Returns 0 without a look-up if those columns fit
    /// completely into one batch.
    fn decoded_bytes(&self, rows: u64) -> Result<u64> {
        let uneven = self.specs(&self.uneven);
        // A fill value is stored once, whatever the number of its samples.
        let fits = self.decoded <= self.batch_bytes() && uneven.iter().all(|column| column.fill.is_none());
        if fits { Ok(0) } else { self.reader(rows)?.decoded_bytes(&uneven) }
    }

    /// Return how many bytes a read of the next rows would now request from storage. Cost: reads the tails of the rows' files.
    fn requested_bytes(&self, rows: u64) -> Result<u64> {
        let ranges = self.reader(rows)?.ranges(&self.specs(&self.columns))?;
        Ok(ranges.iter().map(|range| range.end() - range.begin).sum())
    }

    fn reader(&self, rows: u64) -> Result<Reader> {
        let next = Stride { first: self.next, step: 1, count: rows.min(self.len() - self.next) };
        Reader::new(self.snapshot.clone(), self.selection.positions(next), OnCorrupt::Raise)
    }

    fn specs(&self, columns: &[usize]) -> Vec<&ColumnSpec> {
        columns.iter().map(|index| &self.snapshot.schema.columns[*index]).collect()
    }
}

/// Return the size in bytes of each value in a batch, including nulls. Returns None if the size depends on the value.
fn bytes_of_each(kind: &ColumnKind) -> Result<Option<u64>> {
    if kind.has_codes() {
        return Ok(Some(CODE_BYTES));
    }
    let (dtype, shape) = kind.stored()?;
    if shape.is_fixed() { Ok(Some(shape.fixed_bytes(dtype)?)) } else { Ok(None) }
}

/// Passes over many samples, such as comparisons and compaction, read at most this many at once.
pub const ROWS: usize = 1 << 16;

/// How many samples are read at once, according to the size of those before.
#[derive(Debug, Clone, Copy)]
pub struct GroupSize {
    pub samples: usize,
}

impl Default for GroupSize {
    fn default() -> GroupSize {
        GroupSize { samples: 4 }
    }
}

impl GroupSize {
    /// Note the size of the samples that were read. The next group takes up to an eighth of the memory budget, and is up to 16 times larger.
    pub fn note(&mut self, samples: usize, bytes: usize) {
        let fitting = (Config::memory_bytes() as usize / 8) * samples.max(1) / bytes.max(1);
        self.samples = fitting.clamp(1, ROWS).min(16 * self.samples);
    }
}
