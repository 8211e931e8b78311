//! Plans of one order on one machine: jobs with the same seed, the ranks of a job, the worker processes of a rank. One of them leads: it plans
//! for all, fetches each page once, and evicts a page only after all have read it. The others wait for it.
//!
//! Each member has a locked file with its numbers, which the others read. The kernel releases the locks of a process that dies, so that
//! another member can lead.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::page_runs::Member;
use crate::drive::{Drive, LEADERS, ORDERS, now_seconds};
use crate::flight::Flight;
use crate::place::mix;
use crate::registry::{self, Registered};

/// A member that reads nothing for this long while another waits for it is left behind.
const PATIENCE: Duration = if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(5) };

/// Loaders of one order share a plan if they are at most so many steps apart. If they began at the same step, then also if one began so
/// much later: that is how long the first one waits for it.
const NEAR_STEPS: u64 = 8;
const NEAR_SECONDS: u64 = 60;

/// The numbers in a member's file, in this order.
#[derive(Debug, Clone, Copy)]
pub enum Field {
    Order,
    /// Members of one order that are too far apart form groups of their own.
    Group,
    Rank,
    Begin,
    Stride,
    /// All of the member's steps below this are read.
    Read,
    /// The member reads no step from this on, as far as it knows.
    Until,
    /// Of the leader: all pages of the steps below this are cached.
    Ready,
    /// Of the leader: pages may be evicted that are not used from this step on.
    Floor,
    /// 1 if the member leads.
    Leads,
    /// 1 if the leader plans for this member. The leader writes it.
    Known,
    /// 1 while the member's loader waits for a step.
    Waits,
    /// Of the leader: it counts up while the leader lives, also if the store is slow.
    Pulse,
    /// When the member joined, in seconds since 1970.
    Joined,
}

const FIELDS: usize = Field::Joined as usize + 1;

/// How far a leader is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Led {
    pub ready: u64,
    pub floor: u64,
    pulse: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Numbers([u64; FIELDS]);

impl Numbers {
    fn of(&self, field: Field) -> u64 {
        self.0[field as usize]
    }

    /// Return what a file has, or None if it is too short.
    fn parse(bytes: &[u8]) -> Option<Numbers> {
        let (numbers, _) = bytes.as_chunks::<8>();
        let numbers = numbers.first_chunk::<FIELDS>()?;
        Some(Numbers(numbers.map(u64::from_le_bytes)))
    }

    /// Return whether the member has read all steps that it wants.
    fn has_ended(&self) -> bool {
        self.of(Field::Read) >= self.of(Field::Until)
    }

    /// Return whether this leader is near a member that begins, and has read the steps below `read`.
    fn is_near(&self, member: Member, read: u64) -> bool {
        let is_new = u64::from(now_seconds()).saturating_sub(self.of(Field::Joined)) <= NEAR_SECONDS;
        let near_steps = NEAR_STEPS.max(member.stride);
        self.of(Field::Read).abs_diff(read) <= near_steps
            || is_new && self.of(Field::Begin).abs_diff(member.begin) <= near_steps
    }

    fn member(&self) -> Member {
        Member { rank: self.of(Field::Rank), begin: self.of(Field::Begin), stride: self.of(Field::Stride).max(1) }
    }
}

/// The file of this plan.
#[derive(Debug)]
pub struct MemberFile(Registered);

impl MemberFile {
    /// Write a number. A failure means that the folder is lost, which the next look at it finds.
    pub fn set(&self, field: Field, value: u64) {
        let _ = self.0.lock.file.write_all_at(&value.to_le_bytes(), 8 * field as u64);
    }
}

#[derive(Debug)]
struct Seen {
    numbers: Numbers,
    /// Since when another member waits for this one, which reads nothing.
    holds_up_since: Option<Instant>,
    is_left: bool,
}

/// The group of plans to which this one belongs.
#[derive(Debug)]
pub struct Election {
    folder: PathBuf,
    locks: PathBuf,
    order: u64,
    pub group: u64,
    pub own: Arc<MemberFile>,
    leads: Option<Flight>,
    /// The members at the last look, with this one.
    members: HashMap<PathBuf, Seen>,
}

impl Election {
    /// Join the first group, from `first` on, that has no leader or one that is near. This member has read the steps below `read`, and reads those below
    /// `until`. A leader is near at step `read`, or if it has just begun where this member begins.
    pub fn join(
        drive: &Drive,
        order: u64,
        member: Member,
        (read, until): (u64, u64),
        first: u64,
    ) -> io::Result<Election> {
        let (folder, locks) = (drive.part(ORDERS), drive.part(LEADERS));
        let mut group = first;
        loop {
            let leads = try_lead(&locks, order, group)?;
            // A leader that has not written its number yet has just begun, as this plan has.
            if leads.is_none() && leader(&folder, order, group)?.is_some_and(|leader| !leader.is_near(member, read)) {
                group += 1;
                continue;
            }
            let mut numbers = [0; FIELDS];
            let values =
                [order, group, member.rank, member.begin, member.stride, read, until, 0, 0, u64::from(leads.is_some())];
            numbers[..values.len()].copy_from_slice(&values);
            numbers[Field::Joined as usize] = u64::from(now_seconds());
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let own = Arc::new(MemberFile(Registered::new(&folder, &bytes)?));
            let mut election = Election { folder, locks, order, group, own, leads, members: HashMap::new() };
            election.look(0)?;
            return Ok(election);
        }
    }

