//! Reads of real files. A file system that refuses O_DIRECT ends a test early.

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::stream::SLOT_BYTES;
use super::*;
use crate::Piece;
use crate::buffer::Buffer;

fn read(path: &Path, begin: u64, pieces: &[Piece], shared: bool) -> io::Result<Vec<Bytes>> {
    let range = RangeRequest { pieces: pieces.to_vec(), shared, ..RangeRequest::plain("x", begin, 0, None) };
    fetch(&[(path.to_path_buf(), &range)]).remove(0)
}

#[test]
fn unaligned_pieces_are_what_the_file_holds() -> io::Result<()> {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR"))?; // A temporary folder on tmpfs may not support O_DIRECT.
    let path = folder.path().join("file");
    let body: Vec<u8> = (0..6_000_001u32).map(|value| (value * 7 / 3) as u8).collect();
    std::fs::write(&path, &body)?;
    for begin in [0u64, 1, 4095, 4096, 1_048_570, 2_999_999] {
        for bytes in [1usize, 100, 4096, 2_000_001] {
            for shared in [false, true] {
                let pieces = [Piece { skip: 0, bytes }, Piece { skip: 13, bytes: 0 }, Piece { skip: 5, bytes: 17 }];
                let at = begin as usize;
                let found = match read(&path, begin, &pieces, shared) {
                    Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(()),
                    other => other?,
                };
                assert_eq!(found[0], body[at..at + bytes]);
                assert_eq!((found[1].len(), &found[2][..]), (0, &body[at + bytes + 18..at + bytes + 35]));
            }
        }
    }
    let last = read(&path, 6_000_000, &[Piece { skip: 0, bytes: 1 }], false)?;
    assert_eq!(last[0], body[6_000_000..]);
    let beyond = read(&path, 6_000_000, &[Piece { skip: 0, bytes: 2 }], false);
    assert!(beyond.is_err_and(|error| error.kind() == io::ErrorKind::UnexpectedEof));
    Ok(())
}

#[test]
fn a_stream_shows_each_range_once() -> io::Result<()> {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR"))?;
    let path = folder.path().join("file");
    let body: Vec<u8> = (0..9_000_001u32).map(|value| (value * 7 / 3) as u8).collect();
    std::fs::write(&path, &body)?;
    let ranges: Vec<RangeRequest> = (0..100u64)
        .map(|index| {
            let begin = index * 90_000 + index % 7 * 1000;
            RangeRequest::plain(
                "x",
                begin,
                STREAM_BYTES.min(body.len() as u64 - begin).min(index * index * 50 + 1),
                None,
            )
        })
        .collect();
    for _ in 0..3 {
        let requests: Vec<(PathBuf, &RangeRequest)> = ranges.iter().map(|range| (path.clone(), range)).collect();
        let mut seen = vec![0; ranges.len()];
        let answers = stream(&requests, None, &mut |index, bytes| {
            seen[index] += 1;
            assert_eq!(bytes, &body[ranges[index].begin as usize..ranges[index].end() as usize]);
        });
        if answers.iter().any(|answer| answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Unsupported)) {
            return Ok(());
        }
        assert!(answers.iter().all(Result::is_ok) && seen.iter().all(|count| *count == 1), "{answers:?} {seen:?}");
    }
    let beyond = RangeRequest::plain("x", 9_000_000, 2, None);
    let answers =
        stream(&[(path.clone(), &beyond), (path.clone(), &ranges[5])], None, &mut |index, _| assert_eq!(index, 1));
    assert!(answers[0].as_ref().is_err_and(|error| error.kind() == io::ErrorKind::UnexpectedEof) && answers[1].is_ok());
    // Aligned ranges are read in place; all others go through the pool.
    let memory = Buffer::new(1 << 20)?;
    // SAFETY: the buffer holds 1 MiB, and all of it is written before it is read.
    let memory = unsafe { std::slice::from_raw_parts_mut(memory.memory(), 1 << 20) };
    memory.fill(0);
    let places = [(0u64, 65_536usize), (65_536, 196_608), (262_145, 4096), (1 << 20, 131_072), (2_000_000, 131_072)];
    let ranges: Vec<RangeRequest> =
        places.iter().map(|(begin, bytes)| RangeRequest::plain("x", *begin, *bytes as u64, None)).collect();
    let (mut targets, mut rest): (Vec<&mut [u8]>, _) = (Vec::new(), memory);
    for (_, bytes) in places {
        let (target, later) = rest.split_at_mut(bytes);
        targets.push(target);
        rest = later;
    }
    let requests: Vec<(PathBuf, &RangeRequest)> = ranges.iter().map(|range| (path.clone(), range)).collect();
    let whole = |range: usize| &body[ranges[range].begin as usize..ranges[range].end() as usize];
    let answers = stream(&requests, Some(&mut targets), &mut |index, bytes| assert_eq!(bytes, whole(index)));
    assert!(answers.iter().all(Result::is_ok) && (0..5).all(|index| *targets[index] == *whole(index)));
    // A panicking stream waits for its in-flight requests, and the next stream still works.
    let broken =
        std::panic::AssertUnwindSafe(|| stream(&requests, None, &mut |_, _| std::panic::resume_unwind(Box::new(()))));
    assert!(std::panic::catch_unwind(broken).is_err());
    assert!(stream(&requests, None, &mut |index, bytes| assert_eq!(bytes, whole(index))).iter().all(Result::is_ok));
    Ok(())
}

