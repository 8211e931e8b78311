//! The faults that the proxy can inject, and their rates.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The request is carried out, but its reply is lost.
    Lose,
    /// The connection breaks before the request is carried out.
    Reset,
    /// The reply is 503 SlowDown; the request is not carried out.
    Throttle,
    /// The reply is 429 TooManyRequests; the request is not carried out.
    TooMany,
    /// The reply is 500 InternalError; the request is not carried out.
    Fail,
    /// The connection closes halfway through the body of the reply.
    Truncate,
    /// The reply is late.
    Late,
    /// A listing request receives an earlier listing.
    Stale,
}

pub(super) const NAMES: [(&str, Fault); 8] = [
    ("lose", Fault::Lose),
    ("reset", Fault::Reset),
    ("throttle", Fault::Throttle),
    ("toomany", Fault::TooMany),
    ("fail", Fault::Fail),
    ("truncate", Fault::Truncate),
    ("late", Fault::Late),
    ("stale", Fault::Stale),
];

/// The rate of each fault per thousand requests, and settings that apply to all faults.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    pub seed: u64,
    pub per_mille: [u64; NAMES.len()],
    /// A delay added to every reply.
    pub delay_ms: u64,
    /// The maximum extra delay of a late reply.
    pub late_ms: u64,
    /// The maximum number of consecutive faults for one method and path; 0 means no limit. A limit lets every request eventually
    /// succeed.
    pub in_a_row: u64,
}

impl Faults {
    /// Parse `name=value&…`; unknown names are an error.
    pub fn parse(query: &str) -> Result<Faults, String> {
        let mut faults = Faults { late_ms: 50, in_a_row: 3, ..Faults::default() };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| format!("`{pair}` is not of the form name=value"))?;
            let value: u64 = value.parse().map_err(|_| format!("`{value}` is not a number"))?;
            match (name, NAMES.iter().position(|(known, _)| *known == name)) {
                (_, Some(index)) => faults.per_mille[index] = value,
                ("all", _) => faults.per_mille = [value; NAMES.len()],
                ("seed", _) => faults.seed = value,
                ("delay_ms", _) => faults.delay_ms = value,
                ("late_ms", _) => faults.late_ms = value,
                ("in_a_row", _) => faults.in_a_row = value,
                _ => return Err(format!("unknown fault `{name}`")),
            }
        }
        Ok(faults)
    }
}
