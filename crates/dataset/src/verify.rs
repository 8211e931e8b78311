//! Look at every byte a snapshot rests on: the chain of records, root, pages, words, and every data file whole.

use penstock_error::{Error, Kind, Result};
use penstock_format::cursor::malformed;
use penstock_format::datafile::{Chunk, FOOTER_BYTES, HEADER_BYTES, Layout, MAX_BLOCKS};
use penstock_format::ids::data_name;
use penstock_format::manifest::{FileRef, Fragment};

use crate::datafile::DataFile;
use crate::log;
use crate::snapshot::Snapshot;

/// What `verify` found.
#[derive(Debug, Clone, Default)]
pub struct Report {
    pub commits: u64,
    pub fragments: u64,
    pub data_files: u64,
    pub data_bytes: u64,
    pub samples: u64,
    pub problems: Vec<Problem>,
}

#[derive(Debug, Clone)]
pub struct Problem {
    pub object: String,
    pub error: Error,
}

/// Check a snapshot. Damage is reported, not raised; a store that cannot be reached is raised.
pub fn verify(snapshot: &Snapshot, mut progress: impl FnMut(&Report)) -> Result<Report> {
    let mut report = Report { commits: 1, ..Report::default() };
    let store = snapshot.context.storage.as_ref();
    let walked = log::walk(store, snapshot.record(), |_| {
        report.commits += 1;
        Ok(())
    });
    note(&mut report, "log".into(), walked)?;
    for column in &snapshot.schema.columns {
        note(&mut report, format!("words of `{}`", column.name), snapshot.vocabulary(column.id).map(|_| ()))?;
    }
    for part in 0..snapshot.parts.len() {
        let fragments = match snapshot.fragments(part) {
            Ok((_, fragments)) => fragments,
            Err(error) => {
                note(&mut report, format!("manifest part {part}"), Err(error))?;
                continue;
            }
        };
        for fragment in fragments.as_slice() {
            check_fragment(snapshot, fragment, &mut report)?;
            progress(&report);
        }
    }
    Ok(report)
}

/// Keep damage; pass on what is none.
fn note(report: &mut Report, object: String, result: Result<()>) -> Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::NotFound | Kind::Unsupported) => {
            report.problems.push(Problem { object, error });
            Ok(())
        }
        Err(error) => Err(error),
    }
}

fn check_fragment(snapshot: &Snapshot, fragment: &Fragment, report: &mut Report) -> Result<()> {
    report.fragments += 1;
    report.samples += fragment.samples;
    for file in &fragment.files {
        report.data_files += 1;
        report.data_bytes += file.file_bytes;
        let checked = check_file(snapshot, file, fragment.samples);
        note(report, data_name(file.id), checked)?;
    }
    Ok(())
}

fn check_file(snapshot: &Snapshot, reference: &FileRef, samples: u64) -> Result<()> {
    let file = DataFile::open(snapshot.context.storage.as_ref(), reference, samples)?;
    check_footer(&file, reference)?;
    let columns: Vec<u64> = file.tail.chunks.iter().map(|chunk| chunk.column).collect();
    if columns != reference.columns {
        return Err(malformed(format!("it has the columns {columns:?}, the manifest says {:?}", reference.columns)));
    }
    let mut covered: Vec<(u64, u64)> = Vec::new();
    for (index, chunk) in file.tail.chunks.iter().enumerate() {
        debug_assert!(chunk.blocks() as u64 <= MAX_BLOCKS);
        for block in 0..chunk.blocks() {
            let stored = file.stored(index, block)?;
            covered.push((stored.start as u64, stored.end as u64));
            check_block(&file, chunk, index, block, stored)?;
        }
    }
    covered.sort_unstable();
    let mut at = HEADER_BYTES;
    for (begin, end) in covered.into_iter().chain([(file.data_end, file.data_end)]) {
        if begin > at && file.map[at as usize..begin as usize].iter().any(|byte| *byte != 0) {
            return Err(Error::new("block-checksum", format!("the padding at bytes {at}..{begin} is not zero")));
        }
        at = at.max(end);
    }
    Ok(())
}

/// The footer repeats what the manifest says.
fn check_footer(file: &DataFile, reference: &FileRef) -> Result<()> {
    let mut expected = Vec::new();
    expected.extend_from_slice(&file.data_end.to_le_bytes());
    expected.extend_from_slice(&(reference.tail_bytes as u32).to_le_bytes());
    expected.extend_from_slice(&reference.tail_crc.to_le_bytes());
    expected.extend_from_slice(&reference.file_bytes.to_le_bytes());
    expected.extend_from_slice(&[1, 0, 0, 0]);
    expected.extend_from_slice(b"PNSD");
    match file.map[(reference.file_bytes - FOOTER_BYTES) as usize..] == expected[..] {
        true => Ok(()),
        false => Err(malformed("its footer does not say what the manifest says")),
    }
}

/// Decode a block and look at every row in it.
fn check_block(file: &DataFile, chunk: &Chunk, index: usize, block: usize, stored: std::ops::Range<usize>) -> Result<()> {
    let decoded;
    let bytes = match chunk.raw_bytes {
        None => &file.map[stored],
        Some(_) => {
            decoded = file.decoded(index, block, file.map.slice(stored))?;
            &decoded[..]
        }
    };
    if chunk.layout == Layout::Packed {
        let head = file.packed(index, block, bytes)?;
        let (cell, free_count) = (chunk.shape.fixed_bytes(chunk.dtype)?, chunk.shape.free_count());
        let mut free = Vec::new();
        for row in 0..chunk.rows_of(block) as usize {
            let range = head.range(bytes, row)?;
            free.clear();
            head.free(bytes, row, range.len(), cell, &mut free, free_count)?;
        }
    }
    Ok(())
}
