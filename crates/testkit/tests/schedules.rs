//! Random schedules of several writers, on a disk and on a server. They append, add stages, update, delete, change the schema, merge, compact and fence at the same
//! time. Operations of the disk fail, replies are lost, or the power fails; a proxy delays and cuts the requests to the server. Each commit says in its message what it does. A model that follows the log must then have the same samples.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_dataset::{
    Context, Input, Isolation, OnCorrupt, Policies, Policy, Purpose, Reader, Snapshot, Texts, Transaction, Validate,
    compact, create, create_branch, fence, merge,
};
use penstock_error::{Error, Kind, Result};
use penstock_format::record::{Record, RecordKind};
use penstock_format::schema::{ColumnKind, ColumnSpec};
use penstock_storage::{Io, Local, Remote, Store};
use penstock_tensor::Column;
use penstock_testkit::crash::CrashDisk;
use penstock_testkit::minio::{BUCKET, Minio};
use penstock_testkit::proxy::{Faults, Proxy, schedules};
use penstock_testkit::random::{Random, slice};
use penstock_testkit::samples;

const SEEDS: u64 = 10_000;
/// A schedule on a server takes 20 times as long.
const SEEDS_ON_A_SERVER: u64 = 1_000;
/// There are more workers than cores, because schedules on a server spend most of their time waiting.
const WORKERS: u64 = 8;
/// The columns whose values the model knows, after the key.
const COLUMNS: [&str; 2] = ["a", "b"];
/// Codes of errors that a writer may see while the disk fails and others commit.
const EXPECTED: [&str; 5] =
    ["conflict", "storage-failed", "commit-state-unknown", "transaction-expired", "interrupted"];

type Cells = [Option<i32>; 2];
/// The samples by key, each with its row id and its cells.
type Samples = BTreeMap<i32, (i64, Cells)>;

fn column(name: &str) -> ColumnSpec {
    ColumnSpec::new(name, ColumnKind::Scalar { dtype: "int32".into() })
}

fn input(name: &str, values: &[Option<i32>]) -> Input {
    let data = values.iter().flat_map(|value| value.unwrap_or(0).to_le_bytes()).collect();
    let validity = values.contains(&None).then(|| values.iter().map(Option::is_some).collect());
    Input { name: name.into(), column: Column::Fixed { data, validity, samples: values.len() }, words: None }
}

/// Opens the dataset, each time with a context of its own.
type Open<'a> = &'a (dyn Fn() -> Result<Arc<Snapshot>> + Sync);

fn opened(store: Arc<dyn Store>) -> Result<Arc<Snapshot>> {
    Snapshot::open(Context::new(store), 0).map(Arc::new)
}

fn on_disk(disk: &CrashDisk) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(Local::open(Path::new("/data/set"), Arc::new(disk.clone()), Io::Auto)?))
}

/// Read all samples of a snapshot.
fn samples_of(snapshot: &Arc<Snapshot>) -> Result<Samples> {
    let mut reader = Reader::new(snapshot.clone(), (0..snapshot.len()).collect(), OnCorrupt::Raise)?;
    let specs = ["key", "a", "b"].iter().map(|name| snapshot.column(name)).collect::<Result<Vec<_>>>()?;
    reader.fetch(&specs, Purpose::Take)?;
    let mut values = Vec::new();
    for spec in specs {
        let mut data = vec![0; snapshot.len() as usize * 4];
        let nulls = reader.fixed(spec, &mut data)?.unwrap_or_else(|| vec![false; snapshot.len() as usize]);
        let cells = data
            .as_chunks::<4>()
            .0
            .iter()
            .zip(nulls)
            .map(|(bytes, null)| (!null).then_some(i32::from_le_bytes(*bytes)));
        values.push(cells.collect::<Vec<_>>());
    }
    let sample = |(place, row_id): (usize, i64)| {
        (values[0][place].unwrap_or(-1), (row_id, [values[1][place], values[2][place]]))
    };
    let found: Samples = reader.plan.row_ids().iter().copied().enumerate().map(sample).collect();
    match found.len() as u64 == snapshot.len() {
        true => Ok(found),
        false => Err(Error::new("internal", "a key is there twice")),
    }
}

/// What a commit does, as its message says it: words, separated by `;`.
#[derive(Default)]
struct Effects(Vec<String>);

impl Effects {
    fn note(&mut self, effect: String) {
        self.0.push(effect);
    }

