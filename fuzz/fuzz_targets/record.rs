//! Fuzzes the commit record parser, with the raw input and with the input resealed with a valid checksum.
#![no_main]
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use penstock_format::record::Record;
use penstock_fuzz::sealed;

fuzz_target!(|data: &[u8]| {
    let _ = Record::parse(&Bytes::copy_from_slice(data), 0, 1);
    if let Some(record) = sealed(data, b"PNSL").and_then(|bytes| Record::parse(&bytes, 0, 0).ok()) {
        let again = Bytes::from(record.encode());
        assert_eq!(Record::parse(&again, record.branch, record.number).expect("an encoded record parses"), record);
    }
});
