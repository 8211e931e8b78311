//! Changes of a schema: add, drop and rename columns, and merge the changes of two branches (spec section 8).

use std::collections::HashMap;

use penstock_error::{Error, Result};

use crate::files::FileRef;
use crate::schema::{ColumnKind, ColumnSpec, Fill, Schema};

/// Ids of columns that were added later have this bit. They are random, so that two branches never give one id to two columns.
const ADDED: u64 = 1 << 47;

impl Schema {
    /// Return the schema with another column at the end. `random` determines its id.
    pub fn with_column(&self, column: ColumnSpec, random: u64) -> Result<Schema> {
        let mut schema = self.next();
        schema.columns.push(ColumnSpec { id: ADDED | random & (ADDED - 1), ..column });
        schema.check().map_err(|error| error.hint(self.names()))?;
        Ok(schema)
    }

    /// Give the last column the value that samples without a value have.
    pub fn set_fill(&mut self, file: FileRef) {
        if let Some(column) = self.columns.last_mut() {
            column.fill = Some(Fill(file));
        }
    }

    /// Return the schema without a column.
    pub fn without_column(&self, name: &str) -> Result<Schema> {
        self.found(name, "drop")?;
        if let Some(dependent) = self.columns.iter().find(|column| column.kind.of() == Some(name)) {
            let text = format!("cannot drop column `{name}`: column `{}` belongs to it", dependent.name);
            return Err(Error::new("invalid-schema", text).hint(format!("drop `{}` first", dependent.name)));
        }
        let mut schema = self.next();
        schema.columns.retain(|column| column.name != name);
        Ok(schema)
    }

    /// Return the schema with another name for a column. Columns that belong to it follow.
    pub fn renamed(&self, old: &str, new: &str) -> Result<Schema> {
        self.found(old, "rename")?;
        let mut schema = self.next();
        for column in &mut schema.columns {
            if column.name == old {
                column.name = new.to_owned();
            }
            column.kind.follow(old, new);
        }
        schema.check().map_err(|error| error.context(format!("cannot rename column `{old}`")))?;
        Ok(schema)
    }

    fn next(&self) -> Schema {
        Schema { schema_id: self.schema_id + 1, ..self.clone() }
    }

    fn names(&self) -> String {
        format!("columns: {}", self.columns.iter().map(|column| column.name.as_str()).collect::<Vec<_>>().join(", "))
    }

    fn found(&self, name: &str, verb: &str) -> Result<&ColumnSpec> {
        self.column(name).map(|(_, column)| column).ok_or_else(|| {
            Error::new("column-not-found", format!("cannot {verb} column `{name}`: the dataset has no such column")).hint(self.names())
        })
    }

    /// Merge the changes that two branches made to `base`. A column that one side dropped is dropped.
    pub fn merged(base: &Schema, ours: &Schema, theirs: &Schema) -> Result<Schema> {
        if theirs == base || theirs == ours {
            return Ok(ours.clone());
        }
        let by_id = |schema: &Schema| schema.columns.iter().map(|column| (column.id, column.clone())).collect::<HashMap<u64, ColumnSpec>>();
        let (before, known, other) = (by_id(base), by_id(ours), by_id(theirs));
        let conflict = |name: &str, what: &str| {
            Err(Error::new("conflict", format!("found conflicts: both sides changed column `{name}`: {what}"))
                .column(name)
                .hint("rename or drop the column on one side, then merge again"))
        };
        let mut merged = ours.next();
        merged.schema_id = merged.schema_id.max(theirs.schema_id + 1);
        merged.next_column = ours.next_column.max(theirs.next_column);
        // A column that one side dropped is dropped.
        merged.columns.retain(|column| other.contains_key(&column.id) || !before.contains_key(&column.id));
        for column in &mut merged.columns {
            let (Some(their), base) = (other.get(&column.id), before.get(&column.id)) else { continue };
            // Columns that belong to another one follow its name, so their own definitions are compared without it.
            let plain = |spec: &ColumnSpec| (spec.name.clone(), spec.kind.without_of(), spec.codec, spec.fill.clone());
            match base {
                Some(base) if plain(their) == plain(base) => {}
                Some(base) if plain(column) == plain(base) => *column = their.clone(),
                _ if plain(column) == plain(their) => {}
                _ => return conflict(&column.name, &format!("theirs calls it `{}`", their.name)),
            }
        }
        merged
            .columns
            .extend(theirs.columns.iter().filter(|column| !before.contains_key(&column.id) && !known.contains_key(&column.id)).cloned());
        if let Some(name) = merged.follow_names(&[ours, theirs]) {
            return conflict(&name, "the image column that it belongs to was dropped");
        }
        let mut seen = HashMap::new();
        for column in &merged.columns {
            if seen.insert(column.name.clone(), column.id).is_some() {
                return conflict(&column.name, "each side has a column of this name");
            }
        }
        merged.check()?;
        Ok(merged)
    }

