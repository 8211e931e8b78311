//! Fuzzes the parsers for names, stages and the frames of journals, with the raw input and with the input resealed with a valid checksum. What
//! parses is encoded and parsed again.
#![no_main]
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use penstock_format::ids::ObjectRef;
use penstock_format::names::{Layer, Names};
use penstock_format::transit::journal::{Began, Frame, JournaledColumn, encode};
use penstock_format::transit::stage::Stage;
use penstock_fuzz::sealed;

fn frame(data: &[u8]) {
    let _ = Began::parse(Bytes::copy_from_slice(data));
    let Ok(found) = Frame::parse(Bytes::copy_from_slice(data)) else { return };
    let given: Vec<JournaledColumn> = found.columns.iter().map(|(name, column, words)| (&name[..], column, words.as_ref())).collect();
    let (head, values) = encode(&found.verb, found.decode, &found.row_ids, &given, &found.reads).expect("nothing is pulled");
    let body = [&head[..]].into_iter().chain(values).collect::<Vec<&[u8]>>().concat();
    let again = Frame::parse(body.into()).expect("an encoded frame parses");
    assert_eq!(format!("{found:?}"), format!("{again:?}"));
}

fuzz_target!(|data: &[u8]| {
    let parse = |bytes: &Bytes| {
        let _ = (Names::parse(bytes, 0), Layer::parse(ObjectRef::of(Default::default(), bytes), bytes));
        if let Ok(stage) = Stage::parse(bytes) {
            assert_eq!(Stage::parse(&stage.encode().into()).expect("an encoded stage parses"), stage);
        }
    };
    frame(data);
    parse(&Bytes::copy_from_slice(data));
    [b"PNSN", b"PNSG"].into_iter().filter_map(|magic| sealed(data, magic)).for_each(|bytes| parse(&bytes));
});
