//! Attachments: objects that a program derived from samples, such as an index, and the samples that they cover (spec section 7).

use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Writer, malformed};
use crate::ids::ObjectRef;
use crate::overlay::Overlay;
use crate::rows::RowSet;

/// Maximum size of an attachment's kind in bytes.
pub const KIND_BYTES: usize = 64;
/// Maximum size of an attachment's parameters in bytes.
pub const PARAMETERS_BYTES: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    pub kind: String,
    pub object: ObjectRef,
    /// The columns whose values it was made of, ascending. If empty, only the samples matter.
    pub columns: Vec<u64>,
    /// The samples that it was made of.
    pub rows: RowSet,
    /// Samples that it no longer covers, because they were given other values.
    pub changed: Vec<RowSet>,
    /// A JSON object.
    pub parameters: String,
}

impl Attachment {
    pub const LEAST_BYTES: usize = 30;

    /// Return whether new values of an overlay are values that the attachment was made of.
    pub fn depends_on(&self, overlay: &Overlay) -> bool {
        overlay.has_values() && overlay.columns.iter().any(|column| self.columns.contains(column))
    }

    pub fn parse(cursor: &mut Cursor) -> Result<Attachment> {
        let attachment = Attachment {
            kind: cursor.string()?,
            object: ObjectRef::parse(cursor)?,
            columns: cursor.varints()?,
            rows: RowSet::parse(cursor)?,
            changed: cursor.list(2, RowSet::parse)?,
            parameters: cursor.string()?,
        };
        attachment.check().map_err(|error| malformed(error.message()))?;
        Ok(attachment)
    }

    /// Check what every reader checks.
    pub fn check(&self) -> Result<()> {
        let Attachment { kind, columns, parameters, .. } = self;
        let invalid = |what: String| Err(Error::new("invalid-argument", format!("an attachment {what}")));
        if kind.is_empty() || kind.len() > KIND_BYTES {
            return invalid(format!("has a kind that is {} bytes long, expected 1 to {KIND_BYTES}", kind.len()));
        }
        if !columns.is_sorted_by(|one, other| one < other) {
            return invalid(format!("of kind `{kind}` has columns that do not ascend"));
        }
        let is_object = matches!(serde_json::from_str(parameters), Ok(serde_json::Value::Object(_)));
        if !is_object || parameters.len() > PARAMETERS_BYTES {
            let text = format!(
                "has {} bytes of parameters, expected a JSON object of at most {PARAMETERS_BYTES} bytes",
                parameters.len()
            );
            return invalid(format!("of kind `{kind}` {text}"));
        }
        Ok(())
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.string(&self.kind);
        self.object.write(writer);
        writer.varints(&self.columns);
        self.rows.write(writer);
        writer.list(&self.changed, |writer, rows| rows.write(writer));
        writer.string(&self.parameters);
    }
}
