//! Build the deltas or the state of a merge: link the fragments of the other side, copy its words, and write or link its values.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::Id;
use penstock_format::cursor::Writer;
use penstock_format::files::FileRef;
use penstock_format::ids::{ObjectRef, Run};
use penstock_format::manifest::{Fragment, PageRef, WordsSegment};
use penstock_format::overlay::Overlay;
use penstock_format::record::Delta;
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::schema::ColumnSpec;

use crate::commit::manifest::objects::{INLINE_BYTES, write_pages, write_rows, write_words};
use crate::commit::manifest::overlays::write_values;
use crate::commit::manifest::rewrite::{PlacedRun, Rewritten, rewritten};
use crate::commit::manifest::root::copy_to_fragments;
use crate::commit::manifest::stored::WordList;
use crate::config::Config;
use crate::read::fetch::Purpose;
use crate::read::reader::{OnCorrupt, Reader};
use crate::read::scan::GroupSize;
use crate::snapshot::Snapshot;
use crate::snapshot::attachments::note_changed;
use crate::snapshot::live::ManifestPart;
use crate::snapshot::overlays::Overlays;
use crate::snapshot::values::file_of;
use crate::write::pending::Pending;

/// What a merge adds to a snapshot.
#[derive(Default)]
pub struct Additions {
    pub parts: Vec<ManifestPart>,
    pub words: Vec<WordsSegment>,
    pub overlays: Vec<Overlay>,
    /// Feature bits required to read the values that were written.
    pub features: u64,
}

/// A record that has other commits' deltas, too, has room for this many deltas and bytes of a merge.
const DELTAS: usize = 24;
const BYTES: usize = 2048;

impl Additions {
    /// Return whether there are neither fragments nor overlays.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.overlays.is_empty()
    }

    /// Add samples that were written again. Returns their fragments.
    pub fn copy(&mut self, Rewritten { fragments, features, .. }: Rewritten) -> Vec<Fragment> {
        self.parts.extend(fragments.iter().cloned().map(|fragment| ManifestPart::Fragment(Arc::new(fragment))));
        self.features |= features;
        fragments
    }

    /// Return the additions as deltas. Returns None if there are too many for a record.
    pub fn deltas(&self) -> Option<Vec<Delta>> {
        let parts = self.parts.iter().map(|part| match part {
            ManifestPart::Page(page) => Delta::Page(*page),
            ManifestPart::Fragment(fragment) => Delta::Fragment(fragment.clone()),
        });
        let words = self.words.iter().map(|segment| Delta::Words(*segment));
        let deltas: Vec<Delta> = parts.chain(words).chain(self.overlays.iter().cloned().map(Delta::Overlay)).collect();
        let written = Writer::written(|writer| deltas.iter().for_each(|delta| delta.write(writer)));
        (deltas.len() <= DELTAS && written.len() <= BYTES).then_some(deltas)
    }
}

/// The fragments that a merge links.
pub struct Linked {
    /// Parts of the other side by index, and whether each of their fragments is needed.
    parts: Vec<(usize, Vec<bool>)>,
    /// The row ids of these fragments, deleted ones included.
    pub row_ids: RowIds,
    /// Added samples whose fragments have samples that `ours` has in other fragments, since a layout. They are written again.
    pub copied: RowIds,
}

/// Which fragments a merge needs.
pub struct Wanted<'a> {
    /// Samples of `theirs` that the merge adds.
    pub added: &'a RowIds,
    /// Samples that `theirs` deleted, and of whose deletion `ours` learns.
    pub learned: &'a RowIds,
    /// Row ids that `ours` has in no fragment.
    pub lacking: &'a RowIds,
    /// Row ids in fragments that `theirs` got since all common ancestors.
    pub new: &'a RowIds,
}