    /// Return what differs between two snapshots, as a merge sees it.
    fn between(before: &Samples, after: &Samples) -> Effects {
        let mut effects = Effects::default();
        for (key, (_, [a, b])) in after.iter().filter(|(key, _)| !before.contains_key(key)) {
            effects.note(format!("append {key} {} {}", shown(*a), shown(*b)));
        }
        for (key, (_, cells)) in before {
            match after.get(key) {
                None => effects.note(format!("drop {key}")),
                Some((_, now)) => {
                    for place in (0..2).filter(|place| cells[*place] != now[*place]) {
                        effects.note(format!("update {key} {place} {}", shown(now[place])));
                    }
                }
            }
        }
        effects
    }

    fn message(&self, tag: &str) -> String {
        [tag].into_iter().chain(self.0.iter().map(String::as_str)).collect::<Vec<&str>>().join(";")
    }

    /// Apply the effects of a message to the model. Returns false if the model has no such samples.
    fn apply(message: &str, model: &mut BTreeMap<i32, Cells>) -> bool {
        message.split(';').skip(1).all(|effect| {
            let words: Vec<&str> = effect.split(' ').collect();
            let number = |place: usize| words.get(place).and_then(|word| word.parse::<i32>().ok());
            let Some(key) = number(1) else { return false };
            match words[0] {
                "append" => model.insert(key, [number(2), number(3)]).is_none(),
                "update" => {
                    model.get_mut(&key).map(|cells| cells[number(2).unwrap_or(0) as usize] = number(3)).is_some()
                }
                "delete" => model.remove(&key).is_some(),
                // Both sides of a merge may have deleted it.
                "drop" => {
                    model.remove(&key);
                    true
                }
                _ => false,
            }
        })
    }
}

fn shown(value: Option<i32>) -> String {
    value.map_or("null".into(), |value| value.to_string())
}

/// What the calls of all writers returned.
#[derive(Default)]
struct Told {
    /// The tags of acknowledged commits.
    tags: BTreeSet<String>,
    /// Row ids of acknowledged appends, by key.
    row_ids: BTreeMap<i32, i64>,
    /// What must never happen.
    wrong: Vec<String>,
    verbs: BTreeMap<&'static str, u64>,
}

struct Writer<'a> {
    number: i32,
    random: Random,
    handle: Arc<Snapshot>,
    commits: i32,
    keys: i32,
    told: &'a Mutex<Told>,
}

