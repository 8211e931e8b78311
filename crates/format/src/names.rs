//! Records of the names log (spec section 9).

use std::collections::BTreeMap;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Magic, Writer, malformed, seal, unseal};
use crate::ids::SnapshotId;

/// The kind of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum NameKind {
    Branch = 0,
    Tag = 1,
    Pin = 2,
    Decision = 3,
}

/// An operation that sets or removes a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    pub removes: bool,
    pub kind: NameKind,
    pub name: String,
    pub target: SnapshotId,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    pub number: u64,
    pub time_us: i64,
    pub operations: Vec<Operation>,
}

impl Names {
    pub fn encode(&self) -> Vec<u8> {
        seal(Magic::Names, |writer| {
            writer.u64(self.number);
            writer.u64(self.time_us.cast_unsigned());
            writer.list(&self.operations, |writer, operation| operation.write(writer));
        })
    }

    /// Parse a names record that was read as record `number` of the log.
    pub fn parse(body: &Bytes, number: u64) -> Result<Names> {
        let mut cursor = unseal(Magic::Names, body)?;
        let found = cursor.u64()?;
        if found != number {
            return Err(malformed(format!("the names record at number {number} identifies itself as number {found}")));
        }
        let time_us = cursor.u64()?.cast_signed();
        let operations = cursor.list(Operation::LEAST_BYTES, Operation::parse)?;
        cursor.end()?;
        Ok(Names { number, time_us, operations })
    }
}

/// The names that exist after all records applied so far.
#[derive(Debug, Default)]
pub struct Folded {
    /// The number of the next record.
    pub next: u64,
    /// The time of the last record.
    pub time_us: i64,
    names: BTreeMap<(NameKind, String), SnapshotId>,
}

impl Folded {
    /// Apply the record with number `next`.
    pub fn apply(&mut self, record: Names) {
        for Operation { removes, kind, name, target } in record.operations {
            match removes {
                true => self.names.remove(&(kind, name)),
                false => self.names.insert((kind, name), target),
            };
        }
        self.time_us = record.time_us;
        self.next = record.number + 1;
    }

    pub fn get(&self, kind: NameKind, name: &str) -> Option<SnapshotId> {
        self.names.get(&(kind, name.to_owned())).copied()
    }

    /// Return all names of a kind.
    pub fn all(&self, kind: NameKind) -> BTreeMap<String, SnapshotId> {
        let of_kind = self.names.iter().filter(|((found, _), _)| *found == kind);
        of_kind.map(|((_, name), target)| (name.clone(), *target)).collect()
    }
}

impl Operation {
    const LEAST_BYTES: usize = 35;

    fn write(&self, writer: &mut Writer) {
        writer.u8(self.removes.into());
        writer.u8(self.kind as u8);
        writer.string(&self.name);
        writer.u64(self.target.branch);
        writer.u64(self.target.number);
        writer.id(self.target.uuid);
    }

    fn parse(cursor: &mut Cursor) -> Result<Operation> {
        let removes = cursor.flag()?;
        let kind = match cursor.u8()? {
            0 => NameKind::Branch,
            1 => NameKind::Tag,
            2 => NameKind::Pin,
            3 => NameKind::Decision,
            other => return Err(Error::new("unknown-feature", format!("a name has the unknown kind {other}")).hint("upgrade Penstock")),
        };
        let name = cursor.string()?;
        let target = SnapshotId { branch: cursor.u64()?, number: cursor.u64()?, uuid: cursor.id()? };
        Ok(Operation { removes, kind, name, target })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Id;

    #[test]
    fn a_record_comes_back_and_none_of_its_damages_does() {
        let target = SnapshotId { branch: 3, number: 70_000, uuid: Id([7; 16]) };
        let operation = |removes, kind, name: &str| Operation { removes, kind, name: name.into(), target };
        let operations = vec![operation(false, NameKind::Pin, "loader-1"), operation(true, NameKind::Tag, "")];
        let names = Names { number: 5, time_us: -3, operations };
        let body = names.encode();
        assert_eq!(Names::parse(&Bytes::from(body.clone()), 5).ok().as_ref(), Some(&names));
        assert!(Names::parse(&Bytes::from(body.clone()), 6).is_err());
        for at in 0..body.len() {
            assert!(Names::parse(&Bytes::copy_from_slice(&body[..at]), 5).is_err());
            let mut damaged = body.clone();
            damaged[at] ^= 1;
            assert!(Names::parse(&Bytes::from(damaged), 5).is_err());
        }
    }
}
