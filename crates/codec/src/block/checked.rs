//! Validates the output of every block decoder.

use penstock_error::{Error, Result};

pub fn exact(count: usize, out: Vec<u8>, codec: &str) -> Result<Vec<u8>> {
    if count == out.len() { Ok(out) } else { Err(undecodable(codec, format!("{count} bytes, expected {}", out.len()))) }
}

pub fn undecodable(codec: &str, error: impl std::fmt::Display) -> Error {
    Error::new("object-malformed", format!("cannot decode {codec} block: {error}")).hint("run `penstock verify`")
}
