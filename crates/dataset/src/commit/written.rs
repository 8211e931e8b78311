//! Commits that are made by one call, rather than by a transaction.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::{
    ObjectRef, data_name, page_name, root_name, rows_name, stages_name, statistics_name, words_name,
};
use penstock_format::manifest::{Fragment, Root};
use penstock_format::record::{RecordKind, Transaction};
use penstock_format::rows::RowSet;

use crate::commit::changes::{ChangeSet, Member, Proposal, transaction_entry};
use crate::commit::drive;
use crate::commit::manifest::objects::folders_of;
use crate::snapshot::Snapshot;
use crate::store::context::Context;

/// The texts of a commit.
#[derive(Debug, Clone, Copy)]
pub struct Texts<'a> {
    pub message: &'a str,
    pub author: &'a str,
    pub properties: &'a str,
}

/// A commit in the making, and the objects that were written for it. They are deleted unless the commit succeeds or may have succeeded.
pub struct Written {
    home: Arc<Context>,
    pub base: Arc<Snapshot>,
    pub puts: Vec<String>,
}

impl Written {
    /// Begin a commit that follows `base`, or is refused.
    pub fn at(base: &Arc<Snapshot>) -> Result<Written> {
        base.record().check_writable()?;
        base.entry.check_open()?;
        let (home, base) = drive::held(base)?;
        Ok(Written { home, base, puts: Vec::new() })
    }

    /// Return a proposal without changes. `samples` are the numbers of samples that it adds and deletes.
    pub fn proposal(&self, kind: RecordKind, texts: Texts, samples: (u64, u64)) -> Result<Proposal> {
        let Texts { message, author, properties } = texts;
        let entry = transaction_entry(self.base.context.new_id()?, message, author, properties, samples)?;
        let transaction = Transaction { assigned: 0, ..entry }; // Added samples have row ids of other branches.
        let own = Member { transaction, deltas: Vec::new(), changes: ChangeSet::default() };
        Ok(Proposal::new(kind, own, &self.base))
    }

    /// Delete the objects that were written for this commit and that the root joins: its root, its new fragments and its changes do not name them. Cost:
    /// one request for each of them.
    pub fn delete_joined<'a>(
        &mut self,
        root: (&ObjectRef, &Root),
        new: impl Iterator<Item = &'a Fragment>,
        changes: &ChangeSet,
    ) {
        let (reference, root) = root;
        let of_attachments = root.attachments.iter().map(|attachment| &attachment.rows);
        let rows = root
            .overlays
            .iter()
            .map(|overlay| &overlay.rows)
            .chain(of_attachments)
            .chain(changes.writes.iter().map(|change| &change.rows));
        let rows = rows
            .filter_map(|rows| if let RowSet::Object(rows) = rows { Some(rows_name(rows.object.id)) } else { None });
        let mut named: HashSet<String> = rows.collect();
        named.insert(root_name(reference.id));
        named.extend(root.pages.iter().map(|page| page_name(page.object.id)));
        named.extend(root.pages.iter().filter_map(|page| page.statistics).map(|object| statistics_name(object.id)));
        named.extend(root.words.iter().map(|segment| words_name(segment.object.id)));
        named.extend(root.overlays.iter().flat_map(|overlay| &overlay.files).map(|file| data_name(file.id)));
        named.extend(root.stages.iter().map(|stages| stages_name(stages.id)));
        named.extend(new.flat_map(|fragment| &fragment.files).map(|file| data_name(file.id)));
        // One that cannot be deleted is harmless.
        self.puts.retain(|name| named.contains(name) || self.base.context.delete(name).is_err());
    }

    /// Commit the proposal, and return the new snapshot.
    pub fn commit(&mut self, proposal: Proposal) -> Result<Snapshot> {
        let Written { home, base, puts } = self;
        let committed = drive::commit(home, base, puts, &[], proposal);
        if committed.as_ref().err().is_none_or(|error| error.code() == "commit-state-unknown") {
            self.puts.clear(); // The commit succeeded or may have succeeded.
        }
        committed
    }
}

/// Commit what `propose` returns for the newest snapshot of the handle's branch. Repeat this up to `races` times if other commits are made in the meantime.
/// Returns the new snapshot and what else `propose` returned. Without a proposal, the snapshot is the newest one.
pub fn commit_to_newest<T>(
    handle: &Arc<Snapshot>,
    races: u32,
    mut propose: impl FnMut(&mut Written) -> Result<(Option<Proposal>, T)>,
) -> Result<(Snapshot, T)> {
    let mut race = 0;
    loop {
        let newest = Arc::new(handle.refreshed()?);
        let mut written = Written::at(&newest)?;
        let (proposal, done) = propose(&mut written)?;
        let Some(proposal) = proposal else { return Ok((newest.within(handle.context.clone()), done)) };
        written.base.context.storage.sync(&folders_of(&written.puts))?;
        match written.commit(proposal) {
            Err(error) if error.code() == "conflict" && race < races => race += 1,
            committed => return Ok((committed?, done)),
        }
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        for name in self.puts.drain(..) {
            let _ = self.base.context.delete(&name); // A leftover object is harmless, because no snapshot refers to it.
        }
    }
}