    /// Make columns belong to the images that they belonged to before, whatever those are called now. Returns a column whose image is gone.
    fn follow_names(&mut self, before: &[&Schema]) -> Option<String> {
        let names: HashMap<u64, String> = self.columns.iter().map(|column| (column.id, column.name.clone())).collect();
        for column in &mut self.columns {
            let target = before.iter().find_map(|schema| {
                let of = schema.columns.iter().find(|known| known.id == column.id)?.kind.of()?;
                Some(schema.column(of)?.1.id)
            });
            let Some(of) = column.kind.of().map(str::to_owned) else { continue };
            match target.and_then(|id| names.get(&id)) {
                Some(name) => column.kind.follow(&of, name),
                None => return Some(column.name.clone()),
            }
        }
        None
    }
}

impl ColumnKind {
    /// Return the name of the image column that this column belongs to.
    pub fn of(&self) -> Option<&str> {
        match self {
            ColumnKind::Boxes { of, .. } | ColumnKind::Mask { of } | ColumnKind::Keypoints { of, .. } => of.as_deref(),
            _ => None,
        }
    }

    /// Follow the image column to a new name.
    fn follow(&mut self, old: &str, new: &str) {
        if let ColumnKind::Boxes { of: Some(of), .. } | ColumnKind::Mask { of: Some(of) } | ColumnKind::Keypoints { of: Some(of), .. } =
            self
            && of == old
        {
            *of = new.to_owned();
        }
    }

    fn without_of(&self) -> ColumnKind {
        let mut kind = self.clone();
        if let ColumnKind::Boxes { of, .. } | ColumnKind::Mask { of } | ColumnKind::Keypoints { of, .. } = &mut kind {
            *of = of.as_ref().map(|_| String::new());
        }
        kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datafile::Codec;

    fn column(name: &str, kind: ColumnKind) -> ColumnSpec {
        ColumnSpec { id: 0, name: name.into(), kind, codec: Codec::None, fill: None }
    }

    fn base() -> Result<Schema> {
        let image = ColumnKind::Image { exif_orientation: true, mode: Default::default() };
        Schema::create(vec![
            column("image", image),
            column("boxes", ColumnKind::Boxes { format: "xyxy".into(), of: Some("image".into()) }),
            column("text", ColumnKind::Text),
        ])
    }

    fn names(schema: &Schema) -> Vec<&str> {
        schema.columns.iter().map(|column| column.name.as_str()).collect()
    }

    #[test]
    fn columns_are_added_dropped_and_renamed() -> Result<()> {
        let schema = base()?.with_column(column("year", ColumnKind::Text), 7)?.renamed("image", "photo")?.without_column("text")?;
        assert_eq!((names(&schema), schema.columns[1].kind.of(), schema.schema_id), (vec!["photo", "boxes", "year"], Some("photo"), 3));
        assert_eq!(Schema::parse(&schema.to_json()?)?, schema);
        for refused in [
            schema.with_column(column("photo", ColumnKind::Text), 8),
            schema.with_column(column("_row", ColumnKind::Text), 8),
            schema.without_column("photo"),
            schema.without_column("text"),
            schema.renamed("year", "boxes"),
            schema.renamed("text", "x"),
        ] {
            assert!(refused.is_err_and(|error| ["invalid-schema", "column-not-found"].contains(&error.code())));
        }
        Ok(())
    }

    #[test]
    fn changes_of_two_branches_are_merged() -> Result<()> {
        let base = base()?;
        let ours = base.renamed("image", "photo")?.with_column(column("a", ColumnKind::Text), 1)?;
        let theirs = base.without_column("text")?.with_column(column("b", ColumnKind::Text), 2)?;
        for (one, other) in [(&ours, &theirs), (&theirs, &ours)] {
            let merged = Schema::merged(&base, one, other)?;
            let mut found = names(&merged);
            found.sort_unstable();
            assert_eq!((found, merged.columns[1].kind.of()), (vec!["a", "b", "boxes", "photo"], Some("photo")));
        }
        assert_eq!(Schema::merged(&base, &base, &theirs)?.columns, theirs.columns);
        assert_eq!(Schema::merged(&base, &ours, &base)?, ours);
        let image = ColumnKind::Image { exif_orientation: true, mode: Default::default() };
        let masks = base.with_column(column("masks", ColumnKind::Mask { of: Some("image".into()) }), 3)?;
        for (one, other) in [
            (base.renamed("text", "x")?, base.renamed("text", "y")?),
            (base.with_column(column("a", ColumnKind::Text), 1)?, base.with_column(column("a", ColumnKind::Text), 2)?),
            (base.renamed("text", "a")?, base.with_column(column("a", ColumnKind::Text), 2)?),
            (base.without_column("boxes")?.without_column("image")?.with_column(column("image", image), 4)?, masks),
        ] {
            assert_eq!(Schema::merged(&base, &one, &other).err().map(|error| error.code()), Some("conflict"));
        }
        Ok(())
    }
}
