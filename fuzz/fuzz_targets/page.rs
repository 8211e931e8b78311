//! Fuzzes the parsers for manifest pages, roots and words objects, with the raw input and with the input resealed with a valid
//! checksum.
#![no_main]
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use penstock_format::manifest::{Root, parse_page, parse_words};

fuzz_target!(|data: &[u8]| {
    let bytes = Bytes::copy_from_slice(data);
    let _ = (parse_page(&bytes), Root::parse(&bytes), parse_words(&bytes));
    if data.len() > 12 {
        for magic in [b"PNSP", b"PNSR", b"PNSW"] {
            let mut sealed = data.to_vec();
            let end = sealed.len() - 4;
            sealed[..4].copy_from_slice(magic);
            sealed[4..8].copy_from_slice(&[1, 0, 0, 0]);
            let sum = penstock_format::crc(&sealed[..end]).to_le_bytes();
            sealed[end..].copy_from_slice(&sum);
            let sealed = Bytes::from(sealed);
            let _ = (parse_page(&sealed), Root::parse(&sealed), parse_words(&sealed));
        }
    }
});
