//! Tests the commit state machine with replies in random order, lost replies, unreadable records, and races. Each acknowledged
//! transaction is in the log exactly once, record numbers have no gaps, and each record refers to its predecessor. A transaction
//! fails with a conflict exactly if another commit changed the same cells.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use penstock_dataset::{
    ChangeSet, Context, Event, LogEntry, Machine, Member, Proposal, Request, RowsRead, Theirs, create,
};
use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::ids::{ObjectRef, Run, record_name};
use penstock_format::manifest::Fragment;
use penstock_format::record::{Change, ChangeKind, Delta, Record, RecordKind, Transaction};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};
use penstock_storage::{Memory, Read as _};
use penstock_testkit::random::{Random, is_soak, seeds};
use penstock_testkit::samples;

type Log = BTreeMap<u64, Vec<u8>>;

/// The row ids in objects, by reference.
pub type Sets = HashMap<RowIdsRef, Arc<RowIds>>;

fn machine(uuid: u8, changes: ChangeSet) -> Machine {
    Machine::new(proposal(transaction(uuid, 0), changes, Sets::new()))
}

pub fn member(transaction: Transaction, changes: ChangeSet) -> Member {
    let fragment =
        Fragment { samples: 2, is_stage: false, runs: vec![Run { first: 1 << 63, count: 2 }], files: Vec::new() };
    Member { transaction, deltas: vec![Delta::Fragment(Arc::new(fragment))], changes }
}

pub fn proposal(transaction: Transaction, changes: ChangeSet, row_ids: Sets) -> Proposal {
    Proposal {
        kind: RecordKind::Data,
        own: member(transaction, changes),
        others: Vec::new(),
        row_ids,
        columns: Vec::new(),
        features: 0,
        base: 0,
        gc_epoch: 0,
        schema: None,
        fence_epoch: 0,
        layout: None,
        theirs: Theirs::default(),
        may_exist: false,
    }
}

pub fn transaction(uuid: u8, samples_deleted: u64) -> Transaction {
    Transaction {
        uuid: Id([uuid; 16]),
        message: "m".into(),
        author: "a".into(),
        properties: "{}".into(),
        first_counter: 0,
        assigned: 2,
        samples_added: 2,
        samples_deleted,
    }
}

/// Number of samples before the transactions begin.
const SAMPLES: u64 = 90;

/// What a transaction changes: one column of some samples, or their existence. It also appends two samples.
struct Cells {
    column: Option<u64>,
    rows: BTreeSet<u64>,
    /// The column and the rows that it reads, or all rows.
    read: Option<(u64, Option<BTreeSet<u64>>)>,
}

impl Cells {
    fn random(random: &mut Random) -> Cells {
        let column = (!random.chance(3)).then(|| 1 + random.below(2));
        // Many rows need an object, few do not.
        let (begin, step) = (random.below(SAMPLES), 1 + random.below(3));
        let count = if random.chance(2) { 1 + random.below(3) } else { 40 };
        let rows = (begin..SAMPLES).step_by(step as usize).take(count as usize).collect();
        let read = random.chance(3).then(|| {
            let some = (0..SAMPLES).filter(|_| random.chance(20)).collect();
            (1 + random.below(2), (!random.chance(6)).then_some(some))
        });
        Cells { column, rows, read }
    }

    /// Return whether this transaction may not follow the other one.
    fn meets(&self, other: &Cells) -> bool {
        let columns = self.column.is_none() || other.column.is_none() || self.column == other.column;
        let read = self.read.as_ref().is_some_and(|(column, rows)| match rows {
            None => true, // Each transaction appends.
            Some(rows) => other.column.is_none_or(|changed| changed == *column) && !rows.is_disjoint(&other.rows),
        });
        read || columns && !self.rows.is_disjoint(&other.rows)
    }

    fn reads(&self) -> Vec<RowsRead> {
        let read = |(column, rows): &(u64, Option<BTreeSet<u64>>)| RowsRead {
            columns: vec![*column],
            rows: rows.as_ref().map(|rows| Arc::new(rows.iter().copied().collect())),
        };
        self.read.iter().map(read).collect()
    }

    fn stored(&self, uuid: u8) -> (Vec<Change>, Option<(RowIdsRef, Arc<RowIds>)>) {
        let ids: RowIds = self.rows.iter().copied().collect();
        let (rows, _) = ids.encode(Id([uuid; 16]));
        let known = if let RowSet::Object(reference) = rows { Some((reference, Arc::new(ids))) } else { None };
        let kind = if self.column.is_some() { ChangeKind::Value } else { ChangeKind::Delete };
        (vec![Change { kind, columns: self.column.into_iter().collect(), rows }], known)
    }
}

