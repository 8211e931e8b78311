//! Changes of the classes of label columns: add, rename and merge them (spec section 8).

use penstock_error::{Error, Result};

use crate::classes::Classes;
use crate::schema::{ColumnSpec, Schema};

impl Schema {
    /// Return the schema with more classes in a label column, or None if it has all of them.
    pub fn with_classes(&self, name: &str, names: &[String]) -> Result<Option<Schema>> {
        let (place, _) = self.labels(name, "add classes to")?;
        let mut schema = self.next();
        let column = &mut schema.columns[place];
        let before = column.clone();
        let Some(classes) = column.kind.classes_mut() else { return Ok(None) };
        let narrow = (!classes.has_codes()).then(|| classes.dtype());
        classes.add(names);
        let changed = *column != before;
        // Data files of lists have int64 anyway.
        if let (true, Some(narrow), true) = (column.kind.has_codes(), narrow, changed) {
            column.was = vec![narrow.name().to_owned()];
        }
        schema.check().map_err(|error| error.context(format!("cannot add classes to column `{name}`")).column(name))?;
        Ok(changed.then_some(schema))
    }

    /// Return the schema with another name for a class. Samples of the class follow.
    pub fn with_class_renamed(&self, name: &str, old: &str, new: &str) -> Result<Schema> {
        let (place, classes) = self.labels(name, "rename a class of")?;
        let Some(at) = classes.names.iter().position(|known| known == old) else {
            let known: Vec<&str> = classes.names.iter().take(20).map(String::as_str).collect();
            let text = format!("cannot rename class `{old}` of column `{name}`: the column has no such class");
            return Err(Error::new("class-not-found", text)
                .column(name)
                .hint(format!("classes: {}", known.join(", "))));
        };
        let mut schema = self.next();
        if let Some(classes) = schema.columns[place].kind.classes_mut() {
            classes.names[at] = new.to_owned();
        }
        schema
            .check()
            .map_err(|error| error.context(format!("cannot rename class `{old}` of column `{name}`")).column(name))?;
        Ok(schema)
    }

    /// Return the schema with its classes in the places that they have in another one, or None if they are there already. No class that the other
    /// one has is lost.
    pub fn with_places_of(&self, other: &Schema) -> Result<Option<Schema>> {
        let known = other.columns_by_id();
        let mut schema = self.clone();
        for column in &mut schema.columns {
            let (Some(before), now) = (known.get(&column.id).copied(), column.clone()) else { continue };
            column.merge_classes(Some(before), before, &now).map_err(|what| conflict(&column.name, &what))?;
        }
        Ok((schema != *self).then_some(schema))
    }

    /// Return the place and the classes of a label column.
    fn labels(&self, name: &str, verb: &str) -> Result<(usize, &Classes)> {
        let column = self.found(name, verb)?;
        let place = self.columns.iter().position(|known| known.id == column.id).unwrap_or_default();
        column.kind.classes().map(|classes| (place, classes)).ok_or_else(|| {
            let text = format!(
                "cannot {verb} column `{name}`: it is a column of type {}, expected label or labels",
                column.kind.name()
            );
            let hint = match column.kind.is_category() {
                true => "a category needs no list of words: append the new ones",
                false => "only ps.Label and ps.Labels have classes",
            };
            Error::new("invalid-schema", text).column(name).hint(hint)
        })
    }
}

fn conflict(name: &str, what: &str) -> Error {
    let text = format!("found conflicts: column `{name}`: {what}");
    Error::new("conflict", text).column(name).hint("rename one of the classes, then merge again")
}

impl ColumnSpec {
    /// Refuse classes of the same name, which two sides added.
    pub(crate) fn check_classes(&self) -> Result<()> {
        let check = self.kind.classes().map_or(Ok(()), Classes::check_names);
        check.map_err(|what| conflict(&self.name, &what))
    }

    /// Merge the classes that two sides gave to a label column. Fails with what is wrong.
    pub(crate) fn merge_classes(
        &mut self,
        base: Option<&ColumnSpec>,
        ours: &ColumnSpec,
        theirs: &ColumnSpec,
    ) -> std::result::Result<(), String> {
        let (Some(our), Some(their)) = (ours.kind.classes(), theirs.kind.classes()) else { return Ok(()) };
        let none = Classes::default();
        let before = base.and_then(|base| base.kind.classes()).unwrap_or(&none);
        let mut merged = Classes::merged(before, our, their)?;
        merged.take(before); // A reset may have removed classes that files of the other side use.
        merged.check_names()?;
        if let Some(classes) = self.kind.classes_mut() {
            *classes = merged;
        }
        let was =
            [Some(ours), Some(theirs), base].into_iter().flatten().map(|spec| &spec.was).find(|was| !was.is_empty());
        self.was = was.cloned().unwrap_or_default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::ColumnKind;

    fn schema() -> Result<Schema> {
        let names = vec!["cat".to_owned(), "dog".to_owned()];
        let (label, labels) = (
            ColumnKind::Label(Classes::new(names.clone())),
            ColumnKind::Labels { classes: Classes::new(names), of: None },
        );
        Schema::create(vec![
            ColumnSpec::new("label", label),
            ColumnSpec::new("labels", labels),
            ColumnSpec::new("text", ColumnKind::Text),
        ])
    }

    fn with(schema: &Schema, names: &[&str]) -> Result<Schema> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let label = schema.with_classes("label", &names)?.unwrap_or_else(|| schema.clone());
        Ok(label.with_classes("labels", &names)?.unwrap_or(label))
    }

