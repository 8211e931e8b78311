//! The types of columns (spec section 8), and all that depends on a type in the format. What a new type shares with others needs no other file.

use penstock_error::{Error, Result};
use penstock_tensor::{Dtype, Shape};
use serde::{Deserialize, Serialize};

use crate::classes::Classes;
use crate::datafile::Class;

/// The pixel format in which reads return an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum ImageMode {
    #[default]
    #[serde(rename = "RGB")]
    Rgb,
    #[serde(rename = "L")]
    Grey,
    #[serde(rename = "RGBA")]
    Rgba,
    #[serde(rename = "I;16")]
    Deep,
    #[serde(rename = "stored")]
    Stored,
}

impl ImageMode {
    fn is_default(&self) -> bool {
        *self == ImageMode::default()
    }
}

/// The type of a column. Readers reject unknown types.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ColumnKind {
    Scalar {
        dtype: String,
    },
    Text,
    Bytes,
    Json,
    Label(Classes),
    /// A list of labels for each sample. `of` names the boxes or keypoints that have one label each.
    Labels {
        #[serde(flatten)]
        classes: Classes,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<String>,
    },
    Category,
    Tensor {
        dtype: String,
        shape: Vec<Option<u64>>,
        /// Side lengths of the tiles. If None, the writer tiles large samples and chooses the side lengths.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tile: Option<Vec<u64>>,
    },
    Image {
        #[serde(default = "yes")]
        exif_orientation: bool,
        /// The pixel format in which loaders return images.
        #[serde(default, skip_serializing_if = "ImageMode::is_default")]
        mode: ImageMode,
    },
    Boxes {
        format: String,
        of: Option<String>,
    },
    Mask {
        of: Option<String>,
    },
    Keypoints {
        points: Option<u64>,
        dimensions: u64,
        of: Option<String>,
    },
}

