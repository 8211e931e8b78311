//! Fuzzes the commit record parser, with the raw input and with the input resealed with a valid checksum.
#![no_main]
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use penstock_format::record::Record;

fuzz_target!(|data: &[u8]| {
    let _ = Record::parse(&Bytes::copy_from_slice(data), 0, 1);
    if data.len() > 12 {
        let mut sealed = data.to_vec();
        let end = sealed.len() - 4;
        sealed[..8].copy_from_slice(b"PNSL\x01\0\0\0");
        let sum = penstock_format::crc(&sealed[..end]).to_le_bytes();
        sealed[end..].copy_from_slice(&sum);
        if let Ok(record) = Record::parse(&sealed.into(), 0, 0) {
            let again = Bytes::from(record.encode());
            assert_eq!(Record::parse(&again, record.branch, record.number).expect("an encoded record parses"), record);
        }
    }
});
