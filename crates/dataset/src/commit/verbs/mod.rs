//! What a transaction can do besides appending, updating and deleting samples.

mod alter;
mod change;
pub mod journal;
mod stage;
mod upsert;
