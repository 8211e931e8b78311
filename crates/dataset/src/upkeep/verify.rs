//! Check every byte that a snapshot depends on: the record chain, the root, pages, words, row ids and all data files.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use penstock_format::cursor::{Strings, malformed};
use penstock_format::datafile::{
    Bounds, Chunk, Codec, FOOTER_BYTES, HEADER_BYTES, Layout, MAX_BLOCKS, UNIT_BYTES, write_header,
};
use penstock_format::files::FileRef;
use penstock_format::ids::{NAMES_FOLDER, Run, data_name, lineage_of, row_id};
use penstock_format::manifest::{Fragment, PageStatistics, Statistics};
use penstock_format::names::NameKind;
use penstock_format::overlay::Overlay;
use penstock_format::record::Record;
use penstock_format::rows::RowIds;
use penstock_format::schema::{ColumnSpec, Content};
use penstock_storage::RangeRequest;
use penstock_tensor::Dtype;

use super::unreferenced::{Unreferenced, unreferenced};
use super::verify_attached;
use crate::config::Config;
use crate::log::history::History;
use crate::log::{newest, records, refs};
use crate::read::codes::no_class;
use crate::read::ragged::check_label_codes;
use crate::read::reader::check_bools;
use crate::snapshot::Snapshot;
use crate::snapshot::values::{check_stored_as, file_of};
use crate::store::datafile::DataFile;

/// The result of `verify`.
#[derive(Debug, Clone, Default)]
pub struct Report {
    pub commits: u64,
    pub fragments: u64,
    pub data_files: u64,
    pub data_bytes: u64,
    pub samples: u64,
    /// Objects that no snapshot refers to. None if they cannot be counted.
    pub unreferenced: Option<Unreferenced>,
    pub problems: Vec<Problem>,
}

#[derive(Debug, Clone)]
pub struct Problem {
    pub object: String,
    pub error: Error,
}

/// Check a snapshot. Damage is added to the report, but an unreachable store is an error.
pub fn verify(snapshot: &Snapshot, mut progress: impl FnMut(&Report)) -> Result<Report> {
    let mut report = Report::default();
    let store = snapshot.context.storage.as_ref();
    let mut history = History::new(snapshot.entry.clone());
    let end = loop {
        match history.next(store) {
            Ok(Some(_)) => report.commits += 1,
            end => break end,
        }
    };
    note(&mut report, "log".into(), end.map(drop))?;
    for error in newest::gaps(store, &snapshot.id())? {
        note(&mut report, "log".into(), Err(error))?;
    }
    check_names(snapshot, &mut report)?;
    for column in &snapshot.schema.columns {
        check_words(snapshot, column, &mut report)?;
    }
    let mut runs: Vec<Run> = Vec::new();
    for part in 0..snapshot.parts.len() {
        let fragments = match snapshot.fragments(part) {
            Ok(fragments) => fragments,
            Err(error) => {
                note(&mut report, format!("manifest part {part}"), Err(error))?;
                continue;
            }
        };
        if let Some(page) = snapshot.parts[part].page() {
            let checked = snapshot
                .context
                .page_statistics(&page)
                .and_then(|known| check_statistics(snapshot, known, fragments.as_slice()));
            note(&mut report, format!("statistics of manifest part {part}"), checked)?;
        }
        for fragment in fragments.as_slice() {
            runs.extend(&fragment.runs);
            report.fragments += 1;
            report.samples += fragment.samples;
            check_files(snapshot, &fragment.files, fragment.samples, &mut report)?;
            progress(&report);
        }
    }
    let mut overlays = HashSet::new();
    for (index, overlay) in snapshot.overlays.all().iter().enumerate() {
        if overlay.has_values() && !overlays.insert(overlay.id) {
            note(
                &mut report,
                format!("overlay {index}"),
                Err(malformed(format!("overlay {} is listed twice", overlay.id))),
            )?;
        }
        note(&mut report, format!("overlay {index}"), check_overlay(snapshot, overlay, &runs))?;
        check_files(snapshot, &overlay.files, overlay.rows.ids(), &mut report)?;
        progress(&report);
    }
    for file in snapshot.schema.fill_files() {
        check_files(snapshot, std::slice::from_ref(file), 1, &mut report)?;
    }
    for (object, result) in verify_attached::each(snapshot) {
        note(&mut report, object, result)?;
    }
    report.unreferenced = unreferenced(&snapshot.context)?;
    note(&mut report, "row ids".into(), check_runs(snapshot, runs))?;
    note(&mut report, "row ids".into(), check_hidden(snapshot))?;
    let record = snapshot.record();
    report.samples = report.samples.saturating_sub(record.samples - record.live); // Hidden samples were checked as well.
    Ok(report)
}

