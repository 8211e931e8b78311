//! Pure functions that determine which sample each draw visits. `mixture` maps draws to samples, using `quota`, `sequence`,
//! `permutation` and `random`. `cut` maps steps to draws.

pub mod cut;
pub mod mixture;
pub mod permutation;
pub mod quota;
pub mod random;
pub mod sequence;
