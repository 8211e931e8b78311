//! The classes of label columns: names by place, and the codes in which data files store them (spec section 8).
//!
//! Readers see the place of a class in the list. Places differ between branches on which classes were added, so data files store codes, which
//! are the same on all of them.

use std::collections::{HashMap, HashSet};

use penstock_tensor::Dtype;
use serde::{Deserialize, Serialize};

/// Codes of added classes have this bit.
const ADDED: u64 = 1 << 47;

/// Names of classes, and their codes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Classes {
    pub names: Vec<String>,
    /// The code of each name. If this list is empty, each code is the place of its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub codes: Vec<u64>,
}

/// Maps stored codes to places.
pub struct ClassPlaces<'a> {
    classes: &'a Classes,
    added: HashMap<u64, usize>,
}

impl ClassPlaces<'_> {
    /// Return the place of a stored code, or None if no class has it.
    #[inline]
    pub fn of(&self, code: u64) -> Option<usize> {
        match usize::try_from(code) {
            Ok(place) if self.classes.code_of(place) == Some(code) => Some(place),
            _ => self.added.get(&code).copied(),
        }
    }
}

impl Classes {
    pub fn new(names: Vec<String>) -> Classes {
        Classes { names, codes: Vec::new() }
    }

    /// Return whether classes were added, so that codes are not places.
    pub fn has_codes(&self) -> bool {
        !self.codes.is_empty()
    }

    /// Return the dtype of a label's code.
    pub fn dtype(&self) -> Dtype {
        match self.names.len() {
            _ if self.has_codes() => Dtype::Uint64,
            0..=256 => Dtype::Uint8,
            257..=65_536 => Dtype::Uint16,
            _ => Dtype::Uint32,
        }
    }

    /// Return the stored code of the class at a place.
    #[inline]
    pub fn code_of(&self, place: usize) -> Option<u64> {
        match self.has_codes() {
            true => self.codes.get(place).copied(),
            false => (place < self.names.len()).then_some(place as u64),
        }
    }

    /// Return a map from codes to places.
    pub fn places(&self) -> ClassPlaces<'_> {
        let added = self.codes.iter().enumerate().filter(|(place, code)| *place as u64 != **code);
        ClassPlaces { classes: self, added: added.map(|(place, code)| (*code, place)).collect() }
    }

    /// Return the codes with their names.
    fn pairs(&self) -> impl Iterator<Item = (u64, &str)> {
        self.names.iter().enumerate().filter_map(move |(place, name)| Some((self.code_of(place)?, &name[..])))
    }

    /// Append a class.
    fn push(&mut self, code: u64, name: &str) {
        if !self.has_codes() && code != self.names.len() as u64 {
            self.codes = (0..self.names.len() as u64).collect();
        }
        if self.has_codes() || code != self.names.len() as u64 {
            self.codes.push(code);
        }
        self.names.push(name.to_owned());
    }

    /// Add the classes that are not there yet. The code of a class follows from its name, so two branches give it the same one.
    pub(crate) fn add(&mut self, names: &[String]) {
        let mut known: HashSet<String> = self.names.iter().cloned().collect();
        let mut codes: HashSet<u64> = self.pairs().map(|(code, _)| code).collect();
        for name in names {
            if !known.insert(name.clone()) {
                continue;
            }
            let mut code = code_from(name);
            while !codes.insert(code) {
                code = ADDED | (code + 1) & (ADDED - 1);
            }
            self.push(code, name);
        }
    }

    /// Return the classes of `ours` and `theirs`, which both changed `base`, in the order of ours. Fails with what is wrong.
    pub(crate) fn merged(base: &Classes, ours: &Classes, theirs: &Classes) -> std::result::Result<Classes, String> {
        let by_code = |classes: &Classes| {
            classes.pairs().map(|(code, name)| (code, name.to_owned())).collect::<HashMap<u64, String>>()
        };
        let (before, other) = (by_code(base), by_code(theirs));
        let mut merged = Classes::default();
        for (code, name) in ours.pairs() {
            let name = match (before.get(&code), other.get(&code)) {
                (_, Some(their)) if their == name => name,
                (Some(before), Some(their)) if before == name => &their[..],
                (before, Some(their)) if before != Some(their) => {
                    return Err(format!("theirs calls class `{name}` `{their}`"));
                }
                _ => name,
            };
            merged.push(code, name);
        }
        merged.take(theirs);
        merged.check_names()?;
        Ok(merged)
    }

    /// Refuse merged classes if two of them have the same name.
    pub(crate) fn check_names(&self) -> std::result::Result<(), String> {
        self.repeated().map_or(Ok(()), |name| Err(format!("each side has a different class `{name}`")))
    }

    /// Append the classes of another schema that this one lacks.
    pub(crate) fn take(&mut self, other: &Classes) {
        let known: HashSet<u64> = self.pairs().map(|(code, _)| code).collect();
        let lacking: Vec<(u64, &str)> = other.pairs().filter(|(code, _)| !known.contains(code)).collect();
        lacking.into_iter().for_each(|(code, name)| self.push(code, name));
    }

    /// Return a name that is given twice.
    fn repeated(&self) -> Option<&str> {
        let mut seen = HashSet::new();
        self.names.iter().find(|name| !seen.insert(*name)).map(String::as_str)
    }

    /// Return what is wrong with the classes.
    pub(crate) fn fault(&self) -> Option<String> {
        if let Some(name) = self.repeated() {
            return Some(format!("label `{name}` is given twice"));
        }
        let mut seen = HashSet::new();
        let is_code = |(place, code): (usize, &u64)| {
            (*code == place as u64 || *code & !(ADDED - 1) == ADDED) && seen.insert(*code)
        };
        let fits = self.codes.is_empty()
            || self.codes.len() == self.names.len() && self.codes.iter().any(|code| *code >= ADDED);
        (!fits || !self.codes.iter().enumerate().all(is_code)).then(|| "its codes do not fit its names".to_owned())
    }
}

/// Return the code of a class that is added under this name: FNV-1a of the name's bytes.
fn code_from(name: &str) -> u64 {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    ADDED | hash & (ADDED - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_names_never_change() {
        let found = ["fox", "größe / ✓", ""].map(code_from);
        assert_eq!(found, [143043866520462, 210706720107500, 172505283306277]);
    }
}
