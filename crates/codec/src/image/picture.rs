//! The basic image types: formats, headers, pixels, and decoder limits.

use penstock_error::Error;

/// Decoder limits. An image that exceeds a limit is refused before its pixels are allocated.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub pixels: u64,
}

impl Default for Limits {
    /// Return a limit of 2^28 pixels. Nearly all cameras produce smaller images, and images within the limit do no harm (Pillow
    /// warns at 89 M pixels and refuses 179 M).
    fn default() -> Limits {
        Limits { pixels: 1 << 28 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Jpeg,
    Png,
    Webp,
}

/// The properties in an image header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub format: Format,
    pub width: u64,
    pub height: u64,
    pub channels: usize,
    pub bits: u8,
}

/// The size of an image and the cost of decoding it, read from its header without a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outline {
    pub width: usize,
    pub height: usize,
    /// Memory that decoding needs in addition to the pixels, for a multi-scan JPEG's coefficients or a WebP's planes.
    pub decoder_bytes: u64,
}

/// Decoded pixels of shape (height, width, channels), with 8 or 16 bits per channel in native byte order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub bits: u8,
    pub data: Vec<u8>,
}

/// Return the error for an animation. Reading only its first frame would lose the others in silence.
pub(crate) fn animation(format: &str) -> Error {
    Error::new("unsupported-format", format!("cannot decode {format}: it is an animation"))
        .hint("store its frames as separate images")
}

pub(crate) fn undecodable(text: impl Into<String>) -> Error {
    Error::new("media-undecodable", text)
}
