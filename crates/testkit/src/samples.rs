//! A small dataset with every layout, every codec, and most column kinds, and a function that reads the whole dataset.

use std::sync::Arc;

use penstock_codec::encode_png;
use penstock_dataset::{
    Context, History, Input, Isolation, OnCorrupt, Purpose, Reader, Receipt, Snapshot, Transaction, Validate, verify,
};
use penstock_error::{Error, Result};
use penstock_format::classes::Classes;
use penstock_format::datafile::Codec;
use penstock_format::record::Record;
use penstock_format::schema::{ColumnKind, ColumnSpec, Content, ImageMode};
use penstock_storage::Store;
use penstock_tensor::{Column, Ragged};

use crate::random::Random;

fn column(name: &str, kind: ColumnKind, codec: Codec) -> ColumnSpec {
    ColumnSpec { codec, ..ColumnSpec::new(name, kind) }
}

/// Return a schema with at least one column of each layout and codec.
pub fn schema() -> Vec<ColumnSpec> {
    let tensor = |shape: &[Option<u64>], dtype: &str| ColumnKind::Tensor {
        dtype: dtype.into(),
        shape: shape.to_vec(),
        tile: None,
    };
    let tiled = |shape: &[Option<u64>], tile: &[u64]| ColumnKind::Tensor {
        dtype: "int16".into(),
        shape: shape.to_vec(),
        tile: Some(tile.to_vec()),
    };
    vec![
        column("number", ColumnKind::Scalar { dtype: "int32".into() }, Codec::None),
        column("packed_zstd", tensor(&[Some(8)], "float32"), Codec::Zstd),
        column("text", ColumnKind::Text, Codec::None),
        column("text_lz4", ColumnKind::Text, Codec::Lz4),
        column("label", ColumnKind::Label(Classes::new(vec!["cat".into(), "dog".into()])), Codec::None),
        column("breed", ColumnKind::Category, Codec::None),
        column(
            "labels",
            ColumnKind::Labels { classes: Classes::new(vec!["cat".into(), "dog".into()]), of: None },
            Codec::None,
        ),
        column("cloud", tensor(&[None, Some(2), None], "int16"), Codec::None),
        column("large", tensor(&[None], "uint8"), Codec::None),
        column("image", ColumnKind::Image { exif_orientation: true, mode: ImageMode::Rgb }, Codec::None),
        column("tiled", tiled(&[None, Some(3)], &[2, 2]), Codec::None),
        column("tiled_lz4", tiled(&[Some(4), Some(5)], &[4, 3]), Codec::Lz4),
    ]
}

/// Return a schema with many columns, so that a commit's fragment is too large for its record and is stored in a page.
/// The category column makes commits write words.
pub fn wide_schema() -> Vec<ColumnSpec> {
    let scalar = |index: usize| column(&format!("n{index}"), ColumnKind::Scalar { dtype: "int16".into() }, Codec::None);
    (0..WIDE_COLUMNS).map(scalar).chain([column("breed", ColumnKind::Category, Codec::None)]).collect()
}

const WIDE_COLUMNS: usize = 700;

/// Append to a wide dataset in one commit. If `narrow`, append only the first column and the words.
pub fn append_wide(base: &Arc<Snapshot>, seed: u64, samples: usize, narrow: bool) -> Result<(Receipt, Snapshot)> {
    let values = |index: usize| {
        (0..samples).flat_map(|row| (seed as i16 * 100 + row as i16 + index as i16).to_le_bytes()).collect()
    };
    let count = if narrow { 1 } else { WIDE_COLUMNS };
    let scalar =
        |index: usize| Input { name: format!("n{index}"), column: fixed(values(index), samples, None), words: None };
    let mut words = Ragged::default();
    (0..samples).for_each(|row| words.push(Some(format!("word{seed}-{row}").as_bytes()), &[]));
    let breed = Input { name: "breed".into(), column: Column::Ragged(words), words: None };
    let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
    transaction.append((0..count).map(scalar).chain([breed]).collect(), Validate::Header)?;
    transaction.commit(&format!("seed {seed}"), "testkit", "{}")
}

