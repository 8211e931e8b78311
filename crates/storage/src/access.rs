//! How an object is best read.

/// How an object is best read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// With `map`: it becomes memory, and reads cost no call.
    Mapped,
    /// With `fetch`: callers plan all ranges first.
    Ranged,
    /// Like `Ranged`, but `stream` reads large values straight to where they go.
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