/// Choose the fragments of `theirs` that `ours` needs. A fragment all of whose samples were deleted is needed as well, because it may be a stage,
/// which must not be added again. Cost: reads the pages that `ours` lacks and, for fragments without samples, those that `theirs` lacks.
pub fn linked(ours: &Snapshot, theirs: &Snapshot, wanted: &Wanted) -> Result<Linked> {
    let known = ours.pages();
    let (mut parts, mut row_ids, mut copied) = (Vec::new(), Vec::new(), Vec::new());
    let count = |fragment: &Fragment, ids: &RowIds| ids.count_in_runs(&fragment.runs);
    let is_gone =
        |fragment: &Fragment| count(fragment, wanted.added) == 0 && count(fragment, wanted.new) == fragment.samples;
    let own = names_in(ours, theirs, &known, is_gone)?;
    let mut is_needed = |fragment: &Fragment| match count(fragment, wanted.lacking) {
        0 => false,
        all if all == fragment.samples && is_gone(fragment) => {
            fragment.files.first().is_some_and(|file| !own.contains(&file.id))
        }
        all if all == fragment.samples => count(fragment, wanted.added) + count(fragment, wanted.learned) > 0,
        _ => {
            copied.extend(&fragment.runs);
            false
        }
    };
    for (index, part) in theirs.parts.iter().enumerate() {
        if part.page().is_some_and(|page| known.contains(&page)) {
            continue;
        }
        let fragments = theirs.fragments(index)?;
        let wanted: Vec<bool> = fragments.as_slice().iter().map(&mut is_needed).collect();
        let chosen = fragments.as_slice().iter().zip(&wanted).filter(|(_, wanted)| **wanted);
        row_ids.extend(chosen.flat_map(|(fragment, _)| &fragment.runs));
        parts.push((index, wanted));
    }
    let copied = RowIds::of_runs(copied).and(wanted.lacking).and(wanted.added);
    Ok(Linked { parts, row_ids: RowIds::of_runs(row_ids), copied })
}

/// Return which data files of the fragments that `is_gone` selects in `theirs` are also in fragments of `ours`. `known` are the pages of `ours`.
fn names_in(
    ours: &Snapshot,
    theirs: &Snapshot,
    known: &HashSet<PageRef>,
    is_gone: impl Fn(&Fragment) -> bool,
) -> Result<HashSet<Id>> {
    let mut files = HashSet::new();
    theirs.each_fragment_outside(known, |fragment| {
        files.extend(fragment.files.first().filter(|_| is_gone(fragment)).map(|file| file.id));
        Ok(())
    })?;
    Ok(ours.rows_of_files(Some(theirs), &files)?.into_iter().map(|(file, _)| file).collect())
}

/// Visit the data files of the chosen fragments. Cost: reads the pages of these fragments, unless they are cached.
pub fn linked_files(theirs: &Snapshot, linked: &Linked, visit: &mut dyn FnMut(&FileRef) -> Result<()>) -> Result<()> {
    for (index, wanted) in &linked.parts {
        let fragments = theirs.fragments(*index)?;
        let chosen = fragments.as_slice().iter().zip(wanted).filter(|(_, wanted)| **wanted);
        chosen.flat_map(|(fragment, _)| &fragment.files).try_for_each(&mut *visit)?;
    }
    Ok(())
}

/// Return the chosen fragments as parts. Cost: writes pages if some of the pages' fragments are not needed, or if there are many fragments.
pub fn new_parts(theirs: &Snapshot, linked: &Linked, puts: &mut Vec<String>) -> Result<Vec<ManifestPart>> {
    let (mut parts, mut loose): (Vec<ManifestPart>, Vec<Fragment>) = Default::default();
    let flush = |parts: &mut Vec<ManifestPart>, loose: &mut Vec<Fragment>, puts: &mut Vec<String>| -> Result<()> {
        copy_to_fragments(&theirs.context, loose)?;
        match loose.iter().map(Fragment::encoded_bytes).sum::<usize>() <= INLINE_BYTES {
            true => parts.extend(loose.drain(..).map(|fragment| ManifestPart::Fragment(Arc::new(fragment)))),
            false => parts.extend(write_pages(&theirs.context, loose, puts)?.into_iter().map(ManifestPart::Page)),
        }
        loose.clear();
        Ok(())
    };
    for (index, wanted) in &linked.parts {
        match &theirs.parts[*index] {
            ManifestPart::Page(page) if wanted.iter().all(|wanted| *wanted) => {
                flush(&mut parts, &mut loose, puts)?;
                parts.push(ManifestPart::Page(*page));
            }
            part => {
                part.page().iter().try_for_each(|page| theirs.context.carry_statistics(page))?;
                let fragments = theirs.fragments(*index)?;
                loose.extend(
                    fragments
                        .as_slice()
                        .iter()
                        .zip(wanted)
                        .filter(|(_, wanted)| **wanted)
                        .map(|(fragment, _)| fragment.clone()),
                );
            }
        }
    }
    flush(&mut parts, &mut loose, puts)?;
    Ok(parts)
}

