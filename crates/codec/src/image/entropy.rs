//! An entropy decoder for regions of baseline JPEGs. It skips blocks outside the region, decoding several Huffman codes at a
//! time.
//!
//! For large photographs, Huffman decoding took three quarters of the decoding time. About 40 % of the codes belong to blocks
//! above or beside a random crop. For a skipped block, only the end position and the DC difference matter, not the
//! coefficients. One table is therefore indexed by the next [`SKIP_BITS`] bits. It returns the number of coefficients in those
//! bits, and the total length of their codes and numbers. For blocks inside the region, another table returns the run and the
//! value of the next coefficient. libjpeg-turbo handles everything else: restart intervals, multiple scans, invalid codes, and
//! files that end early. If this decoder fails, `region` decodes the file with the library instead. `jpeg_region.c` calls this
//! decoder MCU by MCU. No input makes the decoder panic.

use std::ffi::{c_int, c_void};
use std::slice;

/// Number of index bits in the tables that return one code or one coefficient.
const VALUE_BITS: u32 = 10;
/// Number of index bits in the table that counts all coefficients in those bits.
const SKIP_BITS: u32 = 12;
/// The run length assigned to an end-of-block code, longer than any real run.
const END: u32 = 128;
/// The coefficient count in a `skips` entry whose index bits do not contain a complete code and its number.
const UNKNOWN: u32 = 512;
/// Minimum file size, in bytes, for building tables. Tables that the previous image also used are always built. Building takes
/// 0.1 ms.
const LARGE: usize = 16 << 10;
/// Number of tables to keep: enough for the standard tables and a few others.
const KEPT: usize = 16;
/// A distance in bytes that exceeds the library's read-ahead.
const FAR: usize = 64;
const BLOCKS_IN_MCU: usize = 10;

const NATURAL: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21,
    28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54,
    47, 55, 62, 63,
];

/// A Huffman table in the library's layout: the number of codes of each length, and their symbols.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Codes {
    lengths: [u8; 17],
    symbols: [u8; 256],
}

/// The C code's description of a scan. Its pointers are valid only during the call.
#[repr(C)]
pub struct Scan {
    count: usize,
    blocks: c_int,
    /// One entry for each block of an MCU.
    members: [Member; BLOCKS_IN_MCU],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Member {
    component: c_int,
    /// Whether only the DC coefficient is required.
    flat: c_int,
    dc: *const Codes,
    ac: *const Codes,
}

/// A Huffman code. Its symbol describes the number that follows: how many zeros precede it, and its size in bits.
#[derive(Clone, Copy)]
struct Code {
    length: u32,
    symbol: u8,
}

impl Code {
    fn size(self) -> u32 {
        u32::from(self.symbol & 15)
    }

    /// Return the total length in bits of the code and its number.
    fn both(self) -> u32 {
        self.length + self.size()
    }

    fn run(self) -> u32 {
        if self.size() == 0 && self.symbol != 0xf0 { END } else { u32::from(self.symbol >> 4) }
    }
}

struct Table {
    codes: Codes,
    ac: bool,
    /// The last code of each length, or -1 if no code has that length.
    last: [i32; 17],
    /// For each length, the index of a code's symbol minus the code.
    place: [i32; 17],
    /// Bits 0–7 are the length, and bits 8–15 are the symbol. The entry is 0 if the code is longer than the index.
    short: Box<[u16; 1 << VALUE_BITS]>,
    /// For AC: bits 0–7 are the length of the code and its number, bits 8–15 are the run, and bits 16–31 are the number. The
    /// entry is 0 if the code and its number together are longer than the index.
    values: Box<[u32; 1 << VALUE_BITS]>,
    /// For AC: bits 0–3 are the length, and bits 4–15 are the number of coefficients.
    skips: Box<[u16; 1 << SKIP_BITS]>,
}

impl Table {
    fn new(codes: &Codes, ac: bool) -> Option<Table> {
        let mut table = Table {
            codes: *codes,
            ac,
            last: [-1; 17],
            place: [0; 17],
            short: Box::new([0; 1 << VALUE_BITS]),
            values: Box::new([0; 1 << VALUE_BITS]),
            skips: Box::new([0; 1 << SKIP_BITS]),
        };
        let (mut code, mut at) = (0usize, 0usize);
        for length in 1..=16u32 {
            let used = usize::from(codes.lengths[length as usize]);
            let symbols = codes.symbols.get(at..at + used)?;
            if code + used > 1 << length || (!ac && symbols.iter().any(|symbol| *symbol > 11)) {
                return None;
            }
            if length <= VALUE_BITS {
                let wide = 1 << (VALUE_BITS - length);
                for (number, symbol) in symbols.iter().enumerate() {
                    table.short[(code + number) * wide..][..wide].fill(length as u16 | u16::from(*symbol) << 8);
                }
            }
            table.place[length as usize] = at as i32 - code as i32;
            (code, at) = (code + used, at + used);
            if used > 0 {
                table.last[length as usize] = code as i32 - 1;
            }
            code <<= 1;
        }
        if ac {
            table.values = Box::new(std::array::from_fn(|bits| table.value((bits as u64) << (64 - VALUE_BITS))));
            table.skips = Box::new(std::array::from_fn(|bits| table.skipped((bits as u64) << (64 - SKIP_BITS))));
        }
        Some(table)
    }

