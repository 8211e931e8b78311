//! Making samples visible: transactions, and the protocol that commits them. `conflict` and `machine` are pure.

pub mod changes;
pub mod conflict;
pub mod create;
mod drive;
pub mod machine;
mod root;
pub mod transaction;
