//! The best way to read an object.

/// The best way to read an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Use `map`: the object is mapped into memory, and reads need no further calls.
    Mapped,
    /// Use `fetch`: callers plan all ranges in advance.
    Ranged,
    /// Like `Ranged`, but `stream` reads large values straight into their destination.
    Streamed,
}

/// The order in which a mapped object will be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    InOrder,
    Random,
}

impl Access {
    pub fn is_mapped(self) -> bool {
        self == Access::Mapped
    }
}
