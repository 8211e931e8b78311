//! Records that have valid checksums but that no writer produces: their row ids were never assigned, or were assigned twice.

use std::sync::Arc;

use penstock_dataset::{Context, Isolation, Snapshot, Transaction, Validate, create, verify};
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::ids::{Run, record_name};
use penstock_format::overlay::Overlay;
use penstock_format::record::{Change, ChangeKind, Delta, Record};
use penstock_format::rows::RowSet;
use penstock_storage::Memory;
use penstock_testkit::samples;

/// Make two commits of six samples each; return the store and the newest record.
fn two_commits(name: &str) -> Result<(Memory, Record)> {
    let memory = Memory::named(name);
    let first = Arc::new(create(Arc::new(Memory::named(name)), samples::schema(), "create", "records")?);
    let (_, second) = samples::append(&first, 1, 6)?;
    let (_, third) = samples::append(&Arc::new(second), 2, 6)?;
    let record = third.record().clone();
    Ok((memory, record))
}

/// Changes a record into one that no writer produces.
type Craft = fn(&mut Record);

/// Return the store with another record of the same number.
fn with_record(memory: &Memory, record: &Record) -> Memory {
    let mut objects = memory.objects();
    objects.insert(record_name(0, record.number), record.encode().into());
    Memory::holding(objects)
}

fn runs(record: &mut Record) -> &mut Run {
    let fragments = record
        .deltas
        .iter_mut()
        .filter_map(|delta| if let Delta::Fragment(fragment) = delta { Some(fragment) } else { None });
    &mut Arc::make_mut(fragments.last().expect("a small append is stored in its record")).runs[0]
}

fn deletion(first: u64, count: u64) -> Delta {
    Delta::Overlay(Overlay::deleting(RowSet::Runs(vec![Run { first, count }])))
}

#[test]
fn row_ids_that_nobody_gave_out_are_refused() -> Result<()> {
    let changes: [(&str, Craft); 12] = [
        ("a lineage of more than 23 bits", |record| record.lineage = 1 << 23),
        ("a counter of more than 40 bits", |record| record.next_counter = (1 << 40) + 1),
        ("a counter below the number of samples", |record| record.next_counter = 11),
        ("a counter of zero", |record| record.next_counter = 0),
        ("a transaction beyond the end", |record| record.transactions[0].first_counter = 7),
        ("a transaction at the largest counter", |record| record.transactions[0].first_counter = u64::MAX),
        ("a run beyond the end", |record| runs(record).first = 7),
        ("a provisional run", |record| runs(record).first |= 1 << 63),
        ("more live samples than samples", |record| record.live += 1),
        ("an overlay with row ids beyond the end", |record| record.deltas.push(deletion(11, 2))),
        ("an overlay with provisional row ids", |record| record.deltas.push(deletion(1 << 63, 1))),
        ("an overlay without row ids", |record| record.deltas.push(deletion(3, 0))),
    ];
    let (_, record) = two_commits("nobody")?;
    let parse = |record: &Record| Record::parse(&record.encode().into(), record.branch, record.number);
    assert_eq!(parse(&record)?, record);
    for (what, change) in changes {
        let mut crafted = record.clone();
        change(&mut crafted);
        assert_eq!(parse(&crafted).map(|_| ()).map_err(|error| error.code()), Err("object-malformed"), "{what}");
    }
    Ok(())
}

#[test]
fn verify_finds_row_ids_that_were_given_out_twice() -> Result<()> {
    let changes: [(&str, Craft); 2] = [
        ("row ids assigned twice", |record| record.transactions[0].first_counter = 0),
        ("two samples with the same row id", |record| runs(record).first = 5),
    ];
    let (memory, record) = two_commits("twice")?;
    for (what, change) in [("nothing", (|_| ()) as Craft)].into_iter().chain(changes) {
        let mut crafted = record.clone();
        change(&mut crafted);
        let problems = verify(&*samples::open(with_record(&memory, &crafted))?, |_| {})?.problems;
        assert_eq!(problems.is_empty(), what == "nothing", "{what}: {problems:?}");
    }
    Ok(())
}

#[test]
fn overlays_that_do_not_fit_the_samples_are_errors() -> Result<()> {
    let (memory, record) = two_commits("overlays")?;
    let value = |first, count| {
        let rows = RowSet::Runs(vec![Run { first, count }]);
        Delta::Overlay(Overlay { columns: vec![1], id: Id([first as u8; 16]), rows, files: Vec::new() })
    };
    // Row ids 12 to 19 were assigned, but the newest snapshot has no samples for them. The third entry is where the error is found.
    let cases = [
        ("one deleted", vec![deletion(3, 1)], 11, None),
        ("null values", vec![value(3, 4)], 12, None),
        ("two deletions", vec![deletion(3, 1), deletion(8, 4)], 7, None),
        ("a wrong number of live samples", vec![deletion(3, 1)], 10, Some("open")),
        ("a deletion of a sample that does not exist", vec![deletion(13, 1)], 11, Some("read")),
        ("a sample deleted twice", vec![deletion(3, 1), deletion(2, 2)], 9, Some("read")),
        ("values of a sample that does not exist", vec![value(11, 2)], 12, Some("verify")),
        ("an overlay that is listed twice", vec![value(3, 4), value(3, 4)], 12, Some("verify")),
    ];
    for (what, overlays, live, found_by) in cases {
        let mut crafted = record.clone();
        crafted.next_counter = 20;
        crafted.live = live;
        crafted.deltas.extend(overlays);
        let found = match samples::open(with_record(&memory, &crafted)) {
            Err(error) => Some(("open", error.code())),
            Ok(snapshot) => match samples::contents(&snapshot) {
                Err(error) => Some(("read", error.code())),
                Ok(_) => verify(&snapshot, |_| {})?.problems.first().map(|problem| ("verify", problem.error.code())),
            },
        };
        assert_eq!(found, found_by.map(|by| (by, "object-malformed")), "{what}");
    }
    Ok(())
}

#[test]
fn a_change_set_of_2_to_the_62_rows_does_not_stop_an_upsert() -> Result<()> {
    let (memory, record) = two_commits("upsert")?;
    for (kind, count) in [(ChangeKind::Append, 1 << 34), (ChangeKind::Append, 1 << 62), (ChangeKind::Value, 1 << 62)] {
        let mut crafted = record.clone();
        crafted.changes = vec![Change { kind, columns: Vec::new(), rows: RowSet::Runs(vec![Run { first: 6, count }]) }];
        let context = Context::new(Arc::new(with_record(&memory, &crafted)));
        let newest = Snapshot::open(context.clone(), 0)?;
        let parent = newest.record().parents[0].snapshot();
        let mut transaction =
            Transaction::begin(Arc::new(Snapshot::open_at(context, &parent.to_string())?), Isolation::Serializable)?;
        let batch = samples::batch(3, 2)?.into_iter().filter(|input| input.name == "text").collect();
        assert_eq!(transaction.upsert("text", batch, Validate::Header)?.len(), 2);
        assert_eq!(
            transaction.commit("upsert", "records", "{}")?.1.len(),
            14,
            "the rows that exist were looked through"
        );
    }
    Ok(())
}
