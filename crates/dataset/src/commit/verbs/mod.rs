//! What a transaction can do besides appending, updating and deleting samples.

mod alter;
mod change;
mod journal;
mod keyed;
mod stage;
mod upsert;
