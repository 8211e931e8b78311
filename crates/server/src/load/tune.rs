//! The search for the knee: the fewest workers that reach nearly the best throughput. More workers only wait longer.

use std::sync::Arc;

use penstock_error::Result;

use super::line::Line;
use super::measure::measure;
use super::see::{See, stopped};
use super::worker::Workers;

/// Share of the best throughput that the knee has at least. The best of many measurements looks better than it is, by a few hundredths.
const ENOUGH: f64 = 0.94;
/// What reaches this share of the best throughput is measured again, because rates of one step can differ by a tenth.
const NEAR: f64 = 0.85;
/// The search ends when the step below the knee has more than this share of its workers.
const CLOSE: f64 = 0.8;

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
        Step { workers, bytes_per_second: lines.iter().map(Line::bytes_per_second).sum(), mean_ms: waited / (requests as f64).max(1.0) }
    }

    /// Return the mean of two measurements of the same workers.
    fn mean(self, other: Step) -> Step {
        Step {
            workers: self.workers,
            bytes_per_second: f64::midpoint(self.bytes_per_second, other.bytes_per_second),
            mean_ms: f64::midpoint(self.mean_ms, other.mean_ms),
        }
    }
}

/// Measure 1, 2, 4, … and `most` workers, all that come near the best of them again, and then between the last two that matter. Throughput
/// may rise slowly for long, so no number of workers is left out because the one before brought little.
pub async fn search(workers: &Arc<Workers>, most: usize, seconds: f64, see: &mut See<'_>) -> Result<Tuned> {
    let mut steps: Vec<Step> = Vec::new();
    for count in doubled(most) {
        steps.push(measured(workers, count, seconds, see).await?);
    }
    let near = best(&steps) * NEAR;
    // In reverse order, so that a machine that becomes slower or faster in the meantime favours none of them.
    for step in steps.iter_mut().rev().filter(|step| step.bytes_per_second >= near) {
        *step = step.mean(measured(workers, step.workers, seconds, see).await?);
    }
    loop {
        let (below, at) = knee(&steps);
        let Step { workers: count, bytes_per_second, mean_ms } = steps[at];
        let between = (below + count) / 2;
        if between == below || below as f64 > count as f64 * CLOSE {
            return Ok(Tuned { workers: count, bytes_per_second, mean_ms, steps });
        }
        let step = measured(workers, between, seconds, see).await?.mean(measured(workers, between, seconds, see).await?);
        steps.insert(at, step);
    }
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

/// Return the number of workers of the step below the knee, or 0, and the index of the knee. Steps are sorted by workers.
fn knee(steps: &[Step]) -> (usize, usize) {
    let enough = best(steps) * ENOUGH;
    let at = steps.iter().position(|step| step.bytes_per_second >= enough).unwrap_or_default();
    (at.checked_sub(1).map_or(0, |below| steps[below].workers), at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_knee_has_the_fewest_workers_with_nearly_the_best_throughput() {
        let step = |workers, bytes_per_second| Step { workers, bytes_per_second, mean_ms: 1.0 };
        let steps = [step(1, 10.0), step(2, 19.0), step(4, 36.0), step(8, 39.0), step(16, 40.0), step(32, 38.0)];
        assert_eq!(knee(&steps), (4, 3));
        assert_eq!(knee(&steps[..1]), (0, 0));
    }

    #[test]
    fn all_powers_of_two_and_the_most_are_measured() {
        let counts = |most| doubled(most).collect::<Vec<_>>();
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
        assert_eq!(counts(300), [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
    }

    #[test]
    fn two_measurements_are_averaged() {
        let step = |bytes_per_second, mean_ms| Step { workers: 4, bytes_per_second, mean_ms };
        let mean = step(10.0, 1.0).mean(step(20.0, 3.0));
        assert_eq!((mean.workers, mean.bytes_per_second, mean.mean_ms), (4, 15.0, 2.0));
    }
}
