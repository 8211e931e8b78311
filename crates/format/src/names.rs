//! Records of the names log (spec section 9).

use std::collections::BTreeMap;
use std::sync::Arc;

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

impl NameKind {
    const ALL: [NameKind; 4] = [NameKind::Branch, NameKind::Tag, NameKind::Pin, NameKind::Decision];
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
    /// The objects with the names before these operations, oldest first.
    pub objects: Vec<ObjectRef>,
    pub operations: Vec<Operation>,
    /// The last `own` operations are new in this record.
    pub own: u64,
}

/// Maximum number of bytes in a record of the names log. A larger one moves its operations to an object.
pub const NAMES_BYTES: usize = 4 << 10;

/// Maximum number of bytes of branches that a record repeats from its objects.
const BRANCHES_BYTES: usize = 1 << 10;

/// A new object takes the place of earlier ones that are at most this many times as long. A larger factor rewrites names more often, and a
/// smaller one leaves more objects to be read.
const GROWTH: u64 = 8;

impl Names {
    pub fn encode(&self) -> Vec<u8> {
        seal(Magic::Names, |writer| {
            writer.u64(self.number);
            writer.u64(self.time_us.cast_unsigned());
            writer.list(&self.objects, |writer, object| object.write(writer));
            writer.list(&self.operations, |writer, operation| operation.write(writer));
            writer.varint(self.own);
        })
    }

    /// Parse a names record that was read as record `number` of the log.
    pub fn parse(body: &Bytes, number: u64) -> Result<Names> {
        let names = unseal(Magic::Names, body, |cursor| {
            let found = cursor.u64()?;
            if found != number {
                return Err(malformed(format!(
                    "the names record at number {number} identifies itself as number {found}"
                )));
            }
            Ok(Names {
                number,
                time_us: cursor.u64()?.cast_signed(),
                objects: cursor.list(ObjectRef::LEAST_BYTES, ObjectRef::parse)?,
                operations: cursor.list(Operation::LEAST_BYTES, Operation::parse)?,
                own: cursor.varint()?,
            })
        })?;
        match names.own > 0 && names.own <= names.operations.len() as u64 {
            true => Ok(names),
            false => Err(malformed(format!(
                "the names record {number} adds {} of its {} operations",
                names.own,
                names.operations.len()
            ))),
        }
    }

    /// Return what a name names if this record has the answer, whatever its objects have: None if the name was removed.
    pub fn find(&self, kind: NameKind, name: &str) -> Option<Option<SnapshotId>> {
        found(&self.operations, kind, name)
    }
}

/// Return the target of the last of these operations with a name: None if it removes the name.
fn found(operations: &[Operation], kind: NameKind, name: &str) -> Option<Option<SnapshotId>> {
    let last = operations.iter().rev().find(|operation| operation.kind == kind && operation.name == name);
    last.map(Operation::result)
}

/// An object of names: the last operation of each name in a part of the log.
#[derive(Debug, Clone)]
pub struct Layer {
    pub object: ObjectRef,
    /// In the order of kinds and names.
    entries: Arc<Vec<Operation>>,
}

impl Layer {
    /// Parse an object of names. Only a first object lacks removals, which `Folded::follow` checks.
    pub fn parse(object: ObjectRef, body: &Bytes) -> Result<Layer> {
        let entries = unseal(Magic::Names, body, |cursor| cursor.list(Operation::LEAST_BYTES, Operation::parse))?;
        match entries.iter().is_sorted_by(|one, other| one.key() < other.key()) {
            true => Ok(Layer { object, entries: Arc::new(entries) }),
            false => Err(malformed("a names object has names that are not in order")),
        }
    }

    fn find(&self, kind: NameKind, name: &str) -> Option<Option<SnapshotId>> {
        let place = self.entries.binary_search_by(|entry| entry.key().cmp(&(kind, name))).ok()?;
        Some(self.entries[place].result())
    }
}

/// A new object of names, and its body.
pub struct NewLayer {
    pub layer: Layer,
    pub body: Vec<u8>,
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
    /// The objects of the last record, oldest first.
    layers: Vec<Layer>,
    /// The operations of the last record.
    operations: Vec<Operation>,
}

impl Folded {
    /// Return the objects of a record that are not known.
    pub fn unknown(&self, record: &Names) -> Vec<ObjectRef> {
        let is_unknown = |object: &&ObjectRef| self.layers.iter().all(|layer| layer.object != **object);
        record.objects.iter().filter(is_unknown).copied().collect()
    }

    /// Become the names after a record. `read` has its objects that were not known. Costs no copy of those that were.
    pub fn follow(&mut self, record: Names, read: &[Layer]) -> Result<()> {
        let find = |object: &ObjectRef| read.iter().chain(&self.layers).find(|layer| layer.object == *object).cloned();
        let layers: Vec<Layer> = record.objects.iter().filter_map(find).collect();
        if layers.len() != record.objects.len() {
            return Err(Error::new("internal", "a names record was folded without its objects"));
        }
        if layers.first().is_some_and(|first| first.entries.iter().any(|entry| entry.removes)) {
            return Err(malformed("the first names object has a removal"));
        }
        let crc = sealed_crc(&record.encode());
        let Names { number, time_us, operations, .. } = record;
        *self = Folded { next: number + 1, time_us, crc, layers, operations };
        Ok(())
    }

