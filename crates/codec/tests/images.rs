//! Tests that decode and encode whole images.

use penstock_codec::exif::upright;
use penstock_codec::{Limits, Orientation, Picture, decode, encode_png, outline, probe};
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
fn bytes_that_are_not_an_image_are_refused_with_the_first_of_them() {
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
    // A 2 x 3 picture with one channel: 0 1 2 3 4 5
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
        assert_eq!(upright(picture.clone(), orientation).data, data, "orientation {orientation}");
    }
}

/// Make a WebP file with one chunk. If `canvas` is given, a VP8X chunk with that canvas size precedes it.
fn webp(canvas: Option<(usize, usize)>, name: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let chunk =
        |name: &[u8], body: &[u8]| [name, &(body.len() as u32).to_le_bytes(), body, &vec![0; body.len() % 2]].concat();
    let mut chunks = chunk(name, body);
    if let Some((width, height)) = canvas {
        let size = |size: usize| ((size - 1) as u32).to_le_bytes()[..3].to_vec();
        chunks = [chunk(b"VP8X", &[vec![0; 4], size(width), size(height)].concat()), chunks].concat();
    }
    [b"RIFF", &(chunks.len() as u32 + 4).to_le_bytes()[..], b"WEBP", &chunks].concat()
}

/// Make the start of a lossy frame.
fn frame(width: u16, height: u16) -> Vec<u8> {
    [&[0x10, 2, 0, 0x9d, 1, 0x2a][..], &width.to_le_bytes(), &height.to_le_bytes(), &[0; 40]].concat()
}

#[test]
fn a_webp_frame_that_differs_from_its_canvas_is_refused_before_it_is_allocated() {
    let bomb = webp(Some((4, 4)), b"VP8 ", &frame(16_383, 16_383));
    let error = probe(&bomb, Limits::default()).expect_err("a frame larger than the canvas");
    assert_eq!(error.code(), "media-undecodable");
    assert!(error.message().contains("a frame of 16383 x 16383 pixels on a canvas of 4 x 4"), "{error}");
    let large = webp(None, b"VP8 ", &frame(16_383, 16_383));
    assert_eq!(probe(&large, Limits { pixels: 1 << 20 }).expect_err("too large").code(), "media-too-large");
}

#[test]
fn the_outline_of_a_webp_is_that_of_its_header() -> Result<()> {
    let lossless = [&[0x2f][..], &(29u32 | 39 << 14).to_le_bytes(), &[0; 8]].concat();
    for bytes in [
        webp(None, b"VP8 ", &frame(30, 40)),
        webp(None, b"VP8L", &lossless),
        webp(Some((30, 40)), b"VP8 ", &frame(30, 40)),
    ] {
        let (header, outline) = (probe(&bytes, Limits::default())?, outline(&bytes).expect("a header"));
        assert_eq!((header.width, header.height), (30, 40));
        assert_eq!((outline.width, outline.height, outline.decoder_bytes), (30, 40, 4 * 30 * 40));
    }
    assert!(outline(b"RIFF\x04\0\0\0WEBPVP8 ").is_none());
    Ok(())
}
