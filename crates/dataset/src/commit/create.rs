//! Create a dataset by writing its root and commit 0.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_cache::Tiered;
use penstock_error::{Error, Result};
use penstock_format::ids::{NameOwner, ObjectRef, log_folder, owner_of, record_name, root_name};
use penstock_format::manifest::Root;
use penstock_format::record::{Change, ChangeKind, Record, RecordKind};
use penstock_format::rows::RowSet;
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_storage::{CERTAIN_TRIES, Created, Store, create_certainly};

use super::changes::transaction_entry;
use crate::config::now_us;
use crate::log::records::LogEntry;
use crate::log::{newest, records};
use crate::snapshot::Snapshot;
use crate::store::context::Context;

/// Create a dataset by writing its root and commit 0. Objects left by an unfinished `create` do not prevent a new attempt.
pub fn create(tiered: impl Into<Tiered>, columns: Vec<ColumnSpec>, message: &str, author: &str) -> Result<Snapshot> {
    let schema = Schema::create(columns)?;
    let context = Context::new(tiered);
    let store = context.storage.as_ref();
    store.writable()?;
    check_free(store)?;
    store.initialise()?;
    let held = store.held()?;
    let store = held.as_deref().unwrap_or(store);
    let dataset = context.new_id()?;
    let root = Root {
        dataset,
        branch: 0,
        number: 0,
        schema: schema.to_json()?,
        pages: Vec::new(),
        words: Vec::new(),
        overlays: Vec::new(),
        stages: Vec::new(),
        attachments: Vec::new(),
    };
    let root_id = context.new_id()?;
    let root_body = root.encode();
    let record = Record {
        kind: RecordKind::Create,
        dataset,
        branch: 0,
        number: 0,
        features_read: 0,
        features_write: 0,
        time_us: now_us(),
        gc_epoch: 0,
        landmark: 0,
        parents: Vec::new(),
        transactions: vec![transaction_entry(context.new_id()?, message, author, "{}", (0, 0))?],
        lineage: 0,
        next_counter: 0,
        samples: 0,
        live: 0,
        root: ObjectRef::of(root_id, &root_body),
        deltas: Vec::new(),
        changes: vec![Change { kind: ChangeKind::Schema, columns: Vec::new(), rows: RowSet::Runs(Vec::new()) }],
        data: Bytes::new(),
    };
    let body = record.encode();
    let entry = LogEntry::parse(&body.clone().into(), 0, 0)?;
    let snapshot = Snapshot::with_root(context.clone(), entry, Arc::new(root))?;
    context.hold_to(dataset)?;
    let root_name = root_name(root_id);
    let stored = store.put(&root_name, &root_body).and_then(|()| store.sync(&["r"]));
    // A remote store is checked only now: MinIO removes the folder of the last object deleted, here a probe, and refuses a put by
    // another process at that moment.
    let created = stored.and_then(|()| store.prove()).and_then(|()| create_first(store, &body, &record));
    if let Err(error) = created {
        if error.code() != "commit-state-unknown" {
            let _ = store.delete(&root_name); // An orphaned root is harmless.
        }
        return Err(error);
    }
    newest::leave_hint(store, &log_folder(0), 0);
    Ok(snapshot)
}

/// Put commit 0. No later step may fail. If a response is lost, return success only when the outcome is certain.
fn create_first(store: &dyn Store, body: &[u8], record: &Record) -> Result<()> {
    let name = record_name(0, 0);
    for _ in 0..CERTAIN_TRIES {
        match create_certainly(store, &name, body)? {
            Created::Exists => match records::read_record(store, 0, 0) {
                Ok(entry) if entry.record.uuid() == record.uuid() => return Ok(()),
                Ok(_) => return Err(exists(store)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)), // Wait briefly, then put the same body again.
            },
            _ => return Ok(()),
        }
    }
    let text =
        format!("cannot determine whether dataset `{}` was created: `{name}` exists but cannot be read", store.uri());
    Err(Error::new("commit-state-unknown", text).hint("try to open the dataset, or create it elsewhere"))
}

/// Refuse a location that already contains a dataset or foreign objects.
fn check_free(store: &dyn Store) -> Result<()> {
    if store.exists(&record_name(0, 0))? {
        return Err(exists(store));
    }
    let mut taken = None;
    store.survey(&mut |name| {
        taken = match owner_of(name) {
            NameOwner::Ours => return ControlFlow::Continue(()),
            NameOwner::Commit => Some(exists(store)),
            NameOwner::Foreign => {
                let text = format!(
                    "cannot create dataset `{}`: it contains `{name}`, which is not part of a dataset",
                    store.uri()
                );
                Some(Error::new("folder-not-empty", text).hint("choose a new folder or prefix"))
            }
        };
        ControlFlow::Break(())
    })?;
    taken.map_or(Ok(()), Err)
}

fn exists(store: &dyn Store) -> Error {
    Error::new("dataset-exists", format!("cannot create dataset `{}`: a dataset already exists there", store.uri()))
        .hint("open it with ps.open, or choose another location")
}
