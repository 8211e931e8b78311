//! Fuzzes the parsers for manifest pages, roots, words objects and row ids, with the raw input and with the input resealed with a
//! valid checksum.
#![no_main]
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use penstock_format::Id;
use penstock_format::ids::ObjectRef;
use penstock_format::manifest::{Root, parse_page, parse_words};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};
use penstock_fuzz::sealed;

/// Parse row ids as the object of a reference whose counts match any set. A set that parses is encoded and parsed again.
fn row_ids(bytes: &Bytes) {
    let any = |ids: u64| RowIdsRef { object: ObjectRef::of(Id::default(), bytes), base: 0, ids, least: 0, span: u64::MAX };
    for ids in 1..40 {
        let Ok(set) = RowIds::parse(bytes, &any(ids)) else { continue };
        assert_eq!(set.runs_in(0..u64::MAX).iter().map(|(run, _)| run.count).sum::<u64>(), ids);
        if let (RowSet::Object(reference), Some(body)) = set.encode(Id::default()) {
            assert_eq!(RowIds::parse(&body.into(), &reference).expect("an encoded set parses"), set);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let parse = |bytes: &Bytes| {
        let _ = (parse_page(bytes), Root::parse(bytes), parse_words(bytes));
        row_ids(bytes);
    };
    parse(&Bytes::copy_from_slice(data));
    [b"PNSP", b"PNSR", b"PNSW", b"PNSO"].into_iter().filter_map(|magic| sealed(data, magic)).for_each(|bytes| parse(&bytes));
});
