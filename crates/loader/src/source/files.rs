//! A column whose values are separate files, such as NPY arrays or images. Files are read as they are, and only their lengths are
//! verified.

use std::sync::Arc;

use bytes::Bytes;
use penstock_dataset::RaggedValues;
use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;
use penstock_storage::{Access, RangeRequest, Store};

/// The location of one value.
pub struct FileValue {
    pub name: String,
    /// Size of the file when it was listed.
    pub file_bytes: u64,
    /// Offset of the value in the file. The value extends to the end of the file.
    pub begin: u64,
    /// Sizes of the free dimensions.
    pub free: Vec<u64>,
}

pub struct Files {
    pub spec: ColumnSpec,
    pub storage: Arc<dyn Store>,
    pub entries: Vec<FileValue>,
}

impl Files {
    fn entry(&self, position: u64) -> &FileValue {
        &self.entries[position as usize]
    }

    /// Copy values of fixed shape, `cell` bytes each, into `out`.
    pub fn fixed(&self, positions: &[u64], cell: usize, out: &mut [u8]) -> Result<()> {
        if cell == 0 {
            return Ok(());
        }
        let step = self.storage.features().stream_bytes as usize;
        if step == 0 {
            return positions.iter().zip(out.chunks_exact_mut(cell)).try_for_each(|(position, out)| {
                let body = self.body(*position).map_err(|error| self.wrong(*position, error))?;
                out.copy_from_slice(&body[self.entry(*position).begin as usize..]);
                Ok(())
            });
        }
        let (mut ranges, mut targets) = (Vec::new(), Vec::new());
        for (position, out) in positions.iter().zip(out.chunks_exact_mut(cell)) {
            let entry = self.entry(*position);
            for (number, target) in out.chunks_mut(step).enumerate() {
                let begin = entry.begin + (number * step) as u64;
                ranges.push(RangeRequest::plain(&entry.name, begin, target.len() as u64, Some(entry.file_bytes)));
                targets.push(target);
            }
        }
        let pieces = self.storage.stream(&ranges, Some(&mut targets), &mut |_, _| {});
        let each = cell.div_ceil(step);
        pieces
            .into_iter()
            .enumerate()
            .try_for_each(|(number, piece)| piece.map_err(|error| self.wrong(positions[number / each], error)))
    }

    /// Read values of any length.
    pub fn raw(&self, positions: &[u64]) -> Result<RaggedValues> {
        let bodies = if self.storage.features().access.is_some_and(Access::is_mapped) {
            positions.iter().map(|at| self.body(*at)).collect()
        } else {
            self.fetched(positions)
        };
        let value = |(position, body): (&u64, Result<Bytes>)| {
            let entry = self.entry(*position);
            body.map(|body| body.slice(entry.begin as usize..)).map_err(|error| self.wrong(*position, error))
        };
        let values = positions.iter().zip(bodies).map(value).collect::<Result<Vec<Bytes>>>()?;
        let free = positions.iter().flat_map(|position| self.entry(*position).free.clone()).collect();
        Ok(RaggedValues::of(values, free, self.entries.first().map_or(0, |entry| entry.free.len())))
    }

    /// Read whole files concurrently.
    fn fetched(&self, positions: &[u64]) -> Vec<Result<Bytes>> {
        let range = |position: &u64| {
            let entry = self.entry(*position);
            RangeRequest::plain(&entry.name, 0, entry.file_bytes, Some(entry.file_bytes))
        };
        let bodies = self.storage.fetch(positions.iter().map(range).collect());
        bodies.into_iter().map(|pieces| pieces.map(|pieces| pieces.into_iter().next().unwrap_or_default())).collect()
    }

    /// Return a whole file. Small files are read, and large ones are mapped.
    fn body(&self, position: u64) -> Result<Bytes> {
        const MAPPED_FROM_BYTES: u64 = 1 << 20;
        let entry = self.entry(position);
        let body = match entry.file_bytes < MAPPED_FROM_BYTES {
            true => self.storage.read(&entry.name)?,
            false => self.storage.map(&entry.name, entry.file_bytes)?,
        };
        if body.len() as u64 != entry.file_bytes {
            let text = format!("it has {} bytes, but had {} when it was listed", body.len(), entry.file_bytes);
            return Err(Error::new("object-truncated", text));
        }
        Ok(body)
    }

    /// Return the path of the file at `position`.
    pub fn path(&self, position: u64) -> String {
        format!("{}/{}", self.storage.uri(), self.entry(position).name)
    }

    fn wrong(&self, position: u64, error: Error) -> Error {
        let path = self.path(position);
        error
            .context(format!("cannot load `{path}` (sample {position})"))
            .rows(vec![position])
            .hint("the files must not change after they are listed; list them again")
    }
}