    pub fn get(&self, kind: NameKind, name: &str) -> Option<SnapshotId> {
        let in_layers = || self.layers.iter().rev().find_map(|layer| layer.find(kind, name));
        found(&self.operations, kind, name).or_else(in_layers).flatten()
    }

    /// Return all names of a kind.
    pub fn all(&self, kind: NameKind) -> BTreeMap<String, SnapshotId> {
        let mut names = BTreeMap::new();
        let all = self.layers.iter().flat_map(|layer| layer.entries.iter()).chain(&self.operations);
        for operation in all.filter(|operation| operation.kind == kind) {
            match operation.result() {
                Some(target) => names.insert(operation.name.clone(), target),
                None => names.remove(&operation.name),
            };
        }
        names
    }

    /// Return the next record, and the object `id` if the record needs a new one.
    pub fn followed_by(&self, operation: Operation, time_us: i64, id: Id) -> (Names, Option<NewLayer>) {
        let operations = self.operations.iter().cloned().chain([operation.clone()]).collect();
        let mut objects: Vec<ObjectRef> = self.layers.iter().map(|layer| layer.object).collect();
        let names = Names { number: self.next, time_us, objects: objects.clone(), operations, own: 1 };
        let mut bytes = names.encode().len() as u64;
        if bytes <= NAMES_BYTES as u64 {
            return (names, None);
        }
        while objects.last().is_some_and(|object| object.bytes <= GROWTH * bytes) {
            bytes += objects.pop().map_or(0, |object| object.bytes);
        }
        let mut entries = BTreeMap::new();
        let replaced = self.layers[objects.len()..].iter().flat_map(|layer| layer.entries.iter());
        entries.extend(replaced.chain(&self.operations).map(|entry| (entry.key(), entry)));
        let entries: Vec<Operation> =
            entries.into_values().filter(|entry| !entry.removes || !objects.is_empty()).cloned().collect();
        let body = seal(Magic::Names, |writer| writer.list(&entries, |writer, operation| operation.write(writer)));
        let layer = Layer { object: ObjectRef::of(id, &body), entries: Arc::new(entries) };
        objects.push(layer.object);
        let mut operations = self.branches();
        operations.push(operation);
        (Names { objects, operations, ..names }, Some(NewLayer { layer, body }))
    }

    /// Return the operations that set the present branches, if they are short enough to be repeated.
    fn branches(&self) -> Vec<Operation> {
        let set_name = |(name, target)| Operation { removes: false, kind: NameKind::Branch, name, target };
        let branches: Vec<Operation> = self.all(NameKind::Branch).into_iter().map(set_name).collect();
        let written = Writer::written(|writer| branches.iter().for_each(|operation| operation.write(writer)));
        if written.len() > BRANCHES_BYTES { Vec::new() } else { branches }
    }
}

impl Operation {
    const LEAST_BYTES: usize = 35;

    fn key(&self) -> (NameKind, &str) {
        (self.kind, &self.name)
    }

    /// Return what the name names after this operation.
    fn result(&self) -> Option<SnapshotId> {
        (!self.removes).then_some(self.target)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u8(self.removes.into());
        writer.u8(self.kind as u8);
        writer.string(&self.name);
        self.target.write(writer);
    }

