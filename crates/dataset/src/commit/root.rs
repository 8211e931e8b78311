//! Write manifest pages and roots.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::SnapshotId;
use penstock_format::ids::{ObjectRef, page_name, root_name};
use penstock_format::manifest::{Fragment, PAGE_BYTES, PAGE_FRAGMENTS, PageRef, Root, WordsSegment, encode_pages};

use crate::snapshot::Snapshot;
use crate::snapshot::live::Part;
use crate::store::context::Context;

/// If the encoded fragments exceed this size, they are written to manifest pages before the commit. This keeps records small, so
/// that one record can contain the deltas of many commits.
pub const INLINE_BYTES: usize = 1024;

/// Write fragments to manifest pages. Cost: one put per page.
pub fn write_pages(context: &Context, fragments: &[Fragment], base: u64, puts: &mut Vec<String>) -> Result<Vec<PageRef>> {
    encode_pages(fragments)
        .into_iter()
        .map(|(body, fragments, samples, live)| {
            let id = context.new_id()?;
            puts.push(page_name(id));
            context.storage.put(&page_name(id), &body)?;
            Ok(PageRef { object: ObjectRef::of(id, &body), base, fragments, samples, live })
        })
        .collect()
}

/// Write a root that describes a snapshot's state. Loose fragments are merged into the preceding page if it has room, to keep the
/// number of pages small.
pub fn write_root(snapshot: &Snapshot, puts: &mut Vec<String>) -> Result<(ObjectRef, Arc<Root>)> {
    let context = &snapshot.context;
    let (mut pages, mut loose): (Vec<PageRef>, Vec<Fragment>) = (Vec::new(), Vec::new());
    let flush = |pages: &mut Vec<PageRef>, loose: &mut Vec<Fragment>, puts: &mut Vec<String>| -> Result<()> {
        if let Some(last) = pages.last().copied() {
            let room = last.fragments as usize + loose.len() <= PAGE_FRAGMENTS && last.object.bytes as usize <= PAGE_BYTES / 2;
            if room && !loose.is_empty() {
                pages.pop();
                let mut merged = context.page(&last)?.to_vec();
                merged.append(loose);
                *loose = merged;
            }
        }
        pages.extend(write_pages(context, loose, 0, puts)?);
        loose.clear();
        Ok(())
    };
    for part in &snapshot.live.parts {
        match part {
            Part::Fragment(fragment) => loose.push(fragment.as_ref().clone()),
            Part::Page(page) => {
                flush(&mut pages, &mut loose, puts)?;
                pages.push(*page);
            }
        }
    }
    flush(&mut pages, &mut loose, puts)?;
    let mut words: Vec<WordsSegment> = snapshot.words_segments().copied().collect();
    words.sort_by_key(|segment| (segment.column, segment.first_code));
    let SnapshotId { branch, number, .. } = snapshot.id();
    let root = Root { dataset: snapshot.record().dataset, branch, number, schema: snapshot.schema.to_json()?, pages, words };
    let (id, body) = (context.new_id()?, root.encode());
    puts.push(root_name(id));
    context.storage.put(&root_name(id), &body)?;
    context.storage.sync(if root.pages.is_empty() { &["r"] } else { &["p", "r"] })?;
    Ok((ObjectRef::of(id, &body), Arc::new(root)))
}
