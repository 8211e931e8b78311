//! Fuzzes the parser for packed blocks, which contain ragged samples.
#![no_main]
use libfuzzer_sys::fuzz_target;
use penstock_format::datafile::Packed;
use penstock_tensor::{Dtype, Shape};

fuzz_target!(|data: &[u8]| {
    let [rows, kind, block @ ..] = data else { return };
    let (dtype, shape) = match kind % 3 {
        0 => (Dtype::Bytes, Shape(vec![None])),
        1 => (Dtype::Float32, Shape(vec![None, Some(4)])),
        _ => (Dtype::Int16, Shape(vec![None, Some(2), None])),
    };
    let rows = usize::from(*rows);
    let Ok(packed) = Packed::parse(block, rows, dtype, &shape) else { return };
    let cell = shape.fixed_bytes(dtype).expect("a small shape has a valid size");
    for row in 0..rows {
        if let Ok(range) = packed.range(block, row) {
            let bytes = block[range].len();
            let _ = packed.free(block, row, bytes, cell, &mut Vec::new(), shape.free_count());
        }
    }
});
