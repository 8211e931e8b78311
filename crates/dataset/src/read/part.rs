//! Read a part of one value of bytes. `slices` reads it if the value has a block of its own, as if it were an array of bytes.

use std::ops::Range;

use penstock_error::{Error, Result};
use penstock_format::datafile::UNIT_BYTES;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Dtype;

use super::fetch::Purpose;
use super::ragged::RaggedValues;
use super::reader::Reader;
use super::slices::SampleExtent;
use crate::config::Config;

/// A value of which a part can be read.
pub enum FoundValue {
    Null,
    /// It shares a block with other values, or has one checksum unit, so it was read.
    Small(RaggedValues),
    /// `read_part` can read any part of it. Unless it `is_plain`, each part costs the whole block.
    Large {
        bytes: u64,
        is_plain: bool,
    },
}

impl FoundValue {
    /// Return the value if it was read.
    pub fn small(&self) -> Option<&[u8]> {
        match self {
            FoundValue::Small(values) => values.get(0),
            _ => None,
        }
    }

    /// Return the number of bytes of the value. None if it is null.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            FoundValue::Null => None,
            FoundValue::Small(_) => self.small().map(|value| value.len() as u64),
            FoundValue::Large { bytes, .. } => Some(*bytes),
        }
    }
}

impl Reader {
    /// Find the value of the plan's only sample. Cost: reads the tail of its data file, and the block of a small value.
    pub fn find_value(&mut self, column: &ColumnSpec) -> Result<FoundValue> {
        if column.kind.stored()?.0 != Dtype::Bytes {
            let text = format!("cannot read bytes of column `{}`: its values are not stored as bytes", column.name);
            return Err(
                Error::new("invalid-argument", text).hint(format!("read its values: ds[\"{}\"][0]", column.name))
            );
        }
        self.open(&[column])?;
        let extent = if self.has_own(column) {
            SampleExtent::Small
        } else {
            self.extents(column)?.pop().unwrap_or(SampleExtent::Null)
        };
        if let SampleExtent::Large { shape, is_plain, .. } = extent {
            return Ok(FoundValue::Large { bytes: shape.first().copied().unwrap_or(0), is_plain });
        }
        if extent == SampleExtent::Null {
            return Ok(FoundValue::Null);
        }
        self.fetch(&[column], Purpose::Take)?;
        let values = self.ragged(column)?;
        Ok(if values.has_nulls() { FoundValue::Null } else { FoundValue::Small(values) })
    }

    /// Return a flag per place in the result for values of bytes that have at least `least` bytes and are not compressed. No flags if no file is so
    /// large. Cost: reads the tails of data files that are not open.
    pub fn large_values(&mut self, column: &ColumnSpec, least: u64) -> Result<Vec<bool>> {
        if column.kind.stored()?.0 != Dtype::Bytes
            || self.files(&[column]).iter().all(|(file, _)| file.file_bytes < least)
        {
            return Ok(Vec::new());
        }
        self.open(&[column])?;
        let is_large = |extent: &SampleExtent| matches!(extent, SampleExtent::Large { shape, is_plain: true, .. } if shape.first() >= Some(&least));
        Ok(self.extents(column)?.iter().map(is_large).collect())
    }

    /// Read a part of a value that was found. Costs the same as `read_part`, and nothing if it was read.
    pub fn part_of(&self, column: &ColumnSpec, found: &FoundValue, range: Range<u64>, out: &mut Vec<u8>) -> Result<()> {
        out.resize((range.end - range.start) as usize, 0);
        match (found, found.small()) {
            (FoundValue::Large { is_plain, .. }, _) => self.read_part(column, range, *is_plain, out)?,
            (_, Some(value)) => out.copy_from_slice(&value[range.start as usize..range.end as usize]),
            _ => out.clear(),
        }
        Ok(())
    }

    /// Read a part of a large value. Cost: reads the checksum units that contain it, or the whole block if it is compressed. Of a value that
    /// `is_plain`, holds a sixteenth of the memory budget at a time.
    pub fn read_part(&self, column: &ColumnSpec, range: Range<u64>, is_plain: bool, out: &mut [u8]) -> Result<()> {
        let most = if is_plain { (Config::memory_bytes() / 16).next_multiple_of(UNIT_BYTES) } else { u64::MAX };
        let (mut at, mut rest) = (range.start, out);
        while at < range.end {
            let end = ((at / UNIT_BYTES * UNIT_BYTES).saturating_add(most)).min(range.end);
            let (now, later) = rest.split_at_mut((end - at) as usize);
            let part = std::iter::once(at..end).collect();
            self.slices(column, &[Some(part)], vec![now])?;
            (at, rest) = (end, later);
        }
        Ok(())
    }
}
