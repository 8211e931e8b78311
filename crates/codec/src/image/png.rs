//! Decodes PNGs with 1 to 16 bits per channel, and encodes them with 8 or 16, using the `png` crate. 16-bit channels keep 16
//! bits. Palettes become RGB or RGBA, and grey with alpha becomes RGBA. Animations are refused.

use std::io::Cursor;

use penstock_error::{Error, Result};
use png::{BitDepth, ColorType, Decoder, Encoder, Transformations};

use super::picture::{Format, Header, Outline, Picture, animation, undecodable};

fn failed(error: png::DecodingError) -> Error {
    undecodable(format!("cannot decode PNG: {error}"))
}

/// Limit on the memory that a decoder uses for anything besides pixels, such as its palette and tables.
const SIDE_BYTES: usize = 16 << 20;

fn decoder<'a>(bytes: &'a [u8], header: Option<&Header>) -> Decoder<Cursor<&'a [u8]>> {
    let pixels = header.map_or(0, |header| header.width as usize * header.height as usize * 8);
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), png::Limits { bytes: SIDE_BYTES + pixels });
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder
}

pub fn probe(bytes: &[u8]) -> Result<Header> {
    let mut decoder = decoder(bytes, None);
    let info = decoder.read_header_info().map_err(failed)?;
    let channels = match info.color_type {
        ColorType::Grayscale => 1,
        ColorType::Rgb | ColorType::Indexed => 3,
        ColorType::GrayscaleAlpha | ColorType::Rgba => 4,
    };
    let bits = if info.bit_depth == BitDepth::Sixteen { 16 } else { 8 };
    if is_animated(bytes) {
        return Err(animation("PNG"));
    }
    Ok(Header { format: Format::Png, width: info.width.into(), height: info.height.into(), channels, bits })
}

/// Return whether a PNG declares an animation: by an `acTL` chunk before its pixels. Source: PNG (third edition), section 11.3.6.
fn is_animated(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(8..).unwrap_or_default();
    while let [a, b, c, d, name @ ..] = rest {
        match name.get(..4) {
            Some(b"acTL") => return true,
            None | Some(b"IDAT") => return false,
            _ => {}
        }
        // A chunk has a name and a checksum of four bytes each around its body.
        rest = name.get(8usize.saturating_add(u32::from_be_bytes([*a, *b, *c, *d]) as usize)..).unwrap_or_default();
    }
    false
}

/// Read the outline of a PNG. Returns None if its header is cut off.
pub fn outline(bytes: &[u8]) -> Option<Outline> {
    let size = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
    Some(Outline { width: size(16)?, height: size(20)?, decoder_bytes: 0 })
}

pub fn decode(bytes: &[u8], header: &Header) -> Result<Picture> {
    let mut decoder = decoder(bytes, Some(header));
    decoder.set_transformations(Transformations::EXPAND);
    let (picture, color) = read_frame(decoder)?;
    Ok(if color == ColorType::GrayscaleAlpha { grey_alpha_to_rgba(picture) } else { picture })
}

/// Return whether the pixels of a PNG are palette indexes. The caller has checked the header.
pub fn is_indexed(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x89PNG") && bytes.get(25) == Some(&(ColorType::Indexed as u8))
}

/// Decode the class numbers of an indexed or grey PNG as stored. A transparent colour is a class like any other. Returns None for
/// other colour types.
pub fn decode_indices(bytes: &[u8], header: &Header) -> Result<Option<Picture>> {
    let mut decoder = decoder(bytes, Some(header));
    let info = decoder.read_header_info().map_err(failed)?;
    let bits = info.bit_depth as usize;
    if !matches!(info.color_type, ColorType::Indexed | ColorType::Grayscale) {
        return Ok(None);
    }
    decoder.set_transformations(Transformations::IDENTITY);
    let (mut picture, _) = read_frame(decoder)?;
    if bits < 8 {
        let line_bytes = (picture.width * bits).div_ceil(8);
        let mask = (1u8 << bits) - 1;
        let unpacked = (0..picture.height).flat_map(|y| (0..picture.width).map(move |x| (y, x)));
        picture.data = unpacked
            .map(|(y, x)| picture.data[y * line_bytes + x * bits / 8] >> (8 - bits - x * bits % 8) & mask)
            .collect();
    }
    picture.channels = 1;
    Ok(Some(picture))
}

fn read_frame(decoder: Decoder<Cursor<&[u8]>>) -> Result<(Picture, ColorType)> {
    let mut reader = decoder.read_info().map_err(failed)?;
    let size = reader
        .output_buffer_size()
        .ok_or_else(|| undecodable("cannot decode PNG: it is larger than the address space"))?;
    let mut data = vec![0; size];
    let info = reader.next_frame(&mut data).map_err(failed)?;
    data.truncate(info.buffer_size());
    let bits = if info.bit_depth == BitDepth::Sixteen { 16 } else { 8 };
    if bits == 16 {
        for pair in data.chunks_exact_mut(2) {
            let value = u16::from_be_bytes([pair[0], pair[1]]);
            pair.copy_from_slice(&value.to_ne_bytes());
        }
    }
    Ok((
        Picture {
            height: info.height as usize,
            width: info.width as usize,
            channels: info.color_type.samples(),
            bits,
            data,
        },
        info.color_type,
    ))
}

fn grey_alpha_to_rgba(picture: Picture) -> Picture {
    let size = usize::from(picture.bits) / 8;
    let data = picture
        .data
        .chunks_exact(2 * size)
        .flat_map(|pixel| [&pixel[..size], &pixel[..size], &pixel[..size], &pixel[size..]].concat())
        .collect();
    Picture { channels: 4, data, ..picture }
}

/// Encode pixels as PNG, losslessly. `data` has shape (height, width, channels) and native byte order.
pub fn encode(height: usize, width: usize, channels: usize, bits: u8, data: &[u8]) -> Result<Vec<u8>> {
    let invalid = |text: String| Error::new("invalid-value", format!("cannot store the array as PNG: {text}"));
    let color = match channels {
        1 => ColorType::Grayscale,
        3 => ColorType::Rgb,
        4 => ColorType::Rgba,
        other => return Err(invalid(format!("{other} channels, expected 1, 3 or 4"))),
    };
    let checked_side = |size: usize| {
        u32::try_from(size).ok().filter(|size| *size > 0).ok_or_else(|| invalid(format!("{height} x {width} pixels")))
    };
    let mut out = Vec::new();
    let mut encoder = Encoder::new(&mut out, checked_side(width)?, checked_side(height)?);
    encoder.set_color(color);
    encoder.set_depth(if bits == 16 { BitDepth::Sixteen } else { BitDepth::Eight });
    let swapped: Vec<u8>;
    let data = if bits == 16 {
        swapped = data.chunks_exact(2).flat_map(|pair| u16::from_ne_bytes([pair[0], pair[1]]).to_be_bytes()).collect();
        &swapped
    } else {
        data
    };
    let written =
        encoder.write_header().and_then(|mut writer| writer.write_image_data(data).and_then(|()| writer.finish()));
    written.map_err(|error| invalid(error.to_string()))?;
    Ok(out)
}
