//! Tests layouts and fences: what began before a fence fails, and a layout is applied to what others have committed in the meantime.

use std::sync::Arc;

use penstock_dataset::{Context, Isolation, Snapshot, Texts, Transaction, Validate, compact, create, fence, verify};
use penstock_error::Result;
use penstock_format::record::RecordKind;
use penstock_storage::Memory;
use penstock_testkit::samples;

const TEXTS: Texts = Texts { message: "", author: "test", properties: "{}" };

fn open(name: &str) -> Result<Arc<Snapshot>> {
    Snapshot::open(Context::new(Box::new(Memory::named(name))), 0).map(Arc::new)
}

fn append(base: &Arc<Snapshot>) -> Result<Transaction> {
    let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
    transaction.append(samples::batch(1, 3)?, Validate::Header)?;
    Ok(transaction)
}

#[test]
fn what_began_before_a_fence_fails() -> Result<()> {
    let name = "layouts fence";
    create(Box::new(Memory::named(name)), samples::schema(), "create", "test")?;
    let base = Arc::new(samples::append(&open(name)?, 0, 6)?.1);
    let (before, stage) = (append(&base)?, append(&base)?.into_stage()?);
    let fenced = fence(&base, 3, TEXTS)?;
    assert_eq!((fenced.record().kind, fenced.record().gc_epoch, fenced.len()), (RecordKind::Fence, 3, 6));
    assert_eq!(before.commit("", "test", "{}").err().map(|error| error.code()), Some("transaction-expired"));
    let mut with_stage = Transaction::begin(open(name)?, Isolation::Serializable)?;
    with_stage.add(&[stage])?;
    assert_eq!(with_stage.commit("", "test", "{}").err().map(|error| error.code()), Some("transaction-expired"));
    // A handle of before may begin a transaction, which knows only the old epoch.
    assert_eq!(append(&base)?.commit("", "test", "{}").err().map(|error| error.code()), Some("transaction-expired"));
    assert_eq!(append(&open(name)?)?.commit("", "test", "{}")?.1.len(), 9);
    // A lower epoch changes nothing, and fences of two collectors do not end each other.
    assert_eq!(fence(&base, 2, TEXTS)?.record().gc_epoch, 3);
    Ok(())
}

#[test]
fn a_layout_keeps_samples_and_tells_older_handles_from_newer_ones() -> Result<()> {
    let name = "layouts handles";
    create(Box::new(Memory::named(name)), samples::schema(), "create", "test")?;
    for seed in 0..5 {
        samples::append(&open(name)?, seed, 6)?;
        samples::change(&open(name)?, seed)?;
    }
    let before = open(name)?;
    // The first string has the id of the snapshot.
    let values = |snapshot: &Snapshot| samples::contents(snapshot).map(|all| all[1..].to_vec());
    let expected = values(&before)?;
    // It was made at `before`, and is committed after the layout.
    let mut late = append(&before)?;
    let (laid_out, done) = compact(&before, TEXTS)?;
    assert!(done.new_fragments < done.fragments && laid_out.record().kind == RecordKind::Layout, "{done:?}");
    assert_eq!((values(&laid_out)?, values(&before)?), (expected.clone(), expected));
    late.append(samples::batch(2, 1)?, Validate::Header)?;
    let (_, after) = late.commit("", "test", "{}")?;
    assert_eq!(after.len(), before.len() + 4);
    assert!(verify(&after, |_| {})?.problems.is_empty());
    let (same, done) = compact(&Arc::new(laid_out), TEXTS)?;
    assert_eq!((same.len(), done.dropped), (after.len(), 0));
    Ok(())
}
