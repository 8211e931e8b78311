//! The schema of spec section 8: the columns of a dataset and how data files store each one.

use penstock_error::{Error, Result};
use penstock_tensor::{Dtype, MAX_DIMENSIONS};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::datafile::Codec;
use crate::files::{FilePlace, FileRef};
use crate::id::Id;
pub use crate::kinds::{ColumnKind, Content, ImageMode};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Schema {
    pub schema_id: u64,
    pub next_column: u64,
    pub columns: Vec<ColumnSpec>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ColumnSpec {
    /// The column id, or 0 until `create` numbers the columns.
    #[serde(default)]
    pub id: u64,
    pub name: String,
    #[serde(flatten)]
    pub kind: ColumnKind,
    #[serde(default)]
    pub codec: Codec,
    /// The value of samples for which no data file lists the column. They are null without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<FillValue>,
    /// Earlier dtypes, oldest first. Data files may have any of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub was: Vec<String>,
}

impl ColumnSpec {
    /// Return a new column that is not compressed.
    pub fn new(name: &str, kind: ColumnKind) -> ColumnSpec {
        ColumnSpec { id: 0, name: name.to_owned(), kind, codec: Codec::None, fill: None, was: Vec::new() }
    }
}

/// A data file with one sample, which is the value of many.
#[derive(Debug, Clone, PartialEq)]
pub struct FillValue(pub FileRef);

/// The JSON form of a `FillValue`. The column is that of its spec.
#[derive(Serialize, Deserialize)]
struct FillFile {
    id: String,
    file_bytes: u64,
    tail_bytes: u64,
    tail_crc: u32,
}

impl Serialize for FillValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let FileRef { id, file_bytes, tail_bytes, tail_crc, .. } = self.0;
        FillFile { id: id.to_string(), file_bytes, tail_bytes, tail_crc }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for FillValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<FillValue, D::Error> {
        let FillFile { id, file_bytes, tail_bytes, tail_crc } = FillFile::deserialize(deserializer)?;
        let id =
            Id::parse(&id).ok_or_else(|| D::Error::custom("the fill value of a column has an invalid data file id"))?;
        Ok(FillValue(FileRef { id, file_bytes, tail_bytes, tail_crc, columns: Vec::new(), place: FilePlace::Object }))
    }
}

/// Ids from here on belong to columns that were added after `create`.
const FIRST_ADDED: u64 = 1 << 32;

/// Maximum number of category columns. A commit may add words to each of them, and each such delta occupies about 40 bytes of the record.
pub const MAX_CATEGORIES: usize = 32;

impl Schema {
    /// Create the schema of a new dataset: number and check its columns.
    pub fn create(mut columns: Vec<ColumnSpec>) -> Result<Schema> {
        for (index, column) in columns.iter_mut().enumerate() {
            column.id = index as u64 + 1;
        }
        let schema = Schema { schema_id: 0, next_column: columns.len() as u64 + 1, columns };
        schema.check()?;
        Ok(schema)
    }

    pub fn parse(text: &str) -> Result<Schema> {
        let mut schema: Schema = serde_json::from_str(text).map_err(|error| {
            Error::new("unsupported-format", format!("cannot read the schema: {error}"))
                .hint("a newer Penstock may have written it; upgrade Penstock")
        })?;
        for column in &mut schema.columns {
            let id = column.id;
            column.fill.iter_mut().for_each(|FillValue(file)| file.columns = vec![id]);
        }
        schema.check()?;
        Ok(schema)
    }

    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::new("internal", format!("cannot write the schema: {error}")))
    }

    pub fn column(&self, name: &str) -> Option<(usize, &ColumnSpec)> {
        self.columns.iter().enumerate().find(|(_, column)| column.name == name)
    }

    pub fn column_by_id(&self, id: u64) -> Option<&ColumnSpec> {
        self.columns.iter().find(|column| column.id == id)
    }

    /// Return the data files of the fill values.
    pub fn fill_files(&self) -> impl Iterator<Item = &FileRef> {
        self.columns.iter().filter_map(|column| column.fill.as_ref().map(|FillValue(file)| file))
    }

    pub fn has_column(&self, id: u64) -> bool {
        self.column_by_id(id).is_some()
    }

    /// Return the columns that another schema lacks.
    pub fn columns_missing_in<'a>(&'a self, other: &'a Schema) -> impl Iterator<Item = &'a ColumnSpec> {
        let known = other.columns_by_id();
        self.columns.iter().filter(move |column| !known.contains_key(&column.id))
    }

    pub(crate) fn check(&self) -> Result<()> {
        let invalid = |text: String| Err(Error::new("invalid-schema", text));
        if self.columns.len() > 10_000 {
            return invalid(format!("cannot create {} columns: at most 10,000 are supported", self.columns.len()));
        }
        let categories = self.columns.iter().filter(|column| column.kind.is_category()).count();
        if categories > MAX_CATEGORIES {
            return invalid(format!(
                "cannot create {categories} category columns: at most {MAX_CATEGORIES} are supported, because their new words must fit in one record"
            ));
        }
        let mut seen = std::collections::HashSet::new();
        let mut ids = std::collections::HashSet::new();
        for column in &self.columns {
            let name = &column.name;
            if !seen.insert(name) {
                return invalid(format!("cannot create column `{name}`: the name is given twice"));
            }
            if column.id == 0 || (self.next_column..FIRST_ADDED).contains(&column.id) || !ids.insert(column.id) {
                return invalid(format!("column `{name}` has id {}, which is out of range or used twice", column.id));
            }
            if name.is_empty() || name.len() > 255 || name.starts_with('_') || name.chars().any(char::is_control) {
                return Err(Error::new(
                    "invalid-schema",
                    format!("cannot create column `{name}`: a name must have 1 to 255 bytes, no control characters and no leading `_`"),
                )
                .hint("names that begin with `_` are reserved for virtual columns such as _row_id"));
            }
            self.check_kind(column)?;
        }
        Ok(())
    }

    fn check_kind(&self, column: &ColumnSpec) -> Result<()> {
        let name = &column.name;
        let invalid =
            |text: String| Err(Error::new("invalid-schema", format!("cannot create column `{name}`: {text}")));
        let (dtype, shape) =
            column.kind.stored().map_err(|error| error.context(format!("cannot create column `{name}`")))?;
        if shape.0.len() > MAX_DIMENSIONS {
            return invalid(format!("it has {} dimensions, but at most {MAX_DIMENSIONS} are supported", shape.0.len()));
        }
        if shape.0.contains(&Some(0)) {
            return invalid("it has a fixed dimension of 0, so its samples would be empty".into());
        }
        shape.fixed_bytes(dtype).map_err(|error| error.context(format!("cannot create column `{name}`")))?;
        if let Some(was) = column.was.iter().find(|was| !Dtype::from_name(was).is_some_and(|was| was.widens_to(dtype)))
        {
            return invalid(format!("its earlier dtype `{was}` cannot become {}", dtype.name()));
        }
        if let Some(fault) = column.kind.fault() {
            return invalid(fault);
        }
        let Some(of) = column.kind.of() else { return Ok(()) };
        column.kind.check_owner(of, self.column(of).map(|(_, owner)| &owner.kind)).or_else(invalid)
    }
}