    /// Return the code at the top of `bits`, or None if it is invalid.
    #[inline(always)]
    fn code(&self, bits: u64) -> Option<Code> {
        match self.short[(bits >> (64 - VALUE_BITS)) as usize] {
            0 => self.long_code(bits),
            known => Some(Code { length: u32::from(known & 0xff), symbol: (known >> 8) as u8 }),
        }
    }

    fn long_code(&self, bits: u64) -> Option<Code> {
        let length =
            (VALUE_BITS + 1..=16).find(|length| (bits >> (64 - length)) as i32 <= self.last[*length as usize])?;
        let at = (bits >> (64 - length)) as i32 + self.place[length as usize];
        Some(Code { length, symbol: *self.codes.symbols.get(at as usize)? })
    }

    /// Compute the entry of `values` for the top of `bits`.
    fn value(&self, bits: u64) -> u32 {
        match self.code(bits) {
            Some(code) if code.both() <= VALUE_BITS => {
                code.both() | code.run() << 8 | number(bits << code.length, code.size()) << 16
            }
            _ => 0,
        }
    }

    /// Compute the entry of `skips` for the top of `bits`.
    fn skipped(&self, mut bits: u64) -> u16 {
        let (mut length, mut coefficients) = (0, 0);
        // Counting stops at 64 coefficients, the size of a block. A count that does not include END therefore stays below END.
        while let Some(code) = self.code(bits)
            && coefficients < 64
            && length + code.both() <= SKIP_BITS
        {
            length += code.both();
            if code.run() == END {
                coefficients += END;
                break;
            }
            coefficients += code.run() + 1;
            bits <<= code.both();
        }
        (length | if length == 0 { UNKNOWN } else { coefficients } << 4) as u16
    }
}

/// Decode the number in the top `size` bits of `bits`. In JPEG's encoding, numbers whose first bit is 0 are negative.
#[inline(always)]
fn number(bits: u64, size: u32) -> u32 {
    let value = (bits >> 1 >> (63 - size)) as u32;
    if bits >> 63 == 0 { value.wrapping_sub((1 << size) - 1) } else { value }
}

/// Reads the bits of a scan.
#[derive(Clone, Copy, Default)]
struct Bits {
    /// Index of the next byte.
    next: usize,
    /// The next bits, from the top. Bits below the first `count` may be set; a refill reads them again.
    bits: u64,
    count: u32,
    /// Number of padding zeros added after the end of the data.
    padding: u32,
}

impl Bits {
    /// Refill to at least 56 bits.
    #[inline(always)]
    fn refill(&mut self, bytes: &[u8]) {
        const LOW: u64 = 0x0101_0101_0101_0101;
        if let Some(word) = bytes.get(self.next..).and_then(|rest| rest.first_chunk()) {
            let word = u64::from_be_bytes(*word);
            // None of these bytes is 0xff, so none begins a marker or precedes a stuffed zero.
            if (!word).wrapping_sub(LOW) & word & (LOW << 7) == 0 {
                self.bits |= word >> self.count;
                self.next += ((63 - self.count) / 8) as usize;
                self.count |= 56;
                return;
            }
        }
        *self = self.refilled_slowly(bytes);
    }

