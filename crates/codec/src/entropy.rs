//! The entropy decoder of baseline JPEG, for regions: blocks that nobody wants are skipped several Huffman codes at a time.
//!
//! Two thirds and more of the time of a large photograph are its Huffman codes, and on average half of them lie above or beside a region.
//! A skipped block needs no coefficients, only where it ends and what it adds to DC. So one table tells, for the next [`SKIP_BITS`] bits,
//! how long all codes and numbers in them are together and how many coefficients they stand for; another, for blocks that are wanted,
//! the value and the run of the next coefficient. What this does not know is left to libjpeg-turbo: restart intervals, several scans,
//! codes that are no good, files that end early. Called by `jpeg_region.c`, MCU by MCU; no input makes it panic.

use std::ffi::c_int;

/// Bits that one look into a table sees: for a coefficient, and for as many as there are in them.
const VALUE_BITS: u32 = 11;
const SKIP_BITS: u32 = 13;
/// Coefficients to go on by, where the block ends.
const END: u32 = 128;
/// Nothing can be told from these bits.
const UNKNOWN: u32 = 512;

const NATURAL: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28, 35, 42, 49, 56,
    57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
];

/// A Huffman table as the library has it: how many codes there are of each length, from 1 on, and their symbols.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Codes {
    lengths: [u8; 17],
    symbols: [u8; 256],
}

/// What the C side says of a scan. Pointers are good for the call.
#[repr(C)]
pub struct Scan {
    bytes: *const u8,
    count: usize,
    blocks: c_int,
    component: [c_int; 10],
    /// Of each block of an MCU: DC and AC.
    tables: [[*const Codes; 2]; 10],
}

/// Codes as tables. An entry of `values`: length of code and number in bits 0–7, coefficients to go on by in 8–15, value in 16–31.
/// An entry of `skips`: length in bits 0–3, coefficients in 4–15.
struct Table {
    codes: Codes,
    ac: bool,
    /// Of each length: its last code, or -1, and what to add to a code for the place of its symbol.
    last: [i32; 17],
    place: [i32; 17],
    values: Box<[u32; 1 << VALUE_BITS]>,
    skips: Box<[u16; 1 << SKIP_BITS]>,
}

/// A symbol of the code at the top of some bits.
#[derive(Clone, Copy)]
struct Code {
    length: u32,
    symbol: u8,
}

impl Code {
    /// Bits of the number that follows.
    fn size(self) -> u32 {
        u32::from(self.symbol & 15)
    }

    /// Zeros before that number; END where the block has no more.
    fn run(self) -> u32 {
        if self.size() == 0 && self.symbol != 0xf0 { END } else { u32::from(self.symbol >> 4) }
    }
}

impl Table {
    fn new(codes: Codes) -> Option<Table> {
        let (mut last, mut place) = ([-1; 17], [0; 17]);
        let (mut code, mut at) = (0i32, 0i32);
        for length in 1..=16 {
            place[length] = at - code;
            code += i32::from(codes.lengths[length]);
            at += i32::from(codes.lengths[length]);
            if at > 256 || code > 1 << length {
                return None;
            }
            if codes.lengths[length] > 0 {
                last[length] = code - 1;
            }
            code <<= 1;
        }
        Some(Table { codes, ac: false, last, place, values: Box::new([0; 1 << VALUE_BITS]), skips: Box::new([0; 1 << SKIP_BITS]) })
    }

    fn dc(codes: Codes) -> Option<Table> {
        let mut table = Table::new(codes)?;
        let used = codes.lengths[1..].iter().map(|n| usize::from(*n)).sum::<usize>();
        if codes.symbols[..used].iter().any(|symbol| *symbol > 11) {
            return None;
        }
        table.values = table.look(VALUE_BITS, |table, bits| {
            let Some(code) = table.code(bits) else { return 0 };
            let length = code.length + code.size();
            if length > VALUE_BITS { 0 } else { length | number(bits << code.length, code.size()) << 16 }
        });
        Some(table)
    }

