//! Decodes JPEG with libjpeg-turbo 3 through its TurboJPEG 3 API. The C library handles errors internally with setjmp, so nothing
//! unwinds through Rust.
//!
//! Supports 8-bit baseline, progressive, arithmetic and lossless files. Colour spaces may be grey, RGB/YCbCr or CMYK/YCCK. CMYK
//! and YCCK are converted to RGB. Warnings are ignored, as in browsers and Pillow. A file without an end marker is treated as
//! truncated and refused.

use std::ffi::CStr;

use penstock_error::{Error, Result};
use turbojpeg_sys as tj;

use super::picture::{Format, Header, Outline, Picture, undecodable};

/// Maximum number of scans in a progressive file. Files with more scans are treated as an attack. libjpeg-turbo's own fuzzers use
/// 500.
const SCAN_LIMIT: i32 = 500;

struct Decoder(tj::tjhandle);

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: the handle came from tj3Init and is destroyed once.
        unsafe { tj::tj3Destroy(self.0) }
    }
}

impl Decoder {
    fn open(bytes: &[u8]) -> Result<(Decoder, Header)> {
        // SAFETY: the function has no preconditions. A null result is handled below.
        let handle = unsafe { tj::tj3Init(tj::TJINIT_TJINIT_DECOMPRESS as i32) };
        if handle.is_null() {
            return Err(Error::new("internal", "cannot create a libjpeg-turbo decoder"));
        }
        let decoder = Decoder(handle);
        // SAFETY: the handle is live; the buffer outlives the call.
        let code = unsafe {
            tj::tj3Set(decoder.0, tj::TJPARAM_TJPARAM_SCANLIMIT as i32, SCAN_LIMIT);
            tj::tj3DecompressHeader(decoder.0, bytes.as_ptr(), bytes.len() as _)
        };
        if code != 0 && decoder.is_fatal() {
            return Err(undecodable(format!("cannot decode JPEG: {}", decoder.message())));
        }
        let precision = decoder.get(tj::TJPARAM_TJPARAM_PRECISION as i32);
        if precision != 8 {
            return Err(Error::new(
                "unsupported-format",
                format!("cannot decode JPEG: {precision} bits per channel, expected 8"),
            )
            .hint("store it as a 16-bit PNG"));
        }
        let channels =
            if decoder.get(tj::TJPARAM_TJPARAM_COLORSPACE as i32) == tj::TJCS_TJCS_GRAY as i32 { 1 } else { 3 };
        let (width, height) =
            (decoder.get(tj::TJPARAM_TJPARAM_JPEGWIDTH as i32), decoder.get(tj::TJPARAM_TJPARAM_JPEGHEIGHT as i32));
        let header = Header {
            format: Format::Jpeg,
            width: width.max(0) as u64,
            height: height.max(0) as u64,
            channels,
            bits: 8,
        };
        Ok((decoder, header))
    }

    fn get(&self, parameter: i32) -> i32 {
        // SAFETY: the handle is live.
        unsafe { tj::tj3Get(self.0, parameter) }
    }

    fn is_fatal(&self) -> bool {
        // SAFETY: the handle is live.
        unsafe { tj::tj3GetErrorCode(self.0) == tj::TJERR_TJERR_FATAL as i32 }
    }

    fn message(&self) -> String {
        // SAFETY: the library returns a C string that lives as long as the handle.
        unsafe { CStr::from_ptr(tj::tj3GetErrorStr(self.0)) }.to_string_lossy().into_owned()
    }
}

/// Read the outline of a JPEG. Returns None if the file has no frame.
pub fn outline(bytes: &[u8]) -> Option<Outline> {
    let mut segments = segments(bytes);
    let is_frame = |marker: u8| matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc);
    let (marker, frame) = segments.find(|(marker, _)| is_frame(*marker))?;
    let size = |at: usize| Some(usize::from(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?)));
    let (height, width) = (size(1)?, size(3)?);
    let components = frame.get(6..)?.chunks_exact(3).take(usize::from(frame[5]));
    let scan = segments.find(|(marker, _)| *marker == 0xda);
    let in_first_scan = scan.and_then(|(_, scan)| scan.first().copied()).unwrap_or_default();
    let mut decoder_bytes = 0;
    if marker & 3 == 2 || usize::from(in_first_scan) < components.len() {
        let sampling = components.map(|component| (u64::from(component[1] >> 4), u64::from(component[1] & 15)));
        let most = sampling.clone().fold((1, 1), |most, one| (most.0.max(one.0), most.1.max(one.1)));
        let blocks = |size: usize, (part, all): (u64, u64)| (size as u64 * part).div_ceil(all * 8);
        decoder_bytes =
            sampling.map(|one| blocks(width, (one.0, most.0)) * blocks(height, (one.1, most.1)) * 128).sum();
    }
    Some(Outline { width, height, decoder_bytes })
}

