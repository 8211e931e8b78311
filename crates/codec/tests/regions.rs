//! Tests that a decoded region equals a crop of the fully decoded image, at full size and at each scale. If `PENSTOCK_TEST_DATA`
//! is set, real photographs are tested too.

use penstock_codec::mode::{Mode, in_mode};
use penstock_codec::pixels::Pool;
use penstock_codec::region::{Encoded, Region};
use penstock_codec::{Limits, Orientation, decode};
use turbojpeg_sys as tj;

/// One pool for all tests, so that pixels are decoded into the memory of earlier images.
static POOL: Pool = Pool::new(1 << 20);

/// Encode a JPEG of noise and gradients with the library's own encoder.
fn jpeg(width: usize, height: usize, subsampling: i32, grey: bool, seed: u32) -> Vec<u8> {
    jpeg_with(width, height, subsampling, grey, seed, &[])
}

/// Encode the same JPEG as `jpeg`, with additional library parameters.
fn jpeg_with(
    width: usize,
    height: usize,
    subsampling: i32,
    grey: bool,
    seed: u32,
    parameters: &[(tj::TJPARAM, i32)],
) -> Vec<u8> {
    let mut state = seed | 1;
    let mut noise = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let pixels: Vec<u8> = (0..width * height * 3).map(|i| ((i / 7) as u32 + noise() % 64) as u8).collect();
    // SAFETY: the handle is live, and the buffer has width x height RGB pixels. The library allocates the output, which we
    // free.
    unsafe {
        let handle = tj::tj3Init(tj::TJINIT_TJINIT_COMPRESS as i32);
        tj::tj3Set(handle, tj::TJPARAM_TJPARAM_QUALITY as i32, 90);
        tj::tj3Set(
            handle,
            tj::TJPARAM_TJPARAM_SUBSAMP as i32,
            if grey { tj::TJSAMP_TJSAMP_GRAY as i32 } else { subsampling },
        );
        for (parameter, value) in parameters {
            assert_eq!(tj::tj3Set(handle, *parameter as i32, *value), 0);
        }
        let (mut out, mut size) = (std::ptr::null_mut(), 0);
        let code = tj::tj3Compress8(
            handle,
            pixels.as_ptr(),
            width as i32,
            0,
            height as i32,
            tj::TJPF_TJPF_RGB,
            &mut out,
            &mut size,
        );
        assert_eq!(code, 0);
        let bytes = std::slice::from_raw_parts(out, size as usize).to_vec();
        tj::tj3Free(out.cast());
        tj::tj3Destroy(handle);
        bytes
    }
}

fn check(bytes: &[u8], regions: usize) {
    let encoded = Encoded::open(bytes, Limits::default(), Orientation::Stored, &POOL).unwrap();
    let (width, height) = encoded.size();
    let full = in_mode(decode(bytes, Limits::default(), Orientation::Stored).unwrap(), Mode::Rgb).unwrap();
    let mut state = 12345u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    for number in 0..regions {
        let (left, top) = (below(width), below(height));
        let mut region = Region { left, top, width: 1 + below(width - left), height: 1 + below(height - top) };
        if number == 0 {
            region = Region::whole(width, height);
        }
        let part = encoded.region(region, 1).unwrap();
        let (x, y) = (part.left as usize, part.top as usize);
        for row in 0..region.height {
            let found = &part.data[((y + row) * part.width + x) * 3..][..region.width * 3];
            let expected = &full.data[((region.top + row) * width + region.left) * 3..][..region.width * 3];
            assert!(found == expected, "row {row} of {region:?} of {width} x {height} differs");
        }
    }
}

#[test]
fn regions_equal_crops_of_full_decodes() {
    for (number, (width, height)) in
        [(500, 375), (64, 64), (33, 17), (1, 1), (129, 200), (16, 300)].into_iter().enumerate()
    {
        for subsampling in 0..3 {
            check(&jpeg(width, height, subsampling, false, number as u32 + 1), 60);
        }
        check(&jpeg(width, height, 0, true, 9), 20);
    }
}

/// The files have custom tables, restart intervals, progressive or arithmetic coding, or coefficients of maximum length.
#[test]
fn regions_of_all_ways_to_code_equal_crops() {
    let restarts = (tj::TJPARAM_TJPARAM_RESTARTBLOCKS, 3);
    let ways = [
        vec![(tj::TJPARAM_TJPARAM_OPTIMIZE, 1)],
        vec![restarts],
        vec![(tj::TJPARAM_TJPARAM_OPTIMIZE, 1), restarts],
        vec![(tj::TJPARAM_TJPARAM_PROGRESSIVE, 1)],
        vec![(tj::TJPARAM_TJPARAM_ARITHMETIC, 1)],
        vec![(tj::TJPARAM_TJPARAM_QUALITY, 100)],
        vec![(tj::TJPARAM_TJPARAM_QUALITY, 100), (tj::TJPARAM_TJPARAM_OPTIMIZE, 1)],
        vec![(tj::TJPARAM_TJPARAM_QUALITY, 1)],
    ];
    for (number, way) in ways.iter().enumerate() {
        for subsampling in 0..3 {
            check(&jpeg_with(301, 203, subsampling, false, number as u32, way), 30);
        }
        check(&jpeg_with(97, 80, 0, true, number as u32, way), 30);
    }
}

