//! Converts prepared Python values to columns. `penstock/columns/` prepares dtypes, nulls and shapes, and this file copies the
//! bytes.

use std::cell::RefCell;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use numpy::{PyArray1, PyArrayMethods as _, PyReadonlyArray1, PyReadonlyArray2};
use penstock_dataset::{Input, parallel_map};
use penstock_error::Error;
use penstock_tensor::{Column, Pull, Pulled, Ragged};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString, PyTuple};

use crate::errors::OrRaise;

/// The exception that Python raised while the core pulled values. The core's own error only reports that the pull failed.
pub type Raised = Arc<Mutex<Option<PyErr>>>;

/// Large values that Python provides in parts.
struct PythonParts {
    pull: Py<PyAny>,
    raised: Raised,
    /// The transaction that reads the values.
    owner: usize,
}

/// The owner of values that no transaction of a caller pulls.
pub const NO_OWNER: usize = 0;

thread_local! {
    /// The transactions that are pulling a value in this thread, outermost first.
    static PULLS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Return whether transaction `owner` is pulling a value in this thread.
pub fn is_pulled_by(owner: usize) -> bool {
    PULLS.with_borrow(|pulls| pulls.contains(&owner))
}

impl std::fmt::Debug for PythonParts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PythonParts")
    }
}

impl Pull for PythonParts {
    fn pull(
        &self,
        row: usize,
        window: &[Range<u64>],
        take: &mut dyn FnMut(&[u8]) -> penstock_error::Result<()>,
    ) -> penstock_error::Result<()> {
        let wanted: Vec<(u64, u64)> = window.iter().map(|range| (range.start, range.end)).collect();
        loop {
            PULLS.with_borrow_mut(|pulls| pulls.push(self.owner));
            let pulled = Python::attach(|py| {
                let array = self.pull.bind(py).call1((row, &wanted))?.cast_into::<PyArray1<u8>>()?;
                Ok::<_, PyErr>(array.readonly().as_slice()?.to_vec())
            });
            PULLS.with_borrow_mut(Vec::pop);
            let bytes = pulled.map_err(|error| {
                *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                Error::new("invalid-value", "could not be read from its source").at_row(row as u64)
            })?;
            if !wanted.is_empty() {
                return take(&bytes);
            }
            // Bytes, which have no slices, end with an empty piece.
            if bytes.is_empty() {
                return Ok(());
            }
            take(&bytes)?;
        }
    }
}

/// Convert one prepared column, which is one of
/// `("fixed", bytes (n·cell,) uint8, validity (n,) bool | None, n)` ·
/// `("items", list of bytes | bytearray | str | Path | (height, width, channels, bits, pixels (m,) uint8) | None)` ·
/// `("flat", data (m,) uint8, ends (n,) int64, free (n, k) int64 | None, validity (n,) bool | None)` ·
/// `("coded", Words, indices of words (8·n,) uint8 holding int64, validity (n,) bool | None)` ·
/// `("pulled", pull(row, [(low, high), …]) -> (m,) uint8, shapes: list of n lists, validity (n,) bool | None)`. Bytes have no shapes:
/// `pull(row, [])` returns their next piece, which is empty at the end.
///
/// Row numbers in errors start at `first_row`.
pub fn input(
    py: Python<'_>,
    prepared: &Bound<'_, PyAny>,
    name: &str,
    first_row: u64,
    raised: &Raised,
    owner: usize,
) -> PyResult<Input> {
    let parts = prepared.cast::<PyTuple>()?;
    let form: String = parts.get_item(0)?.extract()?;
    let column = match form.as_str() {
        "fixed" => {
            let data: PyReadonlyArray1<'_, u8> = parts.get_item(1)?.extract()?;
            let validity = validity(&parts.get_item(2)?)?;
            Column::Fixed { data: data.as_slice()?.to_vec(), validity, samples: parts.get_item(3)?.extract()? }
        }
        "items" => items(py, parts.get_item(1)?.cast::<PyList>()?, name, first_row)?,
        "flat" => {
            let data: PyReadonlyArray1<'_, u8> = parts.get_item(1)?.extract()?;
            let ends: PyReadonlyArray1<'_, i64> = parts.get_item(2)?.extract()?;
            let free: Option<PyReadonlyArray2<'_, i64>> = parts.get_item(3)?.extract()?;
            let data = data.as_slice()?;
            let ends = ends_of(ends.as_slice()?, data.len(), name).or_raise(py)?;
            let free = match free {
                Some(free) => free.as_slice()?.iter().map(|size| *size as u64).collect(),
                None => Vec::new(),
            };
            Column::Ragged(Ragged { data: data.to_vec(), ends, free, validity: validity(&parts.get_item(4)?)? })
        }
        "coded" => {
            let words: PyRef<'_, Words> = parts.get_item(1)?.extract()?;
            let places: PyReadonlyArray1<'_, u8> = parts.get_item(2)?.extract()?;
            let data = places.as_slice()?.to_vec();
            let samples = data.len() / 8;
            let column = Column::Fixed { data, validity: validity(&parts.get_item(3)?)?, samples };
            return Ok(Input { name: name.into(), column, words: Some(words.0.clone()) });
        }
        "pulled" => {
            let source = Arc::new(PythonParts { pull: parts.get_item(1)?.unbind(), raised: raised.clone(), owner });
            Column::Pulled(Pulled {
                shapes: parts.get_item(2)?.extract()?,
                validity: validity(&parts.get_item(3)?)?,
                source,
            })
        }
        other => return Err(Error::new("internal", format!("unknown form `{other}`"))).or_raise(py),
    };
    Ok(Input { name: name.into(), column, words: None })
}