/// Open the dataset in a store, with caches of its own.
pub fn open(store: impl Store + 'static) -> Result<Arc<Snapshot>> {
    Snapshot::open(Context::new(Arc::new(store)), 0).map(Arc::new)
}

/// Fail if `verify` finds a problem.
pub fn check_verified(snapshot: &Snapshot) -> Result<()> {
    match verify(snapshot, |_| {})?.problems.first() {
        None => Ok(()),
        Some(problem) => Err(Error::new("internal", format!("{}: {}", problem.object, problem.error))),
    }
}

/// Return the records of a snapshot and its ancestors, newest first.
pub fn commits(snapshot: &Snapshot) -> Result<Vec<Arc<Record>>> {
    let (mut history, mut records) = (History::new(snapshot.entry.clone()), Vec::new());
    while let Some(entry) = history.next(snapshot.context.storage.as_ref())? {
        records.push(entry.record);
    }
    Ok(records)
}

fn fixed(data: Vec<u8>, samples: usize, null_at: Option<usize>) -> Column {
    let validity = null_at.map(|null| (0..samples).map(|index| index != null).collect());
    Column::Fixed { data, validity, samples }
}

/// Make a batch of `samples` samples from a seed, with occasional nulls.
pub fn batch(seed: u64, samples: usize) -> Result<Vec<Input>> {
    let mut random = Random(seed);
    let mut ragged = |most: u64, words: bool| {
        let mut values = Ragged::default();
        for index in 0..samples {
            let length = random.below(most) as usize;
            let bytes: Vec<u8> = if words {
                format!("word{}", random.below(5)).into_bytes()
            } else {
                (0..length).map(|_| b'a' + random.below(26) as u8).collect()
            };
            values.push((index % 5 != 3).then_some(&bytes[..]), &[]);
        }
        Column::Ragged(values)
    };
    let (text, text_lz4, breed) = (ragged(60, false), ragged(60, false), ragged(1, true));
    let mut cloud = Ragged::default();
    let mut large = Ragged::default();
    let mut images = Ragged::default();
    for index in 0..samples {
        let (points, width) = (random.below(3), random.below(3));
        cloud.push(Some(&random.bytes((points * 2 * width * 2) as usize)), &[points, width]);
        let length = 1000 + random.below(300);
        large.push(Some(&random.bytes(length as usize)), &[length]);
        let png = encode_png(2, 3, 3, 8, &random.bytes(18))?;
        images.push((index % 4 != 1).then_some(&png[..]), &[]);
    }
    let mut tiled = Ragged::default();
    for index in 0..samples {
        let rows = random.below(4);
        tiled.push((index % 3 != 2).then_some(&random.bytes(rows as usize * 6)[..]), &[rows]);
    }
    let tiled_lz4 = fixed((0..samples * 40).map(|index| (index / 11) as u8).collect(), samples, samples.checked_sub(1));
    let mut lists = Ragged::default();
    for index in 0..samples {
        let codes: Vec<u8> = (0..random.below(4)).flat_map(|_| (random.below(2) as i64).to_le_bytes()).collect();
        lists.push((index % 5 != 4).then_some(&codes[..]), &[codes.len() as u64 / 8]);
    }
    let labels = (0..samples).flat_map(|_| (random.below(2) as i64).to_le_bytes()).collect();
    let columns = [
        ("number", fixed(random.bytes(samples * 4), samples, Some(samples / 2))),
        ("packed_zstd", fixed((0..samples * 32).map(|index| (index / 9) as u8).collect(), samples, None)),
        ("text", text),
        ("text_lz4", text_lz4),
        ("label", fixed(labels, samples, Some(0))),
        ("breed", breed),
        ("labels", Column::Ragged(lists)),
        ("cloud", Column::Ragged(cloud)),
        ("large", Column::Ragged(large)),
        ("image", Column::Ragged(images)),
        ("tiled", Column::Ragged(tiled)),
        ("tiled_lz4", tiled_lz4),
    ];
    Ok(columns.into_iter().map(|(name, column)| Input { name: name.into(), column, words: None }).collect())
}

