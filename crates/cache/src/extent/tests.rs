//! Tests of extents: what was written is read, and damage of any kind reads as "not cached".

use super::*;

const OBJECT_BYTES: u64 = 3 * PAGE_BYTES + 100;

fn key() -> Key {
    Key::new("s3://bucket/pets", "data/1", "", 0)
}

fn body() -> Vec<u8> {
    (0..OBJECT_BYTES).map(|byte| (byte * 7 % 251) as u8).collect()
}

/// Return the bytes of each cached page, or None for a page that is not cached.
fn pages(extent: &Extent) -> io::Result<Vec<Option<Vec<u8>>>> {
    let crcs = extent.table(0..extent.pages())?;
    let page = |(number, crc): (usize, &u32)| {
        let begin = number as u64 * PAGE_BYTES;
        let mut out = vec![0; PAGE_BYTES.min(extent.data_bytes() - begin) as usize];
        Ok((extent.read(number as u32, &[*crc], &mut out)? == 1).then_some(out))
    };
    crcs.iter().enumerate().map(page).collect()
}

#[test]
fn an_extent_has_what_was_written() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("extent");
    assert!(Extent::open(&path, &key(), None)?.is_none());
    let (extent, body) = (Extent::create(&path, &key(), OBJECT_BYTES)?, body());
    assert_eq!(pages(&extent)?, [None, None, None, None]);
    extent.write(1, &body[4096..8192], 500)?;
    extent.write(3, &body[12288..], 500)?;
    let again = Extent::open(&path, &key(), Some(OBJECT_BYTES))?.ok_or(io::ErrorKind::NotFound)?;
    let expected = [None, Some(body[4096..8192].to_vec()), None, Some(body[12288..].to_vec())];
    assert_eq!(pages(&again)?, expected);
    assert_eq!((again.object_bytes, again.key.clone(), again.pages()), (OBJECT_BYTES, key(), 4));
    // What was just stored is not the oldest.
    assert_eq!(extent.stamps()?, [500]);
    again.stamp(0, 1000);
    again.stamp(0, 1001);
    assert_eq!(extent.stamps()?, [1000]);
    again.clear(1..4)?;
    assert_eq!(pages(&extent)?, [None, None, None, None]);
    assert!(Extent::open(&path, &key(), Some(OBJECT_BYTES))?.is_some());
    Ok(())
}

#[test]
fn another_object_or_version_is_not_cached() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("extent");
    Extent::create(&path, &key(), OBJECT_BYTES)?;
    assert!(Extent::open(&path, &key(), Some(OBJECT_BYTES + 1))?.is_none());
    for other in [
        Key::new("s3://bucket/dogs", "data/1", "", 0),
        Key::new("s3://bucket/pets", "data/2", "", 0),
        Key::new("s3://bucket/pets", "data/1", "v2", 0),
        Key::new("s3://bucket/pets", "data/1", "", 1),
    ] {
        assert!(Extent::open(&path, &other, None)?.is_none());
        assert_ne!(other.hash(), key().hash());
    }
    Ok(())
}

#[test]
fn a_note_is_beside_the_pages_and_only_grows() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("extent");
    let (extent, body) = (Extent::create(&path, &key(), OBJECT_BYTES)?, body());
    extent.write(0, &body, 500)?;
    assert!(extent.note()?.is_none() && extent.growth_of_note(100)? == 0);
    let long = vec![b'x'; 5000];
    let before = extent.overhead_now()?;
    let growth = extent.growth_of_note(long.len())?;
    extent.set_note(&long)?;
    // Another process that has the file open sees it, too.
    let other = Extent::open(&path, &key(), Some(OBJECT_BYTES))?.ok_or(io::ErrorKind::NotFound)?;
    assert_eq!((other.note()?, other.overhead_now()?), (Some(long.clone()), before + growth));
    assert!(growth > 0 && growth.is_multiple_of(PAGE_BYTES));
    other.set_note(b"short")?;
    let found = extent.note()?.unwrap_or_default();
    assert!(found.starts_with(b"short ") && found.len() == long.len() && pages(&extent)?.iter().flatten().count() == 4);
    assert!(extent.set_note(&vec![0; 17 << 10]).is_err());
    let whole = std::fs::read(&path)?;
    // Any flipped bit behind the identity makes the note and the extent unreadable.
    for at in whole.len() - 32 - long.len()..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        std::fs::write(&path, &flipped)?;
        assert!(extent.note()?.is_none(), "byte {at}");
    }
    Ok(())
}