fn entry(log: &Log, number: u64) -> Result<LogEntry> {
    LogEntry::parse(&Bytes::from(log[&number].clone()), 0, number)
}

/// Reply to one request; on average, one in `faults` puts or reads fails. `sets` has the row ids that are stored in objects.
fn answer(log: &mut Log, sets: &Sets, request: Request, random: &mut Random, faults: u64) -> Result<Event> {
    Ok(match request {
        Request::ReadNewest => {
            let newest = log.keys().next_back().copied().unwrap_or(0);
            Event::Newest { parent: Box::new(entry(log, newest)?), words: Vec::new(), now_us: 5 }
        }
        Request::ReadSpan { first, end } => {
            Event::Span((first..end).map(|number| entry(log, number)).collect::<Result<_>>()?)
        }
        Request::CheckAppended { .. } => Event::Appended(None),
        Request::ReadRowIds(wanted) => Event::RowIds(wanted.into_iter().map(|set| (set, sets[&set].clone())).collect()),
        Request::WriteRoot => Event::RootWritten(ObjectRef { id: Id([9; 16]), bytes: 10, crc: 1 }),
        Request::WriteWhole(_) => Event::WholeWritten(ObjectRef { id: Id([8; 16]), bytes: 10, crc: 1 }),
        Request::Create { record, body } => {
            let number = record.number;
            let lost = random.chance(faults);
            if lost && random.chance(2) {
                return Ok(Event::Unknown); // The put never arrived.
            }
            let taken = log.contains_key(&number);
            log.entry(number).or_insert(body);
            match (lost, taken) {
                (true, _) => Event::Unknown, // The put arrived, but its reply was lost.
                (false, true) => Event::Exists,
                (false, false) => Event::Created,
            }
        }
        Request::Read { number } if random.chance(faults) => {
            debug_assert!(log.contains_key(&number));
            Event::Unreadable
        }
        Request::Read { number } => Event::Found(Box::new(entry(log, number)?)),
        Request::Done(_) => return Err(Error::new("internal", "no request to answer")),
    })
}

