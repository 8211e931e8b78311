//! Write manifest pages and sets of row ids.

use penstock_error::Result;
use penstock_format::ids::{page_name, rows_name};
use penstock_format::manifest::{Fragment, PageRef, encode_pages};
use penstock_format::rows::{RowIds, RowSet};

use crate::store::context::Context;

/// If the encoded fragments exceed this size, they are written to manifest pages before the commit. This keeps records small, so
/// that one record can contain the deltas of many commits.
pub const INLINE_BYTES: usize = 1024;

/// Write fragments to manifest pages. Cost: one put per page.
pub fn write_pages(context: &Context, fragments: &[Fragment], puts: &mut Vec<String>) -> Result<Vec<PageRef>> {
    encode_pages(fragments)
        .into_iter()
        .map(|(body, fragments)| {
            let id = context.new_id()?;
            puts.push(page_name(id));
            context.storage.put(&page_name(id), &body)?;
            Ok(PageRef::of(id, &body, fragments))
        })
        .collect()
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
