//! Check the headers or all pixels of encoded images before the images are stored.

use penstock_codec::{Mode, Orientation, decode, decode_mask, probe, probe_mask};
use penstock_error::{Error, Result};
use penstock_format::schema::ImageMode;
use penstock_tensor::Column;

use crate::config::Config;
use crate::parallel;

/// How much of an image `append` checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validate {
    /// Check the magic bytes, size and channels. This detects decompression bombs and values that are not images.
    Header,
    /// Check every pixel. This also detects truncated files.
    Decode,
}

/// The kind of image that a column stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Media {
    /// Pixels that reads return in this mode.
    Image(Mode),
    /// One class number per pixel.
    Mask,
}

/// Return the codec's name for the mode of a column.
pub fn mode_of(mode: ImageMode) -> Mode {
    match mode {
        ImageMode::Rgb => Mode::Rgb,
        ImageMode::Grey => Mode::Grey,
        ImageMode::Rgba => Mode::Rgba,
        ImageMode::Deep => Mode::Deep,
        ImageMode::Stored => Mode::Stored,
    }
}

/// Check that an image can be decoded and that its mode holds its channels and bits.
fn check_image(image: &[u8], mode: Mode, validate: Validate) -> Result<()> {
    let header = probe(image, Config::limits())?;
    mode.check(header.channels, header.bits)?;
    match validate {
        Validate::Header => Ok(()),
        Validate::Decode => decode(image, Config::limits(), Orientation::Stored).map(|_| ()),
    }
}

/// Check media on all threads. Returns one entry per value: an error if the value is refused, otherwise None.
pub fn check<'a>(
    count: usize,
    bytes: usize,
    value: impl Fn(usize) -> Option<&'a [u8]> + Sync,
    kind: Media,
    validate: Validate,
) -> Result<Vec<Option<Error>>> {
    let limits = Config::limits();
    parallel::map(count, bytes, |index| {
        let media = value(index)?;
        let checked = match (validate, kind) {
            (Validate::Header, Media::Mask) => probe_mask(media, limits).map(|_| ()),
            (Validate::Decode, Media::Mask) => decode_mask(media, limits).map(|_| ()),
            (validate, Media::Image(mode)) => check_image(media, mode, validate),
        };
        checked.err()
    })
}

/// Check the headers or all pixels of the encoded images in a column.
pub fn check_media(column: Column, kind: Media, validate: Validate) -> Result<Column> {
    let Column::Ragged(ragged) = &column else {
        return Err(Error::new("invalid-value", "found numbers, expected encoded images"));
    };
    let value = |row: usize| (!ragged.is_null(row)).then(|| ragged.value(row));
    let found = check(ragged.len(), ragged.data.len(), value, kind, validate)?;
    let refused: Vec<(usize, Error)> =
        found.into_iter().enumerate().filter_map(|(row, error)| Some((row, error?))).collect();
    match refused.first() {
        None => Ok(column),
        Some((row, error)) => {
            let rows = refused.iter().map(|(row, _)| *row as u64).collect();
            let text = format!("({} of {} are refused): {}", refused.len(), ragged.len(), error.message());
            let refusal = Error::new(error.code(), text).at_row(*row as u64).rows(rows);
            Err(match error.hint_text() {
                Some(hint) => refusal.hint(hint),
                None => refusal,
            })
        }
    }
}