fn run(seed: u64) -> Result<()> {
    let mut random = Random(seed);
    let faults = 2 + random.below(6);
    let memory = Memory::named(&format!("commits-{seed}"));
    create(Arc::new(Memory::named(&format!("commits-{seed}"))), samples::schema(), "create", "test")?;
    let mut log: Log = [(0, memory.read(&record_name(0, 0))?.to_vec())].into();
    let count = 2 + random.below(4) as u8;
    // A first commit with samples that the others change.
    let all = Transaction { assigned: SAMPLES, samples_added: SAMPLES, ..transaction(200, 0) };
    let mut first = proposal(all, ChangeSet::append(vec![1]), Sets::new());
    first.own.deltas.clear();
    let mut fill = Machine::new(first);
    let mut event = Event::Begin;
    while !matches!(event, Event::Created) {
        event = answer(&mut log, &Sets::new(), fill.step(event)?, &mut Random(0), u64::MAX)?;
    }
    let cells: Vec<Cells> = (1..=count).map(|_| Cells::random(&mut random)).collect();
    let sets: Sets = cells.iter().enumerate().filter_map(|(index, cells)| cells.stored(index as u8 + 1).1).collect();
    let sharing: Vec<u8> = cells.iter().map(|_| if random.chance(3) { random.below(4) as u8 } else { 0 }).collect();
    let begin = |uuid: u8| {
        let cells = &cells[uuid as usize - 1];
        let (writes, own) = cells.stored(uuid);
        let mut changes = ChangeSet::append(vec![1]);
        changes.writes.extend(writes);
        changes.reads = cells.reads();
        let deleted = if cells.column.is_none() { cells.rows.len() as u64 } else { 0 };
        // Some records have more transactions, of other threads.
        let more = (0..sharing[uuid as usize - 1])
            .map(|more| member(transaction(100 + 10 * uuid + more, 0), ChangeSet::append(vec![1])));
        let proposal = Proposal {
            base: 1,
            others: more.collect(),
            ..proposal(transaction(uuid, deleted), changes, own.into_iter().collect())
        };
        (uuid, Machine::new(proposal), Some(Event::Begin))
    };
    let mut running: Vec<(u8, Machine, Option<Event>)> = (1..=count).map(begin).collect();
    let (mut done, mut unknown, mut refused) = (HashSet::new(), HashSet::new(), HashSet::new());
    while !running.is_empty() {
        let turn = random.below(running.len() as u64) as usize;
        let (uuid, machine, event) = &mut running[turn];
        let next = machine.step(event.take().ok_or_else(|| Error::new("internal", "no event"))?);
        match next {
            Ok(Request::Done(record)) => {
                assert_eq!(record.uuid(), Id([*uuid; 16]), "seed {seed}");
                assert_eq!(record.transactions.len(), 1 + usize::from(sharing[*uuid as usize - 1]), "seed {seed}");
                done.insert(*uuid);
                running.remove(turn);
            }
            Ok(request) => *event = Some(answer(&mut log, &sets, request, &mut random, faults)?),
            Err(error) if error.code() == "conflict" => {
                refused.insert(*uuid);
                running.remove(turn);
            }
            Err(error) => {
                assert_eq!(error.code(), "commit-state-unknown", "seed {seed}");
                unknown.insert(*uuid);
                running.remove(turn);
            }
        }
    }
    let mut seen = HashSet::new();
    let (mut before, mut committed): (Option<LogEntry>, Vec<&Cells>) = (None, Vec::new());
    for (index, number) in log.keys().enumerate() {
        assert_eq!(index as u64, *number, "seed {seed}: record numbers must have no gaps");
        let now = entry(&log, *number)?;
        if let Some(before) = &before {
            assert_eq!(now.record.parents[0].crc, before.crc, "seed {seed}: each record must name its predecessor");
            let uuid = usize::from(now.record.uuid().0[0]);
            let added: u64 = now.record.transactions.iter().map(|transaction| transaction.samples_added).sum();
            let deleted: u64 = now.record.transactions.iter().map(|transaction| transaction.samples_deleted).sum();
            assert_eq!(now.record.samples, before.record.samples + added);
            assert_eq!(now.record.live, before.record.live + added - deleted, "seed {seed}");
            let own = cells.get(uuid - 1);
            assert!(
                !committed.iter().any(|other: &&Cells| own.is_some_and(|own| own.meets(other))),
                "seed {seed}: {uuid} lost a value"
            );
            committed.extend(own);
            let mut next = before.record.next_counter;
            for transaction in &now.record.transactions {
                assert_eq!(transaction.first_counter, next, "seed {seed}: row ids must not overlap");
                next += transaction.assigned;
            }
            assert_eq!(now.record.next_counter, next, "seed {seed}");
            let appends = now.record.changes.iter().filter(|change| change.kind == ChangeKind::Append);
            let listed: u64 = appends.map(|change| change.rows.ids()).sum();
            assert_eq!(
                listed,
                next - before.record.next_counter,
                "seed {seed}: the change set lacks samples of a transaction"
            );
            let fragments = now
                .record
                .deltas
                .iter()
                .filter_map(|delta| if let Delta::Fragment(found) = delta { Some(found) } else { None });
            let ids: Vec<Run> = fragments.flat_map(|fragment| fragment.runs.clone()).collect();
            assert!(ids.windows(2).all(|two| two[0].end() <= two[1].first), "seed {seed}: two samples have one row id");
            assert!(
                ids.iter().all(|run| run.end() <= next),
                "seed {seed}: a sample has a row id that no transaction assigned"
            );
            assert!(now.record.time_us > before.record.time_us);
            assert!(seen.insert(now.record.uuid()), "seed {seed}: no transaction may be committed twice");
        }
        before = Some(now);
    }
    for uuid in &done {
        assert!(seen.contains(&Id([*uuid; 16])), "seed {seed}: no acknowledged commit may be lost");
    }
    assert!(seen.len() <= done.len() + unknown.len() + 1, "seed {seed}");
    for uuid in refused {
        assert!(!seen.contains(&Id([uuid; 16])), "seed {seed}: a refused transaction was committed");
        assert!(
            committed.iter().any(|other| cells[uuid as usize - 1].meets(other)),
            "seed {seed}: {uuid} was refused without a cause"
        );
    }
    Ok(())
}

#[test]
fn every_order_of_answers_commits_each_transaction_once() -> Result<()> {
    let count = if is_soak() { 200_000 } else { 10_000 };
    seeds(count).try_for_each(run)
}