/// What the stored values of a column are, besides their dtype and shape. Who writes, reads or verifies values distinguishes columns by this.
#[derive(Debug, Clone, Copy)]
pub enum Content<'a> {
    /// Numbers or bytes of any kind.
    Plain,
    /// UTF-8.
    Text,
    /// The code of a class.
    Label(&'a Classes),
    /// Codes of classes.
    Labels(&'a Classes),
    /// A code in the dictionary of the data file.
    Word,
    /// An encoded image.
    Image(ImageMode),
    /// An encoded mask.
    Mask,
}

impl ColumnKind {
    /// Return the type's name, as shown in messages and tables.
    pub fn name(&self) -> &'static str {
        match self {
            ColumnKind::Scalar { .. } => "scalar",
            ColumnKind::Text => "text",
            ColumnKind::Bytes => "bytes",
            ColumnKind::Json => "json",
            ColumnKind::Label { .. } => "label",
            ColumnKind::Labels { .. } => "labels",
            ColumnKind::Category => "category",
            ColumnKind::Tensor { .. } => "tensor",
            ColumnKind::Image { .. } => "image",
            ColumnKind::Boxes { .. } => "boxes",
            ColumnKind::Mask { .. } => "mask",
            ColumnKind::Keypoints { .. } => "keypoints",
        }
    }

    /// Return whether values are arrays whose shapes may differ between samples.
    pub fn is_array(&self) -> bool {
        matches!(
            self,
            ColumnKind::Tensor { .. }
                | ColumnKind::Boxes { .. }
                | ColumnKind::Keypoints { .. }
                | ColumnKind::Labels { .. }
        )
    }

    /// Return the element type and the shape that data files store.
    pub fn stored(&self) -> Result<(Dtype, Shape)> {
        Ok(match self {
            ColumnKind::Scalar { dtype } => (dtype_of(dtype)?, Shape::scalar()),
            ColumnKind::Text
            | ColumnKind::Bytes
            | ColumnKind::Json
            | ColumnKind::Image { .. }
            | ColumnKind::Mask { .. } => (Dtype::Bytes, Shape::free()),
            ColumnKind::Label(classes) => (classes.dtype(), Shape::scalar()),
            ColumnKind::Labels { .. } => (Dtype::Int64, Shape::free()),
            ColumnKind::Category => (Dtype::Uint32, Shape::scalar()),
            ColumnKind::Tensor { dtype, shape, .. } => (dtype_of(dtype)?, Shape(shape.clone())),
            ColumnKind::Boxes { .. } => (Dtype::Float32, Shape(vec![None, Some(4)])),
            ColumnKind::Keypoints { points, dimensions, .. } => {
                (Dtype::Float32, Shape(vec![None, *points, Some(*dimensions)]))
            }
        })
    }

    /// Return what the stored values are.
    pub fn content(&self) -> Content<'_> {
        match self {
            ColumnKind::Text | ColumnKind::Json => Content::Text,
            ColumnKind::Label(classes) => Content::Label(classes),
            ColumnKind::Labels { classes, .. } => Content::Labels(classes),
            ColumnKind::Category => Content::Word,
            ColumnKind::Image { mode, .. } => Content::Image(*mode),
            ColumnKind::Mask { .. } => Content::Mask,
            _ => Content::Plain,
        }
    }

    /// Return whether values are codes for one word each.
    pub fn has_codes(&self) -> bool {
        matches!(self.content(), Content::Label(_) | Content::Word)
    }

    /// Return whether the words of the codes are those of the dataset, to which commits add.
    pub fn is_category(&self) -> bool {
        matches!(self.content(), Content::Word)
    }

    /// Return the classes of lists of labels.
    pub fn listed_classes(&self) -> Option<&Classes> {
        if let Content::Labels(classes) = self.content() { Some(classes) } else { None }
    }

    /// Return whether values are stored as UTF-8.
    pub fn is_utf8(&self) -> bool {
        matches!(self.content(), Content::Text)
    }

    pub fn is_json(&self) -> bool {
        matches!(self, ColumnKind::Json)
    }

    pub fn is_mask(&self) -> bool {
        matches!(self.content(), Content::Mask)
    }

    /// Return whether parts of a large value can be read on their own.
    pub fn is_tensor(&self) -> bool {
        matches!(self, ColumnKind::Tensor { .. })
    }

    /// Return the side lengths of tiles that the schema gives.
    pub fn tile(&self) -> Option<&[u64]> {
        match self {
            ColumnKind::Tensor { tile, .. } => tile.as_deref(),
            _ => None,
        }
    }

    /// Return the format of boxes.
    pub fn box_format(&self) -> Option<&str> {
        match self {
            ColumnKind::Boxes { format, .. } => Some(format),
            _ => None,
        }
    }

    /// Return whether equal values have equal bytes, so that they can be keys.
    pub fn is_exact(&self) -> bool {
        match self {
            ColumnKind::Text | ColumnKind::Bytes => true,
            ColumnKind::Scalar { dtype } => {
                let inexact = [
                    Dtype::Float16,
                    Dtype::Bfloat16,
                    Dtype::Float32,
                    Dtype::Float64,
                    Dtype::Complex64,
                    Dtype::Complex128,
                ];
                Dtype::from_name(dtype).is_some_and(|dtype| !inexact.contains(&dtype))
            }
            _ => self.has_codes(),
        }
    }

    /// Return whether tails have the bounds of values. Those of a category are in its dictionary.
    pub fn has_bounds(&self) -> bool {
        match self {
            ColumnKind::Scalar { dtype } => {
                Dtype::from_name(dtype).is_some_and(|dtype| Class::of(dtype, &Shape::scalar()).is_some())
            }
            ColumnKind::Label(_) | ColumnKind::Text => true,
            _ => false,
        }
    }

    /// Return the dtype that the schema gives to numbers.
    pub fn dtype(&self) -> Option<&str> {
        match self {
            ColumnKind::Scalar { dtype } | ColumnKind::Tensor { dtype, .. } => Some(dtype),
            _ => None,
        }
    }

    /// Return the name of the column that this column belongs to: an image, or for labels, boxes or keypoints.
    pub fn of(&self) -> Option<&str> {
        match self {
            ColumnKind::Boxes { of, .. }
            | ColumnKind::Mask { of }
            | ColumnKind::Keypoints { of, .. }
            | ColumnKind::Labels { of, .. } => of.as_deref(),
            _ => None,
        }
    }

    /// Follow the column that this column belongs to to a new name.
    pub(crate) fn follow(&mut self, old: &str, new: &str) {
        if let Some(of) = self.of_mut().filter(|of| *of == old) {
            *of = new.to_owned();
        }
    }

    fn of_mut(&mut self) -> Option<&mut String> {
        match self {
            ColumnKind::Boxes { of, .. }
            | ColumnKind::Mask { of }
            | ColumnKind::Keypoints { of, .. }
            | ColumnKind::Labels { of, .. } => of.as_mut(),
            _ => None,
        }
    }

    pub(crate) fn without_classes(mut self) -> ColumnKind {
        if let Some(classes) = self.classes_mut() {
            *classes = Default::default();
        }
        self
    }

    pub(crate) fn without_of(&self) -> ColumnKind {
        let mut kind = self.clone();
        if let Some(of) = kind.of_mut() {
            of.clear();
        }
        kind
    }

    /// Return the classes of a label column.
    pub fn classes(&self) -> Option<&Classes> {
        if let Content::Label(classes) | Content::Labels(classes) = self.content() { Some(classes) } else { None }
    }

    pub(crate) fn classes_mut(&mut self) -> Option<&mut Classes> {
        match self {
            ColumnKind::Label(classes) | ColumnKind::Labels { classes, .. } => Some(classes),
            _ => None,
        }
    }

    /// Return what is wrong with the parameters of the type.
    pub(crate) fn fault(&self) -> Option<String> {
        match self {
            ColumnKind::Tensor { shape, tile: Some(tile), .. }
                if shape.is_empty() || tile.len() != shape.len() || tile.contains(&0) =>
            {
                let shape = Shape(shape.clone());
                Some(format!(
                    "tile {tile:?} does not fit shape {shape}: expected one side of at least 1 for each dimension"
                ))
            }
            ColumnKind::Boxes { format, .. } if !["xyxy", "xywh", "cxcywh"].contains(&format.as_str()) => {
                Some(format!("the box format is `{format}`, expected xyxy, xywh or cxcywh"))
            }
            ColumnKind::Keypoints { dimensions, .. } if !(2..=4).contains(dimensions) => {
                Some(format!("its keypoints have {dimensions} numbers each, expected 2, 3 or 4"))
            }
            _ => self.classes().and_then(Classes::fault),
        }
    }

    /// Refuse to belong to column `of`. `owner` is its type, if it exists.
    pub(crate) fn check_owner(&self, of: &str, owner: Option<&ColumnKind>) -> std::result::Result<(), String> {
        match (self, owner) {
            (ColumnKind::Labels { .. }, Some(ColumnKind::Boxes { .. } | ColumnKind::Keypoints { .. })) => Ok(()),
            (ColumnKind::Labels { .. }, _) => {
                Err(format!("its labels belong to `{of}`, which is not a column of boxes or keypoints of this dataset"))
            }
            (_, Some(ColumnKind::Image { .. })) => Ok(()),
            _ => Err(format!("it belongs to `{of}`, which is not an image column of this dataset")),
        }
    }

    /// Return whether values of both kinds mean the same when they are read, however they are stored.
    pub fn reads_as(&self, other: &ColumnKind) -> bool {
        match (self, other) {
            (ColumnKind::Label(one), ColumnKind::Label(two)) => one.names == two.names,
            (ColumnKind::Labels { classes: one, of }, ColumnKind::Labels { classes: two, of: other }) => {
                one.names == two.names && of == other
            }
            _ => self == other,
        }
    }

    /// Return how images are shown: whether by their EXIF orientation, and in which pixel format.
    pub fn image(&self) -> Option<(bool, ImageMode)> {
        if let ColumnKind::Image { exif_orientation, mode } = self { Some((*exif_orientation, *mode)) } else { None }
    }

    /// Return whether values are encoded pixels.
    pub fn is_media(&self) -> bool {
        self.image().is_some() || self.is_mask()
    }

    /// Return how many numbers each keypoint has.
    pub fn point_numbers(&self) -> Option<u64> {
        if let ColumnKind::Keypoints { dimensions, .. } = self { Some(*dimensions) } else { None }
    }
}

fn yes() -> bool {
    true
}

fn dtype_of(name: &str) -> Result<Dtype> {
    Dtype::from_name(name).ok_or_else(|| {
        Error::new("invalid-schema", format!("unknown dtype `{name}`"))
            .hint("use one of bool, int8…int64, uint8…uint64, float16, bfloat16, float32, float64, complex64, complex128, timestamp, duration, time")
    })
}