/// Write samples of `theirs` again, under their row ids. `columns` are those that it has: the files of its fragments may have old values of others. Cost: reads
/// and writes their values once.
pub fn copied_samples(
    theirs: &Arc<Snapshot>,
    columns: &HashSet<u64>,
    ids: &RowIds,
    puts: &mut Vec<String>,
) -> Result<Rewritten> {
    let mut all = Rewritten::default();
    let mut found: Vec<(RowIds, Vec<&ColumnSpec>)> = Vec::new();
    theirs.each_fragment(|fragment| {
        let rows = RowIds::of_runs(fragment.runs.clone()).and(ids);
        if !rows.is_empty() {
            let is_listed = |spec: &&ColumnSpec| {
                columns.contains(&spec.id) && (spec.fill.is_none() || file_of(&fragment.files, spec.id).is_some())
            };
            found.push((rows, theirs.schema.columns.iter().filter(is_listed).collect()));
        }
        Ok(())
    })?;
    // A sample has a column's fill value unless it was given another one, in its fragment or later.
    for spec in theirs.schema.columns.iter().filter(|spec| spec.fill.is_some() && columns.contains(&spec.id)) {
        let later = theirs.overlay_rows(|overlay| overlay.columns.contains(&spec.id))?;
        for (rows, specs) in std::mem::take(&mut found) {
            match specs.iter().any(|own| own.id == spec.id) {
                true => found.push((rows, specs)),
                false => {
                    found.push((rows.and(&later), specs.iter().copied().chain([spec]).collect()));
                    found.push((rows.minus(&later), specs));
                }
            }
        }
        found.retain(|(rows, _)| !rows.is_empty());
    }
    for (rows, mut specs) in found {
        specs.sort_by_key(|spec| spec.id);
        let ids: Vec<u64> = rows.iter().collect();
        let positions = theirs.positions_of(&ids.iter().map(|id| id.cast_signed()).collect::<Vec<i64>>())?;
        let at: Vec<PlacedRun> =
            ids.into_iter().zip(positions).map(|(first, position)| (Run { first, count: 1 }, position)).collect();
        let Rewritten { fragments, features, .. } = rewritten(theirs, &specs, &at, &HashMap::new(), puts)?;
        all.fragments.extend(fragments);
        all.features |= features;
    }
    Ok(all)
}

/// Write the words of `theirs` that `ours` lacks. Codes of `ours` keep their meaning. Cost: one put per category column with new words, for
/// which both vocabularies are read.
pub fn new_words(ours: &Snapshot, theirs: &Snapshot, puts: &mut Vec<String>) -> Result<Vec<WordsSegment>> {
    let mut added = Vec::new();
    let known: HashSet<ObjectRef> = ours.words_segments().map(|segment| segment.object).collect();
    let new: HashSet<u64> = theirs
        .words_segments()
        .filter(|segment| !known.contains(&segment.object))
        .map(|segment| segment.column)
        .collect();
    for spec in ours.schema.columns.iter().filter(|spec| spec.kind.is_category() && new.contains(&spec.id)) {
        let (own, other) = (ours.vocabulary(spec.id)?, theirs.vocabulary(spec.id)?);
        let words: Vec<&str> = other.iter().filter(|word| own.code(word).is_none()).collect();
        if !words.is_empty() {
            added.push(write_words(&ours.context, spec.id, &words, puts)?);
        }
    }
    Ok(added)
}