/// Check that the snapshots that have names exist. Cost: a read for each name.
fn check_names(snapshot: &Snapshot, report: &mut Report) -> Result<()> {
    for (what, kind) in [("branch", NameKind::Branch), ("tag", NameKind::Tag), ("pin", NameKind::Pin)] {
        let names = match refs::names(&snapshot.context, kind) {
            Err(error) => return note(report, NAMES_FOLDER.into(), Err(error)),
            Ok(names) => names,
        };
        for (name, target) in names {
            let found = records::named(snapshot.context.storage.as_ref(), &target).map(drop);
            note(report, format!("{what} `{name}`"), found)?;
        }
    }
    Ok(())
}

/// Check that each row id of an overlay belongs to a sample, or that no fragment has it any more.
fn check_overlay(snapshot: &Snapshot, overlay: &Overlay, runs: &[Run]) -> Result<()> {
    let ids = &snapshot.context.row_ids([&overlay.rows])?[0];
    let found = ids.count_in_runs(runs);
    if overlay.is_gone() {
        return match found {
            0 => verify_attached::check_known(snapshot, ids),
            found => Err(malformed(format!("{found} samples are listed as gone, but fragments have them"))),
        };
    }
    let gone = if overlay.has_values() { snapshot.overlay_rows(Overlay::is_gone)?.and(ids).len() } else { 0 };
    match found + gone == ids.len() {
        true => Ok(()),
        false => Err(malformed(format!(
            "an overlay has {} row ids, but only {} of them belong to a sample",
            ids.len(),
            found + gone
        ))),
    }
}

/// Check that no sample is deleted or absent twice, so that the number of samples is right.
fn check_hidden(snapshot: &Snapshot) -> Result<()> {
    let sets = match snapshot.context.row_ids(snapshot.overlays.rows(Overlay::hides)) {
        Err(error) if is_damage(&error) => return Ok(()), // `check_overlay` reports it.
        other => other?,
    };
    let (listed, distinct) =
        (sets.iter().map(|set| set.len()).sum::<u64>(), RowIds::union(sets.iter().map(AsRef::as_ref)).len());
    match listed == distinct {
        true => Ok(()),
        false => {
            Err(malformed(format!("deletions and absences list {listed} row ids, but only {distinct} different ones")))
        }
    }
}

/// Check that each row id was assigned by a commit of its branch and belongs to only one sample.
fn check_runs(snapshot: &Snapshot, mut runs: Vec<Run>) -> Result<()> {
    let Record { lineage, next_counter, .. } = *snapshot.record();
    runs.sort_unstable_by_key(|run| run.first);
    let mut end = 0;
    for run in runs {
        if run.first < end {
            return Err(malformed(format!("row id {} belongs to two samples", run.first)));
        }
        end = run.first.saturating_add(run.count);
        // Other branches assign the row ids of other lineages.
        if lineage_of(end - 1) == lineage && end > row_id(lineage, next_counter)
            || lineage_of(end - 1) != lineage_of(run.first)
        {
            return Err(malformed(format!("row id {} belongs to a sample, but no commit assigned it", end - 1)));
        }
    }
    Ok(())
}

/// Read a column's words. If they cannot be read together, each object is read, so that each damaged one is reported.
fn check_words(snapshot: &Snapshot, column: &ColumnSpec, report: &mut Report) -> Result<()> {
    let object = format!("words of `{}`", column.name);
    let Err(first) = snapshot.vocabulary(column.id) else { return Ok(()) };
    let before = report.problems.len();
    for segment in snapshot.words_segments().filter(|segment| segment.column == column.id) {
        note(report, object.clone(), snapshot.context.words(segment).map(drop))?;
    }
    if report.problems.len() > before { Ok(()) } else { note(report, object, Err(first)) }
}

