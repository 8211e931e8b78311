//! A reader contains a take's plan and the blocks fetched for that plan. Other files in this folder each add methods for one kind
//! of value.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_error::{Error, Kind, Result};
use penstock_format::cursor::malformed;
use penstock_format::datafile::{Chunk, Codec, Layout};
use penstock_format::files::FileRef;
use penstock_format::schema::{ColumnSpec, FillValue};
use penstock_storage::Pattern;

use super::blocks::{Fetched, HeldBlocks};

use super::plan::{FragmentRows, Plan, ascending};
use crate::snapshot::Snapshot;
use crate::snapshot::overlays::Divided;
use crate::snapshot::own::{Own, OwnValue};
use crate::snapshot::values::{StoredColumn, file_of};
use crate::store::blocks;
use crate::store::datafile::{DataFile, Decoded};

/// For each value, in the order requested, whether it is null. None if no values are null.
pub type Nulls = Option<Vec<bool>>;

/// How to treat a corrupt row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCorrupt {
    Raise,
    Null,
}

/// Reads samples of a snapshot. `fetch` gets the blocks that are not mapped; `fixed`, `ragged`, `codes` or `slices` then reads each column.
pub struct Reader {
    pub snapshot: Arc<Snapshot>,
    pub plan: Plan,
    pub(super) fetched: Fetched,
    pub on_corrupt: OnCorrupt,
    /// Values that a transaction has in memory, which hide the stored ones. The first that has a value counts.
    pub own: Vec<Own>,
    /// Samples that only `slices` reads, by column: a flag per place in the result.
    pub(super) left_out: Vec<(u64, Vec<bool>)>,
}

/// Rows whose values in one column are in the same file, either the fragment's or an overlay's.
pub(super) struct Located<'a> {
    /// None if the values are null.
    pub file: Option<&'a FileRef>,
    /// The number of samples of the fragment or overlay.
    pub samples: u64,
    /// Rows of the file, each with its place in the result.
    pub rows: Cow<'a, [(u64, u32)]>,
    /// Whether the rows are announced as sequential, if this does not depend on them alone.
    in_order: Option<bool>,
}

/// Located rows, and the chunk that holds their values.
pub(super) struct ColumnRows<'a> {
    pub file: Arc<DataFile>,
    pub chunk: usize,
    /// The rows ascend, except for uncompressed samples of fixed shape, which gain nothing from sorting.
    pub rows: Cow<'a, [(u64, u32)]>,
}

impl ColumnRows<'_> {
    pub fn entry(&self) -> &Chunk {
        &self.file.tail.chunks[self.chunk]
    }
}

impl Reader {
    /// Plan to read samples by position, in this order. Cost: reads the manifest pages of the samples, unless they are cached.
    pub fn new(snapshot: Arc<Snapshot>, positions: Vec<u64>, on_corrupt: OnCorrupt) -> Result<Reader> {
        let plan = Plan::new(&snapshot, positions)?;
        Ok(Reader { snapshot, plan, fetched: Fetched::default(), on_corrupt, own: Vec::new(), left_out: Vec::new() })
    }

    /// Return a flag per place in the result for samples of a column that are left out, or no flags if none are.
    pub(crate) fn left_out_of(&self, column: &ColumnSpec) -> &[bool] {
        self.left_out.iter().find(|(id, _)| *id == column.id).map_or(&[], |(_, flags)| flags)
    }

    /// Use blocks that the caller already has instead of fetching them. Call this before `fetch`.
    pub fn lend(&mut self, held: &HeldBlocks) {
        self.fetched.lend(held);
    }

    /// Release the fetched blocks, but keep the plan.
    pub fn release(&mut self) {
        self.fetched = Fetched::default();
    }

    /// Return whether fetched samples are in one allocation and in order, as `joined` requires.
    pub fn is_placed(&self) -> bool {
        self.fetched.memory.is_some()
    }

    /// Return whether to make the affected rows null instead of reporting an error.
    pub(super) fn passes(&self, error: &Error) -> bool {
        self.on_corrupt == OnCorrupt::Null && error.kind() == Kind::Corrupt
    }