    fn names(schema: &Schema) -> String {
        schema.columns[0].kind.classes().map_or(String::new(), |classes| classes.names.join(" "))
    }

    fn code(schema: &Schema, name: &str) -> Option<u64> {
        let classes = schema.columns[0].kind.classes()?;
        classes.code_of(classes.names.iter().position(|known| known == name)?)
    }

    #[test]
    fn added_classes_have_codes_that_do_not_depend_on_the_order() -> Result<()> {
        let base = schema()?;
        let (one, two) = (with(&base, &["fox", "owl"])?, with(&with(&base, &["owl"])?, &["fox", "cat"])?);
        assert_eq!((names(&one), names(&two)), ("cat dog fox owl".to_owned(), "cat dog owl fox".to_owned()));
        for name in ["cat", "dog", "fox", "owl"] {
            assert_eq!(code(&one, name), code(&two, name));
        }
        assert_eq!((code(&one, "dog"), base.with_classes("label", &["dog".into()])?), (Some(1), None));
        assert_eq!(Schema::parse(&one.to_json()?)?, one);
        let classes = one.columns[0].kind.classes().ok_or_else(|| Error::new("internal", "no classes"))?;
        let places = classes.places();
        for place in 0..4 {
            assert_eq!(classes.code_of(place).and_then(|code| places.of(code)), Some(place));
        }
        assert_eq!(
            (places.of(2), places.of(3), classes.code_of(4), one.columns[0].was.join(" ")),
            (None, None, None, "uint8".into())
        );
        Ok(())
    }

    #[test]
    fn classes_of_two_sides_are_merged_by_name_and_keep_the_places_of_ours() -> Result<()> {
        let base = schema()?;
        let (ours, theirs) = (with(&base, &["owl"])?, with(&base, &["fox", "owl"])?);
        assert_eq!(names(&Schema::merged(&base, &ours, &theirs)?), "cat dog owl fox");
        assert_eq!(names(&Schema::merged(&base, &theirs, &ours)?), "cat dog fox owl");
        assert_eq!(names(&Schema::merged(&base, &base, &theirs)?), "cat dog fox owl");
        let renamed = ours.with_class_renamed("label", "cat", "lynx")?.with_class_renamed("label", "owl", "eagle")?;
        let merged = Schema::merged(&base, &theirs, &renamed);
        assert!(merged.is_err_and(|error| error.code() == "conflict"), "owl has no base, and both sides name it");
        let merged = Schema::merged(&ours, &with(&ours, &["fox"])?, &renamed)?;
        assert_eq!((names(&merged), code(&merged, "eagle")), ("lynx dog eagle fox".to_owned(), code(&ours, "owl")));
        // A reset may bring back a schema without classes that samples of the other side have.
        assert_eq!(names(&Schema::merged(&theirs, &base, &theirs)?), "cat dog fox owl");
        let taken = base.with_class_renamed("label", "cat", "fox")?;
        assert!(
            Schema::merged(&base, &taken, &theirs).is_err_and(|error| error.code() == "conflict"),
            "two classes are called fox"
        );
        Ok(())
    }

    #[test]
    fn a_class_may_have_the_name_that_another_one_had() -> Result<()> {
        let fox = with(&schema()?, &["fox"])?;
        let again = with(&fox.with_class_renamed("label", "fox", "red fox")?, &["fox"])?;
        assert_eq!((names(&again), code(&again, "red fox")), ("cat dog red fox fox".to_owned(), code(&fox, "fox")));
        assert_ne!(code(&again, "fox"), code(&fox, "fox"));
        Ok(())
    }

    #[test]
    fn classes_that_cannot_be_are_refused() -> Result<()> {
        let base = schema()?;
        let fox = with(&base, &["fox"])?;
        for refused in [
            base.with_class_renamed("label", "fox", "owl"),
            base.with_class_renamed("label", "cat", "dog"),
            base.with_class_renamed("text", "cat", "lynx"),
            base.with_class_renamed("other", "cat", "lynx"),
        ] {
            let codes = ["invalid-schema", "class-not-found", "column-not-found"];
            assert!(refused.is_err_and(|error| codes.contains(&error.code())));
        }
        assert!(base.with_classes("text", &["fox".into()]).is_err_and(|error| error.code() == "invalid-schema"));
        for codes in [
            vec![0, 1],
            vec![0, 1, 2, 3],
            vec![0, 0, 1 << 47],
            vec![1, 0, 1 << 47],
            vec![0, 1, 1 << 48],
            vec![0, 1, u64::MAX],
        ] {
            let mut bad = fox.clone();
            bad.columns[0].kind =
                ColumnKind::Label(Classes { codes, names: vec!["cat".into(), "dog".into(), "fox".into()] });
            assert!(Schema::parse(&bad.to_json()?).is_err());
        }
        let mut plain = fox.clone();
        plain.columns[0].kind =
            ColumnKind::Label(Classes { codes: vec![0, 1], names: vec!["cat".into(), "dog".into()] });
        assert!(Schema::parse(&plain.to_json()?).is_err(), "codes that are places are left out");
        Ok(())
    }
}
