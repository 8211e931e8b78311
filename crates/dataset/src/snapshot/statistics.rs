//! Bounds of a column's values by fragment, so that a query reads only the fragments that may have what it looks for.

use std::ops::Range;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::datafile::{Bounds, Class, Span};
use penstock_format::files::FileRef;
use penstock_format::manifest::{PageStatistics, Statistics};
use penstock_format::rows::RowIds;
use penstock_format::schema::{ColumnSpec, Content, FillValue};

use super::Snapshot;
use super::values::file_of;

/// A fragment's samples, and what is known of their values in one column.
#[derive(Debug, Clone, PartialEq)]
pub struct FragmentStatistics {
    /// The positions of its samples.
    pub positions: Range<u64>,
    /// None if nothing is known. Bounds are never too narrow, but may be wider than the values.
    pub statistics: Option<Statistics>,
}

/// Newer values of a column.
struct Newer {
    rows: Arc<RowIds>,
    statistics: Option<Statistics>,
}

impl Snapshot {
    /// Return what is known of a column's values, by fragment, in the order of positions. Fragments without samples are left out. Cost: reads the manifest,
    /// one object for each page, the tails of overlays of this column, and those of fragments that no such object has.
    pub fn statistics(&self, column: &str) -> Result<Vec<FragmentStatistics>> {
        let spec = self.column(column)?;
        let (newer, hidden) = (self.newer_statistics(spec)?, self.hidden()?);
        let filled = match &spec.fill {
            Some(FillValue(file)) => self.statistics_in(std::slice::from_ref(file), 1, spec)?,
            None => None,
        };
        self.open_unknown_tails(spec)?;
        let (mut found, mut position) = (Vec::new(), 0);
        for part in 0..self.parts.len() {
            let of_page = self.page_statistics(part)?;
            let fragments = self.fragments(part)?;
            for (index, fragment) in fragments.as_slice().iter().enumerate() {
                let live = fragment.samples.saturating_sub(hidden.count_in_runs(&fragment.runs));
                let positions = position..position + live;
                position = positions.end;
                if live == 0 {
                    continue;
                }
                let known = of_page.as_ref().and_then(|page| page.of(spec.id, index as u64)).cloned();
                let statistics = match known {
                    Some(known) => Some(known),
                    None => match (file_of(&fragment.files, spec.id), &spec.fill) {
                        (Some(_), _) => self.statistics_in(&fragment.files, fragment.samples, spec)?,
                        // All samples have the same value.
                        (None, Some(_)) => {
                            filled.clone().map(|one| Statistics { nulls: one.nulls * fragment.samples, ..one })
                        }
                        (None, None) => Some(Statistics::of_nulls(fragment.samples)),
                    },
                };
                // Values of before a column was widened are compared as readers get them.
                let mut statistics = statistics.map(|known| as_read(known, spec));
                for Newer { rows, statistics: newer } in
                    newer.iter().filter(|newer| newer.rows.count_in_runs(&fragment.runs) > 0)
                {
                    let nulls = newer.as_ref().map_or(0, |newer| newer.nulls.min(rows.count_in_runs(&fragment.runs)));
                    let newer = newer.clone().map(|newer| Statistics { nulls, ..newer });
                    statistics = statistics.zip(newer).map(|(mut all, newer)| {
                        all.include(&newer);
                        all
                    });
                }
                found.push(FragmentStatistics { positions, statistics });
            }
        }
        Ok(found)
    }

