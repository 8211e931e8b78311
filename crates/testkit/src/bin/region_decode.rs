//! Measures the maximum throughput of training on JPEGs by decoding random regions of the sizes that RandomResizedCrop draws.
//!
//! `region-decode FOLDER THREADS SECONDS [scaled]` prints images per second. With `scaled`, large boxes are decoded at 1/2, 1/4 or 1/8,
//! as random crops to 224 pixels do by default.
#![allow(unused_crate_dependencies)] // Only the library and the other binaries use the remaining dependencies.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use penstock_codec::pixels::Pool;
use penstock_codec::region::{Encoded, Region};
use penstock_codec::{Limits, Orientation};
use penstock_loader::order::random::Draws;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (threads, seconds): (u64, f64) =
        (arguments[2].parse().expect("threads"), arguments[3].parse().expect("seconds"));
    let scaled = arguments.get(4).is_some_and(|word| word == "scaled");
    let files = std::fs::read_dir(&arguments[1]).expect("a folder").flatten();
    let images: Vec<Vec<u8>> = files.filter_map(|file| std::fs::read(file.path()).ok()).collect();
    let pixels = Pool::new(32 << 20);
    let (done, began) = (AtomicUsize::new(0), Instant::now());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (images, done, pixels) = (&images, &done, &pixels);
            scope.spawn(move || {
                let mut draws = Draws::new(1, thread, 0);
                while began.elapsed() < Duration::from_secs_f64(seconds) {
                    let encoded = Encoded::open(
                        &images[draws.below(images.len() as u64) as usize],
                        Limits::default(),
                        Orientation::Exif,
                        pixels,
                    )
                    .expect("a JPEG");
                    let (width, height) = encoded.size();
                    let target = (width * height) as f64 * draws.between(0.08, 1.0);
                    let aspect = draws.between((0.75f64).ln(), (4.0f64 / 3.0).ln()).exp();
                    let (w, h) = ((target * aspect).sqrt() as usize, (target / aspect).sqrt() as usize);
                    if !(1..=width).contains(&w) || !(1..=height).contains(&h) {
                        continue;
                    }
                    let (left, top) =
                        (draws.below((width - w) as u64 + 1) as usize, draws.below((height - h) as u64 + 1) as usize);
                    let sharp = |denominator: &usize| w.min(h) >= 224 * *denominator;
                    let denominator = if scaled { [8, 4, 2].into_iter().find(sharp).unwrap_or(1) } else { 1 };
                    encoded.region(Region { left, top, width: w, height: h }, denominator).expect("pixels");
                    done.fetch_add(1, Relaxed);
                }
            });
        }
    });
    println!("{}", done.load(Relaxed) as f64 / began.elapsed().as_secs_f64());
}
