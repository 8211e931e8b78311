//! Reads the EXIF orientation with the `kamadak-exif` library and applies it to pixels.

use super::picture::Picture;
use super::{jpeg, webp};

/// Return the orientation of a JPEG, PNG or WebP, from 1 to 8. Returns 1 if the image has no readable orientation.
pub fn orientation(bytes: &[u8]) -> u8 {
    if has_no_exif(bytes) {
        return 1;
    }
    let mut reader = exif::Reader::new();
    reader.continue_on_error(true);
    let parsed = if webp::begins(bytes) {
        let Some(body) = webp::exif(bytes) else { return 1 };
        reader.read_raw(body.to_vec())
    } else {
        reader.read_from_container(&mut std::io::Cursor::new(bytes))
    };
    let parsed = parsed.or_else(|error| error.distill_partial_result(|_| {}));
    let value = parsed.ok().and_then(|exif| {
        exif.get_field(exif::Tag::Orientation, exif::In::PRIMARY).and_then(|field| field.value.get_uint(0))
    });
    value.filter(|value| (1..=8).contains(value)).unwrap_or(1) as u8
}

/// Return whether this is a JPEG without an EXIF segment before its first scan. Most training images are such JPEGs. Returns false for
/// unusual files, which the library handles.
fn has_no_exif(bytes: &[u8]) -> bool {
    let known =
        jpeg::segments(bytes).find(|(marker, body)| *marker == 0xda || (*marker == 0xe1 && body.starts_with(b"Exif")));
    known.is_some_and(|(marker, _)| marker == 0xda)
}

/// How to treat the EXIF orientation of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// Rotate and mirror the picture as its EXIF tag specifies.
    Exif,
    /// Return the pixels as stored.
    Stored,
}

impl Orientation {
    pub fn of_column(exif_orientation: bool) -> Orientation {
        if exif_orientation { Orientation::Exif } else { Orientation::Stored }
    }

    /// Return the orientation to apply to an image, as an EXIF tag value, where 1 means upright.
    pub(super) fn tag(self, bytes: &[u8]) -> u8 {
        match self {
            Orientation::Exif => orientation(bytes),
            Orientation::Stored => 1,
        }
    }
}

/// Rotate and mirror a picture so that it is upright. Source: EXIF 2.32, tag 0x0112.
pub fn upright(picture: Picture, orientation: u8) -> Picture {
    if !(2..=8).contains(&orientation) {
        return picture;
    }
    let (height, width) = (picture.height, picture.width);
    let pixel = picture.channels * usize::from(picture.bits) / 8;
    let (out_height, out_width) = if orientation >= 5 { (width, height) } else { (height, width) };
    let mut data = Vec::with_capacity(picture.data.len());
    for y in 0..out_height {
        for x in 0..out_width {
            let (from_y, from_x) = match orientation {
                2 => (y, width - 1 - x),
                3 => (height - 1 - y, width - 1 - x),
                4 => (height - 1 - y, x),
                5 => (x, y),
                6 => (height - 1 - x, y),
                7 => (height - 1 - x, width - 1 - y),
                _ => (x, width - 1 - y),
            };
            let at = (from_y * width + from_x) * pixel;
            data.extend_from_slice(&picture.data[at..at + pixel]);
        }
    }
    Picture { height: out_height, width: out_width, data, ..picture }
}

#[cfg(test)]
mod tests {
    use super::has_no_exif;

    #[test]
    fn only_whole_headers_without_exif_are_passed_by() {
        let jpeg = |segments: &[u8]| [&[0xff, 0xd8][..], segments].concat();
        assert!(has_no_exif(&jpeg(b"\xff\xe0\0\x04ab\xff\xdb\0\x03a\xff\xda\0\x02")));
        assert!(!has_no_exif(&jpeg(b"\xff\xe0\0\x04ab\xff\xe1\0\x08Exif\0\0\xff\xda\0\x02")));
        for odd in
            [&b""[..], b"\xff", b"\xff\xe0\0\x01\xff\xda\0\x02", b"\xff\xe0\0\x09ab", b"\0\xe0\0\x02\xff\xda\0\x02"]
        {
            assert!(!has_no_exif(&jpeg(odd)), "{odd:?}");
        }
        assert!(!has_no_exif(b"\x89PNG"));
    }
}