/// Return whether an object is damaged or missing, rather than out of reach.
pub(super) fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), Kind::Corrupt | Kind::NotFound | Kind::Unsupported)
}

/// Add an error to the report if it describes damage. Returns any other error.
fn note(report: &mut Report, object: String, result: Result<()>) -> Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) if is_damage(&error) => {
            report.problems.push(Problem { object, error });
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Compare the statistics of a page with the tails of its data files.
fn check_statistics(snapshot: &Snapshot, known: Option<Arc<PageStatistics>>, fragments: &[Fragment]) -> Result<()> {
    for (column, (index, statistics)) in known
        .iter()
        .flat_map(|known| &known.columns)
        .flat_map(|(column, known)| known.iter().map(move |one| (*column, one)))
    {
        let fragment = &fragments[*index as usize];
        let Some(file) = file_of(&fragment.files, column) else {
            return Err(malformed(format!(
                "there are some of column {column} in fragment {index}, which does not have it"
            )));
        };
        let Ok(file) = snapshot.context.file(file, fragment.samples) else { continue }; // `check_files` reports it.
        if !file.tail.chunks.iter().any(|chunk| chunk.column == column && Statistics::of(chunk) == *statistics) {
            return Err(malformed(format!(
                "those of column {column} in fragment {index} differ from its data file `{}`",
                file.shown()
            )));
        }
    }
    Ok(())
}

fn check_files(snapshot: &Snapshot, files: &[FileRef], samples: u64, report: &mut Report) -> Result<()> {
    for file in files {
        report.data_files += 1;
        report.data_bytes += file.file_bytes;
        note(report, file.place.shown(file.id), check_file(snapshot, file, samples))?;
    }
    Ok(())
}

/// A byte range that is checked in one step. It is a block, or a run of checksum units in a long block.
struct CheckedRange {
    begin: u64,
    end: u64,
    chunk: usize,
    block: usize,
    units: std::ops::Range<usize>,
}

fn check_file(snapshot: &Snapshot, reference: &FileRef, samples: u64) -> Result<()> {
    let file = snapshot.context.open_file(reference, samples)?;
    let read = |begin: u64, end: u64| read_range(snapshot, &file, begin, end);
    if read(0, HEADER_BYTES)?[..] != *write_header(file.id) {
        return Err(malformed("it is not a data file, or not the expected one"));
    }
    if read(file.file_bytes - FOOTER_BYTES, file.file_bytes)?[..] != *file.footer() {
        return Err(malformed("its footer differs from the manifest"));
    }
    let specs: Vec<Option<&ColumnSpec>> =
        file.tail.chunks.iter().map(|chunk| snapshot.schema.column_by_id(chunk.column)).collect();
    for (chunk, spec) in file.tail.chunks.iter().zip(&specs) {
        if let Some(row) = (0..samples)
            .find(|row| !chunk.is_valid(*row) && chunk.free.iter().any(|sizes| sizes.get(*row as usize) != 0))
        {
            return Err(malformed(format!("sample {row} of column {} is null but has sizes", chunk.column)));
        }
        let Some(spec) = spec else { continue };
        check_stored_as(&file, chunk, spec)?;
        if spec.kind.is_category() {
            let vocabulary = match snapshot.vocabulary(chunk.column) {
                Err(error) if is_damage(&error) => continue, // `check_words` reports it. The file itself may be intact.
                other => other?,
            };
            if let Some(word) =
                chunk.dictionary.iter().flat_map(|words| words.iter()).find(|word| vocabulary.code(word).is_none())
            {
                return Err(malformed(format!("column `{}` has the word `{word}`, which no commit added", spec.name)));
            }
        }
    }
    let mut rest = &checked_ranges(&file, &specs)[..];
    let mut at = HEADER_BYTES;
    let mut found = vec![Bounds::default(); file.tail.chunks.len()];
    while let Some(first) = rest.first() {
        let (from, mut to) = (at.min(first.begin), first.end);
        let fits = rest
            .iter()
            .take_while(|range| range.end <= first.end || range.end - from <= Config::memory_bytes() / 16)
            .count();
        let (group, later) = rest.split_at(fits.max(1));
        rest = later;
        to = group.iter().fold(to, |to, range| to.max(range.end));
        let bytes = read(from, to)?;
        for range in group {
            check_pad(at, range.begin, &bytes, from)?;
            at = at.max(range.end);
            let stored = bytes.slice((range.begin - from) as usize..(range.end - from) as usize);
            check_range(&file, range, specs[range.chunk], stored, &mut found[range.chunk])?;
        }
    }
    for (chunk, mut found) in file.tail.chunks.iter().zip(found) {
        // An empty text has no range.
        if chunk.layout == Layout::Single
            && (0..samples).any(|row| chunk.is_valid(row) && chunk.stored_bytes.get(row as usize) == 0)
        {
            found.include(&Bounds::of_words(std::iter::once(&[][..])));
        }
        if chunk.bounds.as_ref().is_some_and(|bounds| *bounds != found) {
            return Err(malformed(format!("the bounds of column {} in its tail differ from its values", chunk.column)));
        }
    }
    check_pad(at, file.data_end, &read(at.min(file.data_end), file.data_end)?, at)
}

/// Read bytes from a data file. If the file is not mapped, the ranges are requested concurrently.
fn read_range(snapshot: &Snapshot, file: &DataFile, begin: u64, end: u64) -> Result<Bytes> {
    if file.in_memory() {
        return Ok(file.map.slice(begin as usize..end as usize));
    }
    let store = snapshot.context.reads();
    let step = store.features().range_bytes.min(end - begin).max(1);
    let starts = (begin..end).step_by(step as usize);
    let ranges = starts
        .map(|at| RangeRequest::plain(&data_name(file.id), at, step.min(end - at), Some(file.file_bytes)))
        .collect();
    let mut pieces = Vec::new();
    for answer in store.fetch(ranges) {
        pieces.extend(answer?);
    }
    Ok(if pieces.len() == 1 { pieces.remove(0) } else { pieces.concat().into() })
}

/// Return the ranges of all blocks in a file, in file order.
fn checked_ranges(file: &DataFile, specs: &[Option<&ColumnSpec>]) -> Vec<CheckedRange> {
    let mut found = Vec::new();
    for (chunk, entry) in file.tail.chunks.iter().enumerate() {
        debug_assert!(entry.blocks() as u64 <= MAX_BLOCKS);
        for block in 0..entry.blocks() {
            let (begin, bytes, count) =
                (entry.offset.get(block), entry.stored_bytes.get(block), entry.units_of(block).1);
            // A block that must be decoded is read whole. So is text, because a character may span two units.
            let whole = entry.codec != Codec::None
                || entry.layout == Layout::Packed
                || specs[chunk].is_some_and(|spec| spec.kind.is_utf8());
            let step = if whole { count.max(1) } else { UNITS_A_STRETCH };
            for first in (0..count).step_by(step) {
                let units = first..(first + step).min(count);
                let end = begin + (units.end as u64 * UNIT_BYTES).min(bytes);
                found.push(CheckedRange { begin: begin + first as u64 * UNIT_BYTES, end, chunk, block, units });
            }
        }
    }
    found.sort_unstable_by_key(|range| (range.begin, range.end));
    found
}

/// Blocks with more units than this are checked in parts.
const UNITS_A_STRETCH: usize = 128;

/// Check that the padding from `begin` to `end` consists of zeros. `bytes` begins at offset `from`.
fn check_pad(begin: u64, end: u64, bytes: &[u8], from: u64) -> Result<()> {
    if begin < end && bytes[(begin - from) as usize..(end - from) as usize].iter().any(|byte| *byte != 0) {
        return Err(Error::new("block-checksum", format!("the padding at bytes {begin}..{end} is not zero")));
    }
    Ok(())
}

/// Verify the checksums of a range, then decode it and check every row, as a reader would. `found` gets the bounds of its values.
fn check_range(
    file: &DataFile,
    range: &CheckedRange,
    spec: Option<&ColumnSpec>,
    stored: Bytes,
    found: &mut Bounds,
) -> Result<()> {
    let CheckedRange { chunk: index, block, units, .. } = range;
    for (unit, bytes) in units.clone().zip(stored.chunks(UNIT_BYTES as usize)) {
        file.verify_stored(*index, *block, Some(unit), bytes)?;
    }
    let chunk = &file.tail.chunks[*index];
    let bytes = file.decoded(*index, *block, stored)?;
    let with_block = |error: Error| match spec {
        Some(spec) => error.context(format!("block {block} of column `{}`", spec.name)).column(&spec.name),
        None => error,
    };
    if chunk.layout == Layout::Packed {
        let head = file.packed(*index, *block, &bytes)?;
        let (cell, free_count) = (chunk.shape.fixed_bytes(chunk.dtype)?, chunk.shape.free_count());
        let mut free = Vec::new();
        for row in 0..chunk.rows_of(*block) as usize {
            let range = head.range(&bytes, row)?;
            free.clear();
            head.free(&bytes, row, range.len(), cell, &mut free, free_count)?;
            check_value(spec, chunk, &bytes[range.clone()], |_| true).map_err(with_block)?;
            if chunk.is_valid(chunk.first_row_of(*block) + row as u64) {
                found.include(&Bounds::of_words(std::iter::once(&bytes[range])));
            }
        }
        return Ok(());
    }
    let skipped = units.start as u64 * UNIT_BYTES / chunk.shape.fixed_bytes(chunk.dtype)?.max(1);
    let first_row = if chunk.layout == Layout::Fixed { chunk.first_row_of(*block) + skipped } else { *block as u64 };
    if chunk.bounds.is_some() {
        found.include(&match chunk.layout {
            Layout::Fixed => {
                let rows = (bytes.len() / chunk.dtype.size()) as u64;
                let valid: Vec<bool> = (first_row..first_row + rows).map(|row| chunk.is_valid(row)).collect();
                Bounds::of_fixed(&bytes, chunk.dtype, Some(&valid))
            }
            _ => Bounds::of_words(Some(&bytes[..]).filter(|_| chunk.is_valid(first_row)).into_iter()),
        });
    }
    check_value(spec, chunk, &bytes, |place| chunk.layout != Layout::Fixed || chunk.is_valid(first_row + place))
        .map_err(with_block)
}

/// Check a value of a text or JSON column. Values of other columns are always accepted.
pub fn check_text(spec: &ColumnSpec, bytes: &[u8]) -> Result<()> {
    if !spec.kind.is_utf8() {
        return Ok(());
    }
    let text = std::str::from_utf8(bytes).map_err(|error| malformed(format!("a value is not UTF-8: {error}")))?;
    if spec.kind.is_json() && !text.is_empty() {
        serde_json::from_str::<serde::de::IgnoredAny>(text)
            .map_err(|error| malformed(format!("a value is not JSON: {error}")))?;
    }
    Ok(())
}

/// Check that a value, or a run of values of fixed shape, has the column's type. Codes for which `is_valid` returns
/// false are not checked.
fn check_value(spec: Option<&ColumnSpec>, chunk: &Chunk, bytes: &[u8], is_valid: impl Fn(u64) -> bool) -> Result<()> {
    let Some(spec) = spec else { return Ok(()) };
    match spec.kind.content() {
        Content::Text => check_text(spec, bytes),
        Content::Label(classes) => {
            let places = classes.places();
            check_codes(
                chunk,
                bytes,
                |code| places.of(code).ok_or_else(|| no_class(code, classes)).map(|_| ()),
                is_valid,
            )
        }
        Content::Labels(classes) => check_label_codes(bytes, classes, &classes.places()),
        Content::Word => {
            let words = chunk.dictionary.as_ref().map_or(0, Strings::len) as u64;
            let check_code = |code: u64| {
                if code < words {
                    Ok(())
                } else {
                    Err(format!("it has code {code}, but only {words} codes are defined"))
                }
            };
            check_codes(chunk, bytes, check_code, is_valid)
        }
        _ if chunk.dtype == Dtype::Bool => check_bools(bytes),
        _ => Ok(()),
    }
}

fn check_codes(
    chunk: &Chunk,
    bytes: &[u8],
    check_code: impl Fn(u64) -> std::result::Result<(), String>,
    is_valid: impl Fn(u64) -> bool,
) -> Result<()> {
    for (place, code) in bytes.chunks_exact(chunk.dtype.size()).enumerate() {
        let code = code.iter().rev().fold(0u64, |code, byte| code << 8 | u64::from(*byte));
        if let Err(why) = check_code(code)
            && is_valid(place as u64)
        {
            return Err(malformed(format!("a value is wrong: {why}")));
        }
    }
    Ok(())
}