    #[inline(never)]
    fn refilled_slowly(mut self, bytes: &[u8]) -> Bits {
        self.bits &= !(u64::MAX >> self.count);
        while self.count < 56 {
            let (byte, width) = match bytes.get(self.next..) {
                Some([0xff, 0, ..]) => (0xff, 2),
                Some([0xff, ..] | []) | None => (0, 0), // A marker, or the end.
                Some([byte, ..]) => (*byte, 1),
            };
            self.padding += if width == 0 { 8 } else { 0 };
            self.next += width;
            self.bits |= u64::from(byte) << (56 - self.count);
            self.count += 8;
        }
        self
    }

    /// Return whether the library would accept the bits read so far. No bit beyond the data may have been consumed, and the
    /// remaining data must have at least `FAR` bytes or contain a marker. Otherwise, the library may refuse the bytes that it reads ahead.
    #[inline(always)]
    fn is_sound(&self, bytes: &[u8]) -> bool {
        let rest = bytes.get(self.next..).unwrap_or_default();
        self.count >= self.padding
            && (rest.len() >= FAR || rest.windows(2).any(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff)))
    }

    #[inline(always)]
    fn take(&mut self, bits: u32) {
        self.bits <<= bits;
        self.count -= bits;
    }

    /// Read the next code and its number, regardless of their length.
    #[inline(always)]
    fn coded(&mut self, bytes: &[u8], table: &Table) -> Option<(Code, u32)> {
        if self.count < 32 {
            self.refill(bytes);
        }
        let code = table.code(self.bits)?;
        self.take(code.length);
        let value = number(self.bits, code.size());
        self.take(code.size());
        Some((code, value))
    }

    /// Do the same as `coded`, but out of line: calls are rare, because most codes are in a table. `self` is passed by value, so that the
    /// caller's bits stay in registers.
    #[inline(never)]
    fn one(mut self, bytes: &[u8], table: &Table) -> Option<(Bits, Code, u32)> {
        let (code, value) = self.coded(bytes, table)?;
        Some((self, code, value))
    }

    /// Read all coefficients of a block except the first.
    #[inline(always)]
    fn coefficients(&mut self, bytes: &[u8], table: &Table, block: &mut [i16; 64]) -> Option<()> {
        let mut k = 1;
        while k < 64 {
            if self.count < VALUE_BITS {
                self.refill(bytes);
            }
            let entry = table.values[(self.bits >> (64 - VALUE_BITS)) as usize];
            let (run, value) = if entry == 0 {
                let (bits, code, value) = self.one(bytes, table)?;
                *self = bits;
                (code.run(), value)
            } else {
                self.take(entry & 0xff);
                (entry >> 8 & 0xff, entry >> 16)
            };
            k += run;
            if k >= 64 {
                return (run == END).then_some(());
            }
            block[usize::from(NATURAL[k as usize])] = value as i16;
            k += 1;
        }
        Some(())
    }

    /// Skip all coefficients of a block except the first.
    #[inline(always)]
    fn skip(&mut self, bytes: &[u8], table: &Table) -> Option<()> {
        let mut k = 1;
        while k < 64 {
            if self.count < SKIP_BITS {
                self.refill(bytes);
            }
            let entry = u32::from(table.skips[(self.bits >> (64 - SKIP_BITS)) as usize]);
            let more = entry >> 4;
            if k + more <= 64 {
                self.take(entry & 15);
                k += more;
            } else if (END..64 + END - k).contains(&more) {
                self.take(entry & 15);
                return Some(());
            } else {
                // The entry is `UNKNOWN`, or it counts more coefficients than remain in the block.
                let (bits, code, _) = self.one(bytes, table)?;
                *self = bits;
                k += code.run() + 1;
                if k > 64 {
                    return (code.run() == END).then_some(());
                }
            }
        }
        Some(())
    }
}

