//! Hostile images, generated so that the tests need no files: truncated and corrupted images, decompression bombs, absurd sizes,
//! wrong magic numbers, and endless markers.

use penstock_codec::encode_png;
use penstock_error::Result;

use crate::random::Random;

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 })
    })
}

/// Make a PNG whose header claims a size that its data does not have.
fn png_claiming(png: &[u8], width: u32, height: u32) -> Vec<u8> {
    let mut bytes = png.to_vec();
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let sum = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// Make a JPEG header, with no useful scan data, that claims a size and a number of components.
fn jpeg_claiming(width: u16, height: u16, components: u8, precision: u8) -> Vec<u8> {
    let mut bytes = vec![0xff, 0xd8, 0xff, 0xc0];
    bytes.extend_from_slice(&(8 + 3 * u16::from(components)).to_be_bytes());
    bytes.push(precision);
    bytes.extend_from_slice(&height.to_be_bytes());
    bytes.extend_from_slice(&width.to_be_bytes());
    bytes.push(components);
    for component in 0..components {
        bytes.extend_from_slice(&[component + 1, 0x11, 0]);
    }
    bytes.extend_from_slice(&[0xff, 0xda, 0, 8, 1, 1, 0, 0, 63, 0, 1, 2, 3, 0xff, 0xd9]);
    bytes
}

/// Make a one-chunk WebP whose frame header claims a size and is followed by `body`.
fn webp_claiming(lossless: bool, width: u32, height: u32, body: &[u8]) -> Vec<u8> {
    let (name, head) = if lossless {
        (
            b"VP8L",
            [&[0x2f][..], &(width.wrapping_sub(1) & 0x3fff | (height.wrapping_sub(1) & 0x3fff) << 14).to_le_bytes()]
                .concat(),
        )
    } else {
        (
            b"VP8 ",
            [&[0x10, 2, 0, 0x9d, 1, 0x2a][..], &(width as u16).to_le_bytes(), &(height as u16).to_le_bytes()].concat(),
        )
    };
    let length = (head.len() + body.len()) as u32;
    [b"RIFF", &(length + 12).to_le_bytes()[..], b"WEBP", name, &length.to_le_bytes(), &head, body].concat()
}

/// Return the name and bytes of each hostile image. None may make a decoder crash, hang, or exceed its memory limit;
/// the decoder may refuse or accept any of them.
pub fn images() -> Result<Vec<(String, Vec<u8>)>> {
    let mut random = Random(7);
    let png = encode_png(40, 30, 3, 8, &random.bytes(40 * 30 * 3))?;
    let mut all: Vec<(String, Vec<u8>)> = vec![
        ("empty.jpg".into(), Vec::new()),
        ("one_byte.jpg".into(), vec![0xff]),
        ("magic_only.jpg".into(), vec![0xff, 0xd8, 0xff]),
        ("magic_only.png".into(), png[..8].to_vec()),
        ("text.jpg".into(), b"this is no image at all".to_vec()),
        ("gif.png".into(), b"GIF89a\x01\x00\x01\x00\x00\x00\x00;".to_vec()),
        ("bomb.png".into(), png_claiming(&png, 60_000, 60_000)),
        ("absurd.png".into(), png_claiming(&png, 0x7fff_ffff, 0x7fff_ffff)),
        ("zero_wide.png".into(), png_claiming(&png, 0, 30)),
        ("taller_than_data.png".into(), png_claiming(&png, 30, 4000)),
        ("bomb.jpg".into(), jpeg_claiming(65_500, 65_500, 3, 8)),
        ("zero_high.jpg".into(), jpeg_claiming(10, 0, 3, 8)),
        ("five_components.jpg".into(), jpeg_claiming(10, 10, 5, 8)),
        ("twelve_bits.jpg".into(), jpeg_claiming(10, 10, 3, 12)),
        ("no_scan.jpg".into(), jpeg_claiming(10, 10, 3, 8)[..21].to_vec()),
        ("magic_only.webp".into(), b"RIFF\x04\0\0\0WEBP".to_vec()),
        ("bomb.webp".into(), webp_claiming(true, 16_384, 16_384, &[0; 40])),
        ("bomb_lossy.webp".into(), webp_claiming(false, 16_383, 16_383, &[0; 40])),
        ("zero_wide.webp".into(), webp_claiming(false, 0, 10, &[0; 40])),
        ("markers_only.jpg".into(), [0xff, 0xd8].into_iter().chain([0xff; 4096]).collect()),
        ("endless_restart.jpg".into(), [0xff, 0xd8].into_iter().chain([0xff, 0xd0].repeat(2048)).collect()),
    ];
    for cut in [9, 20, 33, 40, png.len() / 2, png.len() - 12, png.len() - 1] {
        all.push((format!("cut_at_{cut}.png"), png[..cut].to_vec()));
    }
    for number in 0..40 {
        let mut rotten = png.clone();
        for _ in 0..=random.below(8) {
            let at = 8 + random.below(png.len() as u64 - 8) as usize;
            rotten[at] ^= 1 << random.below(8);
        }
        all.push((format!("rotten_{number}.png"), rotten));
    }
    for number in 0..40 {
        let length = random.below(400) as usize;
        all.push((format!("noise_{number}.jpg"), [0xff, 0xd8, 0xff].into_iter().chain(random.bytes(length)).collect()));
        let (width, height) = (1 + random.below(64) as u32, 1 + random.below(64) as u32);
        all.push((
            format!("noise_{number}.webp"),
            webp_claiming(number % 2 == 0, width, height, &random.bytes(length)),
        ));
    }
    Ok(all)
}