    /// Return the positions of the fragments that may have a value of a column between two bounds, both included. A NaN is in no such range, and a bound that
    /// is one finds nothing: `Bounds::has_nan` says where there are some. Neighbouring fragments are joined. Cost: as for
    /// `statistics`.
    pub fn may_have(&self, column: &str, span: &Span) -> Result<Vec<Range<u64>>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for FragmentStatistics { positions, statistics } in self.statistics(column)? {
            let bounds = statistics.and_then(|statistics| statistics.bounds);
            if bounds.is_some_and(|bounds| bounds.span.is_none_or(|own| !own.meets(span))) {
                continue;
            }
            match runs.last_mut().filter(|last| last.end == positions.start) {
                Some(last) => last.end = positions.end,
                None => runs.push(positions),
            }
        }
        Ok(runs)
    }

    /// Return the statistics of a part's fragments, if it is a page that has them.
    fn page_statistics(&self, part: usize) -> Result<Option<Arc<PageStatistics>>> {
        self.parts[part].page().map_or(Ok(None), |page| self.context.page_statistics(&page))
    }

    /// Return the statistics of the overlays of a column.
    fn newer_statistics(&self, spec: &ColumnSpec) -> Result<Vec<Newer>> {
        let overlays: Vec<_> = self
            .overlays
            .all()
            .iter()
            .filter(|overlay| overlay.has_values() && overlay.columns.contains(&spec.id))
            .collect();
        let rows = self.context.row_ids(overlays.iter().map(|overlay| &overlay.rows))?;
        let files = overlays.iter().filter_map(|overlay| Some((file_of(&overlay.files, spec.id)?, overlay.rows.ids())));
        self.context.open_tails(files)?;
        let newer = overlays.iter().zip(rows).map(|(overlay, rows)| {
            let statistics = match file_of(&overlay.files, spec.id) {
                Some(_) => self.statistics_in(&overlay.files, overlay.rows.ids(), spec)?,
                None => Some(Statistics::of_nulls(overlay.rows.ids())),
            };
            Ok(Newer { rows, statistics: statistics.map(|known| as_read(known, spec)) })
        });
        newer.collect()
    }

    /// Open the tails of the fragments of which no object has the statistics, concurrently.
    fn open_unknown_tails(&self, spec: &ColumnSpec) -> Result<()> {
        let (caches, mut unknown) = (self.context.caches.get(), Vec::<(FileRef, u64)>::new());
        for part in 0..self.parts.len() {
            let of_page = self.page_statistics(part)?;
            for (index, fragment) in self.fragments(part)?.as_slice().iter().enumerate() {
                if of_page.as_ref().is_none_or(|page| page.of(spec.id, index as u64).is_none()) {
                    let file = file_of(&fragment.files, spec.id).filter(|file| caches.statistics_of(file.id).is_none());
                    unknown.extend(file.map(|file| (file.clone(), fragment.samples)));
                }
            }
        }
        self.context.open_tails(unknown.iter().map(|(file, samples)| (file, *samples))).map(drop)
    }

    /// Return what the tail of one of these files says about a column, if this is known without reading values.
    fn statistics_in(&self, files: &[FileRef], samples: u64, spec: &ColumnSpec) -> Result<Option<Statistics>> {
        let Some(file) = file_of(files, spec.id) else { return Ok(None) };
        if let Some(known) = self.context.caches.get().statistics_of(file.id) {
            return Ok(known.iter().find(|(column, _)| *column == spec.id).map(|(_, statistics)| statistics.clone()));
        }
        let values = self.values(file, samples, spec, None)?;
        Ok(Some(Statistics::of(values.entry())))
    }
}

/// Return statistics of stored values as those of the values that readers get.
fn as_read(stored: Statistics, spec: &ColumnSpec) -> Statistics {
    let Statistics { nulls, words, bounds } = stored;
    let bounds = bounds.and_then(|Bounds { has_nan, span }| {
        let span = match span {
            None => None,
            Some(span) => Some(span_as_read(span, spec)?),
        };
        Some(Bounds { has_nan, span })
    });
    Statistics { nulls, words, bounds }
}

/// Return the span of values that readers get. None if it is not known.
fn span_as_read(span: Span, spec: &ColumnSpec) -> Option<Span> {
    match (spec.kind.content(), span) {
        (Content::Label(classes), Span::Unsigned(least, most)) => {
            let places = (0..classes.names.len())
                .filter(|place| classes.code_of(*place).is_some_and(|code| (least..=most).contains(&code)));
            let (first, last) = (places.clone().next()?, places.clone().next_back()?);
            Some(Span::Unsigned(first as u64, last as u64))
        }
        // Those of a category are words.
        (Content::Word, span) => Some(span),
        (_, span) => {
            let (dtype, shape) = spec.kind.stored().ok()?;
            span.as_class(Class::of(dtype, &shape)?)
        }
    }
}