/// Write values of `theirs` as overlays. Columns with the same samples share files. Cost: reads and writes the values once.
pub fn copied_values(
    theirs: &Arc<Snapshot>,
    values: &[(ColumnSpec, RowIds)],
    puts: &mut Vec<String>,
) -> Result<(Vec<Overlay>, u64)> {
    let mut alike: Vec<(&RowIds, Vec<&ColumnSpec>)> = Vec::new();
    for (spec, rows) in values.iter().filter(|(_, rows)| !rows.is_empty()) {
        match alike.iter_mut().find(|(known, _)| *known == rows) {
            Some((_, specs)) => specs.push(spec),
            None => alike.push((rows, vec![spec])),
        }
    }
    let (schema, budget) = (&theirs.schema, Config::memory_bytes() as usize / 16);
    let (mut overlays, mut features) = (Vec::new(), 0);
    for (rows, specs) in alike {
        let (mut pending, mut lists) = (Pending::default(), HashMap::<u64, WordList>::new());
        let mut flush = |pending: &mut Pending, lists: &mut HashMap<u64, WordList>| -> Result<()> {
            let (written, used) = write_values(&theirs.context, schema, pending, std::mem::take(lists), puts)?;
            overlays.extend(written);
            features |= used;
            Ok(())
        };
        let (mut from, mut group) = (0, GroupSize::default());
        while let Some(ids) = rows.next_group(&mut from, group.samples) {
            let positions = theirs.positions_of(&ids.iter().map(|id| id.cast_signed()).collect::<Vec<i64>>())?;
            let mut reader = Reader::new(theirs.clone(), positions, OnCorrupt::Raise)?;
            let pulled = reader.leave_out_large(&specs)?;
            if pulled {
                flush(&mut pending, &mut lists)?;
            }
            reader.fetch(&specs, Purpose::Take)?;
            let mut columns = Vec::new();
            for spec in &schema.columns {
                let is_copied = specs.iter().any(|copied| copied.id == spec.id);
                columns.push(is_copied.then(|| reader.stored(spec, lists.entry(spec.id).or_default())).transpose()?);
            }
            let before = pending.bytes();
            pending.push(&ids, schema, columns);
            group.note(ids.len(), pending.bytes() - before);
            if pulled || pending.bytes() > budget {
                flush(&mut pending, &mut lists)?;
            }
        }
        flush(&mut pending, &mut lists)?;
    }
    Ok((overlays, features))
}

/// Return the overlay that hides these samples: `Overlay::deleting` them, `without` them, as they never lived on the branch, or `gone`. None if there
/// are none. Cost: at most one put.
pub fn hiding(
    snapshot: &Snapshot,
    rows: &RowIds,
    of: fn(RowSet) -> Overlay,
    puts: &mut Vec<String>,
) -> Result<Option<Overlay>> {
    match rows.is_empty() {
        true => Ok(None),
        false => Ok(Some(of(write_rows(&snapshot.context, rows, puts)?))),
    }
}

/// What a merge changes of the samples that `ours` does not have.
#[derive(Default)]
pub struct Turned {
    /// Samples that are hidden in fragments of `ours`, and get a position.
    pub revived: RowIds,
    /// Absent samples, of which the branch learns that they were deleted.
    pub settled: RowIds,
    /// Gone samples, which were written again.
    pub back: RowIds,
}

impl Turned {
    pub fn is_empty(&self) -> bool {
        self.revived.is_empty() && self.settled.is_empty() && self.back.is_empty()
    }
}

/// Return a snapshot with the additions, and with the stages of `theirs`. The deletions, the absences and the gone samples are written again if they change.
pub fn combined(
    ours: &Snapshot,
    theirs: &Snapshot,
    additions: &Additions,
    turned: &Turned,
    puts: &mut Vec<String>,
) -> Result<Snapshot> {
    let mut overlays: Vec<Overlay> = ours.overlays.all().iter().chain(&additions.overlays).cloned().collect();
    let Turned { revived, settled, back } = turned;
    if !turned.is_empty() {
        let without_values = Overlays::new(overlays.extract_if(.., |overlay| !overlay.has_values()).collect());
        let rows = |is_wanted: fn(&Overlay) -> bool| ours.context.all_row_ids(without_values.rows(is_wanted));
        let (deleted, absent, gone) =
            (rows(Overlay::is_deletion)?, rows(Overlay::is_absence)?, rows(Overlay::is_gone)?);
        overlays.extend(hiding(ours, &deleted.minus(revived).or(settled), Overlay::deleting, puts)?);
        overlays.extend(hiding(ours, &absent.minus(revived).minus(settled), Overlay::without, puts)?);
        overlays.extend(hiding(ours, &gone.minus(back), Overlay::gone, puts)?);
    }
    let mut combined = ours.combined(additions.parts.clone(), overlays, &additions.words);
    additions.overlays.iter().for_each(|overlay| note_changed(&mut combined.attachments, overlay));
    if !back.is_empty() {
        // They were written again with the values of `theirs`.
        let rows = write_rows(&ours.context, back, puts)?;
        combined.attachments.iter_mut().for_each(|attachment| attachment.changed.push(rows.clone()));
    }
    combined.stages.extend(theirs.stages.iter().filter(|stages| !ours.stages.contains(stages)));
    Ok(combined)
}
