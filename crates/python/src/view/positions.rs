//! Positions in a view, as Python passes them: checked, and counted from the start.

use std::borrow::Cow;

use numpy::PyReadonlyArray1;
use penstock_dataset::{Stride, out_of_range};
use penstock_error::Result;

/// Positions are passed as arrays, because a Python list would be built and read element by element.
pub type Positions<'py> = PyReadonlyArray1<'py, i64>;

/// Return the numbers as a slice, copying them if the array is not contiguous.
pub fn in_line<'a>(array: &'a Positions<'_>) -> Cow<'a, [i64]> {
    array.as_slice().map_or_else(|_| Cow::Owned(array.as_array().to_vec()), Cow::Borrowed)
}

/// Resolve and check positions. Negative positions count from the end, as in NumPy.
pub fn resolve(positions: &[i64], len: u64, map: impl Fn(u64) -> u64) -> Result<Vec<u64>> {
    let counted = len as i64;
    if let Some(place) = positions.iter().position(|position| !(-counted..counted).contains(position)) {
        return Err(out_of_range(positions[place], len).rows(vec![place as u64]));
    }
    // Checked before, so that the length of the result is known.
    Ok(positions
        .iter()
        .map(|position| map(if *position < 0 { position + counted } else { *position } as u64))
        .collect())
}

/// Resolve and check a range of positions, which count from the end if they are negative.
pub fn resolve_range(first: i64, step: i64, count: u64, len: u64) -> Result<Vec<Stride>> {
    let (first, step, count, len) = (i128::from(first), i128::from(step), i128::from(count), i128::from(len));
    // How many places are passed before a limit, which is reached in the direction of the step.
    let before = |limit: i128| {
        if step == 0 {
            count
        } else {
            ((limit - first) * step.signum()).max(0).unsigned_abs().div_ceil(step.unsigned_abs()) as i128
        }
        .min(count)
    };
    let outside = match first < -len || first >= len {
        true => 0,
        false => before(if step < 0 { -len - 1 } else { len }),
    };
    if outside < count {
        return Err(out_of_range((first + step * outside) as i64, len as u64).rows(vec![outside as u64]));
    }
    let turn = before(if step < 0 { -1 } else { 0 });
    let part = |begin: i128, end: i128| {
        let place = first + step * begin;
        let first = if place < 0 { place + len } else { place };
        Stride { first: first as u64, step: step as i64, count: (end - begin) as u64 }
    };
    Ok(vec![part(0, turn), part(turn, count)])
}