#[test]
fn versions_of_an_object_share_their_place() {
    let of = |name: &str, extent| Key::new("s3://bucket", name, "", extent);
    assert_eq!(of("a?1?x", 0).place(), of("a?2?y", 0).place());
    assert_eq!(of("a?1?x", 0).place(), of("a", 0).place());
    assert_ne!(of("a?1?x", 0).hash(), of("a?2?y", 0).hash());
    for other in
        [of("a?1?x", 1), of("b?1?x", 0), Key::new("s3://bucket2", "a?1?x", "", 0), Key::new("s3", "bucket\na", "", 0)]
    {
        assert_ne!(of("a?1?x", 0).place(), other.place());
    }
    // Without versions, both hashes are the same.
    assert_eq!(key().place(), key().hash());
}

#[test]
fn every_flipped_bit_reads_as_not_cached() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("extent");
    let (extent, body) = (Extent::create(&path, &key(), OBJECT_BYTES)?, body());
    extent.write(0, &body, 500)?;
    let whole = std::fs::read(&path)?;
    let file = File::options().write(true).open(&path)?;
    let expected: Vec<Vec<u8>> = body.chunks(PAGE_BYTES as usize).map(<[u8]>::to_vec).collect();
    let mut lost = 0;
    // Every byte behind the data, and each 13th byte of the data, with another bit each.
    for at in (0..whole.len()).filter(|at| *at >= body.len() || at % 13 == 0) {
        file.write_all_at(&[whole[at] ^ 1 << (at % 8)], at as u64)?;
        match Extent::open(&path, &key(), Some(OBJECT_BYTES))? {
            None => lost += 1,
            Some(extent) => {
                let found = pages(&extent)?;
                assert!(
                    found
                        .iter()
                        .zip(&expected)
                        .all(|(found, expected)| found.as_ref().is_none_or(|found| found == expected)),
                    "byte {at}"
                );
                lost += usize::from(found.contains(&None));
            }
        }
        file.write_all_at(&whole[at..=at], at as u64)?;
    }
    // Only flips in padding, in stamps and in the 4 bytes that the footer reserves go unnoticed.
    assert!(lost >= body.len() / 13 + 16 + 32 - 4, "{lost}");
    assert_eq!(pages(&extent)?.iter().flatten().count(), 4);
    Ok(())
}

#[test]
fn a_page_at_a_wrong_place_is_not_cached() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("extent");
    let (extent, page) = (Extent::create(&path, &key(), OBJECT_BYTES)?, vec![5; 4096]);
    extent.write(0, &page, 500)?;
    let crc = extent.table(0..1)?[0];
    extent.file.write_all_at(&page, 4096)?;
    let mut out = vec![0; 4096];
    assert_eq!((extent.read(0, &[crc], &mut out)?, extent.read(1, &[crc], &mut out)?), (1, 0));
    Ok(())
}

#[test]
fn a_truncated_file_is_not_cached() -> io::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("extent");
    let extent = Extent::create(&path, &key(), OBJECT_BYTES)?;
    extent.write(0, &body(), 500)?;
    let whole = std::fs::metadata(&path)?.len();
    for bytes in [0, 1, 31, 32, 4096, whole - 1, whole + 1] {
        File::options().write(true).open(&path)?.set_len(bytes)?;
        assert!(Extent::open(&path, &key(), None)?.is_none(), "{bytes}");
    }
    Ok(())
}
