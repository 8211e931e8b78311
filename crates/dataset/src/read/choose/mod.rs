//! Choose samples of a view: at random, by the values of a column, and by groups.

pub mod chosen;
pub mod coded;
