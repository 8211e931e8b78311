//! Codecs, one per file: block codecs (`block`), image codecs with pixel operations (`image`), and wider dtypes (`widen`).
//!
//! This crate does not depend on storage. `dataset` calls `block` and `image`; `python` and `loader` call only `image`.

pub mod block;
pub mod image;
mod widen;

pub use image::{
    Format, Header, Limits, Mode, Orientation, Outline, Picture, cut, decode, decode_in, decode_mask, encode_png, exif,
    mode, outline, pixels, probe, probe_mask, region, resize,
};
pub use widen::widen;