    fn ac(codes: Codes) -> Option<Table> {
        let mut table = Table::new(codes)?;
        table.values = table.look(VALUE_BITS, |table, bits| {
            let Some(code) = table.code(bits) else { return 0 };
            let length = code.length + code.size();
            if length > VALUE_BITS { 0 } else { length | code.run() << 8 | number(bits << code.length, code.size()) << 16 }
        });
        table.ac = true;
        table.skips = table.look(SKIP_BITS, |table, mut bits| {
            let (mut length, mut coefficients) = (0, 0);
            while let Some(code) = table.code(bits) {
                let more = code.length + code.size();
                if length + more > SKIP_BITS || coefficients >= 64 {
                    break;
                }
                length += more;
                coefficients += code.run() + u32::from(code.run() != END);
                bits <<= more;
            }
            let entry = length | if length == 0 { UNKNOWN } else { coefficients } << 4;
            entry as u16
        });
        Some(table)
    }

    /// What is told of each value of the next `bits` bits.
    fn look<T: Copy + Default, const N: usize>(&self, bits: u32, tell: impl Fn(&Table, u64) -> T) -> Box<[T; N]> {
        let mut told = Box::new([T::default(); N]);
        for (value, told) in told.iter_mut().enumerate() {
            *told = tell(self, (value as u64) << (64 - bits));
        }
        told
    }

    /// The code at the top of `bits`.
    fn code(&self, bits: u64) -> Option<Code> {
        let length = (1..=16).find(|length| (bits >> (64 - length)) as i32 <= self.last[*length as usize])?;
        let at = (bits >> (64 - length)) as i32 + self.place[length as usize];
        Some(Code { length, symbol: *self.codes.symbols.get(at as usize)? })
    }
}

/// The number of `size` bits at the top of `bits`, as JPEG writes them: those that begin with 0 are negative.
fn number(bits: u64, size: u32) -> u32 {
    if size == 0 {
        return 0;
    }
    let value = (bits >> (64 - size)) as i32;
    (if value < 1 << (size - 1) { value - (1 << size) + 1 } else { value }) as u32
}

/// The bits of a scan.
#[derive(Clone, Copy, Default)]
struct Bits {
    /// The byte to go on with.
    next: usize,
    /// The next bits, from the top. Below `count` of them there may be more, which come again.
    bits: u64,
    count: u32,
    /// How many of `count` are zeros behind the end of the data.
    padding: u32,
}

impl Bits {
    /// Make it 56 bits or more.
    #[inline(always)]
    fn refill(&mut self, bytes: &[u8]) {
        const LOW: u64 = 0x0101_0101_0101_0101;
        if let Some(word) = bytes.get(self.next..).and_then(|rest| rest.first_chunk()) {
            let word = u64::from_be_bytes(*word);
            // No byte is 0xff, so that none is a marker or followed by a stuffed zero.
            if (!word).wrapping_sub(LOW) & word & (LOW << 7) == 0 {
                self.bits |= word >> self.count;
                self.next += ((63 - self.count) / 8) as usize;
                self.count |= 56;
                return;
            }
        }
        self.refill_slowly(bytes);
    }

    #[inline(never)]
    fn refill_slowly(&mut self, bytes: &[u8]) {
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
    }

    #[inline(always)]
    fn take(&mut self, bits: u32) {
        self.bits <<= bits;
        self.count -= bits;
    }

    /// The next code and its number, one by one.
    #[inline(never)]
    fn one(&mut self, bytes: &[u8], table: &Table) -> Option<(Code, u32)> {
        self.refill(bytes);
        let code = table.code(self.bits)?;
        self.take(code.length);
        let value = number(self.bits, code.size());
        self.take(code.size());
        Some((code, value))
    }

    /// The difference of DC.
    #[inline(always)]
    fn dc(&mut self, bytes: &[u8], table: &Table) -> Option<i32> {
        self.refill(bytes);
        match table.values[(self.bits >> (64 - VALUE_BITS)) as usize] {
            0 => Some(self.one(bytes, table)?.1 as i32),
            entry => {
                self.take(entry & 0xff);
                Some(entry as i32 >> 16)
            }
        }
    }

