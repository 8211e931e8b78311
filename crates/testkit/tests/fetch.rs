//! A hedged request can receive two replies. The reply that is used must be the one whose checksums are verified.

use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use penstock_dataset::{Context, OnCorrupt, Purpose, Reader, Snapshot, create};
use penstock_error::Result;
use penstock_storage::{
    Access, Counters, Created, Features, Listing, Memory, ObjectWriter, RangeRequest, Read, Store, Then,
};
use penstock_testkit::samples;

/// A store that passes good pieces to the `then` callback but returns damaged ones, as if the two came from different replies.
#[derive(Debug)]
struct Racing(Memory);

impl Read for Racing {
    fn uri(&self) -> &str {
        self.0.uri()
    }
    fn features(&self) -> Features {
        Features { access: Some(Access::Ranged), ..self.0.features() }
    }
    fn counters(&self) -> &Counters {
        self.0.counters()
    }
    fn read(&self, name: &str) -> Result<Bytes> {
        self.0.read(name)
    }
    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        let tails = ranges
            .iter()
            .all(|range| range.pieces.len() == 1 && range.begin > 0 && range.object_bytes == Some(range.end() + 32));
        let answers = self.0.fetch_then(ranges, then);
        if tails {
            return answers; // Tails are not hedged.
        }
        let spoil = |piece: &Bytes| {
            let mut body = piece.to_vec();
            if let Some(last) = body.last_mut() {
                *last ^= 1;
            }
            Bytes::from(body)
        };
        answers.into_iter().map(|pieces| pieces.map(|pieces| pieces.iter().map(spoil).collect())).collect()
    }
    fn map(&self, name: &str, bytes: u64) -> Result<Bytes> {
        self.0.map(name, bytes)
    }
}

impl Store for Racing {
    fn exists(&self, name: &str) -> Result<bool> {
        self.0.exists(name)
    }
    fn list_page(&self, folder: &str, after: Option<&str>) -> Result<Listing> {
        self.0.list_page(folder, after)
    }
    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>> {
        self.0.writer(name)
    }
    fn sync(&self, folders: &[&str]) -> Result<()> {
        self.0.sync(folders)
    }
    fn create(&self, name: &str, body: &[u8]) -> Result<Created> {
        self.0.create(name, body)
    }
    fn overwrite(&self, name: &str, body: &[u8]) -> Result<()> {
        self.0.overwrite(name, body)
    }
    fn delete(&self, name: &str) -> Result<()> {
        self.0.delete(name)
    }
    fn initialise(&self) -> Result<()> {
        self.0.initialise()
    }
    fn survey(&self, see: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()> {
        self.0.survey(see)
    }
    fn prove(&self) -> Result<()> {
        self.0.prove()
    }
}

#[test]
fn a_piece_that_was_not_checked_is_not_used() -> Result<()> {
    let snapshot = Arc::new(create(Arc::new(Memory::named("racing")), samples::schema(), "create", "testkit")?);
    // The data file is too large to be read whole.
    let (_, snapshot) = samples::append(&snapshot, 7, 300)?;
    drop(snapshot);
    let racing = Arc::new(Snapshot::open(Context::new(Arc::new(Racing(Memory::named("racing")))), 0)?);
    let (_, column) =
        racing.schema.column("large").ok_or_else(|| penstock_error::Error::new("internal", "no column"))?;
    let mut reader = Reader::new(racing.clone(), vec![0, 100, 299], OnCorrupt::Raise)?;
    reader.fetch(&[column], Purpose::Take)?;
    let read = reader.ragged(column);
    assert!(read.is_err_and(|error| error.code() == "block-checksum"));
    reader.on_corrupt = OnCorrupt::Null;
    let lenient = reader.ragged(column)?;
    assert!((0..3).all(|index| lenient.get(index).is_none()));
    Ok(())
}
