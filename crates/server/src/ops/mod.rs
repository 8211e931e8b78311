//! One function for each operation of the table (`operations`), and `dispatch`, which calls them.

pub mod bucket;
pub mod copy;
pub mod delete;
pub mod dispatch;
pub mod get;
pub mod head;
pub mod list;
pub mod multipart;
pub mod put;
pub mod tier;
