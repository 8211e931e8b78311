//! Receives many ranges at once. Each range has its own task, and one more task waits for all of them.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::batch::{LEAST_RANGES, Member, divide};
use super::connect::Batches;
use super::connect::service::Traffic;
use super::live::{Live, runtime, wait};
use super::ranges::{Asked, Filling};
use super::store::Remote;
use crate::counters::add;
use crate::ranges::{RangeRequest, Then};

impl Remote {
    pub(super) fn receive(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        let count = ranges.len();
        let (live, runtime) = match (self.live(), runtime()) {
            (Ok(live), Ok(runtime)) => (live, runtime),
            (Err(error), _) | (_, Err(error)) => return (0..count).map(|_| Err(error.clone())).collect(),
        };
        add(&self.traffic.counters.ranges, count as u64);
        let bytes = ranges.iter().map(|range| range.end() - range.begin).sum();
        add(&self.traffic.counters.range_bytes, bytes);
        let began = Instant::now();
        let stop: Arc<Mutex<Option<Error>>> = Arc::default();
        let mut tasks = JoinSet::new();
        let members = ranges.into_iter().enumerate().map(|(index, range)| {
            let (path, what) = (self.path(&range.name), self.what("read", &range.name));
            Member { index, path, what, range }
        });
        let members: Vec<Member> = members.collect();
        let batches = live.client.batches.clone().filter(|_| self.traffic.offers_batches() && count >= LEAST_RANGES);
        let (together, alone) = if batches.is_some() { divide(members) } else { (Vec::new(), members) };
        for (members, batches) in together.into_iter().zip(std::iter::repeat(batches).flatten()) {
            let (live, traffic, then) = (live.clone(), self.traffic.clone(), then.clone());
            tasks.spawn_on(async move { live.batch(&batches, &traffic, members, &then).await }, runtime.handle());
        }
        for Member { index, path, what, range } in alone {
            let stop = stop.clone();
            let (live, traffic, hedge, then) = (live.clone(), self.traffic.clone(), self.hedge, then.clone());
            let task = async move {
                let permit = live.retry.concurrency.permit().await;
                // Once one range has failed permanently, the others need not wait for their own deadlines.
                if let Some(error) = stop.lock().unwrap_or_else(PoisonError::into_inner).clone() {
                    return vec![(index, Err(error))];
                }
                let seen = |piece: usize, bytes: &Bytes| then(index, piece, bytes);
                let asked = Asked { counters: &traffic.counters, path, what, then: &seen };
                let pieces = match hedge {
                    true => live.hedged(&asked, range, permit).await,
                    false => live.range(&asked, range, permit).await,
                };
                if let Some(error) = pieces.as_ref().err().filter(|error| error.kind() == Kind::Unavailable) {
                    stop.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
                }
                vec![(index, pieces)]
            };
            tasks.spawn_on(task, runtime.handle());
        }
        // One task waits for all others, so that the caller's thread is woken only once, not once per range. Dropping a task set
        // aborts its tasks.
        let broken = || Error::new("internal", "a network task failed");
        let mut all = JoinSet::new();
        let join = async move {
            let mut answers: Vec<Result<Vec<Bytes>>> = (0..count).map(|_| Err(broken())).collect();
            while let Some(joined) = tasks.join_next().await {
                joined.into_iter().flatten().for_each(|(index, answer)| answers[index] = answer);
            }
            answers
        };
        all.spawn_on(join, runtime.handle());
        match wait(async { all.join_next().await.and_then(|joined| joined.ok()).ok_or_else(broken) }) {
            Ok(answers) => {
                live.cost.note(count, bytes, began.elapsed());
                answers
            }
            Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
        }
    }
}

impl Live {
    /// Read ranges by one request, and what it does not answer by requests of their own.
    async fn batch(
        &self,
        batches: &Batches,
        traffic: &Traffic,
        members: Vec<Member>,
        then: &Then,
    ) -> Vec<(usize, Result<Vec<Bytes>>)> {
        let mut permit = self.retry.concurrency.permit().await;
        let indexes: Vec<usize> = members.iter().map(|member| member.index).collect();
        let seen: Vec<_> =
            indexes.iter().map(|&index| move |piece: usize, bytes: &Bytes| then(index, piece, bytes)).collect();
        let ranges: Vec<_> =
            members.iter().map(|member| (member.path.clone(), member.range.begin, member.range.end())).collect();
        let objects: Vec<Option<u64>> = members.iter().map(|member| member.range.object_bytes).collect();
        let (whats, plans): (Vec<String>, Vec<RangeRequest>) =
            members.into_iter().map(|member| (member.what, member.range)).unzip();
        let mut fillings: Vec<Filling<'_>> =
            plans.into_iter().zip(&seen).map(|(plan, seen)| Filling::new(plan, seen)).collect();
        let send = batches.send(&ranges, &objects, &mut fillings);
        if tokio::time::timeout(self.retry.deadline, send).await.ok().flatten().is_none() {
            // The next response that offers batches lets them be tried again.
            traffic.note_batches(false);
        }
        permit.bytes =
            ranges.iter().zip(&fillings).map(|((_, begin, end), filling)| end - begin - filling.missing()).sum();
        drop(permit);
        let mut answers = Vec::with_capacity(indexes.len());
        let rest = indexes.into_iter().zip(fillings).zip(ranges).zip(whats).zip(&seen);
        for ((((index, filling), (path, ..)), what), seen) in rest {
            let asked = Asked { counters: &traffic.counters, path, what, then: seen };
            answers.push((index, self.rest(&asked, filling, self.retry.concurrency.permit().await).await));
        }
        answers
    }
}
