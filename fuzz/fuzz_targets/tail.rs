//! Fuzzes the tail index parser. If a tail parses, every look-up in it must succeed without a panic.
#![no_main]
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use penstock_format::datafile::Tail;

fuzz_target!(|data: &[u8]| {
    let Ok(tail) = Tail::parse(Bytes::copy_from_slice(data), 1 << 30) else { return };
    for chunk in &tail.chunks {
        for row in [0, chunk.samples / 2, chunk.samples.saturating_sub(1)] {
            if row < chunk.samples {
                let (block, inner) = chunk.locate(row);
                assert!(block < chunk.blocks() && inner < chunk.rows_of(block));
                let (first, count) = chunk.units_of(block);
                assert!(first + count <= chunk.crcs.len());
                let _ = chunk.is_valid(row);
            }
        }
    }
});
