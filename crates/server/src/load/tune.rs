//! The search for the knee: the fewest workers that reach nearly the best throughput. More workers only wait longer.

use std::sync::Arc;

use penstock_error::Result;

use super::line::Line;
use super::measure::measure;
use super::see::{See, stopped};
use super::worker::Workers;

/// Share of the best throughput that the knee has.
const ENOUGH: f64 = 0.95;
/// What reaches this share of the best throughput is measured again.
const NEAR: f64 = 0.85;
/// How often what matters is measured, because one measurement can be wrong by a sixth. The median counts.
const ROUNDS: usize = 5;

/// The result of a search.
#[derive(Debug, Clone)]
pub struct Tuned {
    pub workers: usize,
    pub bytes_per_second: f64,
    pub mean_ms: f64,
    /// All steps, each with its workers.
    pub steps: Vec<Step>,
}

/// What a number of workers reached.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub workers: usize,
    pub bytes_per_second: f64,
    pub mean_ms: f64,
}

impl Step {
    fn of(workers: usize, lines: &[Line]) -> Step {
        let requests: u64 = lines.iter().map(|line| line.requests).sum();
        let waited: f64 = lines.iter().map(|line| line.mean_ms * line.requests as f64).sum();
        Step {
            workers,
            bytes_per_second: lines.iter().map(Line::bytes_per_second).sum(),
            mean_ms: waited / (requests as f64).max(1.0),
        }
    }

    /// Return the measurement of the same workers that has the median throughput.
    fn median(mut steps: Vec<Step>) -> Option<Step> {
        steps.sort_by(|one, other| one.bytes_per_second.total_cmp(&other.bytes_per_second));
        steps.get(steps.len() / 2).copied()
    }
}

/// Measure 1, 2, 4, … and `most` workers, and all that come near the best of them again. Then measure the number with which a curve through them
/// reaches nearly its best. Throughput may rise slowly for long, so no number of workers is left out because the one before brought little.
pub async fn search(workers: &Arc<Workers>, most: usize, seconds: f64, see: &mut See<'_>) -> Result<Tuned> {
    let counts: Vec<usize> = doubled(most).collect();
    let mut steps = rounds(workers, &counts, 1, seconds, see).await?;
    let near = best(&steps) * NEAR;
    let counts: Vec<usize> =
        steps.iter().filter(|step| step.bytes_per_second >= near).map(|step| step.workers).collect();
    steps.retain(|step| step.bytes_per_second < near);
    steps.extend(rounds(workers, &counts, ROUNDS, seconds, see).await?);
    steps.sort_by_key(|step| step.workers);
    let count = knee(&steps);
    let at = steps.partition_point(|step| step.workers < count);
    if steps[at].workers != count {
        let between = rounds(workers, &[count], ROUNDS, seconds, see).await?;
        steps.splice(at..at, between);
    }
    let Step { workers: count, bytes_per_second, mean_ms } = steps[at];
    Ok(Tuned { workers: count, bytes_per_second, mean_ms, steps })
}

/// Measure each number of workers several times, in turns, so that a machine that becomes slower or faster in the meantime favours none of them.
async fn rounds(
    workers: &Arc<Workers>,
    counts: &[usize],
    rounds: usize,
    seconds: f64,
    see: &mut See<'_>,
) -> Result<Vec<Step>> {
    let mut found = vec![Vec::new(); counts.len()];
    for _ in 0..rounds {
        for (count, found) in counts.iter().zip(&mut found) {
            found.push(measured(workers, *count, seconds, see).await?);
        }
    }
    Ok(found.into_iter().filter_map(Step::median).collect())
}

/// Return 1, 2, 4, … and `most`.
fn doubled(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |count| Some(count * 2)).take_while(move |count| *count < most).chain([most])
}

async fn measured(workers: &Arc<Workers>, count: usize, seconds: f64, see: &mut See<'_>) -> Result<Step> {
    let mut quiet = |lines: &[Line]| see(if lines.is_empty() { lines } else { &[] });
    let lines = measure(workers, count, seconds, seconds, &mut quiet).await?;
    // The caller sees one line for each step.
    if see(&lines).is_break() {
        return Err(stopped());
    }
    Ok(Step::of(count, &lines))
}

