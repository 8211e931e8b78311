//! Selections as bytes, to be pickled and hashed, and as text, for the errors of loader states.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::cursor::{Cursor, Writer};

use super::bits::Bits;
use super::split::Split;
use super::strides::{Stride, Strides};
use super::{Bitmap, Selection, Source, Within, out_of_range};
use crate::snapshot::Snapshot;

/// An origin in a loader's state has at most this many characters.
const MOST_CHARACTERS: usize = 400;
/// A bitmap of a bitmap may be nested so deeply.
const MOST_DEPTH: usize = 64;

impl Selection {
    /// Return the description of the selection. It says `all` and `split` without their samples, so that it fits later snapshots, too.
    /// With `origin`, it also has the origin.
    pub fn to_bytes(&self, origin: bool) -> Vec<u8> {
        Writer::written(|writer| self.write(writer, origin))
    }

    fn write(&self, writer: &mut Writer, origin: bool) {
        match &self.of {
            Source::All(_) => writer.u8(0),
            Source::Split(split) => {
                let (low, high) = split.share();
                writer.u8(1);
                [split.seed, low.to_bits(), high.to_bits()].into_iter().for_each(|number| writer.u64(number));
            }
            Source::Bitmap(bitmap) => {
                writer.u8(2);
                bitmap.of.write(writer, false);
                writer.list(&bitmap.bits.words()[..bitmap.bits.end().div_ceil(64) as usize], |writer, word| {
                    writer.u64(*word)
                });
            }
            Source::List(list) => {
                writer.u8(3);
                writer.list(list, |writer, position| writer.u64(*position));
            }
        }
        match &self.within {
            Within::Whole => writer.u8(0),
            Within::Range(range) => {
                writer.u8(1);
                write_stride(writer, range);
            }
            Within::Runs(runs) => {
                writer.u8(2);
                writer.list(&runs.iter().collect::<Vec<_>>(), write_stride);
            }
        }
        writer.string(self.origin.as_deref().filter(|_| origin).unwrap_or_default());
    }

    /// Make a selection of a snapshot from its description. Cost: as for `Split::all` if it is a part of a split.
    pub fn from_bytes(snapshot: &Snapshot, bytes: Vec<u8>) -> Result<Selection> {
        let mut cursor = Cursor::new(Bytes::from(bytes));
        let selection = read(snapshot, &mut cursor, 0)?;
        cursor.end()?;
        Ok(selection)
    }
}

fn write_stride(writer: &mut Writer, stride: &Stride) {
    writer.u64(stride.first);
    writer.signed(stride.step);
    writer.u64(stride.count);
}

fn wrong(text: &str) -> Error {
    Error::new("invalid-argument", format!("cannot read the description of a selection: {text}"))
}

fn read(snapshot: &Snapshot, cursor: &mut Cursor, depth: usize) -> Result<Selection> {
    let of = match cursor.u8()? {
        0 => Source::All(snapshot.len()),
        1 => {
            let (seed, low, high) = (cursor.u64()?, f64::from_bits(cursor.u64()?), f64::from_bits(cursor.u64()?));
            Source::Split(Arc::new(Split::part(snapshot, seed, (low, high))?))
        }
        2 if depth < MOST_DEPTH => {
            let of = read(snapshot, cursor, depth + 1)?;
            let words = cursor.list(8, Cursor::u64)?;
            let bits = Bits::new(64 * words.len() as u64, words);
            if bits.end() > of.len() {
                return Err(out_of_range(bits.end() as i64 - 1, of.len()));
            }
            Source::Bitmap(Arc::new(Bitmap { bits: bits.resized(of.len()), of }))
        }
        3 => Source::List(Arc::new(cursor.list(8, Cursor::u64)?)),
        other => return Err(wrong(&format!("it has a part of unknown kind {other}"))),
    };
    let within = match cursor.u8()? {
        0 => Within::Whole,
        1 => Within::Range(read_stride(cursor)?),
        2 => Within::Runs(Arc::new(Strides::new(&Strides::joined(cursor.list(17, read_stride)?)))),
        other => return Err(wrong(&format!("it has a selection of unknown kind {other}"))),
    };
    let origin = cursor.string()?;
    let largest = match (&of, &within) {
        (Source::List(list), _) => list.iter().max().copied(),
        (_, Within::Whole) => None,
        (_, Within::Range(range)) => range.largest(),
        (_, Within::Runs(runs)) => runs.iter().filter_map(|run| run.largest()).max(),
    };
    let len = if matches!(of, Source::List(_)) { snapshot.len() } else { of.len() };
    if let Some(largest) = largest.filter(|largest| *largest >= len) {
        return Err(out_of_range(largest as i64, len));
    }
    Ok(Selection { of, within, origin: Some(origin).filter(|origin| !origin.is_empty()).map(Arc::from) })
}

fn read_stride(cursor: &mut Cursor) -> Result<Stride> {
    Ok(Stride { first: cursor.u64()?, step: cursor.signed()?, count: cursor.u64()? })
}

/// Where the selection came from.
impl fmt::Display for Selection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(origin) = &self.origin {
            return origin.chars().take(MOST_CHARACTERS).try_for_each(|character| write!(formatter, "{character}"));
        }
        match &self.within {
            Within::Whole => {}
            Within::Range(range) => {
                write!(formatter, "{} samples from {} in steps of {} of ", range.count, range.first, range.step)?
            }
            Within::Runs(runs) => write!(formatter, "{} samples in {} runs of ", runs.count(), runs.len())?,
        }
        match &self.of {
            Source::All(_) => formatter.write_str("all"),
            Source::Split(split) => {
                let (low, high) = split.share();
                write!(formatter, "the split with seed {} from {low} to {}", split.seed, high.min(1.0))
            }
            Source::Bitmap(bitmap) => write!(formatter, "{} chosen samples of {}", bitmap.bits.count(), bitmap.of),
            Source::List(list) => write!(formatter, "a list of {} samples", list.len()),
        }
    }
}
