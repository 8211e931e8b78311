//! A snapshot: the immutable state at one commit. It maps positions and row ids to fragments and rows.

pub mod attachments;
pub mod copies;
mod given;
pub mod live;
pub mod open;
pub mod overlays;
pub mod own;
mod ranks;
pub mod row_ids;
pub mod sizes;
pub mod statistics;
pub mod values;
pub mod vocabulary;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use penstock_error::{Error, Result};
use penstock_format::SnapshotId;
use penstock_format::cursor::malformed;
use penstock_format::files::FileRef;
use penstock_format::ids::{ObjectRef, Run, lineage_of, root_name, row_id};
use penstock_format::manifest::{Attachment, Fragment, PageRef, Root, WordsSegment};
use penstock_format::overlay::Overlay;
use penstock_format::record::{Delta, FEATURE_TILED, Record};
use penstock_format::rows::RowSet;
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_storage::Access;
use penstock_storage::process::PerProcess;
use penstock_tensor::counted;
use quick_cache::sync::Cache;

use self::attachments::{check_attachments, note_changed};
use self::live::{Live, ManifestPart};
use self::overlays::{KeptPatches, Overlays, Patch, PatchWeight};
use self::row_ids::PartRanges;
use self::vocabulary::{CodeTables, Vocabulary};
use crate::log::newest::LogKey;
use crate::log::records::LogEntry;
use crate::store::context::Context;

// Cycle with `live.rs`: a snapshot owns these tables, and the other files in this folder add the methods that use them.

#[derive(Clone)]
pub struct Snapshot {
    pub context: Arc<Context>,
    pub entry: LogEntry,
    pub root: Arc<Root>,
    pub schema: Arc<Schema>,
    pub parts: Arc<Vec<ManifestPart>>,
    pub overlays: Arc<Overlays>,
    /// Stages whose fragments were replaced.
    pub stages: Vec<ObjectRef>,
    /// Attachments, with the row sets of all overlays that changed what they cover.
    pub attachments: Vec<Attachment>,
    pub(super) words: HashMap<u64, Vec<WordsSegment>>,
    pub(super) tables: Arc<PerProcess<Tables>>,
}

/// What a process has found out about a snapshot so far.
#[derive(Default)]
pub(super) struct Tables {
    /// Vocabularies of category columns, and tables that map each data file's local codes to vocabulary codes.
    pub codes: Mutex<CodeTables>,
    pub live: OnceLock<Live>,
    pub ranges: OnceLock<PartRanges>,
    /// The newer values of columns, by part and column. Most snapshots have none.
    pub patches: OnceLock<Cache<(usize, u64), Arc<Patch>, PatchWeight>>,
    /// Those that snapshots of one transaction share.
    pub kept: OnceLock<Arc<KeptPatches>>,
}