/// The decoder's state within a scan. `tables` are indexes into `Entropy::tables`.
struct ScanState {
    bits: Bits,
    dc: [i32; 4],
    blocks: usize,
    component: [usize; BLOCKS_IN_MCU],
    flat: [bool; BLOCKS_IN_MCU],
    tables: [[usize; 2]; BLOCKS_IN_MCU],
}

/// The tables of previous images, and the state of the current scan.
#[derive(Default)]
pub struct Entropy {
    tables: Vec<Table>,
    /// Huffman codes of the previous image, if it was too small to justify building tables.
    before: Vec<(Codes, bool)>,
    place: Option<ScanState>,
}

impl Entropy {
    /// End the current scan. Returns whether a scan was in progress.
    pub fn end(&mut self) -> bool {
        self.place.take().is_some()
    }

    /// Begin a scan. Returns None if the library should decode the scan.
    fn begin(&mut self, scan: &Scan) -> Option<()> {
        self.place = None;
        if self.tables.len() > KEPT {
            self.tables.clear();
        }
        let blocks = usize::try_from(scan.blocks).ok()?;
        let members = scan.members.get(..blocks)?;
        let mut place = ScanState {
            bits: Bits::default(),
            dc: [0; 4],
            blocks,
            component: [0; 10],
            flat: [false; 10],
            tables: [[0; 2]; 10],
        };
        let before = std::mem::take(&mut self.before);
        for (number, member) in members.iter().enumerate() {
            place.component[number] = usize::try_from(member.component).ok().filter(|component| *component < 4)?;
            place.flat[number] = member.flat != 0;
            for (ac, codes) in [(false, member.dc), (true, member.ac)] {
                // SAFETY: the pointer is null or points to one of the library's tables.
                let codes = unsafe { codes.as_ref() }?;
                let known = self.tables.iter().position(|table| table.ac == ac && table.codes == *codes);
                if known.is_none() {
                    if scan.count < LARGE && !before.contains(&(*codes, ac)) {
                        self.before.push((*codes, ac));
                        continue;
                    }
                    self.tables.push(Table::new(codes, ac)?);
                }
                place.tables[number][usize::from(ac)] = known.unwrap_or(self.tables.len() - 1);
            }
        }
        self.place = self.before.is_empty().then_some(place);
        self.place.as_ref().map(|_| ())
    }

    /// Decode an MCU into zeroed blocks, or skip it if `wanted` is None.
    fn mcu(&mut self, bytes: &[u8], mut wanted: Option<&mut [[i16; 64]]>) -> Option<()> {
        let place = self.place.as_mut()?;
        let mut bits = place.bits;
        for number in 0..place.blocks {
            let [dc, ac] = place.tables[number].map(|table| &self.tables[table]);
            let sum = &mut place.dc[place.component[number]];
            *sum = sum.wrapping_add(bits.coded(bytes, dc)?.1 as i32);
            match &mut wanted {
                Some(blocks) => {
                    blocks[number][0] = *sum as i16;
                    if place.flat[number] {
                        bits.skip(bytes, ac)?
                    } else {
                        bits.coefficients(bytes, ac, &mut blocks[number])?
                    }
                }
                None => bits.skip(bytes, ac)?,
            }
        }
        place.bits = bits;
        bits.is_sound(bytes).then_some(())
    }
}

/// Begin a scan. Returns 0, or -1 if the library must decode the scan.
///
/// # Safety
/// `entropy` points to an [`Entropy`] that no other code accesses. The pointers in `scan` are null or valid.
pub unsafe extern "C" fn begin(entropy: *mut c_void, scan: *const Scan) -> c_int {
    // SAFETY: the caller guarantees this.
    let (entropy, scan) = unsafe { (&mut *entropy.cast::<Entropy>(), &*scan) };
    if entropy.begin(scan).is_some() { 0 } else { -1 }
}

