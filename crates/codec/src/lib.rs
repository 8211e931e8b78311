//! Codecs, one per file: block codecs (`block`), media codecs (`jpeg`, `png`; `region` and `entropy` decode parts of images), shared code
//! (`image`, `exif`, `mode`, `pixels`), and operations on pixels (`resize`, `cut`).
//!
//! This crate knows nothing about storage. `dataset` calls `block` and `image`, `python` calls `image`, and `loader` calls all but `block`.

pub mod block;
pub mod cut;
mod entropy;
pub mod exif;
pub mod image;
mod jpeg;
pub mod mode;
pub mod pixels;
mod png;
pub mod region;
pub mod resize;

pub use image::{Format, Header, Limits, Outline, Picture, decode, decode_mask, encode_png, outline, probe, probe_mask};
pub use mode::{Mode, decode_in};
