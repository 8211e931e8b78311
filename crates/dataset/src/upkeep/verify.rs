//! Check every byte that a snapshot depends on: the record chain, the root, pages, words, row ids and all data files
//! (`verify_file`).

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::cursor::malformed;
use penstock_format::files::FileRef;
use penstock_format::ids::{NAMES_FOLDER, Run, lineage_of, row_id};
use penstock_format::manifest::{Fragment, PageStatistics, Statistics};
use penstock_format::names::NameKind;
use penstock_format::overlay::Overlay;
use penstock_format::record::Record;
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;

use super::unreferenced::{Unreferenced, unreferenced};
use super::verify_attached;
use super::verify_file::{check_file, is_damage};
use crate::log::history::History;
use crate::log::{newest, records, refs};
use crate::snapshot::Snapshot;
use crate::snapshot::values::file_of;

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
            Err(malformed(format!("deletions and absences list {listed} row ids, but only {distinct} distinct ones")))
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
                "there are some for column {column} in fragment {index}, which lacks that column"
            )));
        };
        let Ok(file) = snapshot.context.file(file, fragment.samples) else { continue }; // `check_files` reports it.
        if !file.tail.chunks.iter().any(|chunk| chunk.column == column && Statistics::of(chunk) == *statistics) {
            return Err(malformed(format!(
                "those for column {column} in fragment {index} differ from its data file `{}`",
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
