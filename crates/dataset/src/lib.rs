//! The dataset combines format, storage and codec into snapshots, take, scan, transactions and verify.
//!
//! Read path: `View::take` → `Plan::new` → `Snapshot::read_fixed` / `read_ragged` → `DataFile::block` → mapped bytes.
//! Commit path: `Transaction::append` → `FragmentWriter` → `Transaction::commit` → `commit::Machine` → `Storage::create`.
//! This crate does not know about torch, Python or loader threads.

mod commit;
mod config;
mod context;
mod copies;
mod datafile;
mod doctor;
mod encode;
mod fetch;
mod log;
mod media;
mod names;
mod parallel;
mod plan;
mod ragged;
mod read;
mod snapshot;
mod tiles;
mod transaction;
mod values;
mod verify;
mod words;
mod writer;

pub use commit::{Event, Machine, Request, check_texts};
pub use config::Config;
pub use context::Context;
pub use doctor::{Finding, examine};
pub use fetch::{Fetched, Held, Purpose};
pub use log::{LogEntry, walk};
pub use media::{Validate, check as check_media};
pub use names::{pin, pins, unpin};
pub use parallel::map as parallel_map;
pub use penstock_storage::process::generation;
pub use plan::{Plan, out_of_range};
pub use ragged::RaggedValues;
pub use read::{Nulls, OnCorrupt};
pub use snapshot::Snapshot;
pub use transaction::{Input, Receipt, Transaction, create};
pub use verify::check_text;
pub use verify::{Problem, Report, verify};
