//! Write roots.

use std::sync::Arc;

use penstock_error::{Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::files::{FilePlace, FileRef};
use penstock_format::ids::{ObjectRef, root_name};
use penstock_format::manifest::{
    Attachment, Fragment, MANIFEST_PAGE_BYTES, MANIFEST_PAGE_FRAGMENTS, PageRef, Root, WordsSegment,
};
use penstock_format::overlay::Overlay;
use penstock_format::rows::{RowIds, RowSet};

use super::fold::folded;
use super::objects::{folders_of, write_object, write_pages, write_rows};
use crate::snapshot::Snapshot;
use crate::snapshot::live::ManifestPart;
use crate::store::context::Context;

/// Return a snapshot's overlays as its root lists them: all deletions are joined into one overlay, and so are all absent samples, and all gone ones.
/// They come first.
fn overlays_of_root(snapshot: &Snapshot, puts: &mut Vec<String>) -> Result<Vec<Overlay>> {
    // No reader needs an overlay whose columns were all dropped.
    let values = snapshot
        .overlays
        .all()
        .iter()
        .filter(|overlay| overlay.columns.iter().any(|column| snapshot.schema.has_column(*column)))
        .cloned()
        .collect();
    let values = folded(snapshot, values, puts)?;
    let mut joined = |sets: Vec<&RowSet>| -> Result<Option<RowSet>> {
        Ok(match sets[..] {
            [] => None,
            [one] => Some(one.clone()),
            _ => Some(write_rows(&snapshot.context, &snapshot.context.all_row_ids(sets)?, puts)?),
        })
    };
    let deleted = joined(snapshot.overlays.rows(Overlay::is_deletion).collect())?.map(Overlay::deleting);
    let absent = joined(snapshot.overlays.rows(Overlay::is_absence).collect())?.map(Overlay::without);
    let gone = joined(snapshot.overlays.rows(Overlay::is_gone).collect())?.map(Overlay::gone);
    Ok(deleted.into_iter().chain(absent).chain(gone).chain(values).collect())
}

/// Return a snapshot's attachments as its root lists them: without what was changed.
fn covering(snapshot: &Snapshot, puts: &mut Vec<String>) -> Result<Vec<Attachment>> {
    let covering = |(attachment, covered): (&Attachment, RowIds)| {
        let rows = if attachment.changed.is_empty() {
            attachment.rows.clone()
        } else {
            write_rows(&snapshot.context, &covered, puts)?
        };
        Ok(Attachment { rows, changed: Vec::new(), ..attachment.clone() })
    };
    snapshot.attachments()?.into_iter().map(covering).collect()
}

/// Copy data files of fragments from records; see `copy_from_records`.
pub fn copy_to_fragments(context: &Context, fragments: &mut [Fragment]) -> Result<()> {
    copy_from_records(
        context,
        fragments.iter_mut().flat_map(|fragment| fragment.files.iter_mut().map(|file| (file, fragment.samples))),
    )
}

/// Copy data files of overlays from records; see `copy_from_records`.
pub fn copy_to_overlays(context: &Context, overlays: &mut [Overlay]) -> Result<()> {
    copy_from_records(
        context,
        overlays.iter_mut().flat_map(|overlay| overlay.files.iter_mut().map(|file| (file, overlay.rows.ids()))),
    )
}

/// Copy data files from records to the page, the root or the record that will list them. Pages and roots then need no request for each of
/// them, and branches do not depend on the records of others. A damaged file remains where it is. Cost: reads the records of other processes, concurrently.
fn copy_from_records<'a>(context: &Context, files: impl Iterator<Item = (&'a mut FileRef, u64)>) -> Result<()> {
    let in_records: Vec<_> = files.filter(|(file, _)| matches!(file.place, FilePlace::Record { .. })).collect();
    context.open_tails(in_records.iter().map(|(file, samples)| (&**file, *samples)))?;
    for (file, samples) in in_records {
        match context.file(file, samples) {
            Ok(opened) if opened.map.len() as u64 == file.file_bytes => {
                file.place = FilePlace::Inline(opened.map.clone())
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Write a root that describes a snapshot's state. Loose fragments are merged into the preceding page if it has room, to keep the
/// number of pages small.
pub fn write_root(snapshot: &Snapshot, puts: &mut Vec<String>) -> Result<(ObjectRef, Arc<Root>)> {
    let context = &snapshot.context;
    let (mut pages, mut loose): (Vec<PageRef>, Vec<Fragment>) = (Vec::new(), Vec::new());
    let flush = |pages: &mut Vec<PageRef>, loose: &mut Vec<Fragment>, puts: &mut Vec<String>| -> Result<()> {
        if let Some(last) = pages.last().copied() {
            let room = last.fragments as usize + loose.len() <= MANIFEST_PAGE_FRAGMENTS
                && last.object.bytes as usize <= MANIFEST_PAGE_BYTES / 2;
            if room && !loose.is_empty() {
                pages.pop();
                context.carry_statistics(&last)?;
                let mut merged = context.page(&last)?.to_vec();
                merged.append(loose);
                *loose = merged;
            }
        }
        copy_to_fragments(context, loose)?;
        pages.extend(write_pages(context, loose, puts)?);
        loose.clear();
        Ok(())
    };
    for part in snapshot.parts.iter() {
        match part {
            ManifestPart::Fragment(fragment) => loose.push(fragment.as_ref().clone()),
            ManifestPart::Page(page) => {
                flush(&mut pages, &mut loose, puts)?;
                pages.push(*page);
            }
        }
    }
    flush(&mut pages, &mut loose, puts)?;
    let words = snapshot.words_segments().filter(|segment| snapshot.schema.has_column(segment.column));
    let mut words: Vec<WordsSegment> = words.copied().collect();
    words.sort_by_key(|segment| (segment.column, segment.first_code));
    let SnapshotId { branch, number, .. } = snapshot.id();
    let mut overlays = overlays_of_root(snapshot, puts)?;
    copy_to_overlays(context, &mut overlays)?;
    let root = Root {
        dataset: snapshot.record().dataset,
        branch,
        number,
        schema: snapshot.schema.to_json()?,
        pages,
        words,
        overlays,
        stages: snapshot.stages.clone(),
        attachments: covering(snapshot, puts)?,
    };
    let body = root.encode();
    let id = write_object(context, root_name, &body, puts)?;
    context.storage.sync(&folders_of(puts))?;
    Ok((ObjectRef::of(id, &body), Arc::new(root)))
}
