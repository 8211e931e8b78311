//! Let the concurrent reads of a scan or an epoch share blocks, so that each block is read only once.

use std::collections::HashSet;
use std::time::Duration;

use super::{Fetched, Wanted};
use crate::store::blocks::{Duty, get_or_duty};

/// Divide blocks among concurrent groups of a scan, or batches of an epoch, so that each shared block is read once. If `all` is
/// set, every block is shared. Otherwise, only partially needed blocks are shared. Returns the blocks to read here and the blocks
/// that other threads are reading.
pub fn share_out(
    wanted: Vec<Wanted>,
    all: bool,
    duties: &mut Vec<(Wanted, Duty)>,
    fetched: &mut Fetched,
) -> (Vec<Wanted>, Vec<Wanted>) {
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for block in wanted {
        if !all && !block.partial {
            ours.push(block);
            continue;
        }
        match get_or_duty(block.key, Duration::ZERO) {
            Some(Ok(_)) | None if block.beside => {}
            Some(Ok(bytes)) => drop(fetched.blocks.insert(block.key, Ok(bytes))),
            Some(Err(duty)) => {
                let block = Wanted { awaited: true, ..block };
                duties.push((block.clone(), duty));
                ours.push(block);
            }
            None => others.push(block),
        }
    }
    (ours, others)
}

/// Return these blocks and their neighbours in the same stretch of the file. A stretch has `stretch` bytes, which take about as
/// long to read as a request.
pub fn with_neighbours(mut wanted: Vec<Wanted>, stretch: u64) -> Vec<Wanted> {
    wanted.sort_by_key(|wanted| (wanted.key.0, wanted.chunk, wanted.block));
    let mut all: Vec<Wanted> = Vec::with_capacity(wanted.len());
    for (index, block) in wanted.iter().enumerate() {
        let entry = &block.file.tail.chunks[block.chunk];
        let in_stretch = |other: usize| {
            entry.offset.get(other) / stretch == block.offset / stretch && entry.stored_bytes.get(other) > 0
        };
        let same = |other: &&Wanted| other.key.0 == block.key.0 && other.chunk == block.chunk;
        let first = all.last().filter(same).map_or(0, |last| last.block + 1);
        let end = wanted.get(index + 1).filter(same).map_or(entry.blocks(), |next| next.block);
        let beside = |other: usize| Wanted { beside: true, ..Wanted::new(&block.file, block.chunk, other, None) };
        let before = (first..block.block).rev().take_while(|other| in_stretch(*other)).count();
        all.extend((block.block - before..block.block).map(beside));
        all.push(block.clone());
        all.extend((block.block + 1..end).take_while(|other| in_stretch(*other)).map(beside));
    }
    all
}

/// Return the number of bytes from the first to the last block, summed over the chunks of these blocks.
pub fn span_bytes(wanted: &[Wanted]) -> u64 {
    let mut seen = HashSet::new();
    let chunks = wanted.iter().filter(|wanted| seen.insert((wanted.key.0, wanted.chunk)));
    chunks.map(|wanted| wanted.file.tail.chunks[wanted.chunk].span_bytes()).sum()
}
