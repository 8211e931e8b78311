//! Decodes only the required part of an image, at the lowest resolution that the caller permits.
//!
//! In a JPEG, `entropy` skips the blocks above and beside a region, and blocks below it are not read. The result exactly equals a
//! crop of the fully decoded image. Chroma is interpolated across the region's edge, so the decoder also reads a margin. At 1/2,
//! 1/4 and 1/8, the result equals a crop of the whole image decoded at that scale. At these scales, libjpeg-turbo uses SIMD code
//! or skips most of the work. Other images are decoded in full and cropped.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};

use penstock_error::Result;

use super::decode::{decode, probe};
use super::entropy::{self, Entropy};
use super::exif::{self, Orientation};
use super::mode::{Mode, in_mode};
use super::picture::{Format, Header, Limits};
use super::pixels::{Pixels, Pool};

/// A rectangle of an image, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub left: usize,
    pub top: usize,
    pub width: usize,
    pub height: usize,
}

impl Region {
    pub fn whole(width: usize, height: usize) -> Region {
        Region { left: 0, top: 0, width, height }
    }
}

/// Decoded RGB pixels that contain a region.
#[derive(Debug)]
pub struct Decoded<'a> {
    pub width: usize,
    pub height: usize,
    /// RGB pixels, row after row without gaps.
    pub data: Pixels<'a>,
    /// Left edge of the region within `data`, in pixels. This and the next three fields are whole numbers unless the image was scaled down.
    pub left: f64,
    pub top: f64,
    pub region_width: f64,
    pub region_height: f64,
}

/// The entropy decoder to use, or the library's own if `state` is null. The C side calls this struct `entropy`.
#[repr(C)]
struct Taken {
    state: *mut c_void,
    begin: unsafe extern "C" fn(*mut c_void, *const entropy::Scan) -> c_int,
    mcu: unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut [i16; 64]) -> c_int,
}

unsafe extern "C" {
    fn penstock_jpeg_session_bytes() -> usize;
    fn penstock_jpeg_message_bytes() -> usize;
    fn penstock_jpeg_open(memory: *mut c_void, message: *mut c_char);
    fn penstock_jpeg_close(memory: *mut c_void);
    fn penstock_jpeg_header(memory: *mut c_void, bytes: *const u8, count: usize, out: *mut c_int) -> c_int;
    // Over 6 parameters: C passes the box and the target as plain values.
    #[allow(clippy::too_many_arguments)]
    fn penstock_jpeg_region(
        memory: *mut c_void,
        entropy: Taken,
        denominator: c_int,
        left: c_int,
        top: c_int,
        width: c_int,
        height: c_int,
        out: *mut u8,
        pitch: usize,
    ) -> c_int;
}

/// Memory for one libjpeg-turbo decoder, which a thread reuses for every image that it decodes.
struct Session {
    memory: Vec<u64>,
    message: Vec<u8>,
    entropy: Entropy,
}

impl Session {
    fn open() -> Session {
        // SAFETY: the functions have no preconditions.
        let (bytes, message) = unsafe { (penstock_jpeg_session_bytes(), penstock_jpeg_message_bytes()) };
        let mut session =
            Session { memory: vec![0; bytes.div_ceil(8) + 1], message: vec![0; message], entropy: Entropy::default() };
        // SAFETY: the memory is zeroed, has the required size and is aligned for every field. Neither buffer moves while the session lives.
        unsafe { penstock_jpeg_open(session.memory.as_mut_ptr().cast(), session.message.as_mut_ptr().cast()) };
        session
    }

    /// Read the width, height, iMCU width and iMCU height, and whether regions can be decoded. Returns None if the header is
    /// invalid.
    fn header(&mut self, bytes: &[u8]) -> Option<[c_int; 5]> {
        let mut found = [0; 5];
        // SAFETY: the session is open, and `bytes` outlives all reads, which end when the region is decoded or the next header is read.
        let code = unsafe {
            penstock_jpeg_header(self.memory.as_mut_ptr().cast(), bytes.as_ptr(), bytes.len(), found.as_mut_ptr())
        };
        (code == 0).then_some(found)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the session is open and is closed only here.
        unsafe { penstock_jpeg_close(self.memory.as_mut_ptr().cast()) }
    }
}

thread_local! {
    static SESSION: RefCell<Session> = RefCell::new(Session::open());
}

/// An image that has not been decoded yet, with its header and orientation.
#[derive(Debug, Clone, Copy)]
pub struct Encoded<'a> {
    bytes: &'a [u8],
    header: Header,
    orientation: u8,
    pixels: &'a Pool,
}

