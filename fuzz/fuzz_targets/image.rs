//! Fuzzes images. If a header is accepted, the image and its regions at every scale must be decoded or refused within the limits.
#![no_main]
use libfuzzer_sys::fuzz_target;
use penstock_codec::pixels::Pool;
use penstock_codec::region::{Encoded, Region};
use penstock_codec::{Limits, Orientation, decode, decode_mask, probe};

static PIXELS: Pool = Pool::new(1 << 20);

fuzz_target!(|data: &[u8]| {
    let limits = Limits { pixels: 1 << 20 };
    if probe(data, limits).is_ok() {
        let _ = (decode(data, limits, Orientation::Exif), decode_mask(data, limits));
    }
    if let Ok(encoded) = Encoded::open(data, limits, Orientation::Stored, &PIXELS) {
        let (width, height) = encoded.size();
        let part = Region { left: width / 3, top: height / 3, width: width.div_ceil(3), height: height.div_ceil(3) };
        // For a small file, the decoder builds tables only if the previous image had the same Huffman codes.
        for (region, denominator) in [(Region::whole(width, height), 1), (part, 1), (part, 2), (part, 8)] {
            let _ = encoded.region(region, denominator);
        }
    }
});
