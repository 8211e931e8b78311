//! The statistics object (spec section 7): what the tails of one page's fragments say about their columns.

use bytes::Bytes;
use penstock_error::Result;

use crate::cursor::{Cursor, Magic, Writer, malformed, seal, unseal};
use crate::datafile::{Bounds, Chunk, Class};
use crate::id::Id;

/// What is known of a column's values in some samples.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Statistics {
    /// At most this many samples are null.
    pub nulls: u64,
    /// The number of different words, if it is known.
    pub words: Option<u64>,
    /// None if the column has no order, or nothing is known.
    pub bounds: Option<Bounds>,
}

impl Statistics {
    /// Take the statistics of a chunk from its tail.
    pub fn of(chunk: &Chunk) -> Statistics {
        match &chunk.dictionary {
            Some(words) => {
                // Each word is a value.
                let bounds = Some(Bounds::of_words(words.iter().map(str::as_bytes)));
                Statistics { nulls: chunk.nulls(), words: Some(words.len() as u64), bounds }
            }
            None if chunk.nulls() == chunk.samples => Statistics::of_nulls(chunk.samples),
            None => Statistics { nulls: chunk.nulls(), words: None, bounds: chunk.bounds.clone() },
        }
    }

    /// Return the statistics of `samples` nulls.
    pub fn of_nulls(samples: u64) -> Statistics {
        Statistics { nulls: samples, words: None, bounds: Some(Bounds::default()) }
    }

    /// Add samples that may have other values.
    pub fn include(&mut self, other: &Statistics) {
        self.nulls = self.nulls.saturating_add(other.nulls);
        self.words = None;
        self.bounds = self.bounds.take().zip(other.bounds.as_ref()).and_then(|(bounds, more)| bounds.or(more));
    }

    fn write(&self, writer: &mut Writer) {
        let class = self.bounds.as_ref().map_or(0, |bounds| match &bounds.span {
            Some(span) => span.class() as u8,
            None if bounds.has_nan => Class::Float as u8,
            None => Class::Text as u8, // All are null.
        });
        writer.u8(class);
        writer.varint(self.nulls);
        writer.varint(self.words.map_or(0, |words| words + 1));
        self.bounds.iter().for_each(|bounds| bounds.write(writer));
    }

    fn parse(cursor: &mut Cursor) -> Result<Statistics> {
        let class = cursor.u8()?;
        let (nulls, words) = (cursor.varint()?, cursor.varint()?.checked_sub(1));
        let bounds = match (class, Class::from_code(class)) {
            (0, _) => None,
            (_, Some(class)) => Some(Bounds::parse(cursor, Some(class))?),
            (_, None) => return Err(malformed(format!("statistics have unknown class {class}"))),
        };
        Ok(Statistics { nulls, words, bounds })
    }
}

/// The statistics of a page's fragments.
#[derive(Debug, Clone, PartialEq)]
pub struct PageStatistics {
    pub page: Id,
    pub fragments: u64,
    /// Column ids, ascending. Each has some fragments by their index in the page, ascending.
    pub columns: Vec<(u64, Vec<(u64, Statistics)>)>,
}

impl PageStatistics {
    /// Return what is known of a column in a fragment.
    pub fn of(&self, column: u64, fragment: u64) -> Option<&Statistics> {
        let (_, known) = &self.columns[self.columns.binary_search_by_key(&column, |(column, _)| *column).ok()?];
        Some(&known[known.binary_search_by_key(&fragment, |(fragment, _)| *fragment).ok()?].1)
    }

    pub fn encode(&self) -> Vec<u8> {
        seal(Magic::Statistics, |writer| {
            writer.id(self.page);
            writer.varint(self.fragments);
            writer.list(&self.columns, |writer, (column, known)| {
                writer.varint(*column);
                writer.list(known, |writer, (fragment, statistics)| {
                    writer.varint(*fragment);
                    statistics.write(writer);
                });
            });
        })
    }

    pub fn parse(bytes: &Bytes) -> Result<PageStatistics> {
        let parse_fragment = |cursor: &mut Cursor| Ok((cursor.varint()?, Statistics::parse(cursor)?));
        let parse_column = |cursor: &mut Cursor| Ok((cursor.varint()?, cursor.list(4, parse_fragment)?));
        let parsed = unseal(Magic::Statistics, bytes, |cursor| {
            Ok(PageStatistics {
                page: cursor.id()?,
                fragments: cursor.varint()?,
                columns: cursor.list(2, parse_column)?,
            })
        })?;
        let are_in_order = |known: &[(u64, Statistics)]| {
            known.is_sorted_by(|one, other| one.0 < other.0)
                && known.iter().all(|(fragment, _)| *fragment < parsed.fragments)
        };
        match parsed.columns.is_sorted_by(|one, other| one.0 < other.0)
            && parsed.columns.iter().all(|(_, known)| are_in_order(known))
        {
            true => Ok(parsed),
            false => Err(malformed(
                "statistics are not in the order of columns and fragments, or name a fragment that the page lacks",
            )),
        }
    }
}
