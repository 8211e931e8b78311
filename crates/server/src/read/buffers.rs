//! Buffers for pieces of bodies, used again after they were sent. Fresh memory would have to be zeroed by the kernel for each piece.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Number of idle buffers that are kept.
const IDLE: usize = 64;

/// Idle buffers.
#[derive(Debug, Default)]
pub struct Buffers {
    idle: Mutex<Vec<Vec<u8>>>,
}

/// A filled buffer, which returns to the idle ones when it is dropped.
struct Filled {
    memory: Vec<u8>,
    buffers: Arc<Buffers>,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        &self.memory
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        self.buffers.give_back(std::mem::take(&mut self.memory));
    }
}

impl Buffers {
    /// Return an idle buffer, or a new one. Its content is left over from earlier use.
    pub fn get(&self) -> Vec<u8> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Keep a buffer for later use.
    pub fn give_back(&self, memory: Vec<u8>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE {
            idle.push(memory);
        }
    }

    /// Return a filled buffer as bytes.
    pub fn freeze(self: &Arc<Buffers>, memory: Vec<u8>) -> Bytes {
        Bytes::from_owner(Filled { memory, buffers: self.clone() })
    }
}
