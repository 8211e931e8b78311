//! Write manifest pages, words of categories and sets of row ids.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::Id;
use penstock_format::ids::{ObjectRef, page_name, rows_name, statistics_name, words_name};
use penstock_format::manifest::{
    Fragment, PageRef, PageStatistics, Statistics, WordsSegment, encode_pages, encode_words,
};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};

use crate::store::context::Context;

/// Row sets that are in objects, as far as they are known.
pub type KnownRowIds = HashMap<RowIdsRef, Arc<RowIds>>;

/// If the encoded fragments exceed this size, they are written to manifest pages before the commit. This keeps records small, so
/// that one record can contain the deltas of many commits.
pub const INLINE_BYTES: usize = 1024;

/// Write an object under a new id, and return the id. `puts` gets its name, also if the put fails.
pub fn write_object(context: &Context, name: fn(Id) -> String, body: &[u8], puts: &mut Vec<String>) -> Result<Id> {
    let id = context.new_id()?;
    puts.push(name(id));
    context.storage.put(&name(id), body)?;
    Ok(id)
}

/// Write fragments to manifest pages. Cost: one put per page, and one for the statistics of those whose data files this process wrote.
pub fn write_pages(context: &Context, fragments: &[Fragment], puts: &mut Vec<String>) -> Result<Vec<PageRef>> {
    encode_pages(fragments)
        .into_iter()
        .map(|(body, fragments)| {
            let id = write_object(context, page_name, &body, puts)?;
            let statistics = write_statistics(context, id, fragments, puts)?;
            Ok(PageRef { statistics, ..PageRef::of(id, &body, fragments) })
        })
        .collect()
}

/// Write what is known of the columns of a page's fragments, if this process wrote their data files.
fn write_statistics(
    context: &Context,
    page: Id,
    fragments: &[Fragment],
    puts: &mut Vec<String>,
) -> Result<Option<ObjectRef>> {
    let mut columns: BTreeMap<u64, Vec<(u64, Statistics)>> = BTreeMap::new();
    for (index, fragment) in fragments.iter().enumerate() {
        for known in fragment.files.iter().filter_map(|file| context.caches.get().statistics_of(file.id)) {
            for (column, statistics) in known.iter() {
                columns.entry(*column).or_default().push((index as u64, statistics.clone()));
            }
        }
    }
    if columns.is_empty() {
        return Ok(None);
    }
    let statistics = PageStatistics { page, fragments: fragments.len() as u64, columns: columns.into_iter().collect() };
    let body = statistics.encode();
    let id = write_object(context, statistics_name, &body, puts)?;
    // A later root may join the page with others.
    context.caches.get().page_statistics.insert(id, Arc::new(statistics));
    Ok(Some(ObjectRef::of(id, &body)))
}

/// Write new words of a category column. A commit gives them the codes after those that exist. Cost: one put.
pub fn write_words<S: AsRef<str>>(
    context: &Context,
    column: u64,
    words: &[S],
    puts: &mut Vec<String>,
) -> Result<WordsSegment> {
    let body = encode_words(column, words);
    let id = write_object(context, words_name, &body, puts)?;
    Ok(WordsSegment { column, first_code: 0, words: words.len() as u64, object: ObjectRef::of(id, &body) })
}

/// Store a set of row ids. Cost: one put, unless the set has so few runs that its parent can store it.
pub fn write_rows(context: &Context, ids: &RowIds, puts: &mut Vec<String>) -> Result<RowSet> {
    let id = context.new_id()?;
    let (rows, body) = ids.encode(id);
    if let Some(body) = body {
        puts.push(rows_name(id));
        context.storage.put(&rows_name(id), &body)?;
    }
    Ok(rows)
}

/// Return the folders of these names, each once.
pub fn folders_of(names: &[String]) -> Vec<&str> {
    let mut folders: Vec<&str> = names.iter().filter_map(|name| name.split('/').next()).collect();
    folders.sort_unstable();
    folders.dedup();
    folders
}