    fn parse(cursor: &mut Cursor) -> Result<Operation> {
        let (removes, code) = (cursor.flag()?, cursor.u8()?);
        let Some(kind) = NameKind::ALL.get(code as usize).copied() else {
            return Err(
                Error::new("unknown-feature", format!("a name has unknown kind {code}")).hint("upgrade Penstock")
            );
        };
        Ok(Operation { removes, kind, name: cursor.string()?, target: SnapshotId::read(cursor)? })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn operation(removes: bool, kind: NameKind, name: &str) -> Operation {
        Operation {
            removes,
            kind,
            name: name.into(),
            target: SnapshotId { branch: 3, number: 70_000, uuid: Id([7; 16]) },
        }
    }

    #[test]
    fn a_record_comes_back_and_none_of_its_damages_does() {
        let operations = vec![operation(false, NameKind::Pin, "loader-1"), operation(true, NameKind::Tag, "")];
        let object = |bytes| ObjectRef { id: Id([1; 16]), bytes, crc: 5 };
        for objects in [vec![], vec![object(900)], vec![object(900), object(40)]] {
            let names = Names { number: 5, time_us: -3, objects, operations: operations.clone(), own: 1 };
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

    /// The names log in memory: what each operation stored, and a model of what names exist.
    #[derive(Default)]
    struct Log {
        folded: Folded,
        objects: HashMap<Id, Bytes>,
        model: BTreeMap<(NameKind, String), SnapshotId>,
        /// Bytes of all records and objects.
        stored_bytes: usize,
        most_objects: usize,
    }

    impl Log {
        /// Append an operation, and read the names back as another process would.
        fn append(&mut self, operation: Operation) -> Result<()> {
            let number = self.folded.next;
            let mut id = [0; 16];
            id[..8].copy_from_slice(&number.to_le_bytes());
            let (names, new) = self.folded.followed_by(operation.clone(), 1, Id(id));
            if let Some(NewLayer { layer, body }) = new {
                self.stored_bytes += body.len();
                self.objects.insert(layer.object.id, body.into());
            }
            let body = Bytes::from(names.encode());
            assert!(body.len() <= NAMES_BYTES);
            (self.stored_bytes, self.most_objects) =
                (self.stored_bytes + body.len(), self.most_objects.max(names.objects.len()));
            let names = Names::parse(&body, number)?;
            let parse = |object: &ObjectRef| Layer::parse(*object, &self.objects[&object.id]);
            if number.is_multiple_of(97) {
                // A process that knows nothing needs the objects of this record only.
                self.folded = Folded::default();
            }
            let read = self.folded.unknown(&names).iter().map(parse).collect::<Result<Vec<Layer>>>()?;
            self.folded.follow(names, &read)?;
            match operation.result() {
                Some(target) => self.model.insert((operation.kind, operation.name), target),
                None => self.model.remove(&(operation.kind, operation.name)),
            };
            Ok(())
        }

        fn check(&self) {
            for kind in NameKind::ALL {
                let names = self.model.iter().filter(|((found, _), _)| *found == kind);
                let names: BTreeMap<String, SnapshotId> =
                    names.map(|((_, name), target)| (name.clone(), *target)).collect();
                assert!(names.iter().all(|(name, target)| self.folded.get(kind, name) == Some(*target)));
                assert_eq!(self.folded.all(kind), names);
            }
        }
    }

    #[test]
    fn each_of_many_names_costs_as_few_bytes_as_the_first_ones() -> Result<()> {
        let mut log = Log::default();
        let mut bytes_of = Vec::new();
        for thousand in 0..10 {
            let before = log.stored_bytes;
            for number in 0..1000 {
                log.append(operation(false, NameKind::Tag, &format!("tag-{thousand:03}-{number:04}")))?;
            }
            bytes_of.push((log.stored_bytes - before) / 1000);
        }
        log.check();
        assert!(bytes_of.iter().all(|bytes| *bytes < 4096), "{bytes_of:?}");
        let (first, last) = (bytes_of[..5].iter().sum::<usize>(), bytes_of[5..].iter().sum::<usize>());
        assert!(last < first / 4 * 5, "{bytes_of:?}");
        assert!(log.most_objects <= 4, "{}", log.most_objects);
        Ok(())
    }

    #[test]
    fn names_that_are_set_removed_and_set_again_are_those_of_a_model() -> Result<()> {
        let (mut log, mut random) = (Log::default(), 7u64);
        for number in 0..8000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(number);
            let pick = (random >> 33) as usize;
            // Names of one and of 255 bytes, few and many of them, in all kinds. Long names fill a record quickly.
            let kind = [NameKind::Branch, NameKind::Tag, NameKind::Decision, NameKind::Pin][pick % 4];
            let name = match pick / 4 % 3 {
                0 => format!("{}", pick / 12 % 30),
                1 => format!("a name of some length {}", pick / 12 % 700),
                _ => format!("{:ä<127}{}", pick / 12 % 10, ""),
            };
            let removes = log.model.contains_key(&(kind, name.clone())) && pick / 5000 % 3 > 0;
            let target = SnapshotId { branch: 0, number, uuid: Id([number as u8; 16]) };
            log.append(Operation { removes, kind, name, target })?;
            if number.is_multiple_of(400) {
                log.check();
            }
        }
        log.check();
        Ok(())
    }

    #[test]
    fn objects_that_no_writer_makes_are_refused() -> Result<()> {
        let object = |entries: &[Operation]| {
            let body = Bytes::from(seal(Magic::Names, |writer| {
                writer.list(entries, |writer, operation| operation.write(writer))
            }));
            (ObjectRef::of(Id([2; 16]), &body), body)
        };
        let set_name = |name: &str| operation(false, NameKind::Tag, name);
        for entries in [
            vec![set_name("b"), set_name("a")],
            vec![set_name("a"), set_name("a")],
            vec![set_name("a"), operation(false, NameKind::Branch, "a")],
        ] {
            let (reference, body) = object(&entries);
            assert!(Layer::parse(reference, &body).is_err());
        }
        let (reference, body) = object(&[operation(true, NameKind::Tag, "a"), set_name("c")]);
        let layer = Layer::parse(reference, &body)?;
        let names = Names { number: 0, time_us: 1, objects: vec![reference], operations: vec![set_name("b")], own: 1 };
        let mut folded = Folded::default();
        assert!(folded.follow(names.clone(), &[layer]).is_err());
        assert!(folded.follow(names, &[]).is_err());
        assert_eq!((folded.next, folded.all(NameKind::Tag).len()), (0, 0), "a record that is refused changes nothing");
        Ok(())
    }
}
