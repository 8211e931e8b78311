//! Reads and writes stored images: probes headers, decodes to (H, W, C), and encodes arrays as PNG.
//!
//! Only the magic bytes determine the codec. File names have no effect.

use penstock_error::{Error, Result};

use super::exif::Orientation;
use super::picture::{Format, Header, Limits, Outline, Picture, undecodable};
use super::{exif, jpeg, png, webp};

fn format_of(bytes: &[u8]) -> Result<Format> {
    if bytes.is_empty() {
        return Err(undecodable("cannot decode image: it has 0 bytes"));
    }
    if bytes.starts_with(&[0xff, 0xd8, 0xff]) {
        return Ok(Format::Jpeg);
    }
    if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        return Ok(Format::Png);
    }
    if webp::begins(bytes) {
        return Ok(Format::Webp);
    }
    let head: Vec<String> = bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    Err(undecodable(format!("cannot decode image: it begins with {}, expected a JPEG, PNG or WebP", head.join(" ")))
        .hint("convert it first, or store it in a Bytes column"))
}

/// Read only the header. Refuses an image whose header `decode` would refuse.
pub fn probe(bytes: &[u8], limits: Limits) -> Result<Header> {
    let header = match format_of(bytes)? {
        Format::Jpeg => jpeg::probe(bytes)?,
        Format::Png => png::probe(bytes)?,
        Format::Webp => webp::probe(bytes)?,
    };
    check_size(&header, limits)?;
    Ok(header)
}

/// Read the outline of an image, or return None if only a decoder can determine the outline.
pub fn outline(bytes: &[u8]) -> Option<Outline> {
    match format_of(bytes).ok()? {
        Format::Jpeg => jpeg::outline(bytes),
        Format::Png => png::outline(bytes),
        Format::Webp => webp::outline(bytes),
    }
}

fn check_size(header: &Header, limits: Limits) -> Result<()> {
    if header.width == 0 || header.height == 0 {
        return Err(undecodable(format!(
            "cannot decode image: it is {} x {} pixels, expected 1 x 1 or more",
            header.width, header.height
        )));
    }
    if header.width.saturating_mul(header.height) > limits.pixels {
        return Err(Error::new(
            "media-too-large",
            format!(
                "cannot decode image: it has {} x {} pixels, but at most {} are allowed",
                header.width, header.height, limits.pixels
            ),
        )
        .hint("this may be a decompression bomb; if it is not, raise the limit with ps.configure(image_pixels=…)"));
    }
    Ok(())
}

/// Decode an image.
pub fn decode(bytes: &[u8], limits: Limits, orientation: Orientation) -> Result<Picture> {
    let header = probe(bytes, limits)?;
    let picture = match header.format {
        Format::Jpeg => jpeg::decode(bytes, &header)?,
        Format::Png => png::decode(bytes, &header)?,
        Format::Webp => webp::decode(bytes, &header)?,
    };
    Ok(exif::upright(picture, orientation.tag(bytes)))
}

/// Read only the header of a mask. Refuses a mask whose header `decode_mask` would refuse.
pub fn probe_mask(bytes: &[u8], limits: Limits) -> Result<Header> {
    let header = probe(bytes, limits)?;
    if header.channels != 1 && !png::is_indexed(bytes) {
        return Err(no_mask(header.channels));
    }
    Ok(header)
}

fn no_mask(channels: usize) -> Error {
    undecodable(format!("cannot decode mask: it has {channels} channels, expected 1"))
        .hint("a mask has one number per pixel, grey or indexed; map colours to class numbers first, or use ps.Image()")
}

/// Decode a single-channel mask. The palette of an indexed PNG is not applied, so the values are class numbers.
pub fn decode_mask(bytes: &[u8], limits: Limits) -> Result<Picture> {
    let header = probe(bytes, limits)?;
    if header.format == Format::Png
        && let Some(picture) = png::decode_indices(bytes, &header)?
    {
        return Ok(picture);
    }
    let picture = decode(bytes, limits, Orientation::Stored)?;
    if picture.channels != 1 {
        return Err(no_mask(picture.channels));
    }
    Ok(picture)
}
