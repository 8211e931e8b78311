//! Read an object, such as a manifest page or a word list, and check it against the parent's reference.

use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Context as _, Result};
use penstock_format::Id;
use penstock_format::cursor::Strings;
use penstock_format::ids::{ObjectRef, Run, page_name, rows_name, stages_name, statistics_name, words_name};
use penstock_format::manifest::{
    Fragment, PageRef, PageStatistics, Staged, WordsSegment, parse_page, parse_stages, parse_words,
};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};
use penstock_storage::RangeRequest;

use super::context::Context;

impl Context {
    /// Read an object and verify the length and checksum that its parent recorded.
    pub fn object(&self, name: &str, object: &ObjectRef) -> Result<Bytes> {
        let read = || self.reads().read(name).map_err(|error| self.or_replaced(error.object(name)));
        let body = read()?;
        if object.check(name, &body).is_ok() {
            return Ok(body);
        }
        self.reads().distrust(name, 0, body.len() as u64); // The network may have damaged the first response.
        let body = read()?;
        object.check(name, &body)?;
        Ok(body)
    }

    /// Read several objects as `object` does. `name` returns the name of the object with an id. Cost: concurrent requests.
    pub fn objects(&self, objects: &[ObjectRef], name: fn(Id) -> String) -> Result<Vec<Bytes>> {
        if let [object] = objects {
            return Ok(vec![self.object(&name(object.id), object)?]);
        }
        let range = |object: &ObjectRef| RangeRequest::plain(&name(object.id), 0, object.bytes, Some(object.bytes));
        let bodies =
            self.reads().fetch(objects.iter().map(range).collect()).into_iter().zip(objects).map(|(answer, object)| {
                let body = answer
                    .ok()
                    .and_then(|pieces| pieces.into_iter().next())
                    .filter(|body| object.check(&name(object.id), body).is_ok());
                // Reading it alone reports the error, or succeeds after a transient one.
                body.map_or_else(|| self.object(&name(object.id), object), Ok)
            });
        bodies.collect()
    }

    /// Return the fragments of a page, with final row ids.
    pub fn page(&self, page: &PageRef) -> Result<Arc<Vec<Fragment>>> {
        self.caches.get().pages.get_or_insert_with(page, || {
            let name = page_name(page.object.id);
            let fragments =
                parse_page(&self.object(&name, &page.object)?).context(|| format!("cannot read `{name}`"))?;
            let samples: u64 = fragments.iter().map(|fragment| fragment.samples).sum();
            if (fragments.len() as u64, samples) != (page.fragments, page.samples) {
                let found = format!(
                    "{} fragments of {samples} samples, expected {} of {}",
                    fragments.len(),
                    page.fragments,
                    page.samples
                );
                return Err(penstock_format::cursor::malformed(format!("cannot read `{name}`: {found}")));
            }
            let fragments: Vec<Fragment> = fragments.into_iter().map(|fragment| fragment.resolved(page.base)).collect();
            let end = page.least + page.span;
            let outside =
                |run: &Run| run.first < page.least || run.first.checked_add(run.count).is_none_or(|own| own > end);
            if fragments.iter().flat_map(|fragment| &fragment.runs).any(outside) {
                let text =
                    format!("cannot read `{name}`: it has row ids outside the {} from {}", page.span, page.least);
                return Err(penstock_format::cursor::malformed(text));
            }
            Ok(Arc::new(fragments))
        })
    }

    /// Return the statistics of a page's fragments. None if they were not written. Cost: one request, unless they are cached.
    pub fn page_statistics(&self, page: &PageRef) -> Result<Option<Arc<PageStatistics>>> {
        let Some(object) = &page.statistics else { return Ok(None) };
        let found = self.caches.get().page_statistics.get_or_insert_with(&object.id, || {
            let name = statistics_name(object.id);
            let found =
                PageStatistics::parse(&self.object(&name, object)?).context(|| format!("cannot read `{name}`"))?;
            match (found.page, found.fragments) == (page.object.id, page.fragments) {
                true => Ok(Arc::new(found)),
                false => {
                    let text = format!(
                        "cannot read `{name}`: it belongs to page `{}` with {} fragments",
                        found.page, found.fragments
                    );
                    Err(penstock_format::cursor::malformed(text))
                }
            }
        });
        found.map(Some)
    }

