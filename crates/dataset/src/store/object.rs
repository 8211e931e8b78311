//! Read an object, such as a manifest page or a word list, and check it against the parent's reference.

use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Context as _, Result};
use penstock_format::cursor::Strings;
use penstock_format::ids::{ObjectRef, page_name, words_name};
use penstock_format::manifest::{Fragment, PageRef, WordsSegment, parse_page, parse_words};

use super::context::Context;

impl Context {
    /// Read an object and verify the length and checksum that its parent recorded.
    pub fn object(&self, name: &str, object: &ObjectRef) -> Result<Bytes> {
        let read = || self.storage.read(name).map_err(|error| self.or_replaced(error.object(name)));
        let body = read()?;
        if object.check(name, &body).is_ok() {
            return Ok(body);
        }
        let body = read()?; // The network may have damaged the first response.
        object.check(name, &body)?;
        Ok(body)
    }

    /// Return the fragments of a page, with final row ids.
    pub fn page(&self, page: &PageRef) -> Result<Arc<Vec<Fragment>>> {
        self.caches.get().pages.get_or_insert_with(page, || {
            let name = page_name(page.object.id);
            let fragments = parse_page(&self.object(&name, &page.object)?).context(|| format!("cannot read `{name}`"))?;
            let samples: u64 = fragments.iter().map(|fragment| fragment.samples).sum();
            if (fragments.len() as u64, samples) != (page.fragments, page.samples) {
                let found = format!("{} fragments of {samples} samples, expected {} of {}", fragments.len(), page.fragments, page.samples);
                return Err(penstock_format::cursor::malformed(format!("cannot read `{name}`: {found}")));
            }
            Ok(Arc::new(fragments.into_iter().map(|fragment| fragment.resolved(page.base)).collect()))
        })
    }

    pub fn words(&self, segment: &WordsSegment) -> Result<Arc<Strings>> {
        self.caches.get().words.get_or_insert_with(segment, || {
            let name = words_name(segment.object.id);
            let (column, words) = parse_words(&self.object(&name, &segment.object)?).context(|| format!("cannot read `{name}`"))?;
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
