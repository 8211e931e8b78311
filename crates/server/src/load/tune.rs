//! The search for the knee: the fewest workers that reach nearly the best throughput. More workers only wait longer.

use std::sync::Arc;

use penstock_error::Result;

use super::line::Line;
use super::measure::measure;
use super::see::{See, stopped};
use super::worker::Workers;

/// Share of the best throughput that the knee has at least. The best of many measurements looks better than it is, by a few hundredths.
const ENOUGH: f64 = 0.93;
/// What reaches this share of the best throughput is measured again.
const NEAR: f64 = 0.85;
/// How often what matters is measured, because one measurement can be wrong by a sixth. The median counts.
const ROUNDS: usize = 3;
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

    /// Return the measurement of the same workers that has the median throughput.
    fn median(mut steps: Vec<Step>) -> Option<Step> {
        steps.sort_by(|one, other| one.bytes_per_second.total_cmp(&other.bytes_per_second));
        steps.get(steps.len() / 2).copied()
    }
}

/// Measure 1, 2, 4, … and `most` workers, all that come near the best of them again, and then between the last two that matter. Throughput
/// may rise slowly for long, so no number of workers is left out because the one before brought little.
pub async fn search(workers: &Arc<Workers>, most: usize, seconds: f64, see: &mut See<'_>) -> Result<Tuned> {
    let counts: Vec<usize> = doubled(most).collect();
    let mut steps = rounds(workers, &counts, 1, seconds, see).await?;
    let near = best(&steps) * NEAR;
    let counts: Vec<usize> = steps.iter().filter(|step| step.bytes_per_second >= near).map(|step| step.workers).collect();
    steps.retain(|step| step.bytes_per_second < near);
    steps.extend(rounds(workers, &counts, ROUNDS, seconds, see).await?);
    loop {
        steps.sort_by_key(|step| step.workers);
        let (below, at) = knee(&steps);
        let Step { workers: count, bytes_per_second, mean_ms } = steps[at];
        let between = (below + count) / 2;
        if between == below || below as f64 > count as f64 * CLOSE {
            return Ok(Tuned { workers: count, bytes_per_second, mean_ms, steps });
        }
        steps.extend(rounds(workers, &[between], ROUNDS, seconds, see).await?);
    }
}

/// Measure each number of workers several times, in turns, so that a machine that becomes slower or faster in the meantime favours none of them.
async fn rounds(workers: &Arc<Workers>, counts: &[usize], rounds: usize, seconds: f64, see: &mut See<'_>) -> Result<Vec<Step>> {
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
    fn the_median_measurement_counts() {
        let step = |bytes_per_second, mean_ms| Step { workers: 4, bytes_per_second, mean_ms };
        let median = Step::median(vec![step(30.0, 1.0), step(10.0, 3.0), step(20.0, 2.0)]);
        assert_eq!(median.map(|step| (step.workers, step.bytes_per_second, step.mean_ms)), Some((4, 20.0, 2.0)));
        assert!(Step::median(Vec::new()).is_none());
    }
}
