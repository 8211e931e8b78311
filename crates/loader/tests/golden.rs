//! Orders never change, because loader states rely on them. `PENSTOCK_GOLDEN=write` rewrites the golden file, which is allowed
//! only before a release.

use penstock_loader::order::mixture::{Exhausted, Mix, Program, source_seed};
use penstock_loader::order::permutation::Permutation;
use penstock_loader::order::random::{Draws, key};
use penstock_loader::order::sequence::{Order, Sequence};

fn lines() -> Vec<String> {
    let mut lines = Vec::new();
    for n in 1..=4096u64 {
        let permutation = Permutation::new(n, 42);
        let values: Vec<u64> = (0..n).map(|place| permutation.at(place)).collect();
        lines.push(format!("permutation {n} {:016x}", key(&values)));
    }
    for n in (12..62).flat_map(|power| [(1u64 << power) - 1, 1 << power, (1 << power) + 1]) {
        let permutation = Permutation::new(n, 42);
        let values: Vec<u64> =
            (0..32).map(|i| permutation.at(key(&[i]) % n)).chain([permutation.at(0), permutation.at(n - 1)]).collect();
        lines.push(format!("permutation {n} {:016x}", key(&values)));
    }
    let orders = [
        Order::Sequential,
        Order::Full,
        Order::Window { run_samples: 16, window_samples: 256, lanes: 4 },
        Order::Window { run_samples: 7, window_samples: 100, lanes: 1 },
        Order::Replacement { samples: 500, weights: None },
    ];
    for (number, order) in orders.iter().enumerate() {
        let sequence = Sequence::new(order.clone(), 42, 1003, 24, None).unwrap();
        for epoch in [0, 1, 9] {
            let visited: Vec<u64> = (0..sequence.len()).map(|draw| sequence.epoch(epoch).position(draw)).collect();
            lines.push(format!("order {number} epoch {epoch} {:016x}", key(&visited)));
        }
    }
    for exhausted in [Exhausted::Repeat, Exhausted::Stop] {
        let sources = [30, 50, 70].map(|count| Sequence::new(Order::Full, count, count, 24, None).unwrap());
        let mix = Mix { shares: vec![1 << 30, 1 << 31, 1 << 30], epoch_samples: 100, exhausted };
        let program = Program::new(42, sources.to_vec(), &[], Some(mix), 24).unwrap();
        for epoch in 0..3 {
            let places: Vec<u64> = program
                .places(epoch, 0..program.len())
                .iter()
                .flat_map(|place| [place.source as u64, place.position])
                .collect();
            lines.push(format!("mix {exhausted:?} epoch {epoch} {:016x}", key(&places)));
        }
    }
    let sources = [30, 50, 70].iter().enumerate();
    let sources = sources
        .map(|(source, count)| Sequence::new(Order::Full, source_seed(42, source), *count, 24, None).unwrap())
        .collect();
    let mix = Mix { shares: vec![1, 1, 1], epoch_samples: 90, exhausted: Exhausted::Repeat };
    let program = Program::new(42, sources, &[], Some(mix), 24).unwrap();
    let places: Vec<u64> =
        program.places(1, 0..90).iter().flat_map(|place| [place.source as u64, place.position]).collect();
    lines.push(format!("seeds of sources {:016x}", key(&places)));
    let mut draws = Draws::new(key(&[42, 1]), 3, 1 << 40);
    let numbers: Vec<u64> =
        (0..10).flat_map(|_| [draws.below(1000), draws.unit().to_bits(), draws.word().into()]).collect();
    lines.push(format!("draws {:016x}", key(&numbers)));
    lines
}

#[test]
fn orders_are_what_they_were() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/orders-2.txt");
    let found = lines().join("\n") + "\n";
    if std::env::var_os("PENSTOCK_GOLDEN").is_some() {
        std::fs::write(path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    for (found, golden) in found.lines().zip(golden.lines()) {
        assert_eq!(found, golden);
    }
    assert_eq!(found.len(), golden.len());
}
