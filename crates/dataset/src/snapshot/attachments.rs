//! Which samples the attachments of a snapshot cover.

use bytes::Bytes;
use penstock_error::{Context as _, Result};
use penstock_format::cursor::{Cursor, Magic, malformed, unseal};
use penstock_format::ids::attachment_name;
use penstock_format::manifest::Attachment;
use penstock_format::overlay::Overlay;
use penstock_format::record::Record;
use penstock_format::rows::RowIds;
use penstock_format::schema::Schema;

use super::Snapshot;

/// Note that samples were given other values: attachments of these columns do not cover them any more.
pub fn note_changed(attachments: &mut [Attachment], overlay: &Overlay) {
    for attachment in attachments.iter_mut().filter(|attachment| attachment.depends_on(overlay)) {
        attachment.changed.push(overlay.rows.clone());
    }
}

/// Refuse attachments of columns that do not exist, and objects that are attached twice.
pub fn check_attachments(attachments: &[Attachment], schema: &Schema, record: &Record) -> Result<()> {
    for (index, Attachment { kind, object, columns, .. }) in attachments.iter().enumerate() {
        let invalid = |what: String| {
            Err(malformed(format!("commit {} has an attachment of kind `{kind}` {what}", record.snapshot())))
        };
        if let Some(column) = columns.iter().find(|column| !schema.has_column(**column)) {
            return invalid(format!("to column {column}, which does not exist"));
        }
        if attachments[..index].iter().any(|other| other.object.id == object.id) {
            return invalid(format!("with object {}, which another attachment also has", object.id));
        }
    }
    Ok(())
}

impl Snapshot {
    /// Return the attachments, each with the samples that it covers: deleted ones included, those with newer values not. Cost: reads the sets of
    /// row ids that are in objects, concurrently.
    pub fn attachments(&self) -> Result<Vec<(&Attachment, RowIds)>> {
        let with_rows = self.attachments.iter().map(|attachment| {
            let Attachment { rows, changed, .. } = attachment;
            Ok((attachment, self.context.all_row_ids([rows])?.minus(&self.context.all_row_ids(changed)?)))
        });
        with_rows.collect()
    }

    /// Return the content of an attachment. Cost: one request.
    pub fn content_of(&self, attachment: &Attachment) -> Result<Bytes> {
        let name = attachment_name(attachment.object.id);
        let body = self.context.object(&name, &attachment.object)?;
        unseal(Magic::Attachment, &body, Cursor::rest).context(|| format!("cannot read `{name}`"))
    }
}