/// In an image with one component, sampling factors have no effect: an MCU is one block.
#[test]
fn regions_of_grey_files_with_sampling_factors_equal_crops() {
    let mut bytes = jpeg(200, 150, 0, true, 4);
    let frame = bytes.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    assert_eq!(bytes[frame + 11], 0x11);
    for factors in [0x12, 0x21, 0x22, 0x44] {
        bytes[frame + 11] = factors;
        check(&bytes, 40);
    }
}

/// A region at 1/2, 1/4 or 1/8 equals the same part of the library's full decode at that scale.
#[test]
fn scaled_regions_equal_parts_of_scaled_decodes() {
    let (width, height) = (501, 377);
    for (subsampling, denominator) in
        (0..3).flat_map(|subsampling| [2, 4, 8].map(|denominator| (subsampling, denominator)))
    {
        let bytes = jpeg(width, height, subsampling, false, 5);
        let (w, h) = (width.div_ceil(denominator), height.div_ceil(denominator));
        let mut full = vec![0; w * h * 3];
        // SAFETY: the handle is live, and the output has w x h RGB pixels.
        unsafe {
            let handle = tj::tj3Init(tj::TJINIT_TJINIT_DECOMPRESS as i32);
            assert_eq!(tj::tj3DecompressHeader(handle, bytes.as_ptr(), bytes.len() as _), 0);
            assert_eq!(tj::tj3SetScalingFactor(handle, tj::tjscalingfactor { num: 1, denom: denominator as i32 }), 0);
            assert_eq!(
                tj::tj3Decompress8(handle, bytes.as_ptr(), bytes.len() as _, full.as_mut_ptr(), 0, tj::TJPF_TJPF_RGB),
                0
            );
            tj::tj3Destroy(handle);
        }
        let encoded = Encoded::open(&bytes, Limits::default(), Orientation::Stored, &POOL).unwrap();
        for region in [
            Region::whole(width, height),
            Region { left: 160, top: 144, width: 200, height: 100 },
            Region { left: 33, top: 300, width: 400, height: 77 },
        ] {
            let part = encoded.region(region, denominator).unwrap();
            let (left, top) = (region.left / denominator, region.top / denominator);
            let (x, y) = (part.left.floor() as usize, part.top.floor() as usize);
            for row in 0..part.region_height.floor() as usize {
                let wide = part.region_width.floor() as usize * 3;
                let found = &part.data[((y + row) * part.width + x) * 3..][..wide];
                assert!(
                    found == &full[((top + row) * w + left) * 3..][..wide],
                    "row {row} of {region:?} at 1/{denominator}"
                );
            }
        }
    }
}

/// A damaged file is either refused or decoded to the same pixels as in a full decode. A single decoder reads all the files.
#[test]
fn damaged_files_give_what_a_full_decode_gives_or_are_refused() {
    let (mut refused, mut equal) = (0, 0);
    for (number, way) in [vec![], vec![(tj::TJPARAM_TJPARAM_OPTIMIZE, 1)]].iter().enumerate() {
        let good = jpeg_with(120, 90, number as i32 * 2, false, 7, way);
        let mut state = 1u32;
        for _ in 0..1500 {
            let mut bytes = good.clone();
            for _ in 0..2 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let at = (state >> 8) as usize % bytes.len();
                bytes[at] ^= 1 << (state & 7);
            }
            if state & 0x300 == 0 {
                bytes.truncate(good.len() - (state >> 16) as usize % 1000);
            }
            let Ok(encoded) = Encoded::open(&bytes, Limits { pixels: 1 << 20 }, Orientation::Stored, &POOL) else {
                continue;
            };
            let (width, height) = encoded.size();
            match encoded.region(Region::whole(width, height), 1) {
                Err(_) => {
                    assert!(decode(&bytes, Limits::default(), Orientation::Stored).is_err());
                    refused += 1;
                }
                // A region ignores the data after its last row, so a full decode may refuse a file whose region is readable.
                Ok(part) => {
                    if let Ok(full) = decode(&bytes, Limits::default(), Orientation::Stored) {
                        assert!(part.data[..width * height * 3] == in_mode(full, Mode::Rgb).unwrap().data);
                        equal += 1;
                    }
                }
            }
        }
    }
    assert!(refused > 100 && equal > 1000, "{refused} refused, {equal} equal");
}

