//! A store in the memory of one process, for tests and scratch work: `memory://name`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::counters::{Counters, add};
use crate::listing::{ListedObject, Listing};
use crate::process::no_fork;
use crate::ranges::{RangeRequest, Then};
use crate::read::{Features, Read};
use crate::store::{Created, ObjectWriter, Store};

type Objects = Arc<Mutex<BTreeMap<String, Bytes>>>;

#[derive(Debug, Default)]
pub struct Memory {
    uri: String,
    objects: Objects,
    counters: Counters,
}

/// Run `work` under a lock that forked children keep using.
fn locked<T, R>(lock: &Mutex<T>, work: impl FnOnce(&mut T) -> R) -> R {
    let _no_fork = no_fork();
    work(&mut lock.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Memory {
    /// Return this process's store named `name`. Stores with the same name share their objects.
    pub fn named(name: &str) -> Memory {
        static STORES: Mutex<BTreeMap<String, Objects>> = Mutex::new(BTreeMap::new());
        let objects = locked(&STORES, |stores| stores.entry(name.to_owned()).or_default().clone());
        Memory { uri: format!("memory://{name}"), objects, counters: Counters::default() }
    }

    /// Build an unnamed store that contains exactly these objects.
    pub fn holding(objects: BTreeMap<String, Bytes>) -> Memory {
        Memory { uri: "memory://".into(), objects: Arc::new(Mutex::new(objects)), counters: Counters::default() }
    }

    /// Return all objects. The bodies are shared, not copied.
    pub fn objects(&self) -> BTreeMap<String, Bytes> {
        locked(&self.objects, |objects| objects.clone())
    }

    fn object(&self, name: &str) -> Result<Bytes> {
        let body = locked(&self.objects, |objects| objects.get(name).cloned());
        body.ok_or_else(|| Error::new("object-not-found", format!("cannot read `{}/{name}`: no such object", self.uri)))
    }
}

struct MemoryWriter {
    name: String,
    body: Vec<u8>,
    objects: Objects,
}

impl ObjectWriter for MemoryWriter {
    fn write(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.body.extend_from_slice(&bytes);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let MemoryWriter { name, body, objects } = *self;
        locked(&objects, |objects| objects.insert(name, body.into()));
        Ok(())
    }
}

impl Read for Memory {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn features(&self) -> Features {
        Features::default()
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn read(&self, name: &str) -> Result<Bytes> {
        let body = self.object(name)?;
        add(&self.counters.reads, 1);
        add(&self.counters.read_bytes, body.len() as u64);
        Ok(body)
    }

    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        let range_of_object = |(index, range): (usize, RangeRequest)| {
            add(&self.counters.ranges, 1);
            add(&self.counters.range_bytes, range.end() - range.begin);
            let body = self.object(&range.name)?;
            if range.object_bytes.is_some_and(|bytes| bytes != body.len() as u64) || range.end() > body.len() as u64 {
                return Err(Error::new(
                    "object-truncated",
                    format!("cannot read `{}/{}`: unexpected length of {} bytes", self.uri, range.name, body.len()),
                ));
            }
            let pieces: Vec<Bytes> =
                range.places().map(|place| body.slice(place.start as usize..place.end as usize)).collect();
            pieces.iter().enumerate().for_each(|(number, piece)| then(index, number, piece));
            Ok(pieces)
        };
        ranges.into_iter().enumerate().map(range_of_object).collect()
    }

    fn map(&self, name: &str, bytes: u64) -> Result<Bytes> {
        let body = self.object(name)?;
        add(&self.counters.maps, 1);
        add(&self.counters.mapped_bytes, bytes);
        if body.len() as u64 != bytes {
            return Err(Error::new(
                "object-truncated",
                format!("cannot read `{}/{name}`: the object has {} bytes, expected {bytes}", self.uri, body.len()),
            ));
        }
        Ok(body)
    }
}

impl Store for Memory {
    fn exists(&self, name: &str) -> Result<bool> {
        add(&self.counters.lookups, 1);
        Ok(locked(&self.objects, |objects| objects.contains_key(name)))
    }

    fn list_page(&self, folder: &str, _after: Option<&str>) -> Result<Listing> {
        add(&self.counters.lists, 1);
        let prefix = format!("{folder}/");
        let listed = |(name, body): (&String, &Bytes)| {
            let name = name.strip_prefix(&prefix).filter(|rest| !rest.contains('/'))?;
            Some(ListedObject { name: name.to_owned(), bytes: body.len() as u64, modified: None })
        };
        Ok(Listing {
            entries: locked(&self.objects, |objects| objects.iter().filter_map(listed).collect()),
            next: None,
        })
    }

    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>> {
        add(&self.counters.puts, 1);
        Ok(Box::new(MemoryWriter { name: name.to_owned(), body: Vec::new(), objects: self.objects.clone() }))
    }

    fn sync(&self, _folders: &[&str]) -> Result<()> {
        Ok(())
    }

    fn create(&self, name: &str, body: &[u8]) -> Result<Created> {
        add(&self.counters.creates, 1);
        locked(&self.objects, |objects| match objects.contains_key(name) {
            true => Ok(Created::Exists),
            false => {
                objects.insert(name.to_owned(), Bytes::copy_from_slice(body));
                Ok(Created::Created)
            }
        })
    }

    fn overwrite(&self, name: &str, body: &[u8]) -> Result<()> {
        locked(&self.objects, |objects| objects.insert(name.to_owned(), Bytes::copy_from_slice(body)));
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<()> {
        add(&self.counters.deletes, 1);
        locked(&self.objects, |objects| objects.remove(name));
        Ok(())
    }

    fn survey(&self, see: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()> {
        let _ = self.objects().keys().try_for_each(|name| see(name)); // A break from `see` is not a failure.
        Ok(())
    }

    fn initialise(&self) -> Result<()> {
        Ok(())
    }

    fn prove(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_fork_waits_for_the_thread_inside() -> Result<()> {
        let store = Memory::named("forked");
        store.put("one", b"1")?;
        let (inside, entered) = channel();
        let objects = store.objects.clone();
        let holder = std::thread::spawn(move || {
            locked(&objects, |_| {
                let _ = inside.send(());
                // The fork below waits for this thread's lock, so no later code could wake this thread.
                std::thread::sleep(Duration::from_millis(300)); // Sleep while the fork begins.
            });
        });
        assert!(entered.recv().is_ok());
        // SAFETY: the child reads the store, which is what the test checks, and exits. The child needs no other thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the alarm kills a child that hangs, and the parent detects this. `_exit` runs no handlers.
            unsafe {
                libc::alarm(10);
                libc::_exit(i32::from(store.read("one").is_err()));
            }
        }
        let mut status = 0;
        // SAFETY: `child` is our own child, and `status` has room for its status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(holder.join().is_ok());
        Ok(())
    }
}