impl<'a> Encoded<'a> {
    /// Read the header of an image. `pixels` provides the memory for decoded JPEG regions.
    pub fn open(bytes: &'a [u8], limits: Limits, orientation: Orientation, pixels: &'a Pool) -> Result<Encoded<'a>> {
        let header = probe(bytes, limits)?;
        Mode::Rgb.check(header.channels, header.bits)?;
        let orientation = orientation.tag(bytes);
        Ok(Encoded { bytes, header, orientation, pixels })
    }

    /// Return the image's width and height after its orientation is applied.
    pub fn size(&self) -> (usize, usize) {
        let (width, height) = (self.header.width as usize, self.header.height as usize);
        if self.orientation >= 5 { (height, width) } else { (width, height) }
    }

    /// Decode a region as RGB, scaled by 1/`denominator` if the image supports that, otherwise at full size.
    pub fn region(&self, region: Region, denominator: usize) -> Result<Decoded<'a>> {
        let (width, height) = self.size();
        assert!(
            region.width > 0
                && region.height > 0
                && region.left + region.width <= width
                && region.top + region.height <= height,
            "a region must be inside its image"
        );
        if self.header.format == Format::Jpeg
            && self.orientation == 1
            && let Some(decoded) = self.jpeg_region(region, denominator)
        {
            return Ok(decoded);
        }
        let picture = decode(self.bytes, Limits { pixels: u64::MAX }, Orientation::Stored)?;
        let rgb = exif::upright(in_mode(picture, Mode::Rgb)?, self.orientation);
        let (left, top) = (region.left as f64, region.top as f64);
        Ok(Decoded {
            width: rgb.width,
            height: rgb.height,
            data: rgb.data.into(),
            left,
            top,
            region_width: region.width as f64,
            region_height: region.height as f64,
        })
    }

    /// Decode a region of a JPEG. Returns None if the full decoder must decode the file or report its error.
    fn jpeg_region(&self, region: Region, denominator: usize) -> Option<Decoded<'a>> {
        SESSION.with_borrow_mut(|session| {
            let decoded = self.jpeg_region_by(session, region, denominator, true);
            // If our entropy decoder fails, the library's decoder determines the result. Trying our decoder first therefore never
            // changes the result.
            if session.entropy.end() && decoded.is_none() {
                self.jpeg_region_by(session, region, denominator, false)
            } else {
                decoded
            }
        })
    }

    fn jpeg_region_by(
        &self,
        session: &mut Session,
        region: Region,
        denominator: usize,
        own: bool,
    ) -> Option<Decoded<'a>> {
        let [width, height, mcu_width, mcu_height, able] = session.header(self.bytes)?;
        if able == 0 {
            return None;
        }
        // The range to decode, in pixels of the scaled image. It covers the iMCUs that the region touches, plus one iMCU to the left,
        // one to the right and one above.
        let (width, height) = ((width as usize).div_ceil(denominator), (height as usize).div_ceil(denominator));
        let (mcu_width, mcu_height) = (mcu_width as usize / denominator, mcu_height as usize / denominator);
        let along = |begin: usize, length: usize, mcu: usize, size: usize| {
            let (low, high) = (begin / denominator, (begin + length).div_ceil(denominator));
            ((low / mcu * mcu).saturating_sub(mcu), ((high.div_ceil(mcu) + 1) * mcu).min(size))
        };
        let (left, right) = along(region.left, region.width, mcu_width.max(1), width);
        let (top, _) = along(region.top, region.height, mcu_height.max(1), height);
        let bottom = (region.top + region.height).div_ceil(denominator).min(height);
        let (out_width, out_height) = (right - left, bottom - top);
        let mut data = self.pixels.take(out_width * out_height * 3);
        // SAFETY: the session has just read the header of these bytes. `data` has out_height rows of out_width RGB pixels.
        let code = unsafe {
            penstock_jpeg_region(
                session.memory.as_mut_ptr().cast(),
                Taken {
                    state: if own { (&raw mut session.entropy).cast() } else { std::ptr::null_mut() },
                    begin: entropy::begin,
                    mcu: entropy::mcu,
                },
                denominator as c_int,
                left as c_int,
                top as c_int,
                out_width as c_int,
                out_height as c_int,
                data.as_mut_ptr(),
                out_width * 3,
            )
        };
        if code != 0 {
            return None;
        }
        let scale = denominator as f64;
        Some(Decoded {
            width: out_width,
            height: out_height,
            data,
            left: region.left as f64 / scale - left as f64,
            top: region.top as f64 / scale - top as f64,
            region_width: region.width as f64 / scale,
            region_height: region.height as f64 / scale,
        })
    }
}