/// The words of a category column, shared by all slices of the column.
#[pyclass(frozen, module = "penstock._core")]
pub struct Words(Arc<Ragged>);

#[pymethods]
impl Words {
    /// Copy the words. Shapes: `data` (m,) uint8, `ends` (k,) int64.
    #[new]
    fn new(py: Python<'_>, data: PyReadonlyArray1<'_, u8>, ends: PyReadonlyArray1<'_, i64>) -> PyResult<Words> {
        let data = data.as_slice()?.to_vec();
        let ends = ends_of(ends.as_slice()?, data.len(), "words").or_raise(py)?;
        Ok(Words(Arc::new(Ragged { data, ends, ..Ragged::default() })))
    }
}

/// Check that `ends` ascend to the end of the data, and convert them.
fn ends_of(ends: &[i64], bytes: usize, name: &str) -> penstock_error::Result<Vec<u64>> {
    let ends: Vec<u64> = ends.iter().map(|end| *end as u64).collect();
    if ends.is_sorted() && ends.last().copied().unwrap_or(0) == bytes as u64 {
        return Ok(ends);
    }
    Err(Error::new(
        "invalid-value",
        format!("cannot append to column `{name}`: offsets do not ascend to the end of the data"),
    ))
}

fn validity(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<bool>>> {
    let validity: Option<PyReadonlyArray1<'_, bool>> = value.extract()?;
    let list = validity.map(|validity| validity.as_slice().map(<[bool]>::to_vec)).transpose()?;
    Ok(list.filter(|list| list.contains(&false)))
}

/// A value that is read or encoded without the GIL.
enum Later {
    File(PathBuf),
    /// Pixels to encode as PNG: height, width, channels, bits.
    Pixels([usize; 4], Vec<u8>),
}

/// Collect a list of values. Bytes and text are copied while the GIL is held. Afterwards, all threads read files and encode
/// arrays as PNG without the GIL.
fn items(py: Python<'_>, list: &Bound<'_, PyList>, name: &str, first_row: u64) -> PyResult<Column> {
    let mut ragged = Ragged::default();
    let mut later: Vec<(usize, Later)> = Vec::new();
    for (index, item) in list.iter().enumerate() {
        if let Ok(bytes) = item.cast::<PyBytes>() {
            ragged.push(Some(bytes.as_bytes()), &[]);
        } else if let Ok(text) = item.cast::<PyString>() {
            let text = text.to_cow().map_err(|_| {
                let error =
                    Error::new("invalid-value", "is not UTF-8 (it contains a lone surrogate)").at_row(index as u64);
                crate::errors::raise(py, refused(error, name, first_row))
            })?;
            ragged.push(Some(text.as_bytes()), &[]);
        } else if item.is_none() {
            ragged.push(None, &[]);
        } else if let Ok(bytes) = item.cast::<PyByteArray>() {
            ragged.push(Some(&bytes.to_vec()), &[]);
        } else if item.hasattr("__fspath__")? {
            later.push((index, Later::File(item.extract()?)));
            ragged.push(Some(b""), &[]);
        } else if let Ok(parts) = item.cast::<PyTuple>() {
            let (height, width, channels, bits, pixels): (usize, usize, usize, usize, PyReadonlyArray1<'_, u8>) =
                parts.extract()?;
            later.push((index, Later::Pixels([height, width, channels, bits], pixels.as_slice()?.to_vec())));
            ragged.push(Some(b""), &[]);
        } else {
            let kind = item.get_type().name()?.to_string();
            let error = Error::new("invalid-value", format!("is a `{kind}`, expected bytes, str, Path or None"))
                .at_row(index as u64);
            return Err(refused(error, name, first_row)).or_raise(py);
        }
    }
    if later.is_empty() {
        return Ok(Column::Ragged(ragged));
    }
    py.detach(|| fill(ragged, &later)).map_err(|error| refused(error, name, first_row)).or_raise(py)
}

/// Add the column to an error and shift its row numbers by `first_row` to match the user's input.
fn refused(error: Error, name: &str, first_row: u64) -> Error {
    error.column(name).context(format!("cannot append to column `{name}`")).shift_rows(first_row)
}

/// Read or encode the pending values and store them in their slots. Files are read directly into the column's buffer.
fn fill(small: Ragged, later: &[(usize, Later)]) -> penstock_error::Result<Column> {
    let (mut sizes, mut pixel_bytes) = (Vec::with_capacity(later.len()), 0);
    for (_, later) in later {
        match later {
            Later::File(path) => sizes.push(std::fs::metadata(path).map_or(0, |file| file.len() as usize)),
            Later::Pixels(_, pixels) => {
                sizes.push(0);
                pixel_bytes += pixels.len();
            }
        }
    }
    let work = sizes.iter().sum::<usize>() + pixel_bytes;
    let mut data = vec![0; sizes.iter().sum()];
    let mut slots = Vec::with_capacity(later.len());
    let mut rest = data.as_mut_slice();
    for size in &sizes {
        let (slot, more) = rest.split_at_mut(*size);
        slots.push(Mutex::new(slot));
        rest = more;
    }
    // Encoded pixels, and files whose size changes during the read, are returned separately instead of being stored in a slot.
    let bodies = parallel_map(later.len(), work, |index| match &later[index] {
        (row, Later::File(path)) => {
            let mut slot = slots[index].lock().unwrap_or_else(PoisonError::into_inner);
            read_file(path, &mut slot).map_err(|error| {
                Error::new("source-not-found", format!("is `{}`, which cannot be read: {error}", path.display()))
                    .at_row(*row as u64)
            })
        }
        (row, Later::Pixels([height, width, channels, bits], pixels)) => {
            let encoded = penstock_codec::encode_png(*height, *width, *channels, *bits as u8, pixels);
            encoded.map(Some).map_err(|error| {
                Error::new(error.code(), format!("is not an image: {}", error.message())).at_row(*row as u64)
            })
        }
    })?;
    let bodies = bodies.into_iter().collect::<penstock_error::Result<Vec<_>>>()?;
    drop(slots);
    let ends = sizes.iter().scan(0, |end, size| {
        *end += *size as u64;
        Some(*end)
    });
    let files = Ragged { data, ends: ends.collect(), ..Ragged::default() };
    if small.data.is_empty() && bodies.iter().all(Option::is_none) {
        let mut file = later.iter().zip(&files.ends).peekable();
        let mut end = 0;
        let ends = (0..small.len()).map(|row| {
            end = file.next_if(|((index, _), _)| *index == row).map_or(end, |(_, end)| *end);
            end
        });
        return Ok(Column::Ragged(Ragged {
            ends: ends.collect(),
            data: files.data,
            free: Vec::new(),
            validity: small.validity,
        }));
    }
    let mut ragged = Ragged::default();
    let mut made = later.iter().zip(bodies).enumerate().peekable();
    for row in 0..small.len() {
        match made.next_if(|(_, ((index, _), _))| *index == row) {
            None => ragged.push((!small.is_null(row)).then(|| small.value(row)), &[]),
            Some((index, (_, body))) => ragged.push(Some(body.as_deref().unwrap_or_else(|| files.value(index))), &[]),
        }
    }
    Ok(Column::Ragged(ragged))
}

/// Read a file into a slot of the expected size. If the size has changed, return the whole content instead.
fn read_file(path: &Path, slot: &mut [u8]) -> std::io::Result<Option<Vec<u8>>> {
    let mut file = std::fs::File::open(path)?;
    let mut filled = 0;
    while filled < slot.len() {
        match file.read(&mut slot[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let mut more = Vec::new();
    file.read_to_end(&mut more)?;
    if filled == slot.len() && more.is_empty() {
        return Ok(None);
    }
    Ok(Some([&slot[..filled], &more].concat()))
}