/// Decode the next MCU into its zeroed blocks, or skip it if `blocks` is null. Returns 0, or -1 if the data is invalid.
///
/// # Safety
/// `entropy` points to an [`Entropy`] that has begun a scan of these bytes, and that no other code accesses. `blocks` is null or points to
/// the blocks of one MCU.
pub unsafe extern "C" fn mcu(entropy: *mut c_void, bytes: *const u8, count: usize, blocks: *mut [i16; 64]) -> c_int {
    // SAFETY: the caller guarantees this.
    let (entropy, bytes) = unsafe { (&mut *entropy.cast::<Entropy>(), slice::from_raw_parts(bytes, count)) };
    let number = entropy.place.as_ref().map_or(0, |place| place.blocks);
    // SAFETY: the caller guarantees the number of blocks.
    let blocks = (!blocks.is_null()).then(|| unsafe { slice::from_raw_parts_mut(blocks, number) });
    if entropy.mcu(bytes, blocks).is_some() { 0 } else { -1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Return Huffman codes of 2 to 16 bits for all AC symbols and some additional symbols. No code consists only of ones.
    fn codes() -> Codes {
        let mut codes = Codes { lengths: [0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 10, 14, 18, 24, 80], symbols: [0; 256] };
        let symbols = [0x01, 0x00, 0x02, 0x11, 0x03, 0xf0]
            .into_iter()
            .chain((0..=255u8).rev().filter(|symbol| symbol & 15 <= 10));
        for (place, symbol) in codes.symbols.iter_mut().zip(symbols) {
            *place = symbol;
        }
        codes.lengths[16] = 60;
        codes
    }

    /// For any input, skipping a block and decoding it consume the same number of bits, or both refuse the block.
    #[test]
    fn skipping_ends_where_decoding_ends() {
        check(&codes(), 1_000);
        // One bit encodes sixteen zeros here, so one look-up can return more coefficients than a block has.
        let mut zeros = Codes { lengths: [0; 17], symbols: [0; 256] };
        zeros.lengths[1..4].copy_from_slice(&[1, 1, 1]);
        zeros.symbols[..3].copy_from_slice(&[0xf0, 0x00, 0x21]);
        check(&zeros, 100);
    }

    fn check(codes: &Codes, least: usize) {
        let table = Table::new(codes, true).unwrap();
        let mut state = 88172645463325252u64;
        let (mut whole, mut refused) = (0, 0);
        for length in (0..400).flat_map(|length| [length; 100]) {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state as u8
                })
                .collect();
            let (mut decoded, mut skipped) = (Bits::default(), Bits::default());
            loop {
                let (one, other) = (decoded.coefficients(&bytes, &table, &mut [0; 64]), skipped.skip(&bytes, &table));
                assert_eq!(one, other);
                // Both readers must have consumed the same number of bits. Buffered bits do not count as consumed.
                let used = |bits: &Bits| (bits.next as i64, bits.padding, bits.count);
                let (mut a, mut b) = (decoded, skipped);
                (a.refill(&bytes), b.refill(&bytes));
                if one.is_none() {
                    refused += 1;
                    break;
                }
                assert_eq!(a.bits >> 8, b.bits >> 8, "{:?} {:?}", used(&a), used(&b));
                if decoded.count < decoded.padding {
                    assert!(skipped.count < skipped.padding);
                    break;
                }
                whole += 1;
            }
        }
        assert!(whole > 10 * least && refused > least, "{whole} blocks, {refused} refused");
    }

    #[test]
    fn codes_that_cannot_be_are_refused() {
        let good = codes();
        assert!(Table::new(&good, true).is_some());
        assert!(Table::new(&good, false).is_none(), "DC symbols must not exceed 11");
        let mut many = good;
        many.lengths[2] = 5;
        assert!(Table::new(&many, true).is_none(), "five two-bit codes");
        let mut long = good;
        long.lengths[1..].fill(255);
        assert!(Table::new(&long, true).is_none(), "more symbols than a table can hold");
    }

    #[test]
    fn numbers_are_as_jpeg_writes_them() {
        let read = |bits: u64, size: u32| number(bits << (64 - size.max(1)), size) as i32;
        assert_eq!([read(0, 1), read(1, 1), read(0, 3), read(3, 3), read(4, 3), read(7, 3)], [-1, 1, -7, -4, 4, 7]);
        assert_eq!([number(u64::MAX, 0), number(0, 0)], [0, 0]);
        assert_eq!(read(0x7fff, 15), 0x7fff);
    }
}
