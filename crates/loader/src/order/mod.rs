//! Determines which sample each draw visits. Pure. `random`, `permutation` → `sequence` → `mixture` (draw → sample), `cut` (step → draws).

pub mod cut;
pub mod mixture;
pub mod permutation;
pub mod quota;
pub mod random;
pub mod sequence;
