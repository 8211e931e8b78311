//! Write the state of a snapshot: its root, its pages, and the values that a commit joins or moves.

mod fold;
pub mod layout;
pub mod objects;
pub mod overlays;
pub mod rewrite;
pub mod root;
pub mod stored;
