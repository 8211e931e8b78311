//! Tests layouts and fences: what began before a fence fails, and a layout is applied to what others have committed in the meantime.

use std::sync::Arc;

use penstock_dataset::{Isolation, Snapshot, Texts, Transaction, Validate, compact, create, fence, verify};
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::ids::{ObjectRef, Run, page_name, record_name, root_name};
use penstock_format::manifest::{Attachment, Fragment, PageRef, Root, encode_pages};
use penstock_format::overlay::Overlay;
use penstock_format::record::RecordKind;
use penstock_format::rows::RowSet;
use penstock_storage::Memory;
use penstock_testkit::samples;

const TEXTS: Texts = Texts { message: "", author: "test", properties: "{}" };

fn open(name: &str) -> Result<Arc<Snapshot>> {
    samples::open(Memory::named(name))
}

fn append(base: &Arc<Snapshot>) -> Result<Transaction> {
    let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
    transaction.append(samples::batch(1, 3)?, Validate::Header)?;
    Ok(transaction)
}

#[test]
fn what_began_before_a_fence_fails() -> Result<()> {
    let name = "layouts fence";
    create(Arc::new(Memory::named(name)), samples::schema(), "create", "test")?;
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
    create(Arc::new(Memory::named(name)), samples::schema(), "create", "test")?;
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
    samples::check_verified(&after)?;
    let (same, done) = compact(&Arc::new(laid_out), TEXTS)?;
    assert_eq!((same.len(), done.dropped), (after.len(), 0));
    Ok(())
}

/// Change the root and the only page of a layout, and return what reading and `verify` say.
fn crafted(name: &str, change: impl FnOnce(&mut Vec<Fragment>, &mut Root)) -> Result<[Option<&'static str>; 2]> {
    create(Arc::new(Memory::named(name)), samples::schema(), "create", "test")?;
    for seed in 0..3 {
        samples::append(&open(name)?, seed, 6)?;
    }
    let mut first = Transaction::begin(open(name)?, Isolation::Serializable)?;
    first.delete(&[0, 1, 2, 7])?;
    first.commit("", "test", "{}")?;
    let (laid_out, _) = compact(&open(name)?, TEXTS)?;
    let (mut record, mut root) = (laid_out.record().clone(), laid_out.root.as_ref().clone());
    let mut fragments = laid_out.fragments(0)?.as_slice().to_vec();
    change(&mut fragments, &mut root);
    let [(body, own)] = &encode_pages(&fragments)[..] else { panic!("several pages") };
    let page = PageRef { statistics: None, ..PageRef::of(Id([1; 16]), body, own) };
    root.pages.iter_mut().for_each(|known| *known = page);
    let written = root.encode();
    record.root = ObjectRef::of(Id([2; 16]), &written);
    record.samples = root.pages.iter().map(|page| page.samples).sum();
    record.live = record.samples;
    let mut objects = Memory::named(name).objects();
    objects.insert(page_name(Id([1; 16])), body.clone().into());
    objects.insert(root_name(Id([2; 16])), written.into());
    objects.insert(record_name(0, record.number), record.encode().into());
    let opened = || samples::open(Memory::holding(objects.clone()));
    let read = opened().and_then(|snapshot| samples::contents(&snapshot)).err().map(|error| error.code());
    let found = match opened() {
        Err(error) => Some(error.code()),
        Ok(snapshot) => verify(&snapshot, |_| {})?.problems.first().map(|problem| problem.error.code()),
    };
    Ok([read, found])
}

fn far() -> RowSet {
    RowSet::Runs(vec![Run { first: 4000, count: 2 }])
}

#[test]
fn a_layout_of_samples_that_do_not_exist_or_exist_twice_is_refused() -> Result<()> {
    type Change = fn(&mut Vec<Fragment>, &mut Root);
    let malformed = Some("object-malformed");
    let cases: [(&str, Change, [Option<&str>; 2]); 7] = [
        ("nothing", |_, _| {}, [None, None]),
        (
            "row ids that nobody gave out",
            |fragments, _| fragments[0].runs.iter_mut().for_each(|run| run.first += 1000),
            [malformed; 2],
        ),
        ("a page twice", |_, root| root.pages.extend(root.pages.clone()), [malformed; 2]),
        ("a fragment twice", |fragments, _| fragments.extend(fragments.clone()), [malformed; 2]),
        (
            "a gone sample that a fragment has",
            |_, root| root.overlays.push(Overlay::gone(RowSet::Runs(vec![Run { first: 4, count: 1 }]))),
            [None, malformed],
        ),
        ("a gone sample that never was", |_, root| root.overlays.push(Overlay::gone(far())), [None, malformed]),
        (
            "an attachment to samples that never were",
            |_, root| {
                let object = ObjectRef { id: Id([3; 16]), bytes: 1, crc: 0 };
                let (kind, parameters) = ("test.index".into(), "{}".into());
                root.attachments.push(Attachment {
                    kind,
                    object,
                    columns: Vec::new(),
                    rows: far(),
                    changed: Vec::new(),
                    parameters,
                });
            },
            [None, malformed],
        ),
    ];
    for (what, change, expected) in cases {
        assert_eq!(crafted(&format!("layouts crafted {what}"), change)?, expected, "{what}");
    }
    Ok(())
}
