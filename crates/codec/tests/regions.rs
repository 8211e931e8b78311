//! Regions equal the crops of full decodes, exactly; scaled ones what the library gives for the whole image at that scale.
//! With `PENSTOCK_TEST_DATA` set, on real photographs too.

use penstock_codec::region::{Encoded, Region, to_rgb};
use penstock_codec::{Limits, decode};

/// A JPEG of noise and slopes, by the library's own encoder.
fn jpeg(width: usize, height: usize, subsampling: i32, grey: bool, seed: u32) -> Vec<u8> {
    use turbojpeg_sys as tj;
    let mut state = seed | 1;
    let mut noise = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let pixels: Vec<u8> = (0..width * height * 3).map(|i| ((i / 7) as u32 + noise() % 64) as u8).collect();
    // SAFETY: a live handle, a buffer of width x height RGB pixels, and an output that the library allocates and we free.
    unsafe {
        let handle = tj::tj3Init(tj::TJINIT_TJINIT_COMPRESS as i32);
        tj::tj3Set(handle, tj::TJPARAM_TJPARAM_QUALITY as i32, 90);
        tj::tj3Set(handle, tj::TJPARAM_TJPARAM_SUBSAMP as i32, if grey { tj::TJSAMP_TJSAMP_GRAY as i32 } else { subsampling });
        let (mut out, mut size) = (std::ptr::null_mut(), 0);
        let code = tj::tj3Compress8(handle, pixels.as_ptr(), width as i32, 0, height as i32, tj::TJPF_TJPF_RGB, &mut out, &mut size);
        assert_eq!(code, 0);
        let bytes = std::slice::from_raw_parts(out, size as usize).to_vec();
        tj::tj3Free(out.cast());
        tj::tj3Destroy(handle);
        bytes
    }
}

fn check(bytes: &[u8], regions: usize) {
    let encoded = Encoded::open(bytes, Limits::default(), false).unwrap();
    let (width, height) = encoded.size();
    let full = to_rgb(decode(bytes, Limits::default(), false).unwrap());
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
    for (number, (width, height)) in [(500, 375), (64, 64), (33, 17), (1, 1), (129, 200), (16, 300)].into_iter().enumerate() {
        for subsampling in 0..3 {
            check(&jpeg(width, height, subsampling, false, number as u32 + 1), 60);
        }
        check(&jpeg(width, height, 0, true, 9), 20);
    }
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
                let small = Encoded::open(&bytes, Limits { pixels: 4 << 20 }, false).is_ok();
                if small && decode(&bytes, Limits::default(), false).is_ok_and(|picture| picture.bits == 8) && seen < 150 {
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
    let encoded = Encoded::open(cut, Limits::default(), false).unwrap();
    assert_eq!(encoded.region(Region::whole(200, 200), 1).unwrap_err().code(), "media-undecodable");
}
