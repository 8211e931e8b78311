//! Images: what the header lets through must decode or be refused, within limits.
#![no_main]
use libfuzzer_sys::fuzz_target;
use penstock_codec::{Limits, decode, decode_mask, probe};

fuzz_target!(|data: &[u8]| {
    let limits = Limits { pixels: 1 << 20 };
    if probe(data, limits).is_ok() {
        let _ = (decode(data, limits, true), decode_mask(data, limits));
    }
});
