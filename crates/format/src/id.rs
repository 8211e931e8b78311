//! The id of an object, dataset or transaction.

use std::fmt;

/// 128 random bits that identify an object, a dataset or a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Id(pub [u8; 16]);

impl fmt::Display for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

impl Id {
    pub fn parse(text: &str) -> Option<Id> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let value = u128::from_str_radix(text, 16).ok()?;
        Some(Id(value.to_be_bytes()))
    }
}
