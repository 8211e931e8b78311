//! Decodes JPEG, PNG and WebP images, either whole (`decode`) or by region (`region`, `entropy`). Also applies EXIF orientations
//! and colour modes, and resizes and cuts pixels (`resize`, `cut`). To add a format, write a file here, add the format's magic
//! bytes to `decode::format_of`, and extend each function that matches on `Format`.

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

pub use decode::{decode, decode_mask, outline, probe, probe_mask};
pub use exif::Orientation;
pub use mode::{Mode, decode_in};
pub use picture::{Format, Header, Limits, Outline, Picture};
pub use png::encode as encode_png;
