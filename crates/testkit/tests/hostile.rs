//! Hostile images and hostile metadata must not cause a panic, a hang, or memory use beyond the limits.

use std::sync::Arc;

use bytes::Bytes;
use penstock_codec::{Limits, Orientation, decode, decode_mask, probe};
use penstock_error::Result;
use penstock_format::datafile::Tail;
use penstock_format::manifest::{Root, parse_page, parse_words};
use penstock_format::record::Record;
use penstock_testkit::hostile;
use penstock_testkit::random::Random;
use proptest::prelude::*;

#[test]
fn hostile_images_are_refused_or_decoded_within_limits() -> Result<()> {
    let limits = Limits { pixels: 1 << 24 };
    let mut refused = 0;
    for (name, bytes) in hostile::images()? {
        let header = probe(&bytes, limits);
        let decoded = decode(&bytes, limits, Orientation::Exif);
        let _ = decode_mask(&bytes, limits); // Check only that the call returns.
        match (header, decoded) {
            (Err(_), Ok(_)) => panic!("{name}: probe refuses the header, but decode accepts the image"),
            (_, Ok(picture)) => assert!(picture.data.len() as u64 <= limits.pixels * 8, "{name}"),
            (_, Err(error)) => {
                refused += 1;
                assert!(
                    ["media-undecodable", "media-too-large", "unsupported-format"].contains(&error.code()),
                    "{name}: {}",
                    error.code()
                );
            }
        }
    }
    assert!(refused > 40);
    Ok(())
}

fn parse_all(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    let _ = Record::parse(&bytes, 0, 0);
    let _ = Root::parse(&bytes);
    let _ = parse_page(&bytes);
    let _ = parse_words(&bytes);
    let _ = Tail::parse(bytes, 1 << 20);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn parsers_survive_noise(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        parse_all(&bytes);
    }
}

/// Damaged objects with recomputed checksums pass the checksum test, so their content reaches the parsers.
#[test]
fn parsers_survive_rot_behind_a_good_checksum() -> Result<()> {
    let snapshot = penstock_dataset::create(
        Arc::new(penstock_storage::Memory::named("rot")),
        penstock_testkit::samples::schema(),
        "create",
        "test",
    )?;
    let snapshot = Arc::new(snapshot);
    let (_, snapshot) = penstock_testkit::samples::append(&snapshot, 1, 5)?;
    let bodies = [snapshot.record().encode(), snapshot.root.encode()];
    let mut random = Random(3);
    for round in 0..20_000 {
        let body = &bodies[round % bodies.len()];
        let mut rotten = body.clone();
        for _ in 0..=random.below(4) {
            let at = 8 + random.below(body.len() as u64 - 12) as usize;
            rotten[at] = random.number() as u8;
        }
        let end = rotten.len() - 4;
        let sum = penstock_format::crc(&rotten[..end]).to_le_bytes();
        rotten[end..].copy_from_slice(&sum);
        parse_all(&rotten);
    }
    Ok(())
}