/// A device may return fewer bytes than requested, in multiples of its block size. Only a read at the end of a file may return any
/// other number of bytes.
#[test]
fn a_short_read_is_not_taken_for_all() {
    let described = |result: i32, at: u64, bytes: u64, needed: u64| match outcome(result, at, bytes, needed) {
        Outcome::Whole => "whole".to_owned(),
        Outcome::Short(got) => format!("short {got}"),
        Outcome::Failed(error) => format!("{:?}", error.kind()),
    };
    assert_eq!(described(65_536, 0, 65_536, 65_536), "whole");
    assert_eq!(described(61_440, 0, 65_536, 65_536), "short 61440");
    assert_eq!(described(4_096, 0, 65_536, 65_000), "short 4096");
    assert_eq!(described(65_000, 0, 65_536, 65_000), "whole", "the last page of a file");
    assert_eq!(described(464, 4_096, 8_192, 4_560), "whole", "the rest after a short read");
    assert_eq!(described(0, 0, 65_536, 65_000), "UnexpectedEof");
    assert_eq!(described(64_999, 0, 65_536, 65_000), "UnexpectedEof");
    assert_eq!(
        (described(-libc::EINTR, 0, 4_096, 1), described(-libc::EAGAIN, 0, 4_096, 1)),
        ("short 0".into(), "short 0".into())
    );
    assert_eq!(described(-libc::EIO, 0, 4_096, 1), format!("{:?}", io::Error::from_raw_os_error(libc::EIO).kind()));
}

#[test]
fn a_range_that_does_not_fit_is_refused_before_the_device_writes() -> io::Result<()> {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR"))?;
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 1 << 20])?;
    let long = RangeRequest::plain("x", 0, SLOT_BYTES + 1, None);
    let good = RangeRequest::plain("x", 4096, 8192, None);
    let mut seen = Vec::new();
    let answers = stream(&[(path.clone(), &long), (path.clone(), &good)], None, &mut |index, _| seen.push(index));
    assert!(answers[0].as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput));
    if answers[1].is_ok() {
        assert_eq!(seen, [1]);
    }
    let mut target = vec![0; 4096];
    let answers = stream(&[(path, &good)], Some(&mut [&mut target]), &mut |_, _| {});
    assert!(
        answers[0].as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput)
            && target.iter().all(|byte| *byte == 0)
    );
    Ok(())
}

#[test]
fn a_file_system_without_direct_io_is_recognised() {
    let refused = read(Path::new("/proc/version"), 0, &[], false);
    assert!(refused.is_err_and(|error| error.kind() == io::ErrorKind::Unsupported));
}
