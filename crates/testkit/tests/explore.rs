//! Explores all runs of three writers that commit twice each, through the real commit machine, in every order of their steps. Every reply to a
//! put is lost, delayed or doubled, and every read of a record fails, up to a number of faults. Equal states are explored once.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use bytes::Bytes;
use penstock_dataset::{ChangeSet, Event, LogEntry, Machine, Request, create};
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::ids::{Run, record_name};
use penstock_format::record::{Change, ChangeKind};
use penstock_format::rows::RowSet;
use penstock_storage::{Memory, Read as _};
use penstock_testkit::random::is_soak;
use penstock_testkit::samples;

use crate::commits::{member, proposal, transaction};

/// Each writer makes this many commits, one after the other.
const COMMITS: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Outcome {
    Done,
    Refused,
}

#[derive(Debug, Clone)]
struct Writer {
    number: u8,
    outcomes: Vec<Outcome>,
    /// The machine, and what it asks for.
    running: Option<(Machine, Request)>,
}

#[derive(Debug, Clone)]
struct SystemState {
    /// The bodies of records 0, 1, …
    log: Vec<Vec<u8>>,
    /// Puts that may still arrive.
    flight: Vec<(u64, Vec<u8>)>,
    writers: Vec<Writer>,
    faults: u8,
}

/// The samples that a commit changes. Writers 0 and 1 change a common one in their first commits, and writer 2 in its second one.
fn rows(writer: u8, commit: u8) -> Option<Run> {
    match (writer, commit) {
        (0 | 1, 0) | (2, 1) => Some(Run { first: 0, count: 1 }),
        (0, _) => Some(Run { first: 1, count: 2 }),
        _ => None,
    }
}

fn uuid(writer: u8, commit: u8) -> u8 {
    10 * (writer + 1) + commit
}

impl Writer {
    /// Begin the next commit at the newest snapshot, if there is one to make.
    fn begin(&mut self, base: u64) -> Result<()> {
        let commit = self.outcomes.len() as u8;
        let change = |run| Change { kind: ChangeKind::Value, columns: vec![1], rows: RowSet::Runs(vec![run]) };
        self.running = None;
        if commit < COMMITS {
            let mut changes = ChangeSet::append(vec![1]);
            changes.writes.extend(rows(self.number, commit).map(change));
            let mut proposal = proposal(transaction(uuid(self.number, commit), 0), changes, Default::default());
            proposal.base = base;
            let mut machine = Machine::new(proposal);
            let request = machine.step(Event::Begin)?;
            self.running = Some((machine, request));
        }
        Ok(())
    }

    /// Give the machine a reply, and the records that it asks for, until it asks for something that others may change, or ends.
    fn reply(&mut self, event: Event, log: &[Vec<u8>]) -> Result<()> {
        let Some((mut machine, _)) = self.running.take() else { return Ok(()) };
        let mut next = machine.step(event);
        while let Ok(Request::ReadSpan { first, end }) = next {
            next = machine.step(Event::Span((first..end).map(|number| entry(log, number)).collect::<Result<_>>()?));
        }
        let outcome = match next {
            Ok(Request::Done(record)) => {
                assert_eq!(record.uuid(), Id([uuid(self.number, self.outcomes.len() as u8); 16]));
                Outcome::Done
            }
            Ok(request) => {
                self.running = Some((machine, request));
                return Ok(());
            }
            Err(error) => {
                assert_eq!(error.code(), "conflict");
                Outcome::Refused
            }
        };
        self.outcomes.push(outcome);
        self.begin(log.len() as u64 - 1)
    }
}

fn entry(log: &[Vec<u8>], number: u64) -> Result<LogEntry> {
    LogEntry::parse(&Bytes::copy_from_slice(&log[number as usize]), 0, number)
}

impl SystemState {
    fn first(faults: u8) -> Result<SystemState> {
        let memory = Memory::named("explore");
        create(Arc::new(Memory::named("explore")), samples::schema(), "create", "test")?;
        let mut log = vec![memory.read(&record_name(0, 0))?.to_vec()];
        // Ten samples that the writers change.
        let mut first = proposal(transaction(200, 0), ChangeSet::append(vec![1]), Default::default());
        let samples = penstock_format::record::Transaction { assigned: 10, samples_added: 10, ..transaction(200, 0) };
        first.own = member(samples, ChangeSet::append(vec![1]));
        first.own.deltas.clear();
        let (mut machine, mut event) = (Machine::new(first), Event::Begin);
        loop {
            event = match machine.step(event)? {
                Request::ReadNewest => {
                    Event::Newest { parent: Box::new(entry(&log, 0)?), words: Vec::new(), now_us: 5 }
                }
                Request::Create { body, .. } => {
                    log.push(body);
                    break;
                }
                other => panic!("{other:?}"),
            };
        }
        let mut writers: Vec<Writer> =
            (0..3).map(|number| Writer { number, outcomes: Vec::new(), running: None }).collect();
        writers.iter_mut().try_for_each(|writer| writer.begin(1))?;
        Ok(SystemState { log, flight: Vec::new(), writers, faults })
    }

