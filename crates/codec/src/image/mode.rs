//! Converts pixels to the requested format: 8-bit colour or grey, 16-bit grey, or the stored format. Called by `region` and the loader.
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

    /// Refuse an image with `bits` bits per channel if this mode would discard some of them.
    pub fn check(self, bits: u8) -> Result<()> {
        match (self.form(), bits) {
            (Some((_, 8)), 16) => {
                let text = format!("the image has 16 bits per channel, but mode {} has 8", self.name());
                let hint =
                    "use ps.Image(mode=\"stored\") for the column, or mode=\"I;16\" for grey; or convert the images before appending them";
                Err(Error::new("unsupported-format", text).hint(hint))
            }
            _ => Ok(()),
        }
    }
}

/// Decode an image and convert it to the given mode.
pub fn decode_in(bytes: &[u8], limits: Limits, orientation: Orientation, mode: Mode) -> Result<Picture> {
    in_mode(decode(bytes, limits, orientation)?, mode)
}

/// Convert a picture to the given mode. Alpha is composited onto white. Colours are converted to grey with the ITU-R 601 luma
/// formula, as in Pillow. 8-bit grey is multiplied by 257 to get 16-bit grey, so that white stays white.
pub fn in_mode(picture: Picture, mode: Mode) -> Result<Picture> {
    mode.check(picture.bits)?;
    let of = |channels: usize, bits: u8, data: Vec<u8>| Ok(Picture { channels, bits, data, ..picture });
    let pixels = || picture.data.chunks_exact(picture.channels);
    match (mode, picture.channels, picture.bits) {
        (Mode::Stored, ..) => Ok(picture),
        (Mode::Deep, 1, 16) | (Mode::Rgb, 3, 8) | (Mode::Grey, 1, 8) | (Mode::Rgba, 4, 8) => Ok(picture),
        (Mode::Deep, 1, _) => of(1, 16, picture.data.iter().flat_map(|grey| (u16::from(*grey) * 257).to_ne_bytes()).collect()),
        (Mode::Deep, channels, _) => {
            let text = format!("the image has {channels} channels, but mode I;16 has one");
            Err(Error::new("unsupported-format", text).hint("use ps.Image(mode=\"stored\") or another mode for the column"))
        }
        (Mode::Rgb, 1, 8) => of(3, 8, picture.data.iter().flat_map(|grey| [*grey; 3]).collect()),
        (Mode::Rgb, 4, 8) => of(3, 8, pixels().flat_map(on_white).collect()),
        (Mode::Rgba, 1, 8) => of(4, 8, picture.data.iter().flat_map(|grey| [*grey, *grey, *grey, 255]).collect()),
        (Mode::Rgba, 3, 8) => of(4, 8, pixels().flat_map(|pixel| [pixel[0], pixel[1], pixel[2], 255]).collect()),
        (Mode::Grey, 3, 8) => of(1, 8, pixels().map(|pixel| luma([pixel[0], pixel[1], pixel[2]])).collect()),
        (Mode::Grey, 4, 8) => of(1, 8, pixels().map(|pixel| luma(on_white(pixel))).collect()),
        (_, channels, bits) => {
            Err(Error::new("unsupported-format", format!("cannot convert {channels} channels of {bits} bits to {}", mode.name())))
        }
    }
}

fn on_white(pixel: &[u8]) -> [u8; 3] {
    let alpha = u16::from(pixel[3]);
    [0, 1, 2].map(|channel| ((u16::from(pixel[channel]) * alpha + 255 * (255 - alpha) + 127) / 255) as u8)
}

fn luma([red, green, blue]: [u8; 3]) -> u8 {
    ((u32::from(red) * 19_595 + u32::from(green) * 38_470 + u32::from(blue) * 7_471 + 0x8000) >> 16) as u8
}
