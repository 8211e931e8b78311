//! Transactions, and the protocol that commits them and makes their changes visible. `conflict` and `machine` do no I/O.

pub mod changes;
pub mod conflict;
pub mod create;
pub mod drive;
mod group_commit;
mod keys;
pub mod machine;
pub mod manifest;
pub mod transaction;
mod verbs;
pub mod written;
