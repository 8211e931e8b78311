//! Golden files: `spec/golden/v1` is a dataset written by the first release of the format. Every later version must
//! read the same values from it, and the current writer must still encode its metadata objects to the same bytes.
//!
//! Setting `PENSTOCK_GOLDEN=write` rewrites the dataset. This is allowed only before v0.1.0, and only in a commit that says so.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use penstock_dataset::{
    Isolation, New, Policies, Policy, Texts, Transaction, Validate, attach, compact, create, create_branch, create_tag,
    merge,
};
use penstock_error::Result as Ours;
use penstock_format::cursor::{Cursor, Magic, seal, unseal};
use penstock_format::datafile::Tail;
use penstock_format::ids::{Run, record_number, rows_name};
use penstock_format::manifest::{
    Attachment, PageStatistics, Root, encode_pages, encode_stages, encode_words, parse_page, parse_stages, parse_words,
};
use penstock_format::names::Names;
use penstock_format::overlay::Overlay;
use penstock_format::record::{Delta, Record};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};
use penstock_storage::Memory;
use penstock_testkit::samples;

type Objects = BTreeMap<String, Bytes>;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../spec/golden/v1")
}

fn load(folder: &Path, below: &str, objects: &mut Objects) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{below}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            load(&entry.path(), &format!("{name}/"), objects)?;
        } else if !name.ends_with(".txt") {
            objects.insert(name, std::fs::read(entry.path())?.into());
        }
    }
    Ok(())
}

fn make() -> Ours<Objects> {
    let memory = Memory::named("golden");
    let mut snapshot = Arc::new(create(Arc::new(Memory::named("golden")), samples::schema(), "create", "golden")?);
    for seed in 0..2 {
        snapshot = Arc::new(samples::append(&snapshot, seed, 6)?.1);
        snapshot = Arc::new(samples::change(&snapshot, seed)?.1);
    }
    snapshot = Arc::new(samples::append(&snapshot, 3, 40)?.1);
    snapshot = Arc::new(samples::change(&snapshot, 3)?.1);
    while snapshot.root.pages.is_empty() {
        snapshot = Arc::new(samples::append(&snapshot, 7, 1)?.1);
    }
    let branch = Arc::new(create_branch(&snapshot, "other", "golden")?);
    let branch = samples::append(&Arc::new(samples::change(&branch, 8)?.1), 9, 4)?.1;
    snapshot = Arc::new(samples::append(&snapshot, 11, 2)?.1);
    let texts = Texts { message: "merge", author: "golden", properties: "{}" };
    let merged = merge(&snapshot, &branch.id(), &Policies::new(Policy::Fail, Vec::new()), texts)?.snapshot;
    create_tag(&merged.context, "merged", merged.id())?;
    // A layout replaces all of these fragments, those of a stage as well.
    let mut staged = Transaction::begin(Arc::new(merged), Isolation::Serializable)?;
    staged.append(samples::batch(13, 5)?, Validate::Header)?;
    let stage = staged.into_stage()?;
    let mut adding = Transaction::begin(samples::open(Memory::named("golden"))?, Isolation::Serializable)?;
    adding.add(&[stage])?;
    let (_, with_stage) = adding.commit("add a stage", "golden", "{}")?;
    let (laid_out, done) = compact(&Arc::new(with_stage), Texts { message: "compact", ..texts })?;
    assert!(done.dropped > 0 && done.overlays > 0 && laid_out.stages.len() == 1, "{done:?}");
    let changed = Arc::new(samples::change(&Arc::new(laid_out), 17)?.1);
    let columns = changed.schema.columns.iter().map(|spec| spec.name.as_str()).collect::<Vec<&str>>();
    let attached = |kind, rows| New {
        kind,
        content: b"golden",
        columns: &columns[..2],
        rows,
        parameters: "{\"metric\":\"none\"}",
        replaces: &[],
    };
    let one = attach(&changed, &attached("index", None), texts)?;
    let two =
        attach(&Arc::new(one), &attached("sketch", Some(RowIds::of_runs(vec![Run { first: 1, count: 3 }]))), texts)?;
    samples::change(&Arc::new(two), 19)?;
    Ok(memory.objects())
}

fn golden() -> Result<Objects, Box<dyn std::error::Error>> {
    let folder = folder();
    if std::env::var("PENSTOCK_GOLDEN").is_ok_and(|mode| mode == "write") {
        let _ = std::fs::remove_dir_all(&folder); // The folder may not exist yet.
        let objects = make()?;
        for (name, body) in &objects {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().ok_or("no parent")?)?;
            std::fs::write(path, body)?;
        }
        let snapshot = samples::open(Memory::holding(objects))?;
        std::fs::write(folder.join("contents.txt"), samples::contents(&snapshot)?.join("\n"))?;
    }
    let mut objects = Objects::new();
    load(&folder, "", &mut objects)?;
    Ok(objects)
}

