//! What a transaction can do besides appending, updating and deleting samples.

mod alter;
mod stage;
mod upsert;