/// Return the file without the segments that have this marker.
fn without(bytes: &[u8], marker: u8) -> Vec<u8> {
    let (mut kept, mut at) = (bytes[..2].to_vec(), 2);
    while bytes[at + 1] != 0xda {
        let length = 2 + usize::from(u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]));
        if bytes[at + 1] != marker {
            kept.extend(&bytes[at..at + length]);
        }
        at += length;
    }
    kept.extend(&bytes[at..]);
    kept
}

/// The result for a file never depends on the files that the thread decoded before it.
#[test]
fn files_do_not_depend_on_those_before() {
    let way = |parameter, value| jpeg_with(150, 130, 2, false, 11, &[(parameter, value)]);
    let (plain, own) = (jpeg(150, 130, 2, false, 11), way(tj::TJPARAM_TJPARAM_OPTIMIZE, 1));
    // Two AC symbols are swapped. A file without its own table would silently decode to wrong pixels if the decoder reused this
    // table.
    let mut swapped = plain.clone();
    let table = swapped.windows(5).position(|part| part[..2] == [0xff, 0xc4] && part[4] == 0x10).unwrap() + 21;
    swapped.swap(table + 2, table + 3);
    let scan = plain.windows(2).position(|pair| pair == [0xff, 0xda]).unwrap() + 14;
    let mut filled = plain.clone();
    filled.splice(scan + 500..scan + 500, [0xff, 0xff, 0x00]);
    let mut files = vec![
        without(&plain, 0xc4),
        without(&plain, 0xdb),
        filled,
        plain[..plain.len() - 2].to_vec(),
        plain[..plain.len() - 20].to_vec(),
        way(tj::TJPARAM_TJPARAM_PROGRESSIVE, 1),
        plain.clone(),
        own.clone(),
    ];
    let mut state = 3u32;
    for _ in 0..60 {
        let mut bytes = plain.clone();
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bytes[scan + (state >> 8) as usize % (plain.len() - scan)] ^= 1 << (state & 7);
        files.push(bytes);
    }
    let decoded = |bytes: &[u8], region, denominator| {
        let encoded = Encoded::open(bytes, Limits::default(), Orientation::Stored, &POOL).unwrap();
        encoded.region(region, denominator).ok().map(|part| (part.width, part.data.to_vec()))
    };
    let regions = [Region::whole(150, 130), Region { left: 40, top: 30, width: 60, height: 50 }];
    let before = [plain.clone(), own, swapped, way(tj::TJPARAM_TJPARAM_PROGRESSIVE, 1), b"\xff\xd8".to_vec()];
    let mut refused = 0;
    for bytes in &files {
        for (region, denominator) in
            regions.into_iter().flat_map(|region| [1, 2, 8].map(|denominator| (region, denominator)))
        {
            let alone = std::thread::scope(|scope| scope.spawn(|| decoded(bytes, region, denominator)).join().unwrap());
            refused += usize::from(alone.is_none());
            for before in before.iter().chain([bytes]) {
                for _ in 0..2 {
                    let _ = Encoded::open(before, Limits::default(), Orientation::Stored, &POOL)
                        .map(|before| before.region(Region::whole(150, 130), 1).is_ok());
                }
                assert!(decoded(bytes, region, denominator) == alone);
            }
        }
    }
    assert!((1..files.len() * 3).contains(&refused), "{refused} refused");
}

#[test]
fn regions_of_real_photographs_equal_crops() {
    let Some(data) = std::env::var_os("PENSTOCK_TEST_DATA") else { return };
    let mut seen = 0;
    for folder in ["photos-flowers", "detect-bccd", "photos-formats"] {
        let mut folders = vec![std::path::Path::new(&data).join(folder)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let bytes = std::fs::read(&path).unwrap();
                let small = Encoded::open(&bytes, Limits { pixels: 4 << 20 }, Orientation::Stored, &POOL).is_ok();
                if small
                    && decode(&bytes, Limits::default(), Orientation::Stored).is_ok_and(|picture| picture.bits == 8)
                    && seen < 150
                {
                    check(&bytes, 6);
                    seen += 1;
                }
            }
        }
    }
    assert!(seen >= 100, "{seen} photographs");
}

#[test]
fn a_file_cut_short_is_refused() {
    let whole = jpeg(200, 200, 2, false, 3);
    let cut = &whole[..whole.len() / 2];
    let encoded = Encoded::open(cut, Limits::default(), Orientation::Stored, &POOL).unwrap();
    assert_eq!(encoded.region(Region::whole(200, 200), 1).unwrap_err().code(), "media-undecodable");
}