impl Snapshot {
    /// Build the snapshot of a record from the record's root, without reading any object.
    pub fn with_root(context: Arc<Context>, entry: LogEntry, root: Arc<Root>) -> Result<Snapshot> {
        let record = &entry.record;
        if root.dataset != record.dataset || root.branch == record.branch && root.number > record.number {
            let name = root_name(record.root.id);
            return Err(malformed(format!("cannot read `{name}`: it is the root of a different commit")));
        }
        let schema = context.caches.get().schema(&root.schema)?;
        let mut parts: Vec<ManifestPart> = root.pages.iter().map(|page| ManifestPart::Page(*page)).collect();
        let (mut segments, mut overlays) = (root.words.clone(), root.overlays.clone());
        let mut attachments = root.attachments.clone();
        for delta in &record.deltas {
            match delta {
                Delta::Fragment(fragment) => parts.push(ManifestPart::Fragment(fragment.clone())),
                Delta::Page(page) => parts.push(ManifestPart::Page(*page)),
                Delta::Words(words) => segments.push(*words),
                Delta::Overlay(overlay) => {
                    note_changed(&mut attachments, overlay);
                    overlays.push(overlay.clone());
                }
                Delta::Attachment(attachment) => attachments.push(attachment.clone()),
                Delta::Detached(id) => attachments.retain(|attachment| attachment.object.id != *id),
            }
        }
        check_attachments(&attachments, &schema, record)?;
        let overlays = Overlays::new(overlays);
        let found = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.samples()));
        let deleted = overlays.rows(Overlay::hides).map(RowSet::ids).try_fold(0u64, u64::checked_add);
        if found != Some(record.samples) || deleted != Some(record.samples - record.live) {
            return Err(malformed(format!(
                "commit {} has {} samples ({} live), but its manifest has {}, of which {} are deleted or absent",
                record.snapshot(),
                record.samples,
                record.live,
                counted(found),
                counted(deleted)
            )));
        }
        let next = row_id(record.lineage, record.next_counter);
        let is_unknown = |page: &PageRef| {
            let end = page.least.saturating_add(page.span);
            page.span > 0 && end > next && lineage_of(end - 1) == record.lineage
        };
        if root.pages.iter().any(is_unknown) {
            let text = format!("the manifest of commit {} has row ids that no commit allocated", record.snapshot());
            return Err(malformed(text));
        }
        let known = overlays.rows(Overlay::is_gone).map(RowSet::ids).fold(record.samples, u64::saturating_add);
        if let Some(overlay) = overlays.all().iter().find(|overlay| !overlay.is_gone() && overlay.rows.ids() > known) {
            let (ids, samples) = (overlay.rows.ids(), record.samples);
            let text = format!(
                "an overlay of commit {} has {ids} row ids, but the commit has only {samples} samples",
                record.snapshot()
            );
            return Err(malformed(text));
        }
        let mut words: HashMap<u64, Vec<WordsSegment>> = HashMap::new();
        for segment in segments {
            words.entry(segment.column).or_default().push(segment);
        }
        Ok(Snapshot {
            context,
            entry,
            stages: root.stages.clone(),
            attachments,
            root,
            schema,
            parts: Arc::new(parts),
            overlays: Arc::new(overlays),
            words,
            tables: Arc::new(PerProcess::new(Tables::default)),
        })
    }

    /// Return this snapshot with a different context of the same dataset, without reading any object.
    pub fn within(&self, context: Arc<Context>) -> Snapshot {
        Snapshot { context, ..self.clone() }
    }

    /// Return a copy that has found out nothing yet, because it will be changed.
    fn anew(&self) -> Snapshot {
        Snapshot { tables: Arc::new(PerProcess::new(Tables::default)), ..self.clone() }
    }

    /// Return a snapshot of `samples` samples whose values are in these files, with this snapshot's schema and words.
    pub fn of_files(&self, files: Vec<FileRef>, samples: u64) -> Snapshot {
        let mut made = self.anew();
        let record = Arc::make_mut(&mut made.entry.record);
        (record.samples, record.live) = (samples, samples);
        let fragment = Fragment { samples, is_stage: false, runs: vec![Run { first: 0, count: samples }], files };
        // A column that the files lack is null, whatever it is in fragments.
        Arc::make_mut(&mut made.schema).columns.iter_mut().for_each(|column| column.fill = None);
        made.parts = Arc::new(vec![ManifestPart::Fragment(Arc::new(fragment))]);
        (made.overlays, made.stages, made.attachments) = Default::default();
        made
    }

    /// Return what a transaction on this snapshot sees: the snapshot with more fragments, overlays and vocabularies. Their row ids are
    /// provisional. `before` is what the transaction saw last: its overlays are the first of these, except for deletions.
    pub fn with_changes(
        &self,
        before: Option<&Snapshot>,
        new: Vec<Fragment>,
        overlays: Vec<Overlay>,
        words: Vec<(u64, Arc<Vocabulary>)>,
    ) -> Snapshot {
        let mut made = self.anew();
        let samples: u64 = new.iter().map(|fragment| fragment.samples).sum();
        let deleted: u64 =
            overlays.iter().filter(|overlay| overlay.is_deletion()).map(|overlay| overlay.rows.ids()).sum();
        let record = Arc::make_mut(&mut made.entry.record);
        record.samples += samples;
        record.live = (record.live + samples).saturating_sub(deleted);
        record.features_read |= FEATURE_TILED; // The new fragments may have tiles.
        overlays.iter().for_each(|overlay| note_changed(&mut made.attachments, overlay));
        let tables = made.tables.get();
        tables.codes.lock().unwrap_or_else(PoisonError::into_inner).vocabularies.extend(words);
        let kept = before.and_then(|before| before.tables.get().kept.get().cloned());
        let _ = tables.kept.set(kept.unwrap_or_else(|| Arc::new(KeptPatches::new(self.parts.len()))));
        let new = new.into_iter().map(|fragment| ManifestPart::Fragment(Arc::new(fragment)));
        made.parts = Arc::new(self.parts.iter().cloned().chain(new).collect());
        made.overlays = Arc::new(Overlays::new(self.overlays.all().iter().cloned().chain(overlays).collect()));
        made
    }

    /// Return this snapshot with more parts and words, and with these overlays instead of its own. All row ids are final.
    pub fn combined(&self, more: Vec<ManifestPart>, overlays: Vec<Overlay>, words: &[WordsSegment]) -> Snapshot {
        self.replaced(self.parts.iter().cloned().chain(more).collect(), overlays, words)
    }

    /// Return this snapshot with these parts and overlays instead of its own, and with more words. All row ids are final.
    pub fn replaced(&self, parts: Vec<ManifestPart>, overlays: Vec<Overlay>, words: &[WordsSegment]) -> Snapshot {
        let mut made = self.anew();
        let hidden: u64 = overlays.iter().filter(|overlay| overlay.hides()).map(|overlay| overlay.rows.ids()).sum();
        let record = Arc::make_mut(&mut made.entry.record);
        record.samples = parts.iter().map(ManifestPart::samples).sum::<u64>();
        record.live = record.samples.saturating_sub(hidden);
        for segment in words {
            let first_code = self.word_count(segment.column);
            made.words.entry(segment.column).or_default().push(WordsSegment { first_code, ..*segment });
        }
        made.parts = Arc::new(parts);
        made.overlays = Arc::new(Overlays::new(overlays));
        made
    }

    /// Return this snapshot with the samples that are deleted or absent. Their values are those before the deletion.
    pub fn with_hidden(&self) -> Snapshot {
        self.combined(Vec::new(), self.overlays.all().iter().filter(|overlay| !overlay.hides()).cloned().collect(), &[])
    }

    /// Return this snapshot with another schema. `others` have the words of category columns that this snapshot lacks.
    pub fn with_schema(&self, schema: Arc<Schema>, others: &[&Snapshot]) -> Snapshot {
        let mut made = self.anew();
        for spec in schema.columns_missing_in(&self.schema) {
            let known = others.iter().find_map(|other| other.words.get(&spec.id));
            made.words.extend(known.map(|segments| (spec.id, segments.clone())));
        }
        made.attachments.retain(|attachment| attachment.columns.iter().all(|column| schema.has_column(*column)));
        made.schema = schema;
        made
    }

    /// Return whether all data files are mapped.
    pub fn is_mapped(&self) -> bool {
        self.context.reads().features().access.is_some_and(Access::is_mapped)
    }

    /// Return whether the data files of these columns can be read as if they were mapped now, although the store maps only some files. Cost:
    /// reads the manifest, unless all files are mapped or none.
    pub fn is_mapped_now(&self, columns: &[u64]) -> Result<bool> {
        if self.context.reads().features().access.is_some() {
            return Ok(self.is_mapped());
        }
        let mut all_mapped = true;
        self.each_file(Some(columns), |file, _| {
            all_mapped = all_mapped && !self.context.any_ranged(std::iter::once(file).filter(|file| file.is_object()));
            Ok(())
        })?;
        Ok(all_mapped)
    }

    /// Return which log the snapshot's branch has.
    pub fn log_key(&self) -> LogKey {
        let storage = self.context.storage.as_ref();
        let place = storage.place();
        let handle = if place.is_some() { 0 } else { Arc::as_ptr(&self.context.caches).addr() };
        LogKey {
            uri: storage.uri().to_owned(),
            place,
            handle,
            dataset: self.record().dataset,
            branch: self.id().branch,
        }
    }

    pub fn record(&self) -> &Record {
        &self.entry.record
    }

    pub fn id(&self) -> SnapshotId {
        self.entry.record.snapshot()
    }

    /// Return the number of samples, deleted ones not included.
    pub fn len(&self) -> u64 {
        self.entry.record.live
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn column(&self, name: &str) -> Result<&ColumnSpec> {
        let found = self.schema.column(name).map(|(_, column)| column);
        found.ok_or_else(|| {
            Error::new(
                "column-not-found",
                format!("cannot read column `{name}`: `{}` has no such column", self.context.storage.uri()),
            )
            .hint(self.schema.names())
        })
    }
}