    /// Divide the rows of a group among the files that have their values in a column. Cost: reads the row ids of overlays.
    pub(super) fn located<'a>(
        &'a self,
        group: &'a FragmentRows,
        column: &'a ColumnSpec,
    ) -> Result<impl Iterator<Item = Located<'a>>> {
        let fragment = group.fragment();
        let of_fragment = |rows: Cow<'a, [(u64, u32)]>| match (file_of(&fragment.files, column.id), &column.fill) {
            (None, Some(FillValue(file))) => {
                let rows = rows.iter().map(|(_, place)| (0, *place)).collect();
                Located { file: Some(file), samples: 1, rows: Cow::Owned(rows), in_order: Some(true) }
            }
            (file, _) => Located { file, samples: fragment.samples, rows, in_order: None },
        };
        let rows = self.plan.rows(group);
        let Some(Divided { current, newer }) = group.divided(&self.snapshot, column.id, rows)? else {
            return Ok(Some(of_fragment(Cow::Borrowed(rows))).into_iter().chain(Vec::new()));
        };
        let in_order = Some(is_in_order(rows));
        let of_overlay = |rows: &[(usize, (u64, u32))]| {
            let overlay = &self.snapshot.overlays.all()[rows[0].0];
            let rows = rows.iter().map(|(_, row)| *row).collect();
            Located {
                file: file_of(&overlay.files, column.id),
                samples: overlay.rows.ids(),
                rows: Cow::Owned(rows),
                in_order,
            }
        };
        let newer: Vec<Located> = newer.chunk_by(|one, other| one.0 == other.0).map(of_overlay).collect();
        let current = (!current.is_empty()).then(|| of_fragment(Cow::Owned(current)));
        Ok(current.into_iter().chain(newer))
    }

    /// Open the file of located rows, and announce the rows to the store. Returns None if their values are null.
    pub(super) fn rows_of<'a>(&self, located: &'a Located<'_>, column: &ColumnSpec) -> Result<Option<ColumnRows<'a>>> {
        let rows = self.opened(located, column)?;
        rows.iter().for_each(|rows| self.announce(rows, located.in_order));
        Ok(rows)
    }

    /// Open the file of located rows. Returns None if their values are null.
    pub(super) fn opened<'a>(&self, located: &'a Located<'_>, column: &ColumnSpec) -> Result<Option<ColumnRows<'a>>> {
        let Some(reference) = located.file else { return Ok(None) };
        let known = self.fetched.files.get(&reference.id).cloned();
        let StoredColumn { file, chunk } = self.snapshot.values(reference, located.samples, column, known)?;
        let entry = &file.tail.chunks[chunk];
        let any_order = entry.layout == Layout::Fixed && entry.raw_bytes.is_none();
        let rows = if any_order { Cow::Borrowed(&located.rows[..]) } else { ascending(&located.rows) };
        Ok(Some(ColumnRows { file, chunk, rows }))
    }

    /// Announce the rows to the store: a run of neighbours as sequential, other rows as random, and large random samples one by
    /// one. Small samples are announced only if some of them are not in memory: the device then reads many at a time, whereas
    /// page faults would wait for one after the other.
    fn announce(&self, source: &ColumnRows<'_>, in_order: Option<bool>) {
        if !source.file.access.is_mapped() {
            return;
        }
        let (entry, map, storage) = (source.entry(), &source.file.map, self.snapshot.context.reads());
        let in_order = in_order.unwrap_or_else(|| is_in_order(&source.rows));
        if source.file.expected_in_order.swap(in_order, Relaxed) != in_order {
            storage.will_read(map, if in_order { Pattern::InOrder } else { Pattern::Random });
        }
        if in_order || entry.layout == Layout::Tiled {
            return;
        }
        let part = |block: usize| &map[entry.offset.get(block) as usize..][..entry.stored_bytes.get(block) as usize];
        // Of a verified block with several samples, only the pages of one sample are read, and of a decoded block none.
        let is_read = |block: usize| match entry.units_of(block) {
            (_, 0) => false,
            _ if entry.codec != Codec::None => blocks::get(source.file.key(source.chunk, block, None)).is_none(),
            (unit, _) => entry.rows_per_block == 1 || !source.file.is_verified(source.chunk, unit),
        };
        let step = (source.rows.len() / PROBES).max(PROBES);
        let probed = source.rows.iter().skip(PROBES - 1).step_by(step).map(|(row, _)| entry.locate(*row).0);
        let is_cold = probed.filter(|block| is_read(*block)).any(|block| !storage.is_resident(part(block)));
        if !is_cold && entry.rows_per_block != 1 {
            return;
        }
        let told = |block: usize| {
            if (is_cold || part(block).len() >= ANNOUNCE_BYTES) && is_read(block) {
                storage.will_need(part(block));
            }
        };
        let located = source.rows.iter().map(|(row, _)| entry.locate(*row).0);
        if entry.rows_per_block == 1 {
            located.for_each(told);
        } else {
            let mut shared: Vec<usize> = located.collect();
            shared.sort_unstable();
            shared.dedup();
            shared.into_iter().for_each(told);
        }
    }

    /// Run `read` for the rows of every file, except those that are `hidden`. This has a flag for each place in the result, or none. Only if it
    /// `announces` does the kernel learn of the blocks that are read next. An error names the position and the column.
    pub(super) fn each_group(
        &self,
        column: &ColumnSpec,
        hidden: &[bool],
        announces: bool,
        mut read: impl FnMut(Option<&ColumnRows<'_>>, &[(u64, u32)]) -> std::result::Result<(), (Error, u32)>,
    ) -> Result<()> {
        for group in &self.plan.groups {
            let rows = self.plan.rows(group);
            let first = |rows: &[(u64, u32)]| rows.first().map_or(0, |(_, place)| *place);
            let each = match self.located(group, column) {
                Err(error) if self.passes(&error) => {
                    read(None, rows).map_err(|(error, place)| self.locate(error, column, place))?;
                    continue;
                }
                other => other.map_err(|error| self.locate(error, column, first(rows)))?,
            };
            for mut located in each {
                if !hidden.is_empty() {
                    located.rows.to_mut().retain(|(_, place)| !hidden[*place as usize]);
                    if located.rows.is_empty() {
                        continue;
                    }
                }
                let opened = if announces { self.rows_of(&located, column) } else { self.opened(&located, column) };
                let source = match opened {
                    Err(error) if self.passes(&error) => None,
                    other => other.map_err(|error| self.locate(error, column, first(&located.rows)))?,
                };
                read(source.as_ref(), &located.rows).map_err(|(error, place)| self.locate(error, column, place))?;
            }
        }
        Ok(())
    }

    /// Return whether a transaction has new values for this column.
    pub(super) fn has_own(&self, column: &ColumnSpec) -> bool {
        self.own.iter().any(|own| own.changes(column.id))
    }

    /// Return the new values that a transaction has for this column, each with its place in the result.
    pub(super) fn own_values(&self, column: &ColumnSpec) -> Vec<(usize, OwnValue<'_>)> {
        if !self.has_own(column) {
            return Vec::new();
        }
        let find = |row_id: i64| self.own.iter().find_map(|own| own.find(column.id, row_id.cast_unsigned()));
        self.plan.row_ids().into_iter().enumerate().filter_map(|(place, row_id)| Some((place, find(row_id)?))).collect()
    }

    /// Return a decoded block, either from an in-memory file or from the fetched blocks.
    #[inline]
    pub(super) fn block(&self, file: &DataFile, chunk: usize, block: usize) -> Result<Decoded> {
        if file.in_memory() {
            return file.block(chunk, block);
        }
        self.fetched.get(file.key(chunk, block, None)).map(Decoded::Owned)
    }

    /// Add the sample, column and row id to an error about the sample at this place in the result.
    pub fn locate(&self, error: Error, column: &ColumnSpec, place: u32) -> Error {
        let position = self.plan.positions.get(place as usize).copied().unwrap_or(0);
        let row_ids = self.plan.row_ids().get(place as usize).copied().into_iter().collect();
        let error =
            error.context(format!("cannot read sample {position} of column `{}`", column.name)).column(&column.name);
        error.rows(vec![place.into()]).row_ids(row_ids)
    }
}

/// Return whether rows are neighbours, in any order.
fn is_in_order(rows: &[(u64, u32)]) -> bool {
    let (low, high) = rows.iter().fold((u64::MAX, 0), |(low, high), (row, _)| (low.min(*row), high.max(*row)));
    rows.len() > 1 && high - low < 2 * rows.len() as u64
}

/// Smaller samples are announced only if some are not in memory, because a system call costs more than to read them from there.
const ANNOUNCE_BYTES: usize = 16 << 10;

/// Up to this number of samples of a read are looked up in memory, at most one in as many: 1 % of the time of a read.
const PROBES: usize = 8;

/// Check that bools are 0 or 1. NumPy and Arrow would interpret other values differently.
pub fn check_bools(bytes: &[u8]) -> Result<()> {
    match bytes.iter().find(|byte| **byte > 1) {
        None => Ok(()),
        Some(byte) => Err(malformed(format!("a bool has the value {byte}, expected 0 or 1"))),
    }
}

/// Mark the value at a place as null, and zero its bytes.
pub(super) fn set_null(nulls: &mut Nulls, count: usize, place: u32, target: &mut [u8]) {
    nulls.get_or_insert_with(|| vec![false; count])[place as usize] = true;
    target.fill(0);
}