/// Append `samples` samples made from a seed, in one commit. Up to three samples with an odd seed have values in few columns, so that their
/// data file is in the record.
pub fn append(base: &Arc<Snapshot>, seed: u64, samples: usize) -> Result<(Receipt, Snapshot)> {
    let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
    let small = seed % 2 == 1 && samples <= 3;
    let kept = |input: &Input| !small || ["number", "label", "breed"].contains(&&input.name[..]);
    transaction.append(batch(seed, samples)?.into_iter().filter(kept).collect(), Validate::Header)?;
    transaction.commit(&format!("seed {seed}"), "testkit", "{}")
}

/// Change a dataset in one commit: samples at even positions get new values in most columns, and those at odd positions are deleted,
/// except for the first two and the last. With 40 samples or more, the row ids have too many runs for the record.
pub fn change(base: &Arc<Snapshot>, seed: u64) -> Result<(Receipt, Snapshot)> {
    let ids = {
        let positions = (0..base.len()).collect();
        Reader::new(Arc::new(base.within(base.context.clone())), positions, OnCorrupt::Raise)?.plan.row_ids()
    };
    let changed: Vec<i64> = ids.iter().copied().step_by(2).collect();
    let deleted: Vec<i64> = ids.iter().copied().take(ids.len() - 1).skip(5).step_by(2).collect();
    let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
    let kept = |input: &Input| !["large", "tiled_lz4"].contains(&&input.name[..]);
    transaction.update(&changed, batch(seed, changed.len())?.into_iter().filter(kept).collect(), Validate::Header)?;
    transaction.delete(&deleted)?;
    transaction.commit(&format!("change {seed}"), "testkit", "{}")
}

/// Return everything that a reader can see in a snapshot: the snapshot id and row ids as one string, then one string per column.
pub fn contents(snapshot: &Snapshot) -> Result<Vec<String>> {
    let positions = (0..snapshot.len()).rev().collect();
    let mut reader = Reader::new(Arc::new(snapshot.within(snapshot.context.clone())), positions, OnCorrupt::Raise)?;
    reader.fetch(&snapshot.schema.columns.iter().collect::<Vec<_>>(), Purpose::Take)?;
    let mut seen = vec![format!("{} {:?}", snapshot.id(), reader.plan.row_ids())];
    for column in &snapshot.schema.columns {
        let (dtype, shape) = column.kind.stored()?;
        seen.push(match column.kind.content() {
            Content::Label(_) | Content::Word => {
                let mut codes = vec![0; reader.plan.len()];
                let nulls = reader.codes(column, &mut codes)?;
                // If there are words, compare those, because codes depend on the commit order.
                let words = snapshot.vocabulary(column.id)?;
                let named: Vec<Option<&str>> = codes.iter().map(|code| words.iter().nth(*code as usize)).collect();
                if words.is_empty() { format!("{codes:?} {nulls:?}") } else { format!("{named:?} {nulls:?}") }
            }
            _ if shape.is_fixed() => {
                let mut out = vec![0; reader.plan.len() * shape.fixed_bytes(dtype)? as usize];
                let nulls = reader.fixed(column, &mut out)?;
                format!("{out:?} {nulls:?}")
            }
            _ => {
                let values = reader.ragged(column)?;
                let list: Vec<_> = (0..values.len()).map(|index| (values.get(index), values.free(index))).collect();
                format!("{list:?}")
            }
        });
    }
    Ok(seen)
}
