//! Check every byte of a data file, and every value in it.

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use penstock_format::cursor::{Strings, malformed};
use penstock_format::datafile::{
    Bounds, Chunk, Codec, FOOTER_BYTES, HEADER_BYTES, Layout, MAX_BLOCKS, UNIT_BYTES, write_header,
};
use penstock_format::files::FileRef;
use penstock_format::ids::data_name;
use penstock_format::schema::{ColumnSpec, Content};
use penstock_storage::RangeRequest;
use penstock_tensor::Dtype;

use crate::config::Config;
use crate::read::codes::no_class;
use crate::read::ragged::check_label_codes;
use crate::read::reader::check_bools;
use crate::snapshot::Snapshot;
use crate::snapshot::values::check_stored_as;
use crate::store::datafile::DataFile;

/// Return whether an object is damaged or missing, rather than out of reach.
pub fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), Kind::Corrupt | Kind::NotFound | Kind::Unsupported)
}

/// A byte range that is checked in one step. It is a block, or a run of checksum units in a long block.
struct CheckedRange {
    begin: u64,
    end: u64,
    chunk: usize,
    block: usize,
    units: std::ops::Range<usize>,
}

/// Check every byte of a data file, and every value as a reader would.
pub fn check_file(snapshot: &Snapshot, reference: &FileRef, samples: u64) -> Result<()> {
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
            return Err(malformed(format!("a value is invalid: {why}")));
        }
    }
    Ok(())
}
