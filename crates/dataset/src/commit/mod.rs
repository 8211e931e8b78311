//! Transactions, and the protocol that commits them and makes their changes visible. `conflict` and `machine` do no I/O.

pub mod changes;
pub mod conflict;
pub mod create;
pub mod drive;
mod fold;
mod keys;
pub mod machine;
pub mod objects;
pub mod overlays;
mod queue;
pub mod root;
pub mod stored;
pub mod transaction;
mod verbs;
