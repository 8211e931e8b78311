//! What is derived from samples: attachments, and the statistics of columns.

use std::sync::Arc;

use numpy::{PyArray1, PyReadonlyArray1};
use penstock_dataset::New;
use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::datafile::{Bounds, Span};
use penstock_format::manifest::{Attachment, Statistics};
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::OrRaise;
use crate::versions::branches::{Given, texts};
use crate::versions::snapshot::Snapshot;

fn ids(texts: &[String]) -> Result<Vec<Id>> {
    let id = |text: &String| {
        Id::parse(text).ok_or_else(|| Error::new("invalid-argument", format!("`{text}` is not the id of an object")))
    };
    texts.iter().map(id).collect()
}

/// Attach an object to a snapshot. `rows` are row ids, or None for all samples. Returns the new snapshot.
// Over 6 parameters: Python passes each by name.
#[expect(clippy::too_many_arguments, reason = "Python passes each by name")]
#[pyfunction]
#[pyo3(signature = (snapshot, kind, content, columns, rows, parameters, replaces, given))]
pub fn attach(
    py: Python<'_>,
    snapshot: &Snapshot,
    kind: &str,
    content: &[u8],
    columns: Vec<String>,
    rows: Option<PyReadonlyArray1<'_, i64>>,
    parameters: &str,
    replaces: Vec<String>,
    given: Given,
) -> PyResult<Snapshot> {
    let rows = rows.map(|rows| rows.as_array().iter().map(|id| id.cast_unsigned()).collect::<RowIds>());
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let replaces = ids(&replaces).or_raise(py)?;
    let new = New { kind, content, columns: &columns, rows, parameters, replaces: &replaces };
    let made = py.detach(|| penstock_dataset::attach(&snapshot.inner, &new, texts(&given))).or_raise(py)?;
    Ok(Snapshot { inner: Arc::new(made), options: snapshot.options.clone() })
}

/// Remove attachments, given by their objects. Returns the new snapshot.
#[pyfunction]
pub fn detach(py: Python<'_>, snapshot: &Snapshot, objects: Vec<String>, given: Given) -> PyResult<Snapshot> {
    let objects = ids(&objects).or_raise(py)?;
    let made = py.detach(|| penstock_dataset::detach(&snapshot.inner, &objects, texts(&given))).or_raise(py)?;
    Ok(Snapshot { inner: Arc::new(made), options: snapshot.options.clone() })
}

/// Return the attachments of a snapshot, each as a dict with its content and the row ids that it covers.
#[pyfunction]
pub fn attachments<'py>(py: Python<'py>, snapshot: &Snapshot) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let inner = &snapshot.inner;
    let found = py.detach(|| {
        let found = inner.attachments()?.into_iter();
        found
            .map(|(attachment, rows)| Ok((attachment, rows, inner.content_of(attachment)?.to_vec())))
            .collect::<Result<Vec<_>>>()
    });
    let name = |column: &u64| {
        inner.schema.columns.iter().find(|spec| spec.id == *column).map(|spec: &ColumnSpec| spec.name.clone())
    };
    let dict = |(attachment, rows, content): (&Attachment, RowIds, Vec<u8>)| {
        let dict = PyDict::new(py);
        dict.set_item("kind", &attachment.kind)?;
        dict.set_item("object", attachment.object.id.to_string())?;
        dict.set_item("columns", attachment.columns.iter().filter_map(name).collect::<Vec<String>>())?;
        dict.set_item("rows", PyArray1::from_iter(py, rows.iter().map(u64::cast_signed)))?;
        dict.set_item("parameters", &attachment.parameters)?;
        dict.set_item("content", PyBytes::new(py, &content))?;
        PyResult::Ok(dict)
    };
    found.or_raise(py)?.into_iter().map(dict).collect()
}

/// The first position of a fragment, the one after the last, and what is known.
type Known<'py> = (u64, u64, Option<Bound<'py, PyDict>>);

/// Return what is known of a column by fragment: the first position, the one after the last, and the statistics as a dict, or None.
#[pyfunction]
pub fn statistics<'py>(py: Python<'py>, snapshot: &Snapshot, column: &str) -> PyResult<Vec<Known<'py>>> {
    let found = py.detach(|| snapshot.inner.statistics(column)).or_raise(py)?;
    let dict = |Statistics { nulls, words, bounds }: Statistics| -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("nulls", nulls)?;
        dict.set_item("words", words)?;
        if let Some(Bounds { has_nan, span }) = bounds {
            dict.set_item("has_nan", has_nan)?;
            match span {
                None => dict.set_item("span", ())?,
                Some(Span::Signed(least, most)) => dict.set_item("span", (least, most))?,
                Some(Span::Unsigned(least, most)) => dict.set_item("span", (least, most))?,
                Some(Span::Float(least, most)) => dict.set_item("span", (least, most))?,
                Some(Span::Text(least, most)) => {
                    dict.set_item("span", (PyBytes::new(py, &least), most.map(|most| PyBytes::new(py, &most))))?;
                }
            }
        }
        Ok(dict)
    };
    let bounds_of_fragment = |fragment: penstock_dataset::FragmentStatistics| {
        let (positions, statistics) = (fragment.positions, fragment.statistics);
        PyResult::Ok((positions.start, positions.end, statistics.map(dict).transpose()?))
    };
    found.into_iter().map(bounds_of_fragment).collect()
}

/// Return the runs of positions, each as (first, end), whose fragments may have a value from `least` to `most`. Both are numbers, or bytes of text.
#[pyfunction]
pub fn may_have(
    py: Python<'_>,
    snapshot: &Snapshot,
    column: &str,
    least: Ends,
    most: Ends,
) -> PyResult<Vec<(u64, u64)>> {
    let span = match (least, most) {
        (Ends::Signed(least), Ends::Signed(most)) => Span::Signed(least, most),
        (Ends::Float(least), Ends::Float(most)) => Span::Float(least, most),
        (Ends::Text(least), Ends::Text(most)) => Span::Text(least.into(), Some(most.into())),
        _ => return Err(Error::new("invalid-argument", "two bounds have different types")).or_raise(py),
    };
    let runs = py.detach(|| snapshot.inner.may_have(column, &span)).or_raise(py)?;
    Ok(runs.into_iter().map(|run| (run.start, run.end)).collect())
}

/// A bound of values.
#[derive(FromPyObject)]
pub enum Ends {
    Signed(i64),
    Float(f64),
    Text(Vec<u8>),
}
