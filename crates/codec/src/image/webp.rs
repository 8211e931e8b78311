//! Decodes lossy and lossless WebP images with the `image-webp` crate, at 8 bits per channel. Animations are refused, and
//! encoding is not supported.

use std::borrow::Cow;
use std::io::Cursor;

use image_webp::WebPDecoder;
use penstock_error::{Error, Result};

use super::picture::{Format, Header, Outline, Picture, animation, undecodable};

/// The place of the flags in a file with a VP8X header, and the flags. Source: RFC 9649 section 2.7.1.
const FLAGS_AT: usize = 20;
const ANIMATION: u8 = 0x02;
const XMP: u8 = 0x04;
const EXIF: u8 = 0x08;
const ALPHA: u8 = 0x10;

/// Return whether these bytes are the start of a WebP image.
pub fn begins(bytes: &[u8]) -> bool {
    bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP")
}

/// Return the name and body of each chunk of the RIFF container, up to and including the first truncated one. Source: RFC 9649
/// section 2.3.
fn chunks(bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let mut rest = bytes.get(12..).unwrap_or_default();
    std::iter::from_fn(move || {
        let (name, size) = (rest.get(..4)?, rest.get(4..8)?);
        let size = u32::from_le_bytes(size.try_into().ok()?) as usize;
        let body = rest.get(8..8 + size).unwrap_or(&rest[8..]);
        rest = rest.get(8 + size.next_multiple_of(2)..).unwrap_or_default();
        Some((name, body))
    })
}

/// Return the EXIF data of a WebP image in TIFF format, without the JPEG prefix that some writers add, even twice. Returns None if the
/// image has no EXIF data that Google's decoder would read: inside the RIFF container, and announced by its flag.
pub fn exif(bytes: &[u8]) -> Option<&[u8]> {
    let container = bytes.get(..8 + number(bytes, 4, 4)?).unwrap_or(bytes);
    let (_, mut body) = chunks(container).find(|(name, _)| *name == b"EXIF")?;
    while let Some(rest) = body.strip_prefix(b"Exif\0\0") {
        body = rest;
    }
    (container[12..].starts_with(b"VP8X") && container.get(FLAGS_AT)? & EXIF != 0).then_some(body)
}

fn number(body: &[u8], at: usize, bytes: usize) -> Option<usize> {
    Some(body.get(at..at + bytes)?.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}

/// Return the canvas size or frame size in a chunk, or None if the chunk contains neither.
fn size_of((name, body): (&[u8], &[u8])) -> Option<(usize, usize)> {
    match name {
        b"VP8X" => Some((1 + number(body, 4, 3)?, 1 + number(body, 7, 3)?)),
        b"VP8 " => Some((number(body, 6, 2)? & 0x3fff, number(body, 8, 2)? & 0x3fff)),
        b"VP8L" => {
            let header = number(body, 1, 4)?;
            Some((1 + (header & 0x3fff), 1 + (header >> 14 & 0x3fff)))
        }
        _ => None,
    }
}

pub fn probe(bytes: &[u8]) -> Result<Header> {
    let decoder = decoder(bytes)?;
    if decoder.is_animated() {
        return Err(animation("WebP"));
    }
    let (width, height) = decoder.dimensions();
    // The decoder would allocate the frame before it checks that the frame fits the canvas.
    let canvas = (width as usize, height as usize);
    if let Some(frame) =
        chunks(bytes).filter(|(name, _)| *name != b"VP8X").find_map(size_of).filter(|frame| *frame != canvas)
    {
        let (wide, high) = frame;
        return Err(undecodable(format!(
            "cannot decode WebP: it has a frame of {wide} x {high} pixels on a canvas of {width} x {height}"
        )));
    }
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    Ok(Header { format: Format::Webp, width: width.into(), height: height.into(), channels, bits: 8 })
}

/// Read a WebP image's size and how much extra memory its decoder needs. Returns None if the header is cut off.
pub fn outline(bytes: &[u8]) -> Option<Outline> {
    let (width, height) = chunks(bytes).find_map(size_of)?;
    // A lossless image is decoded to RGBA before its alpha is dropped. A lossy one needs luma, chroma and alpha planes.
    Some(Outline { width, height, decoder_bytes: 4 * width as u64 * height as u64 })
}

pub fn decode(bytes: &[u8], header: &Header) -> Result<Picture> {
    let (width, height) = (header.width as usize, header.height as usize);
    let mut data = vec![0; width * height * header.channels];
    decoder(bytes)?.read_image(&mut data).map_err(failed)?;
    Ok(Picture { height, width, channels: header.channels, bits: 8, data })
}

fn decoder(bytes: &[u8]) -> Result<WebPDecoder<Cursor<Cow<'_, [u8]>>>> {
    WebPDecoder::new(Cursor::new(with_true_flags(bytes))).map_err(failed)
}

/// Make the flags in the header agree with the chunks, as Google's decoder does. Tools that strip metadata may leave its flags set.
/// With wrong flags, `image-webp` would refuse the image or drop its alpha.
fn with_true_flags(bytes: &[u8]) -> Cow<'_, [u8]> {
    let found = bytes.get(FLAGS_AT).filter(|flags| bytes[12..].starts_with(b"VP8X") && **flags & ANIMATION == 0);
    let Some(flags) = found.copied() else { return Cow::Borrowed(bytes) };
    let body_of = |wanted: &[u8; 4]| chunks(bytes).find(|(name, _)| *name == wanted).map(|(_, body)| body);
    let alpha = match body_of(b"VP8L") {
        Some(lossless) => number(lossless, 1, 4).is_some_and(|header| header >> 28 & 1 == 1),
        None => body_of(b"ALPH").is_some(),
    };
    let metadata = [(XMP, body_of(b"XMP ").is_some()), (EXIF, body_of(b"EXIF").is_some())];
    let missing = metadata.into_iter().filter(|(_, exists)| !exists).fold(0, |bits, (bit, _)| bits | bit);
    let expected = flags & !missing & !ALPHA | if alpha { ALPHA } else { 0 };
    if expected == flags {
        return Cow::Borrowed(bytes);
    }
    let mut corrected = bytes.to_vec();
    corrected[FLAGS_AT] = expected;
    Cow::Owned(corrected)
}

fn failed(error: image_webp::DecodingError) -> Error {
    undecodable(format!("cannot decode WebP: {error}"))
}
