//! The frames of a transaction's journal (docs/design/0014-journal.md): the calls that changed it, and its reads.

use bytes::Bytes;
use penstock_error::Result;
use penstock_tensor::{Column, Ragged};

use crate::cursor::{Cursor, Writer, malformed};
use crate::id::Id;
use crate::ids::SnapshotId;

/// The first frame: what the transaction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Began {
    pub dataset: Id,
    /// The snapshot at which it began.
    pub snapshot: SnapshotId,
    pub uuid: Id,
    pub serializable: bool,
}

/// What a call does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verb {
    Append,
    Update,
    Upsert {
        key: String,
    },
    Delete,
    /// The record may have been put.
    Commit,
    /// Update the samples that have these keys.
    UpdateOn {
        key: String,
    },
}

/// Columns that were read, of these samples or of all.
pub type ReadFrame = (Vec<u64>, Option<Vec<u64>>);

/// A column that a call gave: its name, its values, and the words of a category.
pub type JournaledColumn<'a> = (&'a str, &'a Column, Option<&'a Ragged>);

/// A frame that was read.
#[derive(Debug)]
pub struct Frame {
    pub verb: Verb,
    /// Whether media are decoded to check them.
    pub decode: bool,
    pub row_ids: Vec<u64>,
    pub columns: Vec<(String, Column, Option<Ragged>)>,
    /// The reads before this call.
    pub reads: Vec<ReadFrame>,
}

const VERSION: u8 = 1;

impl Began {
    pub fn encode(&self) -> Vec<u8> {
        Writer::written(|writer| {
            writer.u8(VERSION);
            writer.id(self.dataset);
            self.snapshot.write(writer);
            writer.id(self.uuid);
            writer.u8(self.serializable.into());
        })
    }

    pub fn parse(body: Bytes) -> Result<Began> {
        let mut cursor = Cursor::new(body);
        let version = cursor.u8()?;
        if version != VERSION {
            return Err(malformed(format!("a journal has version {version}, expected {VERSION}")));
        }
        let (dataset, snapshot) = (cursor.id()?, SnapshotId::read(&mut cursor)?);
        let began = Began { dataset, snapshot, uuid: cursor.id()?, serializable: cursor.flag()? };
        cursor.end()?;
        Ok(began)
    }
}

/// Encode a call: the head, and the values that follow it. Returns None if values are pulled from a source, which a journal cannot repeat.
pub fn encode<'a>(
    verb: &Verb,
    decode: bool,
    row_ids: &[u64],
    columns: &[JournaledColumn<'a>],
    reads: &[ReadFrame],
) -> Option<(Vec<u8>, Vec<&'a [u8]>)> {
    let (mut writer, mut values) = (Writer::default(), Vec::new());
    writer.u8(match verb {
        Verb::Append => 0,
        Verb::Update => 1,
        Verb::Upsert { .. } => 2,
        Verb::Delete => 3,
        Verb::Commit => 4,
        Verb::UpdateOn { .. } => 5,
    });
    if let Verb::Upsert { key } | Verb::UpdateOn { key } = verb {
        writer.string(key);
    }
    writer.u8(decode.into());
    writer.list(row_ids, |writer, row_id| writer.u64(*row_id));
    writer.list(reads, |writer, (columns, row_ids)| {
        writer.varints(columns);
        writer.option(row_ids.as_ref(), |writer, row_ids| writer.list(row_ids, |writer, row_id| writer.u64(*row_id)));
    });
    writer.varint(columns.len() as u64);
    for (name, column, words) in columns {
        writer.string(name);
        match column {
            Column::Pulled(_) => return None,
            Column::Fixed { data, validity, samples } => {
                writer.u8(0);
                writer.varint(*samples as u64);
                write_validity(&mut writer, validity.as_deref());
                writer.varint(data.len() as u64);
                values.push(&data[..]);
            }
            Column::Ragged(ragged) => {
                writer.u8(1);
                write_ragged(&mut writer, ragged, &mut values);
            }
        }
        writer.option(*words, |writer, words| write_ragged(writer, words, &mut values));
    }
    Some((Writer::written(|head| head.bytes(&writer.0)), values))
}

fn write_ragged<'a>(writer: &mut Writer, ragged: &'a Ragged, values: &mut Vec<&'a [u8]>) {
    writer.varints(&ragged.ends);
    writer.varints(&ragged.free);
    write_validity(writer, ragged.validity.as_deref());
    writer.varint(ragged.data.len() as u64);
    values.push(&ragged.data[..]);
}

fn write_validity(writer: &mut Writer, validity: Option<&[bool]>) {
    writer.option(validity, |writer, validity| {
        writer.bytes(&validity.iter().map(|valid| u8::from(*valid)).collect::<Vec<u8>>())
    });
}