    /// Keep the statistics of a page's data files, so that another page with its fragments has them, too. Cost: one request, unless they are cached.
    pub fn carry_statistics(&self, page: &PageRef) -> Result<()> {
        let Some(known) = self.page_statistics(page)? else { return Ok(()) };
        for (index, fragment) in self.page(page)?.iter().enumerate() {
            for file in &fragment.files {
                let columns =
                    file.columns.iter().map(|column| Some((*column, known.of(*column, index as u64)?.clone())));
                if let Some(columns) = columns.collect() {
                    self.caches.get().note_statistics(file.id, columns);
                }
            }
        }
        Ok(())
    }

    /// Return sets of row ids. Cost: one concurrent request per object, unless it is cached.
    pub fn row_ids<'a>(&self, sets: impl IntoIterator<Item = &'a RowSet>) -> Result<Vec<Arc<RowIds>>> {
        let sets: Vec<&RowSet> = sets.into_iter().collect();
        let known = &self.caches.get().row_ids;
        let unknown = |set: &&RowSet| {
            if let RowSet::Object(rows) = set { known.peek(rows).is_none().then_some(*rows) } else { None }
        };
        let unknown: Vec<RowIdsRef> = sets.iter().filter_map(unknown).collect();
        if unknown.len() > 1 {
            let objects: Vec<ObjectRef> = unknown.iter().map(|rows| rows.object).collect();
            for (rows, body) in unknown.iter().zip(self.objects(&objects, rows_name)?) {
                known.insert(*rows, parse_row_ids(&rows_name(rows.object.id), &body, rows)?);
            }
        }
        let row_ids_of = |set: &&RowSet| match set {
            RowSet::Runs(runs) => Ok(Arc::new(RowIds::Runs(runs.clone()))),
            RowSet::Object(rows) => known.get_or_insert_with(rows, || {
                let name = rows_name(rows.object.id);
                parse_row_ids(&name, &self.object(&name, &rows.object)?, rows)
            }),
        };
        sets.iter().map(row_ids_of).collect()
    }

    /// Return all row ids of some sets. Cost: as `row_ids`.
    pub fn all_row_ids<'a>(&self, sets: impl IntoIterator<Item = &'a RowSet>) -> Result<RowIds> {
        let sets = self.row_ids(sets)?;
        Ok(RowIds::union(sets.iter().map(AsRef::as_ref)))
    }

    /// Return the stages of an object. Cost: one request.
    pub fn stages(&self, object: &ObjectRef) -> Result<Vec<Staged>> {
        let name = stages_name(object.id);
        parse_stages(&self.object(&name, object)?).context(|| format!("cannot read `{name}`"))
    }

    pub fn words(&self, segment: &WordsSegment) -> Result<Arc<Strings>> {
        self.caches.get().words.get_or_insert_with(segment, || {
            let name = words_name(segment.object.id);
            let (column, words) =
                parse_words(&self.object(&name, &segment.object)?).context(|| format!("cannot read `{name}`"))?;
            if (column, words.len() as u64) != (segment.column, segment.words) {
                return Err(penstock_format::cursor::malformed(format!(
                    "cannot read `{name}`: its {} words of column {column} do not match the manifest",
                    words.len()
                )));
            }
            Ok(Arc::new(words))
        })
    }
}

fn parse_row_ids(name: &str, body: &Bytes, reference: &RowIdsRef) -> Result<Arc<RowIds>> {
    RowIds::parse(body, reference)
        .map(Arc::new)
        .context(|| format!("cannot read `{name}`"))
        .map_err(|error| error.object(name))
}
