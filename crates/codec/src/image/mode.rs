//! Converts pixels to the requested format: 8-bit colour or grey, 16-bit grey, or the stored format. Called by all reads of images, and
//! by `append` to refuse what a mode cannot hold.
//!
//! Bits and alpha are never lost silently. An image that does not fit the mode is refused, and alpha is composited or kept.

use penstock_error::{Error, Result};

use super::decode::decode;
use super::exif::Orientation;
use super::picture::{Limits, Picture};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Rgb,
    Grey,
    Rgba,
    /// 16-bit grey.
    Deep,
    /// Keep the stored channels and bits.
    Stored,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::Rgb => "RGB",
            Mode::Grey => "L",
            Mode::Rgba => "RGBA",
            Mode::Deep => "I;16",
            Mode::Stored => "stored",
        }
    }

    /// Return the number of channels and the bits per channel, or None if they vary between images.
    pub fn form(self) -> Option<(usize, u8)> {
        match self {
            Mode::Rgb => Some((3, 8)),
            Mode::Grey => Some((1, 8)),
            Mode::Rgba => Some((4, 8)),
            Mode::Deep => Some((1, 16)),
            Mode::Stored => None,
        }
    }

    /// Refuse an image with these channels and bits per channel if this mode would discard some of them.
    pub fn check(self, channels: usize, bits: u8) -> Result<()> {
        let (text, better) = match (self, bits) {
            (Mode::Rgb | Mode::Grey | Mode::Rgba, 16) => {
                let better = if channels == 1 { Mode::Deep } else { Mode::Stored };
                (format!("the image has 16 bits per channel, but mode {} has 8", self.name()), better)
            }
            (Mode::Deep, _) if channels != 1 => {
                let better = if bits == 16 { Mode::Stored } else { Mode::Rgb };
                (format!("the image has {channels} channels, but mode I;16 has one"), better)
            }
            _ => return Ok(()),
        };
        let hint = match better {
            Mode::Stored => "declare the column as ps.Image(mode=\"stored\")".into(),
            _ => format!(
                "declare the column as ps.Image(mode=\"{}\"), or with mode=\"stored\" if its images differ",
                better.name()
            ),
        };
        Err(Error::new("unsupported-format", text)
            .hint(format!("{hint}; or convert the images before you append them")))
    }
}

/// Decode an image and convert it to the given mode.
pub fn decode_in(bytes: &[u8], limits: Limits, orientation: Orientation, mode: Mode) -> Result<Picture> {
    in_mode(decode(bytes, limits, orientation)?, mode)
}

/// Convert a picture to the given mode. Alpha is composited onto white. Colours are converted to grey with the ITU-R 601 luma
/// formula, as in Pillow. 8-bit grey is multiplied by 257 to get 16-bit grey, so that white stays white.
pub fn in_mode(picture: Picture, mode: Mode) -> Result<Picture> {
    mode.check(picture.channels, picture.bits)?;
    let with_form = |channels: usize, bits: u8, data: Vec<u8>| Ok(Picture { channels, bits, data, ..picture });
    let data = &picture.data;
    match (mode, picture.channels, picture.bits) {
        (Mode::Stored, ..) => Ok(picture),
        (Mode::Deep, 1, 16) | (Mode::Rgb, 3, 8) | (Mode::Grey, 1, 8) | (Mode::Rgba, 4, 8) => Ok(picture),
        (Mode::Deep, 1, _) => {
            with_form(1, 16, converted(data, |[grey]: &[u8; 1]| (u16::from(*grey) * 257).to_ne_bytes()))
        }
        (Mode::Rgb, 1, 8) => with_form(3, 8, converted(data, |[grey]: &[u8; 1]| [*grey; 3])),
        (Mode::Rgb, 4, 8) => with_form(3, 8, converted(data, on_white)),
        (Mode::Rgba, 1, 8) => with_form(4, 8, converted(data, |[grey]: &[u8; 1]| [*grey, *grey, *grey, 255])),
        (Mode::Rgba, 3, 8) => {
            with_form(4, 8, converted(data, |[red, green, blue]: &[u8; 3]| [*red, *green, *blue, 255]))
        }
        (Mode::Grey, 3, 8) => with_form(1, 8, converted(data, |pixel: &[u8; 3]| [luma(*pixel)])),
        (Mode::Grey, 4, 8) => with_form(1, 8, converted(data, |pixel: &[u8; 4]| [luma(on_white(pixel))])),
        (_, channels, bits) => Err(Error::new(
            "unsupported-format",
            format!("cannot convert {channels} channels of {bits} bits to {}", mode.name()),
        )),
    }
}

/// Convert pixels of FROM bytes to pixels of TO bytes. With sizes known in advance, the compiler uses vector instructions.
fn converted<const FROM: usize, const TO: usize>(data: &[u8], pixel: impl Fn(&[u8; FROM]) -> [u8; TO]) -> Vec<u8> {
    let from = data.as_chunks::<FROM>().0;
    let mut out = vec![0; from.len() * TO];
    out.as_chunks_mut::<TO>().0.iter_mut().zip(from).for_each(|(out, from)| *out = pixel(from));
    out
}

fn on_white(pixel: &[u8; 4]) -> [u8; 3] {
    let alpha = u16::from(pixel[3]);
    [0, 1, 2].map(|channel| ((u16::from(pixel[channel]) * alpha + 255 * (255 - alpha) + 127) / 255) as u8)
}

fn luma([red, green, blue]: [u8; 3]) -> u8 {
    ((u32::from(red) * 19_595 + u32::from(green) * 38_470 + u32::from(blue) * 7_471 + 0x8000) >> 16) as u8
}