    /// Return whether this plan leads. It begins to do so if no other one does.
    pub fn leads(&mut self) -> io::Result<bool> {
        if self.leads.is_none() {
            self.leads = try_lead(&self.locks, self.order, self.group)?;
            if self.leads.is_some() {
                self.own.set(Field::Leads, 1);
            }
        }
        Ok(self.leads.is_some())
    }

    /// Return how far the leader is, or None until it plans for this member.
    pub fn led_to(&self) -> io::Result<Option<Led>> {
        let all: Vec<(PathBuf, Numbers)> = members(&self.folder, self.order, self.group)?.collect();
        let is_known = all.iter().any(|(path, own)| *path == self.own.0.path && own.of(Field::Known) == 1);
        let leader = all.iter().find(|(_, other)| is_known && other.of(Field::Leads) == 1);
        Ok(leader.map(|(_, leader)| Led {
            ready: leader.of(Field::Ready),
            floor: leader.of(Field::Floor),
            pulse: leader.of(Field::Pulse),
        }))
    }

    /// Look at all members, as the leader. Members that hold others up, which wait for them to read the steps below `wanted`, are left behind.
    /// Returns whether members came or went.
    pub fn look(&mut self, wanted: u64) -> io::Result<bool> {
        let found: HashMap<PathBuf, Numbers> = members(&self.folder, self.order, self.group)?.collect();
        let before = self.members.len();
        self.members.retain(|path, _| found.contains_key(path));
        let mut changed = self.members.len() < before;
        let waiting = found.values().filter(|numbers| numbers.of(Field::Waits) == 1).count();
        for (path, numbers) in found {
            let seen = self.members.entry(path).or_insert_with(|| {
                changed = true;
                Seen { numbers, holds_up_since: None, is_left: false }
            });
            let read = numbers.of(Field::Read);
            let holds_up = read < wanted && numbers.of(Field::Waits) == 0 && waiting > 0 && !numbers.has_ended();
            if !holds_up || read != seen.numbers.of(Field::Read) {
                seen.holds_up_since = None;
            }
            if holds_up && seen.holds_up_since.get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
                seen.is_left = true;
            }
            seen.numbers = numbers;
        }
        Ok(changed)
    }

    /// Return the step below which all members have read that were not left behind and have not read all that they want.
    pub fn floor(&self) -> u64 {
        let members = || self.members.values().filter(|seen| !seen.is_left).map(|seen| &seen.numbers);
        let reading = members().filter(|numbers| !numbers.has_ended()).map(|numbers| numbers.of(Field::Read)).min();
        reading.or_else(|| members().map(|numbers| numbers.of(Field::Read)).min()).unwrap_or(0)
    }

    /// Return the step from which on no member reads.
    pub fn until(&self) -> u64 {
        self.members.values().filter(|seen| !seen.is_left).map(|seen| seen.numbers.of(Field::Until)).max().unwrap_or(0)
    }

    /// Return whether this plan was left behind.
    pub fn is_left(&self) -> bool {
        self.members.get(&self.own.0.path).is_none_or(|seen| seen.is_left)
    }

    /// Return whether the loader of any member waits.
    pub fn waits(&self) -> bool {
        self.members.values().any(|seen| seen.numbers.of(Field::Waits) == 1)
    }

    pub fn is_alone(&self) -> bool {
        self.members.len() == 1
    }

    pub fn members(&self) -> Vec<Member> {
        self.members.values().map(|seen| seen.numbers.member()).collect()
    }

    /// Inform the members of the last look that the plan includes them, and how far it is.
    pub fn include_all(&self, ready: u64) -> io::Result<()> {
        self.own.set(Field::Floor, 0);
        self.own.set(Field::Ready, ready);
        for path in self.members.keys() {
            match File::options().write(true).open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {} // It has just ended.
                file => file?.write_all_at(&1u64.to_le_bytes(), 8 * Field::Known as u64)?,
            }
        }
        Ok(())
    }
}

fn try_lead(locks: &Path, order: u64, group: u64) -> io::Result<Option<Flight>> {
    let lock = Flight::new(locks)?;
    Ok(lock.try_lock(mix(order ^ group), 0..1)?.then_some(lock))
}

/// Return the members of a group, with the paths of their files.
fn members(folder: &Path, order: u64, group: u64) -> io::Result<impl Iterator<Item = (PathBuf, Numbers)>> {
    let all = registry::live(folder)?.into_iter().filter_map(|(path, bytes)| Some((path, Numbers::parse(&bytes)?)));
    Ok(all.filter(move |(_, numbers)| numbers.of(Field::Order) == order && numbers.of(Field::Group) == group))
}

fn leader(folder: &Path, order: u64, group: u64) -> io::Result<Option<Numbers>> {
    Ok(members(folder, order, group)?.map(|(_, numbers)| numbers).find(|numbers| numbers.of(Field::Leads) == 1))
}