#[test]
fn the_golden_dataset_reads_the_same() -> Result<(), Box<dyn std::error::Error>> {
    let objects = golden()?;
    let snapshot = samples::open(Memory::holding(objects))?;
    let expected = std::fs::read_to_string(folder().join("contents.txt"))?;
    assert_eq!(samples::contents(&snapshot)?.join("\n"), expected);
    Ok(samples::check_verified(&snapshot)?)
}

/// Return the branch of a record from the name of its object.
fn branch_of(name: &str) -> Result<u64, Box<dyn std::error::Error>> {
    Ok(u64::from_str_radix(name.split('/').nth(1).ok_or("no branch")?, 16)?)
}

/// Return the references to sets of row ids in all records and roots.
fn row_sets(objects: &Objects) -> Result<Vec<RowIdsRef>, Box<dyn std::error::Error>> {
    let mut sets = Vec::new();
    for (name, body) in objects {
        let last = name.rsplit('/').next().ok_or("no name")?;
        if let Some(number) = record_number(last) {
            if name.starts_with("refs/") {
                continue;
            }
            let record = Record::parse(body, branch_of(name)?, number)?;
            let of_delta = |delta| match delta {
                Delta::Overlay(Overlay { rows, .. }) | Delta::Attachment(Attachment { rows, .. }) => Some(rows),
                _ => None,
            };
            sets.extend(record.changes.into_iter().map(|change| change.rows));
            sets.extend(record.deltas.into_iter().filter_map(of_delta));
        } else if name.starts_with("r/") {
            let root = Root::parse(body)?;
            sets.extend(root.overlays.into_iter().map(|overlay| overlay.rows));
            sets.extend(root.attachments.into_iter().map(|attachment| attachment.rows));
        }
    }
    Ok(sets
        .into_iter()
        .filter_map(|set| if let RowSet::Object(reference) = set { Some(reference) } else { None })
        .collect())
}

#[test]
fn every_golden_object_is_written_the_same_way() -> Result<(), Box<dyn std::error::Error>> {
    let mut seen = [0; 10];
    let objects = golden()?;
    let sets = row_sets(&objects)?;
    for (name, body) in objects {
        let (kind, again) = match name.split('/').next() {
            Some("log" | "refs") if name.ends_with("hint") => {
                let (newest, place) = penstock_format::ids::read_hint(&body).ok_or("no hint")?;
                (0, penstock_format::ids::write_hint(newest, place))
            }
            Some("log") => {
                let number = u64::MAX - name.rsplit('/').next().ok_or("no number")?.parse::<u64>()?;
                (1, Record::parse(&body, branch_of(&name)?, number)?.encode())
            }
            Some("refs") => {
                let number = u64::MAX - name.rsplit('/').next().ok_or("no number")?.parse::<u64>()?;
                (6, Names::parse(&body, number)?.encode())
            }
            Some("r") => (2, Root::parse(&body)?.encode()),
            Some("o") => {
                let reference = sets.iter().find(|set| rows_name(set.object.id) == name).ok_or("no parent")?;
                (
                    5,
                    RowIds::parse(&body, reference)?
                        .encode(reference.object.id)
                        .1
                        .ok_or("too few runs for an object")?,
                )
            }
            Some("s") => (8, PageStatistics::parse(&body)?.encode()),
            Some("a") => {
                let content = unseal(Magic::Attachment, &body, Cursor::rest)?;
                (9, seal(Magic::Attachment, |writer| writer.0.extend_from_slice(&content)))
            }
            Some("g") => (7, encode_stages(&parse_stages(&body)?)),
            Some("p") => (3, encode_pages(&parse_page(&body)?)[0].0.clone()),
            Some("w") => {
                let (column, words) = parse_words(&body)?;
                (4, encode_words(column, &words.iter().collect::<Vec<_>>()))
            }
            _ => continue,
        };
        assert_eq!(again, body, "{name}");
        seen[kind] += 1;
    }
    assert!(seen.iter().all(|count| *count > 0), "every kind of object must occur: {seen:?}");
    Ok(())
}

#[test]
fn a_golden_data_file_has_the_layout_of_the_spec() -> Result<(), Box<dyn std::error::Error>> {
    let objects = golden()?;
    let (_, body) = objects.iter().find(|(name, _)| name.starts_with("d/")).ok_or("no data file")?;
    assert_eq!(&body[..8], b"PNSTKD1\n");
    let footer = &body[body.len() - 32..];
    assert_eq!(&footer[28..], b"PNSD");
    let data_end = u64::from_le_bytes(footer[..8].try_into()?);
    let tail_bytes = u64::from(u32::from_le_bytes(footer[8..12].try_into()?));
    assert_eq!(data_end + tail_bytes + 32, body.len() as u64);
    let tail = Tail::parse(body.slice(data_end as usize..(data_end + tail_bytes) as usize), data_end)?;
    assert!(
        tail.chunks.len() >= 8 && tail.chunks.iter().all(|chunk| chunk.offset.iter().all(|offset| offset % 8 == 0))
    );
    Ok(())
}