    /// A number that is the same for equal states. Bodies of records are named by their uuids, and machines by all that they know.
    fn key(&self) -> u128 {
        let hash = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, self.faults).hash(&mut hasher);
            self.log
                .iter()
                .chain(self.flight.iter().map(|(_, body)| body))
                .for_each(|body| body[body.len() - 4..].hash(&mut hasher));
            (self.log.len(), self.flight.iter().map(|(number, _)| *number).collect::<Vec<u64>>()).hash(&mut hasher);
            for Writer { outcomes, running, .. } in &self.writers {
                let running = running
                    .as_ref()
                    .map(|(machine, request)| (format!("{machine:?}"), std::mem::discriminant(request)));
                (outcomes, running).hash(&mut hasher);
            }
            hasher.finish()
        };
        u128::from(hash(0)) << 64 | u128::from(hash(1))
    }

    /// A put arrives. Returns whether it created the record.
    fn arrive(&mut self, number: u64, body: &[u8]) -> bool {
        assert!(number <= self.log.len() as u64, "a put leaves a gap");
        let created = number == self.log.len() as u64;
        if created {
            self.log.push(body.to_vec());
        }
        created
    }

    /// Return all states that may follow.
    fn next(&self) -> Result<Vec<SystemState>> {
        let mut found = Vec::new();
        for place in 0..self.flight.len() {
            let mut state = self.clone();
            let (number, body) = state.flight.remove(place);
            state.arrive(number, &body);
            found.push(state);
        }
        for (place, writer) in self.writers.iter().enumerate() {
            let Some((_, request)) = &writer.running else { continue };
            let newest = self.log.len() as u64 - 1;
            // A reply, the faults that it takes, and what happens to the log and the puts on their way.
            let mut follow = |event: Event, faults: u8, change: &dyn Fn(&mut SystemState)| -> Result<()> {
                if let Some(faults) = self.faults.checked_sub(faults) {
                    let mut state = SystemState { faults, ..self.clone() };
                    change(&mut state);
                    let SystemState { log, writers, .. } = &mut state;
                    writers[place].reply(event, log)?;
                    found.push(state);
                }
                Ok(())
            };
            let none = |_: &mut SystemState| {};
            match request {
                Request::ReadNewest => {
                    let parent = Box::new(entry(&self.log, newest)?);
                    follow(Event::Newest { parent, words: Vec::new(), now_us: 5 }, 0, &none)?;
                }
                Request::Read { number } => {
                    follow(Event::Found(Box::new(entry(&self.log, *number)?)), 0, &none)?;
                    follow(Event::Unreadable, 1, &none)?;
                }
                Request::Create { record, body } => {
                    let number = record.number;
                    let arrives = |state: &mut SystemState| {
                        state.arrive(number, body);
                    };
                    let later = |state: &mut SystemState| state.flight.push((number, body.clone()));
                    let reply = || if number > newest { Event::Created } else { Event::Exists };
                    follow(reply(), 0, &arrives)?;
                    // The reply is lost; the put is lost; it arrives later; it arrives twice, and the second reply is seen, or it arrives again later.
                    follow(Event::Unknown, 1, &arrives)?;
                    follow(Event::Unknown, 1, &none)?;
                    follow(Event::Unknown, 1, &later)?;
                    follow(Event::Exists, 1, &arrives)?;
                    follow(reply(), 1, &|state| {
                        arrives(state);
                        later(state);
                    })?;
                }
                other => panic!("{other:?}"),
            }
        }
        Ok(found)
    }

    /// Check a run that is over.
    fn check(&self) -> Result<()> {
        let records = (0..self.log.len() as u64).map(|number| entry(&self.log, number)).collect::<Result<Vec<_>>>()?;
        let uuids: Vec<u8> = records[2..].iter().map(|entry| entry.record.uuid().0[0]).collect();
        let distinct: HashSet<u8> = uuids.iter().copied().collect();
        assert_eq!(distinct.len(), uuids.len(), "a transaction was committed twice: {uuids:?}");
        let at = |writer: u8, commit: u8| uuids.iter().position(|known| *known == uuid(writer, commit));
        for writer in &self.writers {
            for (commit, outcome) in (0..).zip(&writer.outcomes) {
                assert_eq!(
                    *outcome == Outcome::Done,
                    at(writer.number, commit).is_some(),
                    "{uuids:?}, {:?}",
                    self.writers
                );
            }
            let places: Vec<Option<usize>> = (0..COMMITS).map(|commit| at(writer.number, commit)).collect();
            assert!(places.iter().flatten().is_sorted(), "a writer's commits are out of order");
        }
        for pair in records.windows(2) {
            assert_eq!(pair[1].record.parents[0].crc, pair[0].crc);
            let (before, own) = (&pair[0].record, &pair[1].record.transactions[0]);
            assert_eq!(own.first_counter, before.next_counter, "row ids overlap");
        }
        // Of the commits that change the common sample, the first one wins.
        let rivals = [(0, 0), (1, 0), (2, 1)].map(|(writer, commit)| self.writers[writer].outcomes[commit]);
        assert!(rivals.contains(&Outcome::Done), "nobody wins");
        Ok(())
    }
}

fn explore(faults: u8) -> Result<(usize, usize)> {
    let (mut stack, mut seen, mut ends) = (vec![SystemState::first(faults)?], HashSet::new(), 0);
    while let Some(state) = stack.pop() {
        if !seen.insert(state.key()) {
            continue;
        }
        if state.flight.is_empty() && state.writers.iter().all(|writer| writer.running.is_none()) {
            state.check()?;
            ends += 1;
            continue;
        }
        let next = state.next()?;
        assert!(!next.is_empty(), "a run does not end");
        stack.extend(next);
    }
    Ok((seen.len(), ends))
}

#[test]
fn all_runs_of_three_writers_with_lost_delayed_and_doubled_replies() -> Result<()> {
    let faults = if is_soak() { 2 } else { 1 };
    let (states, ends) = explore(faults)?;
    println!("{states} states and {ends} ends with up to {faults} faults");
    assert!(states > 10_000 && ends > 50);
    Ok(())
}
