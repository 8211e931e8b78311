//! Records of the names log (spec section 9).

use std::collections::BTreeMap;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Magic, Writer, malformed, seal, unseal};
use crate::id::Id;
use crate::ids::{ObjectRef, SnapshotId, sealed_crc};

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

/// A record of the names log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    pub number: u64,
    pub time_us: i64,
    /// The names before these operations.
    pub object: Option<ObjectRef>,
    pub operations: Vec<Operation>,
    /// The last `own` operations are new in this record.
    pub own: u64,
}

/// Maximum number of bytes in a record of the names log. A larger one begins with a new object.
pub const NAMES_BYTES: usize = 64 << 10;

/// Maximum number of bytes of branches that a record repeats from its object.
const BRANCHES_BYTES: usize = 16 << 10;

impl Names {
    pub fn encode(&self) -> Vec<u8> {
        seal(Magic::Names, |writer| {
            writer.u64(self.number);
            writer.u64(self.time_us.cast_unsigned());
            writer.u8(self.object.is_some().into());
            self.object.iter().for_each(|object| object.write(writer));
            writer.list(&self.operations, |writer, operation| operation.write(writer));
            writer.varint(self.own);
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
        let object = if cursor.flag()? { Some(ObjectRef::parse(&mut cursor)?) } else { None };
        let operations = cursor.list(Operation::LEAST_BYTES, Operation::parse)?;
        let own = cursor.varint()?;
        cursor.end()?;
        if own == 0 || own > operations.len() as u64 {
            return Err(malformed(format!("the names record {number} adds {own} of its {} operations", operations.len())));
        }
        Ok(Names { number, time_us, object, operations, own })
    }

    /// Return what a name names if this record has the answer, whatever its object has: None if the name was removed.
    pub fn find(&self, kind: NameKind, name: &str) -> Option<Option<SnapshotId>> {
        let last = self.operations.iter().rev().find(|operation| operation.kind == kind && operation.name == name);
        last.map(|operation| (!operation.removes).then_some(operation.target))
    }
}

/// The names that exist after a record.
#[derive(Debug, Default)]
pub struct Folded {
    /// The number of the next record.
    pub next: u64,
    /// The time of the last record.
    pub time_us: i64,
    /// The CRC of the last record.
    pub crc: u32,
    /// The object and the operations of the last record.
    pub object: Option<ObjectRef>,
    operations: Vec<Operation>,
    names: BTreeMap<(NameKind, String), SnapshotId>,
}

impl Folded {
    /// Return the names after a record. `before` are the entries of the record's object.
    pub fn of(record: Names, before: &[Operation]) -> Folded {
        let mut folded = Folded::default();
        folded.apply(before);
        folded.follow(record);
        folded
    }

    /// Become the names after the next record.
    pub fn follow(&mut self, record: Names) {
        self.apply(&record.operations);
        let crc = sealed_crc(&record.encode());
        let Names { number, time_us, object, operations, .. } = record;
        *self = Folded { next: number + 1, time_us, crc, object, operations, names: std::mem::take(&mut self.names) };
    }

    fn apply(&mut self, operations: &[Operation]) {
        for Operation { removes, kind, name, target } in operations {
            match removes {
                true => self.names.remove(&(*kind, name.clone())),
                false => self.names.insert((*kind, name.clone()), *target),
            };
        }
    }

    pub fn get(&self, kind: NameKind, name: &str) -> Option<SnapshotId> {
        self.names.get(&(kind, name.to_owned())).copied()
    }

    /// Return all names of a kind.
    pub fn all(&self, kind: NameKind) -> BTreeMap<String, SnapshotId> {
        let of_kind = self.names.iter().filter(|((found, _), _)| *found == kind);
        of_kind.map(|((_, name), target)| (name.clone(), *target)).collect()
    }

    /// Return the next record, and the body of the object `id` if the record needs a new one.
    pub fn followed_by(&self, operation: Operation, time_us: i64, id: Id) -> (Names, Option<Vec<u8>>) {
        let operations = self.operations.iter().cloned().chain([operation.clone()]).collect();
        let names = Names { number: self.next, time_us, object: self.object, operations, own: 1 };
        if names.encode().len() <= NAMES_BYTES {
            return (names, None);
        }
        let entry = |((kind, name), target): (&(NameKind, String), &SnapshotId)| Operation {
            removes: false,
            kind: *kind,
            name: name.clone(),
            target: *target,
        };
        let entries: Vec<Operation> = self.names.iter().map(entry).collect();
        let body = seal(Magic::Names, |writer| writer.list(&entries, |writer, operation| operation.write(writer)));
        let object = Some(ObjectRef::of(id, &body));
        let branches = entries.into_iter().filter(|entry| entry.kind == NameKind::Branch);
        let mut operations: Vec<Operation> = branches.chain([operation.clone()]).collect();
        let mut writer = Writer::default();
        operations.iter().for_each(|operation| operation.write(&mut writer));
        if writer.0.len() > BRANCHES_BYTES {
            operations = vec![operation];
        }
        (Names { object, operations, ..names }, Some(body))
    }
}

/// Parse the entries of an object of names.
pub fn parse_entries(body: &Bytes) -> Result<Vec<Operation>> {
    let mut cursor = unseal(Magic::Names, body)?;
    let entries = cursor.list(Operation::LEAST_BYTES, Operation::parse)?;
    cursor.end()?;
    let key = |entry: &Operation| (entry.kind, entry.name.clone());
    match entries.iter().any(|entry| entry.removes) || !entries.is_sorted_by(|one, other| key(one) < key(other)) {
        true => Err(malformed("an object of names has a removal, or names that are not in order")),
        false => Ok(entries),
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

    fn operation(removes: bool, kind: NameKind, name: &str) -> Operation {
        Operation { removes, kind, name: name.into(), target: SnapshotId { branch: 3, number: 70_000, uuid: Id([7; 16]) } }
    }

    #[test]
    fn a_record_comes_back_and_none_of_its_damages_does() {
        let operations = vec![operation(false, NameKind::Pin, "loader-1"), operation(true, NameKind::Tag, "")];
        for object in [None, Some(ObjectRef { id: Id([1; 16]), bytes: 900, crc: 5 })] {
            let names = Names { number: 5, time_us: -3, object, operations: operations.clone(), own: 1 };
            let body = names.encode();
            assert_eq!(Names::parse(&Bytes::from(body.clone()), 5).ok().as_ref(), Some(&names));
            assert!(Names::parse(&Bytes::from(body.clone()), 6).is_err());
            for own in [0, 3] {
                assert!(Names::parse(&Names { own, ..names.clone() }.encode().into(), 5).is_err());
            }
            for at in 0..body.len() {
                assert!(Names::parse(&Bytes::copy_from_slice(&body[..at]), 5).is_err());
                let mut damaged = body.clone();
                damaged[at] ^= 1;
                assert!(Names::parse(&Bytes::from(damaged), 5).is_err());
            }
        }
    }

    #[test]
    fn thousands_of_operations_take_a_small_record_and_one_object() -> Result<()> {
        let (mut folded, mut objects) = (Folded::default(), std::collections::HashMap::new());
        let mut model = BTreeMap::new();
        for number in 0..5000u32 {
            let (removes, name) = (number % 3 == 2, format!("a name of some length {}", number % 2000 / 2));
            let target = SnapshotId { branch: 0, number: number.into(), uuid: Id([number as u8; 16]) };
            let operation = Operation { removes, kind: NameKind::Tag, name: name.clone(), target };
            let mut id = [0; 16];
            id[..4].copy_from_slice(&number.to_le_bytes());
            let (names, object) = folded.followed_by(operation, 1, Id(id));
            objects.extend(object.map(|body| (Id(id), Bytes::from(body))));
            let body = Bytes::from(names.encode());
            assert!(body.len() <= NAMES_BYTES);
            let names = Names::parse(&body, number.into())?;
            let before = names.object.map_or(Ok(Vec::new()), |object| parse_entries(&objects[&object.id]))?;
            folded = Folded::of(names, &before);
            if removes {
                model.remove(&name)
            } else {
                model.insert(name, target)
            };
            assert_eq!(folded.next, u64::from(number) + 1);
        }
        assert_eq!(folded.all(NameKind::Tag), model);
        assert!((2..20).contains(&objects.len()), "{}", objects.len());
        Ok(())
    }
}
