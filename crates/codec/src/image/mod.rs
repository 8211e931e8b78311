//! Images: JPEG, PNG and WebP, whole (`decode`) or a region (`region`, `entropy`); EXIF orientation and colour modes; operations on pixels
//! (`resize`, `cut`). A new format is a file here, its first bytes in `decode::format_of`, and an arm of each function that matches on `Format`.

pub mod cut;
mod decode;
mod entropy;
pub mod exif;
mod jpeg;
pub mod mode;
mod picture;
pub mod pixels;
mod png;
pub mod region;
pub mod resize;
mod webp;

pub use decode::{decode, decode_mask, encode_png, outline, probe, probe_mask};
pub use exif::Orientation;
pub use mode::{Mode, decode_in};
pub use picture::{Format, Header, Limits, Outline, Picture};
