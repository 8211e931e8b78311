//! Transactions, and the protocol that commits them and makes their changes visible. `conflict` and `machine` do no I/O.

pub mod changes;
pub mod conflict;
pub mod create;
mod drive;
mod fold;
mod keys;
pub mod machine;
mod objects;
mod overlays;
mod root;
pub mod stored;
pub mod transaction;
mod upsert;
