//! Branches: create, list, delete, merge, reset and compact them.

use std::collections::BTreeMap;
use std::sync::Arc;

use numpy::PyArray1;
use penstock_dataset::{Compacted, Merged, Policies, Policy, Texts};
use penstock_error::Result;
use penstock_format::SnapshotId;
use pyo3::prelude::*;

use crate::errors::OrRaise;
use crate::versions::snapshot::Snapshot;

/// Message, author and properties.
pub type Given = (String, String, String);

pub fn texts((message, author, properties): &Given) -> Texts<'_> {
    Texts { message, author, properties }
}

/// The policy of most columns, and those of the columns that differ.
type Chosen = (String, Vec<(String, String)>);

fn policies((others, columns): Chosen) -> Result<Policies> {
    let columns = columns.into_iter().map(|(name, policy)| Ok((name, Policy::parse(&policy)?)));
    Ok(Policies::new(Policy::parse(&others)?, columns.collect::<Result<_>>()?))
}

/// Create a branch at a snapshot, and return its first snapshot.
#[pyfunction]
pub fn create_branch(py: Python<'_>, snapshot: &Snapshot, name: &str, author: &str) -> PyResult<Snapshot> {
    let made = py.detach(|| penstock_dataset::create_branch(&snapshot.inner, name, author)).or_raise(py)?;
    Ok(Snapshot { inner: Arc::new(made), options: snapshot.options.clone() })
}

#[pyfunction]
pub fn delete_branch(py: Python<'_>, snapshot: &Snapshot, name: &str, author: &str) -> PyResult<()> {
    py.detach(|| penstock_dataset::delete_branch(&snapshot.inner.context, name, author)).or_raise(py)
}

/// Return the newest snapshots of all branches: name → snapshot id.
#[pyfunction]
pub fn branches(py: Python<'_>, snapshot: &Snapshot) -> PyResult<BTreeMap<String, String>> {
    let found = py.detach(|| penstock_dataset::branches(&snapshot.inner.context)).or_raise(py)?;
    Ok(found.into_iter().map(|(name, newest)| (name, newest.to_string())).collect())
}

/// Return the name of a snapshot's branch, or None if the branch was deleted.
#[pyfunction]
pub fn branch_name(py: Python<'_>, snapshot: &Snapshot) -> PyResult<Option<String>> {
    py.detach(|| penstock_dataset::branch_name(&snapshot.inner.context, snapshot.inner.id().branch)).or_raise(py)
}

/// A snapshot, and the row ids that it got.
type Outcome<'py> = (Snapshot, Bound<'py, PyArray1<i64>>);

fn outcome<'py>(py: Python<'py>, handle: &Snapshot, merged: Result<Merged>) -> PyResult<Outcome<'py>> {
    let Merged { snapshot, row_ids } = merged.or_raise(py)?;
    let row_ids: Vec<i64> = row_ids.iter().map(u64::cast_signed).collect();
    Ok((Snapshot { inner: Arc::new(snapshot), options: handle.options.clone() }, PyArray1::from_vec(py, row_ids)))
}

/// Merge another snapshot into the branch of this one.
#[pyfunction]
pub fn merge<'py>(
    py: Python<'py>,
    snapshot: &Snapshot,
    other: &str,
    chosen: Chosen,
    given: Given,
) -> PyResult<Outcome<'py>> {
    let merged = py.detach(|| {
        penstock_dataset::merge(&snapshot.inner, &SnapshotId::parse(other)?, &policies(chosen)?, texts(&given))
    });
    outcome(py, snapshot, merged)
}

/// Copy the changes of one commit to the branch of this snapshot.
#[pyfunction]
pub fn cherry_pick<'py>(
    py: Python<'py>,
    snapshot: &Snapshot,
    commit: &str,
    chosen: Chosen,
    given: Given,
) -> PyResult<Outcome<'py>> {
    let merged = py.detach(|| {
        penstock_dataset::cherry_pick(&snapshot.inner, &SnapshotId::parse(commit)?, &policies(chosen)?, texts(&given))
    });
    outcome(py, snapshot, merged)
}

/// Give the branch of this snapshot the state of another snapshot.
#[pyfunction]
pub fn reset(py: Python<'_>, snapshot: &Snapshot, target: &str, given: Given) -> PyResult<Snapshot> {
    let done = py
        .detach(|| penstock_dataset::reset(&snapshot.inner, &SnapshotId::parse(target)?, texts(&given)))
        .or_raise(py)?;
    Ok(Snapshot { inner: Arc::new(done), options: snapshot.options.clone() })
}

/// What a compaction did, by name.
type Counts = BTreeMap<&'static str, u64>;

/// Write small and worn fragments again. Returns the new snapshot, and what was done.
#[pyfunction]
pub fn compact(py: Python<'_>, snapshot: &Snapshot, given: Given) -> PyResult<(Snapshot, Counts)> {
    let (done, counts) = py.detach(|| penstock_dataset::compact(&snapshot.inner, texts(&given))).or_raise(py)?;
    let Compacted { fragments, overlays, new_fragments, written_bytes, dropped, damaged } = counts;
    let named = [
        ("fragments", fragments),
        ("overlays", overlays),
        ("new_fragments", new_fragments),
        ("written_bytes", written_bytes),
    ];
    let counts = named.into_iter().chain([("dropped_samples", dropped), ("damaged_fragments", damaged)]).collect();
    Ok((Snapshot { inner: Arc::new(done), options: snapshot.options.clone() }, counts))
}
