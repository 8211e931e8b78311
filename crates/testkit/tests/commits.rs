//! The commit machine with answers in random order: lost replies, unreadable records, races. Each acknowledged transaction
//! is in the log exactly once, record numbers are dense, and each record names its predecessor.

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use penstock_dataset::{Context, Event, LogEntry, Machine, Request, create};
use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::ids::{ObjectRef, record_name};
use penstock_format::manifest::Fragment;
use penstock_format::record::{Delta, Properties, Transaction};
use penstock_storage::{Memory, Storage as _};
use penstock_testkit::random::Random;
use penstock_testkit::samples;

type Log = BTreeMap<u64, Vec<u8>>;

fn machine(uuid: u8) -> Machine {
    let transaction = Transaction {
        uuid: Id([uuid; 16]),
        message: "m".into(),
        author: "a".into(),
        properties: Properties::Inline("{}".into()),
        first_counter: 0,
        samples_added: 2,
        samples_deleted: 0,
    };
    let fragment = Fragment { samples: 2, live: 2, runs: vec![penstock_format::ids::Run { first: 1 << 63, count: 2 }], files: Vec::new() };
    Machine::new(transaction, vec![Delta::Fragment(fragment)], vec![1], 0, 0)
}

fn entry(log: &Log, number: u64) -> Result<LogEntry> {
    LogEntry::parse(&Bytes::from(log[&number].clone()), 0, number)
}

/// Answer one request; one in `faults` puts or reads fails.
fn answer(log: &mut Log, request: Request, random: &mut Random, faults: u64) -> Result<Event> {
    Ok(match request {
        Request::ReadNewest => {
            let newest = log.keys().next_back().copied().unwrap_or(0);
            Event::Newest { parent: Box::new(entry(log, newest)?), words: Vec::new(), now_us: 5 }
        }
        Request::WriteRoot => Event::RootWritten(ObjectRef { id: Id([9; 16]), bytes: 10, crc: 1 }),
        Request::Create { number, body } => {
            let lost = random.chance(faults);
            if lost && random.chance(2) {
                return Ok(Event::Unknown); // The put never arrived.
            }
            let taken = log.contains_key(&number);
            log.entry(number).or_insert(body);
            match (lost, taken) {
                (true, _) => Event::Unknown, // The put arrived, but its reply is lost.
                (false, true) => Event::Exists,
                (false, false) => Event::Created,
            }
        }
        Request::Read { number } if random.chance(faults) => {
            debug_assert!(log.contains_key(&number));
            Event::Unreadable
        }
        Request::Read { number } => Event::Found(Box::new(entry(log, number)?)),
        Request::Done(_) => return Err(Error::new("internal", "nothing to answer")),
    })
}

fn run(seed: u64) -> Result<()> {
    let mut random = Random(seed);
    let faults = 2 + random.below(6);
    let memory = Memory::named(&format!("commits-{seed}"));
    create(Box::new(Memory::named(&format!("commits-{seed}"))), samples::schema(), "create", "test")?;
    let mut log: Log = [(0, memory.read(&record_name(0, 0))?.to_vec())].into();
    let count = 2 + random.below(4) as u8;
    let mut running: Vec<(u8, Machine, Option<Event>)> = (1..=count).map(|uuid| (uuid, machine(uuid), Some(Event::Begin))).collect();
    let (mut done, mut unknown) = (HashSet::new(), HashSet::new());
    while !running.is_empty() {
        let turn = random.below(running.len() as u64) as usize;
        let (uuid, machine, event) = &mut running[turn];
        let next = machine.step(event.take().ok_or_else(|| Error::new("internal", "no event"))?);
        match next {
            Ok(Request::Done(record)) => {
                assert_eq!(record.uuid(), Id([*uuid; 16]), "seed {seed}");
                done.insert(*uuid);
                running.remove(turn);
            }
            Ok(request) => *event = Some(answer(&mut log, request, &mut random, faults)?),
            Err(error) => {
                assert_eq!(error.code(), "commit-state-unknown", "seed {seed}");
                unknown.insert(*uuid);
                running.remove(turn);
            }
        }
    }
    let mut seen = HashSet::new();
    let mut before: Option<LogEntry> = None;
    for (index, number) in log.keys().enumerate() {
        assert_eq!(index as u64, *number, "seed {seed}: record numbers must be dense");
        let now = entry(&log, *number)?;
        if let Some(before) = &before {
            assert_eq!(now.record.parents[0].crc, before.crc, "seed {seed}: each record must name its predecessor");
            assert_eq!(now.record.samples, before.record.samples + 2);
            assert_eq!(now.record.transactions[0].first_counter, before.record.next_counter, "seed {seed}: row ids must not overlap");
            assert!(now.record.time_us > before.record.time_us);
            assert!(seen.insert(now.record.uuid()), "seed {seed}: a transaction is committed twice");
        }
        before = Some(now);
    }
    for uuid in &done {
        assert!(seen.contains(&Id([*uuid; 16])), "seed {seed}: an acknowledged commit is lost");
    }
    assert!(seen.len() <= done.len() + unknown.len(), "seed {seed}");
    Ok(())
}

#[test]
fn every_order_of_answers_commits_each_transaction_once() -> Result<()> {
    (0..10_000).try_for_each(run)
}

#[test]
fn a_collection_in_between_ends_the_transaction() -> Result<()> {
    let memory = Memory::named("fence");
    let snapshot = create(Box::new(Memory::named("fence")), samples::schema(), "create", "test")?;
    let mut record = snapshot.record().clone();
    record.gc_epoch = 3;
    let parent = LogEntry { crc: 0, record };
    let mut machine = machine(1);
    machine.step(Event::Begin)?;
    let error = machine.step(Event::Newest { parent: Box::new(parent), words: Vec::new(), now_us: 1 }).err();
    assert_eq!(error.map(|error| error.code()), Some("transaction-expired"));
    drop((memory, Context::new(Box::new(Memory::named("fence")))));
    Ok(())
}