    /// The coefficients of a block behind the first.
    #[inline(always)]
    fn coefficients(&mut self, bytes: &[u8], table: &Table, block: &mut [i16; 64]) -> Option<()> {
        let mut k = 1;
        while k < 64 {
            if self.count < 16 {
                self.refill(bytes);
            }
            let entry = table.values[(self.bits >> (64 - VALUE_BITS)) as usize];
            let (run, value) = if entry == 0 {
                let (code, value) = self.one(bytes, table)?;
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

    /// The same, of a block that nobody wants.
    #[inline(always)]
    fn skip(&mut self, bytes: &[u8], table: &Table) -> Option<()> {
        let mut k = 1;
        loop {
            if self.count < 16 {
                self.refill(bytes);
            }
            let entry = u32::from(table.skips[(self.bits >> (64 - SKIP_BITS)) as usize]);
            let more = entry >> 4;
            if k + more < 64 {
                self.take(entry & 15);
                k += more;
                continue;
            }
            if k + more == 64 || (END..64 + END - k).contains(&more) {
                self.take(entry & 15);
                return Some(());
            }
            // More than the block has, or nothing: one by one.
            let run = self.one(bytes, table)?.0.run();
            k += run;
            if k >= 64 {
                return (run == END).then_some(());
            }
            k += 1;
            if k == 64 {
                return Some(());
            }
        }
    }
}

/// Where the decoder is in a scan.
struct Place {
    bits: Bits,
    dc: [i32; 4],
    blocks: usize,
    component: [usize; 10],
    /// Of each block: which tables, DC and AC.
    tables: [[usize; 2]; 10],
}

/// Tables of the images before, and the scan at hand.
#[derive(Default)]
pub struct Entropy {
    tables: Vec<Table>,
    place: Option<Place>,
}

impl Entropy {
    fn begin(&mut self, scan: &Scan) -> Option<()> {
        self.place = None;
        let blocks = usize::try_from(scan.blocks).ok().filter(|blocks| *blocks <= 10)?;
        let mut place = Place { bits: Bits::default(), dc: [0; 4], blocks, component: [0; 10], tables: [[0; 2]; 10] };
        for block in 0..blocks {
            place.component[block] = usize::try_from(scan.component[block]).ok().filter(|component| *component < 4)?;
            for (ac, codes) in scan.tables[block].into_iter().enumerate() {
                // SAFETY: a table of the library, or nothing.
                let codes = unsafe { codes.as_ref() }?;
                place.tables[block][ac] = match self.tables.iter().position(|table| table.codes == *codes && table.ac == (ac == 1)) {
                    Some(known) => known,
                    None => {
                        self.tables.push(if ac == 1 { Table::ac(*codes)? } else { Table::dc(*codes)? });
                        self.tables.len() - 1
                    }
                };
            }
        }
        self.place = Some(place);
        Some(())
    }

    /// Decode an MCU into zeroed blocks, or skip it.
    fn mcu(&mut self, bytes: &[u8], mut wanted: Option<&mut [[i16; 64]]>) -> Option<()> {
        let place = self.place.as_mut()?;
        let mut bits = place.bits;
        for number in 0..place.blocks {
            let [dc, ac] = place.tables[number];
            let (dc, ac) = (&self.tables[dc], &self.tables[ac]);
            let sum = &mut place.dc[place.component[number]];
            *sum = sum.wrapping_add(bits.dc(bytes, dc)?);
            match &mut wanted {
                Some(blocks) => {
                    blocks[number][0] = *sum as i16;
                    bits.coefficients(bytes, ac, &mut blocks[number])?;
                }
                None => bits.skip(bytes, ac)?,
            }
        }
        place.bits = bits;
        (bits.count >= bits.padding).then_some(())
    }
}

/// Begin a scan. 0: done; otherwise the library has to decode it.
///
/// # Safety
/// `entropy` is an [`Entropy`]; the pointers in `scan` are good.
pub unsafe extern "C" fn begin(entropy: *mut Entropy, scan: *const Scan) -> c_int {
    // SAFETY: as promised.
    unsafe { if (*entropy).begin(&*scan).is_some() { 0 } else { -1 } }
}

/// Decode the next MCU into its zeroed blocks, or skip it where `blocks` is null. 0: done; otherwise the data are no good.
///
/// # Safety
/// `entropy` was given the scan of these bytes; `blocks` has as many blocks as its MCUs.
pub unsafe extern "C" fn mcu(entropy: *mut Entropy, bytes: *const u8, count: usize, blocks: *mut [i16; 64]) -> c_int {
    // SAFETY: as promised.
    let done = unsafe {
        let number = (*entropy).place.as_ref().map_or(0, |place| place.blocks);
        let blocks = (!blocks.is_null()).then(|| std::slice::from_raw_parts_mut(blocks, number));
        (*entropy).mcu(std::slice::from_raw_parts(bytes, count), blocks)
    };
    if done.is_some() { 0 } else { -1 }
}
