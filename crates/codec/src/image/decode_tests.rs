//! Tests of decoding and encoding whole images.

use super::*;
use penstock_error::Result;

fn pixels(height: usize, width: usize, channels: usize, bits: u8) -> Vec<u8> {
    (0..height * width * channels * usize::from(bits) / 8).map(|index| (index * 37 % 251) as u8).collect()
}

#[test]
fn png_of_every_shape_comes_back() -> Result<()> {
    for (channels, bits) in [(1, 8), (3, 8), (4, 8), (1, 16), (3, 16), (4, 16)] {
        let data = pixels(7, 5, channels, bits);
        let bytes = encode_png(7, 5, channels, bits, &data)?;
        let picture = decode(&bytes, Limits::default(), Orientation::Exif)?;
        assert_eq!((picture.height, picture.width, picture.channels, picture.bits), (7, 5, channels, bits));
        assert_eq!(picture.data, data);
    }
    Ok(())
}

#[test]
fn what_is_no_image_is_refused_with_its_first_bytes() {
    let error = decode(b"GIF89a", Limits::default(), Orientation::Exif).expect_err("a GIF is not a supported image");
    assert_eq!(error.code(), "media-undecodable");
    assert!(error.message().contains("47 49 46"));
    assert!(decode(b"", Limits::default(), Orientation::Exif).is_err());
}

#[test]
fn a_bomb_is_refused_before_its_pixels() -> Result<()> {
    let bytes = encode_png(100, 100, 1, 8, &pixels(100, 100, 1, 8))?;
    let error = decode(&bytes, Limits { pixels: 9_999 }, Orientation::Exif).expect_err("one pixel too many");
    assert_eq!(error.code(), "media-too-large");
    Ok(())
}

#[test]
fn a_truncated_png_is_refused() -> Result<()> {
    let bytes = encode_png(64, 64, 3, 8, &pixels(64, 64, 3, 8))?;
    assert_eq!(
        decode(&bytes[..bytes.len() / 2], Limits::default(), Orientation::Exif).expect_err("half a file").code(),
        "media-undecodable"
    );
    Ok(())
}

#[test]
fn orientations_move_the_first_pixel_where_exif_says() {
    // A 2 x 3 picture of one channel:  0 1 2
    //                                  3 4 5
    let picture = Picture { height: 2, width: 3, channels: 1, bits: 8, data: (0..6).collect() };
    let expected: [(u8, &[u8]); 8] = [
        (1, &[0, 1, 2, 3, 4, 5]),
        (2, &[2, 1, 0, 5, 4, 3]),
        (3, &[5, 4, 3, 2, 1, 0]),
        (4, &[3, 4, 5, 0, 1, 2]),
        (5, &[0, 3, 1, 4, 2, 5]),
        (6, &[3, 0, 4, 1, 5, 2]),
        (7, &[5, 2, 4, 1, 3, 0]),
        (8, &[2, 5, 1, 4, 0, 3]),
    ];
    for (orientation, data) in expected {
        assert_eq!(crate::exif::upright(picture.clone(), orientation).data, data, "orientation {orientation}");
    }
}
