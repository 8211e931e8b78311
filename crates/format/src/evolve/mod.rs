//! Changes of a schema: add, drop, rename and widen columns, and merge the changes of two branches (spec section 8).

mod classes;

use std::collections::{HashMap, HashSet};

use penstock_error::{Error, Result};
use penstock_tensor::Dtype;

use crate::files::FileRef;
use crate::schema::{ColumnKind, ColumnSpec, FillValue, Schema};

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
            column.fill = Some(FillValue(file));
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

    /// Return the schema with a wider dtype for a column of numbers.
    pub fn widened(&self, name: &str, dtype: &str) -> Result<Schema> {
        let column = self.found(name, "widen")?;
        let is_wider = column.kind.dtype().is_some_and(|from| widens(from, dtype));
        let Some(wider) = column.with_dtype(dtype).filter(|_| is_wider) else {
            let now = column.kind.dtype().unwrap_or(column.kind.name());
            let why = if now == dtype { "it already has this dtype" } else { "not every value would stay the same" };
            let text = format!("cannot widen column `{name}` from {now} to `{dtype}`: {why}");
            return Err(Error::new("invalid-schema", text)
                .column(name)
                .hint("widen numbers, such as int16 to int32 or float64; or add another column with tx.add_column"));
        };
        let mut schema = self.next();
        schema.columns.iter_mut().filter(|column| column.name == name).for_each(|column| *column = wider.clone());
        schema.check()?;
        Ok(schema)
    }

    /// Give columns the wider dtypes that they have in another schema, so that its snapshot can be read. Refuses a column if neither dtype is wider.
    pub fn widen_to(&mut self, other: &Schema) -> Result<()> {
        for column in &mut self.columns {
            let Some(known) = other.column_by_id(column.id) else { continue };
            if !column.take_wider(known) {
                return Err(unlike(column, known));
            }
            column.check_classes()?;
        }
        Ok(())
    }

    /// Return whether columns can be read that have the dtypes of another schema. A reset may bring back narrower ones.
    pub fn has_dtypes_of(&self, other: &Schema) -> bool {
        self.columns.iter().all(|column| {
            let mut wider = column.clone();
            other.column_by_id(column.id).is_none_or(|known| wider.take_wider(known)) && wider == *column
        })
    }

    /// Return whether two schemas have the same columns, earlier dtypes aside.
    pub fn equals_but_for_earlier_dtypes(&self, other: &Schema) -> bool {
        let plain = |spec: &ColumnSpec| ColumnSpec { was: Vec::new(), ..spec.clone() };
        self.columns.iter().map(plain).eq(other.columns.iter().map(plain))
    }

    pub(crate) fn next(&self) -> Schema {
        Schema { schema_id: self.schema_id + 1, ..self.clone() }
    }

    /// Return a hint with the names of the columns.
    pub fn names(&self) -> String {
        format!("columns: {}", self.columns.iter().map(|column| column.name.as_str()).collect::<Vec<_>>().join(", "))
    }

    pub(crate) fn found(&self, name: &str, verb: &str) -> Result<&ColumnSpec> {
        self.column(name).map(|(_, column)| column).ok_or_else(|| {
            Error::new("column-not-found", format!("cannot {verb} column `{name}`: the dataset has no such column"))
                .hint(self.names())
        })
    }

    /// Merge the changes that two branches made to `base`. A column that one side dropped is dropped.
    pub fn merged(base: &Schema, ours: &Schema, theirs: &Schema) -> Result<Schema> {
        if (theirs == base || theirs == ours) && ours.has_dtypes_of(base) && ours.has_dtypes_of(theirs) {
            return Ok(ours.clone());
        }
        let (before, known, other) = (base.columns_by_id(), ours.columns_by_id(), theirs.columns_by_id());
        let mut merged = ours.next();
        merged.schema_id = merged.schema_id.max(theirs.schema_id + 1);
        merged.next_column = ours.next_column.max(theirs.next_column);
        // A column that one side dropped is dropped.
        merged.columns.retain(|column| other.contains_key(&column.id) || !before.contains_key(&column.id));
        for column in &mut merged.columns {
            let (Some(their), base) = (other.get(&column.id).copied(), before.get(&column.id).copied()) else {
                continue;
            };
            // Columns that belong to another one follow its name, so their own definitions are compared without it.
            // Dtypes and classes are merged below.
            let plain = |spec: &ColumnSpec| {
                let kind =
                    spec.with_dtype("").map_or_else(|| spec.kind.without_of(), |spec| spec.kind).without_classes();
                (spec.name.clone(), kind, spec.codec, spec.fill.clone())
            };
            let own = column.clone();
            match base {
                Some(base) if plain(their) == plain(base) => {}
                Some(base) if plain(column) == plain(base) => *column = their.clone(),
                _ if plain(column) == plain(their) => {}
                _ => return Err(both_changed(&column.name, &format!("theirs calls it `{}`", their.name))),
            }
            column.merge_classes(base, &own, their).map_err(|what| both_changed(&own.name, &what))?;
            for other in [Some(&own), Some(their), base].into_iter().flatten() {
                if !column.take_wider(other) {
                    return Err(unlike(column, other));
                }
            }
        }
        merged.columns.extend(
            theirs
                .columns
                .iter()
                .filter(|column| !before.contains_key(&column.id) && !known.contains_key(&column.id))
                .cloned(),
        );
        if let Some(name) = merged.follow_names(&[ours, theirs]) {
            return Err(both_changed(&name, "the image column that it belongs to was dropped"));
        }
        let mut seen = HashSet::new();
        if let Some(column) = merged.columns.iter().find(|column| !seen.insert(&column.name)) {
            return Err(both_changed(&column.name, "each side has a column with this name"));
        }
        if merged.columns == ours.columns {
            return Ok(ours.clone()); // Both sides made the same changes.
        }
        merged.check()?;
        Ok(merged)
    }

    pub(crate) fn columns_by_id(&self) -> HashMap<u64, &ColumnSpec> {
        self.columns.iter().map(|column| (column.id, column)).collect()
    }

    /// Make columns belong to the images that they belonged to before, whatever those are called now. Returns a column whose image is gone.
    fn follow_names(&mut self, before: &[&Schema]) -> Option<String> {
        let names: HashMap<u64, String> = self.columns.iter().map(|column| (column.id, column.name.clone())).collect();
        for column in &mut self.columns {
            let target = before.iter().find_map(|schema| {
                let of = schema.column_by_id(column.id)?.kind.of()?;
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

/// Make the error for a column that two branches changed in different ways.
fn both_changed(name: &str, what: &str) -> Error {
    Error::new("conflict", format!("found conflicts: both sides changed column `{name}`: {what}"))
        .column(name)
        .hint("rename or drop the column on one side, then merge again")
}

/// Return whether the second of two dtypes represents all values of the first one.
fn widens(from: &str, to: &str) -> bool {
    Dtype::from_name(from).zip(Dtype::from_name(to)).is_some_and(|(from, to)| from.widens_to(to))
}

/// Return the smallest dtype that represents each number of both exactly.
fn common(one: Dtype, other: Dtype) -> Option<Dtype> {
    let has_both = |dtype: &Dtype| [one, other].iter().all(|narrow| narrow == dtype || narrow.widens_to(*dtype));
    (0..).map_while(Dtype::from_code).filter(has_both).min_by_key(|dtype| dtype.size())
}

/// Make the error for a column that has two dtypes, neither of which represents the values of the other.
fn unlike(one: &ColumnSpec, other: &ColumnSpec) -> Error {
    let [first, second] = [one, other].map(|spec| spec.kind.dtype().unwrap_or_default());
    let common = Dtype::from_name(first).zip(Dtype::from_name(second)).and_then(|(one, other)| common(one, other));
    let hint = match common {
        Some(common) => format!("widen it to {} on both sides, then merge again", common.name()),
        None => {
            "no dtype can hold the values of both; rename or drop the column on one side, then merge again".to_owned()
        }
    };
    let text = format!("found conflicts: column `{}` is {first} in one snapshot and {second} in another", one.name);
    Error::new("conflict", text).column(&one.name).hint(hint)
}

impl ColumnSpec {
    /// Return the column with another dtype. The present one becomes an earlier one. None if values have no dtype.
    fn with_dtype(&self, wider: &str) -> Option<ColumnSpec> {
        let mut column = self.clone();
        let (ColumnKind::Scalar { dtype } | ColumnKind::Tensor { dtype, .. }) = &mut column.kind else { return None };
        column.was.push(std::mem::replace(dtype, wider.to_owned()));
        Some(column)
    }

    /// Give this column the dtype of another one with the same id if that is wider, and the earlier dtypes and the classes of both. Returns false
    /// if neither dtype represents the values of the other one.
    pub fn take_wider(&mut self, other: &ColumnSpec) -> bool {
        if let (Some(classes), Some(more)) = (self.kind.classes_mut(), other.kind.classes()) {
            classes.take(more);
            if self.was.is_empty() {
                self.was.clone_from(&other.was);
            }
            return true;
        }
        let (Some(one), Some(two)) = (self.kind.dtype().map(str::to_owned), other.kind.dtype().map(str::to_owned))
        else {
            return true;
        };
        if widens(&one, &two) {
            *self = self.with_dtype(&two).unwrap_or_else(|| self.clone());
        } else if one != two && !widens(&two, &one) {
            return false;
        }
        let wide = self.kind.dtype().unwrap_or_default().to_owned();
        for was in other.was.iter().chain([&two]).filter(|was| **was != wide) {
            if !self.was.contains(was) {
                self.was.push(was.clone());
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::Classes;

    fn base() -> Result<Schema> {
        let image = ColumnKind::Image { exif_orientation: true, mode: Default::default() };
        Schema::create(vec![
            ColumnSpec::new("image", image),
            ColumnSpec::new("boxes", ColumnKind::Boxes { format: "xyxy".into(), of: Some("image".into()) }),
            ColumnSpec::new("text", ColumnKind::Text),
        ])
    }

    fn names(schema: &Schema) -> Vec<&str> {
        schema.columns.iter().map(|column| column.name.as_str()).collect()
    }

    #[test]
    fn columns_are_added_dropped_and_renamed() -> Result<()> {
        let schema = base()?
            .with_column(ColumnSpec::new("year", ColumnKind::Text), 7)?
            .renamed("image", "photo")?
            .without_column("text")?;
        assert_eq!(
            (names(&schema), schema.columns[1].kind.of(), schema.schema_id),
            (vec!["photo", "boxes", "year"], Some("photo"), 3)
        );
        assert_eq!(Schema::parse(&schema.to_json()?)?, schema);
        for refused in [
            schema.with_column(ColumnSpec::new("photo", ColumnKind::Text), 8),
            schema.with_column(ColumnSpec::new("_row", ColumnKind::Text), 8),
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
    fn labels_belong_to_boxes_and_follow_their_name() -> Result<()> {
        let labels = |of: &str| {
            ColumnSpec::new(
                "labels",
                ColumnKind::Labels { classes: Classes::new(vec!["cat".into()]), of: Some(of.into()) },
            )
        };
        let schema = base()?.with_column(labels("boxes"), 7)?.renamed("boxes", "places")?;
        assert_eq!(schema.column("labels").and_then(|(_, column)| column.kind.of()), Some("places"));
        assert_eq!(Schema::parse(&schema.to_json()?)?, schema);
        let more = schema.with_classes("labels", &["dog".into()])?.unwrap_or_else(|| schema.clone());
        assert_eq!(
            (Schema::parse(&more.to_json()?)?, more.column("labels").and_then(|(_, column)| column.kind.of())),
            (more.clone(), Some("places"))
        );
        for refused in [
            schema.without_column("places"),
            base()?.with_column(labels("image"), 7),
            base()?.with_column(labels("none"), 7),
        ] {
            assert!(refused.is_err_and(|error| error.code() == "invalid-schema"));
        }
        Ok(())
    }

    #[test]
    fn changes_of_two_branches_are_merged() -> Result<()> {
        let base = base()?;
        let ours = base.renamed("image", "photo")?.with_column(ColumnSpec::new("a", ColumnKind::Text), 1)?;
        let theirs = base.without_column("text")?.with_column(ColumnSpec::new("b", ColumnKind::Text), 2)?;
        for (one, other) in [(&ours, &theirs), (&theirs, &ours)] {
            let merged = Schema::merged(&base, one, other)?;
            let mut found = names(&merged);
            found.sort_unstable();
            assert_eq!((found, merged.columns[1].kind.of()), (vec!["a", "b", "boxes", "photo"], Some("photo")));
        }
        assert_eq!(Schema::merged(&base, &base, &theirs)?.columns, theirs.columns);
        assert_eq!(Schema::merged(&base, &ours, &base)?, ours);
        let image = ColumnKind::Image { exif_orientation: true, mode: Default::default() };
        let masks = base.with_column(ColumnSpec::new("masks", ColumnKind::Mask { of: Some("image".into()) }), 3)?;
        for (one, other) in [
            (base.renamed("text", "x")?, base.renamed("text", "y")?),
            (
                base.with_column(ColumnSpec::new("a", ColumnKind::Text), 1)?,
                base.with_column(ColumnSpec::new("a", ColumnKind::Text), 2)?,
            ),
            (base.renamed("text", "a")?, base.with_column(ColumnSpec::new("a", ColumnKind::Text), 2)?),
            (
                base.without_column("boxes")?
                    .without_column("image")?
                    .with_column(ColumnSpec::new("image", image), 4)?,
                masks,
            ),
        ] {
            assert_eq!(Schema::merged(&base, &one, &other).err().map(|error| error.code()), Some("conflict"));
        }
        Ok(())
    }

    #[test]
    fn numbers_become_wider_and_both_sides_may_widen() -> Result<()> {
        let number = ColumnKind::Scalar { dtype: "int16".into() };
        let base = base()?.with_column(ColumnSpec::new("n", number), 1)?;
        let dtypes = |schema: &Schema| {
            schema.column("n").map(|(_, n)| (n.kind.dtype().unwrap_or_default().to_owned(), n.was.join(" ")))
        };
        let found = |dtype: &str, was: &str| Some((dtype.to_owned(), was.to_owned()));
        let (int32, int64, float64) =
            (base.widened("n", "int32")?, base.widened("n", "int64")?, base.widened("n", "float64")?);
        assert_eq!(dtypes(&int32.widened("n", "int64")?), found("int64", "int16 int32"));
        assert_eq!(Schema::parse(&int32.to_json()?)?, int32);
        for (ours, theirs) in [(&int32, &int64), (&int64, &int32)] {
            assert_eq!(dtypes(&Schema::merged(&base, ours, theirs)?), found("int64", "int16 int32"));
        }
        assert_eq!(dtypes(&Schema::merged(&base, &base, &int32)?), found("int32", "int16"));
        for (dtype, column) in
            [("int8", "n"), ("uint32", "n"), ("float16", "n"), ("text", "n"), ("int16", "n"), ("int32", "text")]
        {
            assert!(base.widened(column, dtype).is_err_and(|error| error.code() == "invalid-schema"), "{dtype}");
        }
        // int64 and float64 have no common wider dtype.
        assert!(Schema::merged(&base, &int64, &float64).is_err_and(|error| error.code() == "conflict"));
        Ok(())
    }
}