impl Frame {
    pub fn parse(body: Bytes) -> Result<Frame> {
        let mut values = Cursor::new(body);
        let mut cursor = Cursor::new(values.bytes()?);
        let verb = match cursor.u8()? {
            0 => Verb::Append,
            1 => Verb::Update,
            2 => Verb::Upsert { key: cursor.string()? },
            3 => Verb::Delete,
            4 => Verb::Commit,
            5 => Verb::UpdateOn { key: cursor.string()? },
            other => return Err(malformed(format!("a journal has a call of unknown kind {other}"))),
        };
        let (decode, row_ids) = (cursor.flag()?, cursor.list(8, Cursor::u64)?);
        let reads =
            cursor.list(2, |cursor| Ok((cursor.varints()?, cursor.option(|cursor| cursor.list(8, Cursor::u64))?)))?;
        let columns = cursor.list(4, |cursor| {
            let name = cursor.string()?;
            let column = match cursor.u8()? {
                0 => {
                    let samples = cursor.varint()? as usize;
                    let (validity, bytes) = (read_validity(cursor)?, cursor.varint()?);
                    let data = take(&mut values, bytes)?;
                    let fits = validity.as_ref().is_none_or(|validity| validity.len() == samples);
                    if !fits || data.len().checked_rem(samples).unwrap_or(data.len()) != 0 {
                        return Err(malformed("a journal has values of unequal size"));
                    }
                    Column::Fixed { data, validity, samples }
                }
                1 => Column::Ragged(read_ragged(cursor, &mut values)?),
                other => return Err(malformed(format!("a journal has values of unknown form {other}"))),
            };
            let words = cursor.option(|cursor| read_ragged(cursor, &mut values))?;
            Ok((name, column, words))
        })?;
        cursor.end()?;
        values.end()?;
        Ok(Frame { verb, decode, row_ids, columns, reads })
    }
}

fn read_ragged(cursor: &mut Cursor, values: &mut Cursor) -> Result<Ragged> {
    let (ends, free) = (cursor.varints()?, cursor.varints()?);
    let (validity, bytes) = (read_validity(cursor)?, cursor.varint()?);
    let data = take(values, bytes)?;
    let fits = validity.as_ref().is_none_or(|validity| validity.len() == ends.len())
        && free.len().checked_rem(ends.len()).unwrap_or(free.len()) == 0;
    if !fits || !ends.is_sorted() || ends.last().copied().unwrap_or(0) != data.len() as u64 {
        return Err(malformed("a journal has values whose ends do not ascend to the end of the data"));
    }
    Ok(Ragged { data, ends, free, validity })
}

fn read_validity(cursor: &mut Cursor) -> Result<Option<Vec<bool>>> {
    cursor.option(|cursor| Ok(cursor.bytes()?.iter().map(|valid| *valid != 0).collect()))
}

fn take(values: &mut Cursor, bytes: u64) -> Result<Vec<u8>> {
    Ok(values.take(bytes.min(values.left() as u64 + 1) as usize)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read_as_they_were_written() -> Result<()> {
        let began = Began {
            dataset: Id([1; 16]),
            snapshot: SnapshotId { branch: 2, number: 3, uuid: Id([4; 16]) },
            uuid: Id([5; 16]),
            serializable: true,
        };
        assert_eq!(Began::parse(began.encode().into())?, began);
        let fixed = Column::Fixed { data: vec![1, 2, 3, 4], validity: Some(vec![true, false]), samples: 2 };
        let words = Ragged { data: b"catdog".to_vec(), ends: vec![3, 6], ..Ragged::default() };
        let ragged = Column::Ragged(Ragged { free: vec![7, 8], ..words.clone() });
        let reads = vec![(vec![1, 2], Some(vec![9, 1 << 63])), (vec![], None)];
        let keyed = [Verb::Upsert { key: "k".into() }, Verb::UpdateOn { key: "é".into() }];
        for verb in [Verb::Append, Verb::Update, Verb::Delete, Verb::Commit].into_iter().chain(keyed) {
            let (head, values) =
                encode(&verb, true, &[5, 6], &[("a", &fixed, Some(&words)), ("b", &ragged, None)], &reads).unwrap();
            let body = [&head[..]].into_iter().chain(values).collect::<Vec<&[u8]>>().concat();
            for length in 0..body.len() {
                assert!(Frame::parse(Bytes::copy_from_slice(&body[..length])).is_err(), "{length}");
            }
            let frame = Frame::parse(body.into())?;
            assert_eq!((frame.verb, frame.decode, &frame.row_ids[..], &frame.reads), (verb, true, &[5, 6][..], &reads));
            let found: Vec<String> = frame.columns.iter().map(|column| format!("{column:?}")).collect();
            assert_eq!(
                found,
                [format!("{:?}", ("a", &fixed, Some(&words))), format!("{:?}", ("b", &ragged, None::<Ragged>))]
            );
        }
        Ok(())
    }
}
