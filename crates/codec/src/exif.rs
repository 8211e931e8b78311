//! EXIF orientation: read it (by the `kamadak-exif` library) and turn pixels by it.

use crate::image::Picture;

/// Orientation 1…8 of a JPEG or PNG; 1 where there is none, or where it can't be read.
pub fn orientation(bytes: &[u8]) -> u8 {
    let mut reader = exif::Reader::new();
    reader.continue_on_error(true);
    let parsed = reader.read_from_container(&mut std::io::Cursor::new(bytes)).or_else(|error| error.distill_partial_result(|_| {}));
    let value =
        parsed.ok().and_then(|exif| exif.get_field(exif::Tag::Orientation, exif::In::PRIMARY).and_then(|field| field.value.get_uint(0)));
    value.filter(|value| (1..=8).contains(value)).unwrap_or(1) as u8
}

/// Turn and mirror a picture so that it stands upright. Source: EXIF 2.32, tag 0x0112.
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
