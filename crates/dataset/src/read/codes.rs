//! Read label and category codes as int64. Category codes refer to the snapshot's vocabulary.

use penstock_error::{Error, Result};
use penstock_format::classes::Classes;
use penstock_format::cursor::{Strings, malformed};
use penstock_format::ints::unpack;
use penstock_format::schema::ColumnSpec;

use super::fixed::put_own;
use super::reader::{Nulls, OnCorrupt, Reader, set_null};

/// Say what is wrong with a stored code that no class has.
pub fn no_class(code: u64, classes: &Classes) -> String {
    match classes.has_codes() {
        true => format!("it has code {code}, which none of the column's {} classes has", classes.names.len()),
        false => format!("it has code {}, but the column has only {} names", code.cast_signed(), classes.names.len()),
    }
}

impl Reader {
    /// Read the codes of a label or category column as int64. Those of labels are places in the list of names, those of categories refer to this
    /// snapshot's vocabulary.
    pub fn codes(&self, column: &ColumnSpec, out: &mut [i64]) -> Result<Nulls> {
        let (dtype, _) = column.kind.stored()?;
        let mut stored = vec![0u8; self.plan.len() * dtype.size()];
        let mut nulls = self.stored_fixed(column, &mut stored, &[])?;
        let own = self.own_values(column);
        let classes = column.kind.classes();
        if classes.is_some() {
            put_own(&own, self.plan.len(), &mut stored, &mut nulls);
        }
        let all = out.iter_mut().enumerate();
        // One byte is by far the most common.
        match dtype.size() {
            1 => all.for_each(|(place, code)| *code = stored[place].into()),
            width => all.for_each(|(place, code)| *code = unpack(&stored, width as u8, place) as i64),
        }
        if let Some(classes) = classes {
            self.find_classes(column, classes, out, &mut nulls)?;
            return Ok(nulls);
        }
        self.globalise(column, out, &mut nulls)?;
        // The codes of a transaction are those of its vocabulary, which is also that of its reads.
        for (place, value) in own {
            match value.bytes {
                None => {
                    set_null(&mut nulls, self.plan.len(), place as u32, &mut []);
                    out[place] = 0;
                }
                Some(code) => {
                    out[place] = unpack(code, dtype.size() as u8, 0) as i64;
                    nulls.iter_mut().for_each(|nulls| nulls[place] = false);
                }
            }
        }
        Ok(nulls)
    }

    /// Map the stored codes of labels to places in the list of names.
    fn find_classes(&self, column: &ColumnSpec, classes: &Classes, codes: &mut [i64], nulls: &mut Nulls) -> Result<()> {
        // A null has code 0, even in a column without classes.
        let (limit, places) = (classes.names.len().max(1) as i64, classes.places());
        for (place, code) in codes.iter_mut().enumerate().filter(|(_, code)| **code >= limit || classes.has_codes()) {
            if let Some(found) = places.of(code.cast_unsigned()) {
                *code = found as i64;
            } else if nulls.as_ref().is_some_and(|nulls| nulls[place]) {
                *code = 0;
            } else {
                let why = no_class(code.cast_unsigned(), classes);
                *code = self
                    .null_instead(why, place as u32, nulls)
                    .map_err(|(error, place)| self.locate(error, column, place))?;
            }
        }
        Ok(())
    }

    /// Map a category column's file-local codes to codes in the vocabulary.
    fn globalise(&self, column: &ColumnSpec, codes: &mut [i64], nulls: &mut Nulls) -> Result<()> {
        let none = Strings::default();
        self.each_group(column, &[], true, |source, _| {
            let Some(source) = source else { return Ok(()) }; // The rows are already null.
            let first = source.rows.first().map_or(0, |(_, place)| *place);
            let dictionary = source.entry().dictionary.as_ref().unwrap_or(&none);
            let found = self.snapshot.codes_of_file(source.file.id, column.id, dictionary.len());
            let (vocabulary, known) = found.map_err(|error| (error, first))?;
            for (_, place) in source.rows.iter() {
                let place = *place as usize;
                if nulls.as_ref().is_some_and(|nulls| nulls[place]) {
                    continue;
                }
                codes[place] = match known.code(codes[place], dictionary, &vocabulary) {
                    Some(code) => code.into(),
                    None => {
                        let why = format!("it has code {}, which does not refer to a word", codes[place]);
                        self.null_instead(why, place as u32, nulls)?
                    }
                };
            }
            Ok(())
        })
    }

    /// Handle a code that has no word or name. Either return an error, or make the sample null and return 0, the code for nulls.
    fn null_instead(&self, why: String, place: u32, nulls: &mut Nulls) -> std::result::Result<i64, (Error, u32)> {
        if self.on_corrupt == OnCorrupt::Raise {
            return Err((malformed(why), place));
        }
        set_null(nulls, self.plan.len(), place, &mut []);
        Ok(0)
    }
}