#[test]
fn a_collection_in_between_ends_the_transaction() -> Result<()> {
    let memory = Memory::named("fence");
    let snapshot = create(Arc::new(Memory::named("fence")), samples::schema(), "create", "test")?;
    let mut record = snapshot.record().clone();
    record.gc_epoch = 3;
    let parent = LogEntry { crc: 0, record: Arc::new(record) };
    let mut machine = machine(1, ChangeSet::append(vec![1]));
    machine.step(Event::Begin)?;
    let error = machine.step(Event::Newest { parent: Box::new(parent), words: Vec::new(), now_us: 1 }).err();
    assert_eq!(error.map(|error| error.code()), Some("transaction-expired"));
    drop((memory, Context::new(Arc::new(Memory::named("fence")))));
    Ok(())
}

/// Step a machine, and reply to its requests without faults, until its commit is done or refused.
fn run_to_end(mut machine: Machine, log: &mut Log) -> Result<Arc<Record>> {
    let mut event = Event::Begin;
    loop {
        match machine.step(event)? {
            Request::Done(record) => return Ok(record),
            request => event = answer(log, &Sets::new(), request, &mut Random(0), u64::MAX)?,
        }
    }
}

/// Commit one append from each of two other transactions, and return the log.
fn log_of_two_appends(name: &str) -> Result<Log> {
    let memory = Memory::named(name);
    create(Arc::new(Memory::named(name)), samples::schema(), "create", "test")?;
    let mut log: Log = [(0, memory.read(&record_name(0, 0))?.to_vec())].into();
    for uuid in [1, 2] {
        run_to_end(machine(uuid, ChangeSet::append(vec![1])), &mut log)?;
    }
    Ok(log)
}

fn values(rows: Run, reads: Vec<RowsRead>) -> ChangeSet {
    ChangeSet {
        writes: vec![Change { kind: ChangeKind::Value, columns: vec![1], rows: RowSet::Runs(vec![rows]) }],
        reads,
        ..ChangeSet::default()
    }
}

#[test]
fn a_rebase_of_values_reads_each_record_in_between_once() -> Result<()> {
    let mut log = log_of_two_appends("span")?;
    let mut machine = machine(3, values(Run { first: 0, count: 2 }, Vec::new()));
    let (mut event, mut seen) = (Event::Begin, Vec::new());
    loop {
        let request = machine.step(event)?;
        match &request {
            Request::Done(record) => {
                assert_eq!((record.number, record.changes[0].kind), (3, ChangeKind::Value));
                break;
            }
            Request::ReadSpan { first, end } => seen.push((*first, *end)),
            _ => {}
        }
        event = answer(&mut log, &Sets::new(), request, &mut Random(0), u64::MAX)?;
    }
    assert_eq!(seen, [(1, 2)], "the newest record is already known");
    Ok(())
}

#[test]
fn a_transaction_that_read_all_rows_conflicts_with_any_append_in_between() -> Result<()> {
    let mut log = log_of_two_appends("conflict")?;
    let reads = vec![RowsRead { columns: vec![1], rows: None }];
    let error = run_to_end(machine(3, values(Run { first: 0, count: 2 }, reads)), &mut log).expect_err("a conflict");
    let first = entry(&log, 1)?.record.snapshot();
    let text = format!(
        "commit {first} was made in the meantime: this transaction read all samples, and that commit appended 2 more"
    );
    assert!(error.code() == "conflict" && error.message().contains(&text), "{error:?}");
    Ok(())
}

#[test]
fn a_shared_record_conflicts_if_any_of_its_transactions_does() -> Result<()> {
    let mut log = log_of_two_appends("shared")?;
    let changed = Run { first: 0, count: 2 };
    run_to_end(machine(3, values(changed, Vec::new())), &mut log)?;
    // The first transaction is a bare append. The second one changes what commit 3 changed.
    for (rows, conflicts) in [(changed, true), (Run { first: 2, count: 1 }, false)] {
        let others = vec![member(transaction(5, 0), values(rows, Vec::new()))];
        let shared =
            Proposal { base: 2, others, ..proposal(transaction(4, 0), ChangeSet::append(vec![1]), Sets::new()) };
        let found = run_to_end(Machine::new(shared), &mut log.clone());
        assert_eq!(found.err().map(|error| error.code()), conflicts.then_some("conflict"));
    }
    Ok(())
}
