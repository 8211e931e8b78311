//! One file per codec: block codecs (`block`), media codecs (`jpeg`, `png`), and what they share (`image`, `exif`).
//!
//! Knows nothing of storage. `dataset` calls `block`; `python` calls `image`.

pub mod block;
pub mod exif;
pub mod image;
mod jpeg;
mod png;

pub use image::{Format, Header, Limits, Picture, decode, decode_mask, encode_png, probe};