impl Writer<'_> {
    fn cell(&mut self) -> Option<i32> {
        (!self.random.chance(5)).then(|| self.random.below(1000) as i32)
    }

    /// Add random changes to a transaction. Returns the keys that it appends, in order.
    fn change(
        &mut self,
        base: &Arc<Snapshot>,
        transaction: &mut Transaction,
        on: &Samples,
        effects: &mut Effects,
    ) -> Result<Vec<i32>> {
        let mut appended = Vec::new();
        if self.random.chance(2) || on.len() < 4 {
            let cells: Vec<Cells> = (0..1 + self.random.below(3)).map(|_| [self.cell(), self.cell()]).collect();
            for [a, b] in &cells {
                appended.push(self.number * 10_000 + self.keys);
                effects.note(format!("append {} {} {}", appended[appended.len() - 1], shown(*a), shown(*b)));
                self.keys += 1;
            }
            let keys: Vec<Option<i32>> = appended.iter().copied().map(Some).collect();
            let (a, b): (Vec<Option<i32>>, Vec<Option<i32>>) = cells.iter().map(|[a, b]| (*a, *b)).unzip();
            let batch = vec![input("key", &keys), input("a", &a), input("b", &b)];
            if self.random.chance(4) {
                let mut staged = Transaction::begin(base.clone(), Isolation::Serializable)?;
                staged.append(batch, Validate::Header)?;
                transaction.add(&[staged.into_stage()?])?;
            } else {
                transaction.append(batch, Validate::Header)?;
            }
        }
        let mut known: Vec<(&i32, &(i64, Cells))> = on.iter().collect();
        for _ in 0..self.random.below(3) {
            if known.is_empty() {
                break;
            }
            let (key, (row_id, _)) = known.swap_remove(self.random.below(known.len() as u64) as usize);
            if self.random.chance(5) {
                transaction.delete(&[*row_id])?;
                effects.note(format!("delete {key}"));
                continue;
            }
            let (place, value) = (self.random.below(2) as usize, self.cell());
            transaction.update(&[*row_id], vec![input(COLUMNS[place], &[value])], Validate::Header)?;
            effects.note(format!("update {key} {place} {}", shown(value)));
        }
        Ok(appended)
    }

    /// Make one commit. Returns what it did and the keys that it appended, or None if there was nothing to do.
    fn commit(&mut self, tag: &str) -> Result<Option<(&'static str, Snapshot, Vec<(i32, i64)>)>> {
        let base = self.handle.clone();
        let texts = Texts { message: tag, author: "writer", properties: "{}" };
        let epoch = base.record().gc_epoch;
        match self.random.below(20) {
            0..=2 => {
                let (snapshot, done) = compact(&base, texts)?;
                Ok((done.fragments > 0).then_some(("compact", snapshot, Vec::new())))
            }
            3 => {
                let mut transaction = Transaction::begin(base, Isolation::Serializable)?;
                let extra = transaction
                    .schema()
                    .columns
                    .iter()
                    .map(|spec| spec.name.clone())
                    .find(|name| name.starts_with('x'));
                match extra.filter(|_| self.random.chance(2)) {
                    Some(name) => transaction.drop_column(&name, true)?,
                    None => transaction.add_column(
                        column(&format!("x{tag}")),
                        Some(input("x", &[Some(7)])),
                        Validate::Header,
                    )?,
                }
                let (_, snapshot) = transaction.commit(tag, "writer", "{}")?;
                Ok(Some(("schema", snapshot, Vec::new())))
            }
            4 if self.random.chance(3) => Ok(Some(("fence", fence(&base, epoch + 1, texts)?, Vec::new()))),
            5..=7 => {
                let mut branch = Arc::new(create_branch(&base, &format!("branch {tag}"), "writer")?);
                let (before, mut appended) = (samples_of(&base)?, Vec::new());
                for _ in 0..1 + self.random.below(2) {
                    let mut transaction = Transaction::begin(branch.clone(), Isolation::Serializable)?;
                    let on = samples_of(&branch)?;
                    let keys = self.change(&branch, &mut transaction, &on, &mut Effects::default())?;
                    let (receipt, snapshot) = transaction.commit("", "writer", "{}")?;
                    appended.extend(keys.into_iter().zip(receipt.first_row_id..));
                    branch = Arc::new(snapshot);
                    if self.random.chance(3) {
                        branch = Arc::new(compact(&branch, Texts { message: "", ..texts })?.0);
                    }
                }
                let message = Effects::between(&before, &samples_of(&branch)?).message(tag);
                let merged = merge(
                    &base,
                    &branch.id(),
                    &Policies::new(Policy::Fail, Vec::new()),
                    Texts { message: &message, ..texts },
                )?;
                Ok(Some(("merge", merged.snapshot, appended)))
            }
            _ => {
                let on = samples_of(&base)?;
                let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
                let mut effects = Effects::default();
                let keys = self.change(&base, &mut transaction, &on, &mut effects)?;
                if effects.0.is_empty() {
                    return Ok(None);
                }
                let message = effects.message(tag);
                let (receipt, snapshot) = transaction.commit(&message, "writer", "{}")?;
                if snapshot.record().gc_epoch != epoch {
                    self.lock().wrong.push(format!(
                        "{tag} began in epoch {epoch}, and was committed in {}",
                        snapshot.record().gc_epoch
                    ));
                }
                Ok(Some(("data", snapshot, keys.into_iter().zip(receipt.first_row_id..).collect())))
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&mut self, commits: u64) {
        for _ in 0..commits {
            self.commits += 1;
            let tag = format!("w{}.{}", self.number, self.commits);
            if self.random.chance(3)
                && let Ok(newest) = self.handle.refreshed()
            {
                self.handle = Arc::new(newest);
            }
            match self.commit(&tag) {
                Ok(None) => {}
                Ok(Some((verb, snapshot, appended))) => {
                    self.handle = Arc::new(snapshot);
                    let mut told = self.lock();
                    told.tags.insert(tag);
                    told.row_ids.extend(appended);
                    *told.verbs.entry(verb).or_default() += 1;
                }
                Err(error) if EXPECTED.contains(&error.code()) || error.kind() == Kind::Unavailable => {
                    if error.code() == "transaction-expired"
                        && let Ok(newest) = self.handle.refreshed()
                    {
                        self.handle = Arc::new(newest);
                    }
                }
                Err(error) => self.lock().wrong.push(format!("{tag}: {} {}", error.code(), error.message())),
            }
        }
    }
}

/// Let writers commit at the same time, each with its own handle.
fn write(open: Open, seed: u64, first: i32, told: &Mutex<Told>) -> Result<()> {
    let mut random = Random(seed ^ 0x5eed);
    let (count, commits) = (3 + random.below(4) as i32, 2 + random.below(5));
    let opened = |number| Ok((number, random.number(), open()?));
    // On a slow machine, a writer without patience may not even open the dataset.
    let is_reachable =
        |writer: &Result<_>| !writer.as_ref().is_err_and(|error: &Error| error.kind() == Kind::Unavailable);
    let writers = (first..first + count).map(opened).filter(is_reachable).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for (number, seed, handle) in writers {
            scope
                .spawn(move || Writer { number, random: Random(seed), handle, commits: 0, keys: 0, told }.run(commits));
        }
    });
    Ok(())
}

