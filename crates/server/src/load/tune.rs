//! The search for the knee: the fewest workers that reach nearly the best throughput. More workers only wait longer.

use std::ops::ControlFlow;
use std::sync::Arc;

use penstock_error::Result;

use super::line::Line;
use super::measure::measure;
use super::worker::Workers;

/// Share of the best throughput that the knee has at least.
const ENOUGH: f64 = 0.97;
/// Doubling ends after this many steps that brought less than a share.
const FLAT_STEPS: usize = 2;
const LEAST_GAIN: f64 = 1.05;

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
}

/// Measure 1, 2, 4, … workers until more bring nothing, and then between the last two that matter.
pub async fn search(workers: &Arc<Workers>, most: usize, seconds: f64, see: &mut dyn FnMut(&[Line]) -> ControlFlow<()>) -> Result<Tuned> {
    let mut steps: Vec<Step> = Vec::new();
    let (mut count, mut flat) = (1, 0);
    while flat < FLAT_STEPS {
        let step = measured(workers, count, seconds, see).await?;
        let gains = steps.iter().all(|earlier| step.bytes_per_second > earlier.bytes_per_second * LEAST_GAIN);
        flat = if gains { 0 } else { flat + 1 };
        steps.push(step);
        if count == most {
            break;
        }
        count = (count * 2).min(most);
    }
    loop {
        steps.sort_unstable_by_key(|step| step.workers);
        let (below, knee) = knee(&steps);
        let between = (below + steps[knee].workers) / 2;
        if between == below || steps.iter().any(|step| step.workers == between) {
            let Step { workers, bytes_per_second, mean_ms } = steps[knee];
            return Ok(Tuned { workers, bytes_per_second, mean_ms, steps });
        }
        steps.push(measured(workers, between, seconds, see).await?);
    }
}

async fn measured(workers: &Arc<Workers>, count: usize, seconds: f64, see: &mut dyn FnMut(&[Line]) -> ControlFlow<()>) -> Result<Step> {
    let mut quiet = |lines: &[Line]| see(if lines.is_empty() { lines } else { &[] });
    let lines = measure(workers, count, seconds, seconds, &mut quiet).await?;
    // The caller sees one line for each step.
    if see(&lines).is_break() {
        return Err(penstock_error::Error::new("interrupted", "the load was stopped"));
    }
    Ok(Step::of(count, &lines))
}

/// Return the number of workers of the step below the knee, or 0, and the index of the knee. Steps are sorted by workers.
fn knee(steps: &[Step]) -> (usize, usize) {
    let best = steps.iter().map(|step| step.bytes_per_second).fold(0.0, f64::max);
    let at = steps.iter().position(|step| step.bytes_per_second >= best * ENOUGH).unwrap_or_default();
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
}