fn best(steps: &[Step]) -> f64 {
    steps.iter().map(|step| step.bytes_per_second).fold(0.0, f64::max)
}

/// Return throughput as a smooth curve: the mean of each step, which counts twice, and of those of its neighbours that come near the best.
fn smooth(steps: &[Step]) -> Vec<f64> {
    let near = best(steps) * NEAR;
    let means = steps.iter().enumerate().map(|(at, step)| {
        let beside = &steps[at.saturating_sub(1)..steps.len().min(at + 2)];
        let beside = beside
            .iter()
            .map(|step| step.bytes_per_second)
            .filter(|rate| *rate >= near && step.bytes_per_second >= near);
        let (sum, count) = beside.fold((step.bytes_per_second, 1.0), |(sum, count), rate| (sum + rate, count + 1.0));
        sum / count
    });
    means.collect()
}

/// Return the fewest workers with which the smooth curve through these steps reaches nearly its best. Steps are sorted by workers.
fn knee(steps: &[Step]) -> usize {
    let curve = smooth(steps);
    let enough = curve.iter().copied().fold(0.0, f64::max) * ENOUGH;
    let at = curve.iter().position(|rate| *rate >= enough).unwrap_or_default();
    let Some(below) = at.checked_sub(1) else { return steps[at].workers };
    // Between two steps, throughput rises with the logarithm of the workers.
    let part = (enough - curve[below]) / (curve[at] - curve[below]);
    let (few, many) = (steps[below].workers as f64, steps[at].workers as f64);
    (few * (many / few).powf(part)).ceil().min(many) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(of: &[(usize, f64)]) -> Vec<Step> {
        of.iter()
            .map(|(workers, bytes_per_second)| Step {
                workers: *workers,
                bytes_per_second: *bytes_per_second,
                mean_ms: 1.0,
            })
            .collect()
    }

    #[test]
    fn the_knee_has_the_fewest_workers_with_nearly_the_best_throughput() {
        // A sharp knee: 7.6 of 8 are reached between 4 and 8.
        assert_eq!(knee(&steps(&[(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0), (16, 8.0), (32, 8.0)])), 8);
        assert_eq!(knee(&steps(&[(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0), (16, 8.0), (32, 7.0), (64, 1.0)])), 8);
        assert_eq!(knee(&steps(&[(1, 10.0), (2, 10.0), (4, 10.0)])), 1);
        assert_eq!(knee(&steps(&[(1, 10.0)])), 1);
        // Throughput rises for long, and the best of it is half noise.
        let flat = [(4, 1.17), (8, 1.25), (16, 1.31), (32, 1.35), (64, 1.31), (128, 1.41), (256, 1.40), (300, 1.43)];
        assert_eq!(knee(&steps(&flat)), 69);
    }

    #[test]
    fn one_odd_measurement_moves_the_knee_by_an_octave_at_most() {
        let mut flat =
            [(1, 0.5), (2, 0.9), (4, 1.2), (8, 1.33), (16, 1.36), (32, 1.38), (64, 1.4), (128, 1.4), (256, 1.4)];
        assert_eq!(knee(&steps(&flat)), 12);
        // Without the curve, the knee would be at 128 workers.
        flat[7].1 *= 1.06;
        assert_eq!(knee(&steps(&flat)), 24);
    }

    #[test]
    fn all_powers_of_two_and_the_most_are_measured() {
        let counts = |most| doubled(most).collect::<Vec<_>>();
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
        assert_eq!(counts(300), [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
    }

    #[test]
    fn the_median_measurement_counts() {
        let step = |bytes_per_second, mean_ms| Step { workers: 4, bytes_per_second, mean_ms };
        let median = Step::median(vec![step(30.0, 1.0), step(10.0, 3.0), step(20.0, 2.0)]);
        assert_eq!(median.map(|step| (step.workers, step.bytes_per_second, step.mean_ms)), Some((4, 20.0, 2.0)));
        assert!(Step::median(Vec::new()).is_none());
    }
}