/// Return the commits of all branches, oldest first, with what they say.
fn shown_log(records: &[Arc<Record>]) -> String {
    let shown = |record: &Arc<Record>| {
        let messages: Vec<&str> = record.transactions.iter().map(|one| one.message.as_str()).collect();
        let parents: Vec<(u64, u64)> = record.parents.iter().map(|parent| (parent.branch, parent.number)).collect();
        format!("{:x}-{} {} of {parents:?} {messages:?}", record.branch, record.number, record.kind.name())
    };
    records.iter().rev().map(shown).collect::<Vec<String>>().join("\n")
}

/// Compare a dataset with the model that follows its log.
fn check(open: Open, told: &Told) -> Result<()> {
    let fail = |text: String| Err(Error::new("internal", text));
    if let Some(wrong) = told.wrong.first() {
        return fail(wrong.clone());
    }
    let snapshot = open()?;
    samples::check_verified(&snapshot)?;
    let (mut model, mut tags, mut epoch) = (BTreeMap::new(), BTreeMap::<String, u32>::new(), 0);
    let records = samples::commits(&snapshot)?;
    for record in records.iter().rev().filter(|record| record.branch == 0) {
        if record.kind != RecordKind::Fence && record.gc_epoch != epoch {
            return fail(format!("commit {} has another epoch", record.number));
        }
        epoch = record.gc_epoch;
        for transaction in &record.transactions {
            let tag = transaction.message.split(';').next().unwrap_or_default();
            *tags.entry(tag.to_owned()).or_default() += 1;
            if !Effects::apply(&transaction.message, &mut model) {
                return fail(format!(
                    "`{}` cannot follow the commits before it:\n{}",
                    transaction.message,
                    shown_log(&records)
                ));
            }
        }
    }
    if let Some(lost) = told.tags.iter().find(|tag| tags.get(*tag) != Some(&1)) {
        return fail(format!(
            "commit {lost} was acknowledged, and is there {} times",
            tags.get(lost).copied().unwrap_or(0)
        ));
    }
    let found = samples_of(&snapshot)?;
    let cells: BTreeMap<i32, Cells> = found.iter().map(|(key, (_, cells))| (*key, *cells)).collect();
    if cells != model {
        let differs = |key: &&i32| cells.get(key) != model.get(key);
        let keys: BTreeSet<&i32> = cells.keys().chain(model.keys()).filter(differs).collect();
        let states =
            keys.iter().map(|key| format!("{key}: {:?}, but its log says {:?}", cells.get(key), model.get(key)));
        return fail(format!("the dataset has {}\n{}", states.collect::<Vec<_>>().join("; "), shown_log(&records)));
    }
    let moved = |(key, row_id): (&i32, &i64)| found.get(key).is_some_and(|(found, _)| found != row_id);
    match told.row_ids.iter().find(|(key, row_id)| moved((key, row_id))) {
        Some((key, row_id)) => fail(format!("key {key} had row id {row_id}, and has {}", found[key].0)),
        None => Ok(()),
    }
}

/// The number of acknowledged commits by verb.
type Verbs = BTreeMap<&'static str, u64>;

