//! The dataset layer, which combines format, storage and codec. It implements snapshots, takes, scans, slices, transactions and
//! `verify`.
//!
//! The folders, from the bottom up, are `store` (open objects), `log` (commits and names), `snapshot` (sample locations), `selection` (samples
//! of a view), `read`, `write`, `commit`, `upkeep` and `branches`. Each folder depends only on those listed before it. Nothing in this crate depends on torch,
//! Python or loader threads.

mod branches;
mod commit;
mod config;
mod log;
mod parallel;
mod prefetch;
mod read;
mod selection;
mod snapshot;
mod store;
mod upkeep;
mod write;

pub use branches::branch::{branch_name, branches, create_branch, delete_branch};
pub use branches::merge::{Merged, cherry_pick, merge};
pub use branches::policy::{Policies, Policy};
pub use branches::reset::reset;
pub use commit::changes::{ChangeSet, KnownRowIds, Member, Proposal, RowsRead, Theirs, check_texts};
pub use commit::written::Texts;

pub use commit::create::create;
pub use commit::machine::{Event, Machine, Request};
pub use commit::transaction::{Isolation, Receipt, Transaction};
pub use config::Config;
pub use log::history::History;
pub use log::records::{LogEntry, resolve};
pub use log::refs::{MAIN, create_tag, delete_tag, names, pin, tagged, unpin};
pub use parallel::map as parallel_map;
pub use penstock_storage::process::generation;
pub use read::blocks::HeldBlocks;
pub use read::blocks::lent::{BlockAt, fetch_blocks, ranges_of};
pub use read::choose::chosen::{Classes, by_class, sample, split};
pub use read::choose::coded::{Coder, Numbered, Tally, by_code, tally};
pub use read::fetch::{Purpose, hold};
pub use read::foresee::Foresight;
pub use read::part::FoundValue;
pub use read::ragged::RaggedValues;
pub use read::reader::{Nulls, OnCorrupt, Reader};
pub use read::scan::{Scan, ScanRange};
pub use read::slices::SampleExtent;
pub use selection::{Bits, Selection, Split, Stride, out_of_range, spread};
pub use snapshot::Snapshot;
pub use snapshot::live::ManifestPart;
pub use snapshot::own::Own;
pub use snapshot::statistics::FragmentStatistics;
pub use store::blocks::{budget_bytes as block_cache_bytes, fit_budget};
pub use store::context::{CACHE_POLICY, Context, Incomplete, file_cache_bytes};
pub use upkeep::attach::{New, attach, detach};
pub use upkeep::compact::{Compacted, compact};
pub use upkeep::diff::{Diff, Difference, Happened};
pub use upkeep::doctor::{Finding, examine};
pub use upkeep::fence::fence;
pub use upkeep::unreferenced::{Unreferenced, unreferenced};
pub use upkeep::verify::{Problem, Report, verify};
pub use upkeep::verify_file::check_text;
pub use upkeep::warm::warm;
pub use write::check::Input;
pub use write::media::{Media, Validate, check as check_media, mode_of};