/// Iterate over the segments of a JPEG as (marker, body). Ends after the first scan's header or at the first malformed segment.
pub fn segments(bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = bytes.strip_prefix(&[0xff, 0xd8]).unwrap_or_default();
    std::iter::from_fn(move || {
        while let [0xff, 0xff, ..] = rest {
            rest = &rest[1..]; // This is padding before a marker.
        }
        let [0xff, marker @ 0xc0..=0xfe, high, low, ..] = rest else { return None };
        let segment = rest[2..].split_at_checked(usize::from(u16::from_be_bytes([*high, *low])))?;
        rest = segment.1;
        Some((*marker, segment.0.get(2..)?))
    })
}

pub fn probe(bytes: &[u8]) -> Result<Header> {
    Ok(Decoder::open(bytes)?.1)
}

/// Decode all pixels. The caller has checked the size in the header against the limits.
pub fn decode(bytes: &[u8], header: &Header) -> Result<Picture> {
    let (decoder, again) = Decoder::open(bytes)?;
    debug_assert_eq!(&again, header);
    let (width, height) = (header.width as usize, header.height as usize);
    let colorspace = decoder.get(tj::TJPARAM_TJPARAM_COLORSPACE as i32);
    let cmyk = colorspace == tj::TJCS_TJCS_CMYK as i32 || colorspace == tj::TJCS_TJCS_YCCK as i32;
    let (format, stride) = match (header.channels, cmyk) {
        (1, _) => (tj::TJPF_TJPF_GRAY, 1),
        (_, true) => (tj::TJPF_TJPF_CMYK, 4),
        _ => (tj::TJPF_TJPF_RGB, 3),
    };
    let mut data = vec![0u8; width * height * stride];
    // SAFETY: the handle is live; `data` has width x height x stride bytes, as the format and pitch require.
    let code = unsafe {
        tj::tj3Decompress8(
            decoder.0,
            bytes.as_ptr(),
            bytes.len() as _,
            data.as_mut_ptr(),
            (width * stride) as i32,
            format,
        )
    };
    if code != 0 && (decoder.is_fatal() || !has_end_marker(bytes)) {
        return Err(undecodable(format!("cannot decode JPEG: {}", decoder.message())));
    }
    if cmyk {
        cmyk_to_rgb(&mut data);
    }
    Ok(Picture { height, width, channels: header.channels, bits: 8, data })
}

/// Return whether an end-of-image marker follows the last scan header. Scan data can contain neither of these markers,
/// because a zero is stuffed after each 0xff. A thumbnail in an EXIF segment has its own markers, but they precede the scans.
fn has_end_marker(bytes: &[u8]) -> bool {
    bytes.windows(2).rev().find(|pair| matches!(pair, [0xff, 0xd9 | 0xda])).is_some_and(|pair| pair[1] == 0xd9)
}

/// Convert CMYK to RGB in place, because a second copy might not fit in memory. CMYK values are inverted (255 means no ink), as
/// in Adobe's files and all other CMYK JPEGs in use.
fn cmyk_to_rgb(data: &mut Vec<u8>) {
    let ink = |colour: u8, key: u8| ((u16::from(colour) * u16::from(key) + 127) / 255) as u8;
    let pixels = data.len() / 4;
    for at in 0..pixels {
        let [cyan, magenta, yellow, key] = [0, 1, 2, 3].map(|ink| data[4 * at + ink]);
        data[3 * at..][..3].copy_from_slice(&[ink(cyan, key), ink(magenta, key), ink(yellow, key)]);
    }
    data.truncate(3 * pixels);
}
