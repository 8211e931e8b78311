//! A snapshot: the immutable state at one commit. It maps positions and row ids to fragments and rows.

pub mod copies;
pub mod live;
pub mod open;
pub mod row_ids;
pub mod sizes;
pub mod values;
pub mod vocabulary;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use penstock_error::{Error, Result};
use penstock_format::SnapshotId;
use penstock_format::cursor::malformed;
use penstock_format::ids::root_name;
use penstock_format::manifest::{Root, WordsSegment};
use penstock_format::record::{Delta, Record};
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_storage::Access;
use penstock_storage::process::PerProcess;

use self::live::{Live, Part};
use self::vocabulary::CodeTables;
use crate::log::records::LogEntry;
use crate::store::context::Context;

// Cycle with `live.rs`: a snapshot owns these tables, and the other files in this folder add the methods that use them.

pub struct Snapshot {
    pub context: Arc<Context>,
    pub entry: LogEntry,
    pub root: Arc<Root>,
    pub schema: Arc<Schema>,
    /// Maps positions to parts.
    pub live: Arc<Live>,
    pub(super) words: HashMap<u64, Vec<WordsSegment>>,
    /// Vocabularies of category columns, and tables that map each data file's local codes to vocabulary codes.
    pub(super) codes: PerProcess<Mutex<CodeTables>>,
    /// Sorted tuples (first row id, count, position), built when a row id is first looked up.
    pub(super) row_index: PerProcess<OnceLock<Vec<(u64, u64, u64)>>>,
}

impl Snapshot {
    /// Build the snapshot of a record from the record's root, without reading any object.
    pub fn with_root(context: Arc<Context>, entry: LogEntry, root: Arc<Root>) -> Result<Snapshot> {
        let record = &entry.record;
        if root.dataset != record.dataset || root.branch != record.branch || root.number > record.number {
            let name = root_name(record.root.id);
            return Err(malformed(format!("cannot read `{name}`: it is the root of a different commit")));
        }
        let schema = Arc::new(Schema::parse(&root.schema)?);
        let mut parts: Vec<Part> = root.pages.iter().map(|page| Part::Page(*page)).collect();
        let mut segments = root.words.clone();
        for delta in &record.deltas {
            match delta {
                Delta::Fragment(fragment) => parts.push(Part::Fragment(Arc::new(fragment.clone()))),
                Delta::Page(page) => parts.push(Part::Page(*page)),
                Delta::Words(words) => segments.push(*words),
            }
        }
        let live = Live::new(parts)?;
        if live.samples() != record.samples || record.samples != record.live {
            let found = live.samples();
            return Err(malformed(format!(
                "commit {} has {} samples ({} live), but its manifest has {found}",
                record.snapshot(),
                record.samples,
                record.live
            )));
        }
        let mut words: HashMap<u64, Vec<WordsSegment>> = HashMap::new();
        for segment in segments {
            words.entry(segment.column).or_default().push(segment);
        }
        Ok(Snapshot {
            context,
            entry,
            root,
            schema,
            live: Arc::new(live),
            words,
            codes: PerProcess::new(Mutex::default),
            row_index: PerProcess::new(OnceLock::new),
        })
    }

    /// Return this snapshot with a different context of the same dataset, without reading any object.
    pub fn within(&self, context: Arc<Context>) -> Snapshot {
        Snapshot {
            context,
            entry: self.entry.clone(),
            root: self.root.clone(),
            schema: self.schema.clone(),
            live: self.live.clone(),
            words: self.words.clone(),
            codes: PerProcess::new(Mutex::default),
            row_index: PerProcess::new(OnceLock::new),
        }
    }

    /// Return whether all data files are mapped.
    pub fn is_mapped(&self) -> bool {
        self.context.storage.access_of_all().is_some_and(Access::is_mapped)
    }

    pub fn record(&self) -> &Record {
        &self.entry.record
    }

    pub fn id(&self) -> SnapshotId {
        self.entry.record.snapshot()
    }

    /// Return the number of samples.
    pub fn len(&self) -> u64 {
        self.entry.record.live
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn column(&self, name: &str) -> Result<&ColumnSpec> {
        let found = self.schema.column(name).map(|(_, column)| column);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.schema.columns.iter().map(|column| column.name.as_str()).collect();
            Error::new("column-not-found", format!("cannot read column `{name}`: `{}` has no such column", self.context.storage.uri()))
                .hint(format!("columns: {}", names.join(", ")))
        })
    }
}