fn take(told: &Mutex<Told>) -> Told {
    std::mem::take(&mut *told.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Run one schedule on a disk whose power fails.
fn local_schedule(seed: u64) -> Result<Verbs> {
    let mut random = Random(seed);
    let disk = CrashDisk::new();
    create(on_disk(&disk)?, ["key", "a", "b"].map(column).to_vec(), "create", "writer")?;
    let told = Mutex::new(Told::default());
    match random.below(3) {
        0 => disk.fail_after(200 + random.below(3000)),
        1 => {
            let first = disk.operations() + 50 + random.below(2000);
            disk.fail_for_a_while(first, first + random.below(6), random.chance(2));
        }
        _ => {}
    }
    write(&|| opened(on_disk(&disk)?), seed, 1, &told)?;
    disk.fail_for_a_while(0, 0, false);
    // Memory that others keep of a log must not outlive it, so the disk after a crash is another one.
    let back = disk.after_crash(random.number());
    let open = || opened(on_disk(&back)?);
    let first = take(&told);
    check(&open, &first)?;
    // Later writers commit as before.
    let told = Mutex::new(first);
    write(&open, seed + 1, 11, &told)?;
    let all = take(&told);
    check(&open, &all)?;
    Ok(all.verbs)
}

/// Run one schedule on a server, through a proxy that delays, cuts and refuses. The dataset is read without the proxy.
fn remote_schedule(seed: u64, minio: &Minio, proxy: &Proxy) -> Result<Verbs> {
    let mut random = Random(seed);
    let uri = format!("s3://{BUCKET}/writers-{seed}");
    let (direct, hedged) = (Minio::options(minio.address, &[])?, if random.chance(3) { "true" } else { "false" });
    create(Arc::new(Remote::open(&uri, &direct)?), ["key", "a", "b"].map(column).to_vec(), "create", "writer")?;
    // With this many faults, writers give up in the middle of a commit.
    let is_hard = random.chance(3);
    let mut faults = Faults { seed, late_ms: 5, in_a_row: if is_hard { 0 } else { 3 }, ..Faults::default() };
    faults.per_mille.iter_mut().for_each(|rate| *rate = random.below(if is_hard { 120 } else { 40 }));
    let through =
        Minio::options(proxy.address, &[("timeout_seconds", if is_hard { "0.5" } else { "120" }), ("hedge", hedged)])?;
    let told = Mutex::new(Told::default());
    let open = || opened(Arc::new(Remote::open(&uri, &direct)?));
    let through_proxy = || {
        proxy.set(Faults::default());
        let handle = opened(Arc::new(Remote::open(&uri, &through)?));
        proxy.set(faults.clone());
        handle
    };
    for (round, first) in [(0, 1), (1, 11)] {
        write(&through_proxy, seed + round, first, &told)?;
        check(&open, &told.lock().unwrap_or_else(PoisonError::into_inner))?;
    }
    Ok(take(&told).verbs)
}

/// Check that each kind of commit was made, if there were many schedules.
fn check_verbs(count: u64, verbs: &Verbs) {
    println!("{count} schedules: {verbs:?}");
    if count < 100 {
        return assert!(verbs.get("data").is_some_and(|done| *done > 0), "{verbs:?}");
    }
    assert!(
        ["data", "merge", "compact", "schema", "fence"]
            .iter()
            .all(|verb| verbs.get(verb).is_some_and(|done| *done > 0)),
        "{verbs:?}"
    );
}

#[test]
fn writers_at_the_same_time_lose_nothing_and_see_what_the_log_says() -> Result<()> {
    let mut verbs = Verbs::new();
    let seeds = slice(SEEDS, 100);
    for seed in seeds.clone() {
        let done = local_schedule(seed).map_err(|error| Error::new("internal", format!("seed {seed}: {error}")))?;
        done.into_iter().for_each(|(verb, count)| *verbs.entry(verb).or_default() += count);
    }
    check_verbs(seeds.end - seeds.start, &verbs);
    Ok(())
}

#[test]
fn writers_on_a_server_lose_nothing_and_see_what_the_log_says() -> Result<()> {
    let minio = Minio::start().map_err(|error| Error::new("internal", error.to_string()))?;
    let seeds = slice(SEEDS_ON_A_SERVER, 100);
    let verbs = Mutex::new(Verbs::new());
    schedules(minio.address, seeds.clone(), WORKERS, |seed, proxy| {
        let done = remote_schedule(seed, &minio, proxy)
            .map_err(|error| Error::new("internal", format!("seed {seed}: {error}")))?;
        let mut verbs = verbs.lock().unwrap_or_else(PoisonError::into_inner);
        done.into_iter().for_each(|(verb, count)| *verbs.entry(verb).or_default() += count);
        Ok(())
    })?;
    check_verbs(seeds.end - seeds.start, &verbs.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(())
}
