//! Changes of the schema in a transaction: add, drop, rename and widen columns, add and rename classes. No data file is rewritten.

use penstock_codec::widen;
use penstock_error::{Error, Result};
use penstock_format::ids::data_name;
use penstock_format::record::{FEATURE_CLASSES, FEATURE_WIDENED};
use penstock_format::schema::{ColumnSpec, Schema};

use crate::commit::changes::Altered;
use crate::commit::transaction::{Transaction, prepare};
use crate::commit::verbs::keyed::keys_in;
use crate::write::check::Input;
use crate::write::column::Stored;
use crate::write::fragments::FragmentsWriter;
use crate::write::media::Validate;

impl Transaction {
    /// Return the schema that the transaction sees.
    pub fn schema(&self) -> &Schema {
        &self.base.schema
    }

    /// Add a column at the end. Existing samples, and samples that are appended without the column, have the value `fill`, or are null. Cost:
    /// writes a data file with the value, and closes the data file of the last append.
    pub fn add_column(&mut self, column: ColumnSpec, fill: Option<Input>, validate: Validate) -> Result<()> {
        self.state.check_open()?;
        self.check_repeatable("add a column")?;
        let random = self.base.context.new_id()?.0;
        let mut schema =
            self.base.schema.with_column(column, random.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)))?;
        let spec = schema.columns[schema.columns.len() - 1].clone();
        let (mut features, mut key) = (0, None);
        if let Some(input) = fill {
            let mark = self.words.mark();
            let stored = prepare(&mut self.words, &self.base, &spec, input, validate);
            let Stored { column, .. } = stored.map_err(|error| {
                self.words.return_to(&mark);
                error.column(&spec.name).context(format!("cannot add column `{}`", spec.name))
            })?;
            let stored = Stored { column, words: self.words.of(spec.id) };
            key = keys_in(&spec, &stored).pop().flatten();
            let mut writer = FragmentsWriter::new(self.base.context.clone(), vec![spec.clone()]);
            let written = writer.push(vec![Some(stored)], 1).and_then(|()| writer.finish());
            self.puts
                .extend(writer.fragments.iter().flat_map(|fragment| &fragment.files).map(|file| data_name(file.id)));
            written?;
            features = writer.features;
            if let Some(file) = writer.fragments.first().and_then(|fragment| fragment.files.first()) {
                schema.set_fill(file.clone());
            }
        }
        let altered = self.altered();
        altered.features |= features;
        altered.fills.extend(key.map(|key| (spec.id, key)));
        self.set_schema(schema)
    }

    /// Drop a column. Earlier snapshots keep it. If it may have values, `force` must be set.
    pub fn drop_column(&mut self, name: &str, force: bool) -> Result<()> {
        self.state.check_open()?;
        self.check_repeatable("drop a column")?;
        let schema = self.base.schema.without_column(name)?;
        let spec = self.base.column(name)?.clone();
        if !force && self.may_have_values(&spec)? {
            let text =
                format!("cannot drop column `{name}`: it has values, which the newest snapshot would no longer have");
            return Err(Error::new("invalid-argument", text).hint("pass force=True; earlier snapshots keep the column"));
        }
        self.reads.keys.retain(|keys| keys.column.id != spec.id);
        self.altered().dropped.push((spec.id, spec.name.clone()));
        self.set_schema(schema)
    }

    /// Rename a column. Its values, and columns that belong to it, follow.
    pub fn rename_column(&mut self, old: &str, new: &str) -> Result<()> {
        self.state.check_open()?;
        self.check_repeatable("rename a column")?;
        let schema = self.base.schema.renamed(old, new)?;
        self.altered();
        self.set_schema(schema)
    }

    /// Give a column of numbers a wider dtype. Files keep the values in their earlier dtype, and reads convert them.
    pub fn widen_column(&mut self, name: &str, dtype: &str) -> Result<()> {
        self.state.check_open()?;
        self.check_repeatable("widen a column")?;
        let schema = self.base.schema.widened(name, dtype)?;
        self.check_not_key(name, "widen")?;
        self.write_pending()?;
        self.convert_fill(name, &schema)?;
        self.altered().features |= FEATURE_WIDENED;
        self.set_schema(schema)
    }

    /// Add classes to a label column, except those that it has. Other commits may add theirs in the meantime.
    pub fn add_classes(&mut self, name: &str, classes: &[String]) -> Result<()> {
        self.state.check_open()?;
        self.check_repeatable("add classes")?;
        let Some(schema) = self.base.schema.with_classes(name, classes)? else { return Ok(()) };
        let dtype =
            |schema: &Schema| schema.column(name).and_then(|(_, spec)| spec.kind.stored().ok()).map(|(dtype, _)| dtype);
        if dtype(&schema) != dtype(&self.base.schema) {
            self.check_not_key(name, "add classes to")?;
            self.write_pending()?;
            self.convert_fill(name, &schema)?;
        }
        let column = self.base.column(name)?.id;
        let altered = self.altered_classes();
        altered.features |= FEATURE_CLASSES;
        if !altered.classes.contains(&column) {
            altered.classes.push(column);
        }
        self.set_schema(schema)
    }

    /// Give a class of a label column another name. Samples of the class follow.
    pub fn rename_class(&mut self, name: &str, old: &str, new: &str) -> Result<()> {
        self.state.check_open()?;
        self.check_repeatable("rename a class")?;
        let schema = self.base.schema.with_class_renamed(name, old, new)?;
        self.altered();
        self.set_schema(schema)
    }

    /// Return the changes of the schema so far, to which a change that is not one of classes will be added.
    fn altered(&mut self) -> &mut Altered {
        let altered = self.altered_classes();
        altered.has_others = true;
        altered
    }

    fn altered_classes(&mut self) -> &mut Altered {
        let before = &self.base.schema;
        self.altered.get_or_insert_with(|| Altered::new(before.clone()))
    }

    /// Convert the fill value of a column that this transaction added to the dtype that the column has in the next schema.
    fn convert_fill(&mut self, name: &str, next: &Schema) -> Result<()> {
        let before = self.base.column(name)?;
        let key = self.altered.as_mut().and_then(|altered| altered.fills.get_mut(&before.id));
        if let (Some(key), Some((_, after))) = (key, next.column(name)) {
            let ((from, _), (to, _)) = (before.kind.stored()?, after.kind.stored()?);
            let mut wide = vec![0; to.size()];
            widen(key, from, to, &mut wide)?;
            *key = wide;
        }
        Ok(())
    }

    /// Refuse to change how the values of a column are stored if the transaction compares them.
    fn check_not_key(&self, name: &str, verb: &str) -> Result<()> {
        if self.base.column(name).is_ok_and(|spec| self.reads.known_keys(spec.id).is_some()) {
            let text = format!("cannot {verb} column `{name}`: this transaction has used it as a key");
            return Err(
                Error::new("invalid-argument", text).hint("do this before the upsert, or in another transaction")
            );
        }
        Ok(())
    }

    /// Return whether any data file lists a column. Cost: reads the manifest.
    fn may_have_values(&mut self, spec: &ColumnSpec) -> Result<bool> {
        let (seen, own) = self.view()?;
        let mut found = own.iter().any(|own| own.changes(spec.id));
        seen.each_file(Some(&[spec.id]), |_, _| {
            found = true;
            Ok(())
        })?;
        Ok(found)
    }
}
