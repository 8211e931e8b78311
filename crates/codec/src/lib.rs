//! One file per codec: block codecs (`block`), media codecs (`jpeg`, `png`, parts of them `region` with `entropy`), what they share
//! (`image`, `exif`, `mode`, `pixels`), and operations on pixels (`resize`, `cut`).
//!
//! Knows nothing of storage. `dataset` calls `block`; `python` calls `image`, `loader` the rest.

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
