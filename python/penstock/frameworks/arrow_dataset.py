"""A view as a `pyarrow.dataset.Dataset`, to which DuckDB, Polars and pyarrow push the columns and filters of a query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc
import pyarrow.dataset as pads

from penstock.errors import UnsupportedError
from penstock.frameworks import arrow

if TYPE_CHECKING:
    from penstock.views.view import View

# Columns of datasets do not begin with an underscore.
_PLACE = "_place"
Columns = Sequence[str] | Mapping[str, Any] | None


class ArrowDataset(pads.Dataset):  # type: ignore[misc]
    """The samples of a view. Reads only the columns that a query returns or that its filter names, and large values only of the samples that
    it selects.

    The base class has no native dataset here, so every method that would use it is replaced.
    """

    def __init__(self, view: View, condition: Any = None, columns: Sequence[str] | None = None) -> None:
        self._view = view
        self._condition = condition
        self._columns = list(view.schema) if columns is None else view._named(columns) or []
        self._places: npt.NDArray[np.int64] | None = None  # Where joined views were selected from others: see `arrow.reader`.

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, with float32 for float16, which DuckDB does not read."""
        return arrow.arrow_schema(arrow.kinds_of(self._view, self._columns, halves=False))

    def scanner(self, columns: Columns = None, filter: Any = None, batch_size: int = 1 << 14, **options: Any) -> pads.Scanner:
        """Begin a scan. `options` are pyarrow's; they have no effect, because Penstock reads ahead itself."""
        return _Scans(partial(self._scanner, columns, filter, batch_size))

    def _scanner(self, columns: Columns, filter: Any, batch_size: int) -> pads.Scanner:
        condition = filter if self._condition is None else self._condition if filter is None else self._condition & filter
        every = self._columns
        if columns is None:
            names = every
        elif isinstance(columns, Mapping):
            names = self._needed({"columns": dict(columns)}, list(columns.values()))
        else:  # A name may be the path of a field in a struct.
            names = [name if name in every else name.lstrip(".").partition(".")[0] for name in columns]
        tested = [] if condition is None else self._needed({"columns": [], "filter": condition}, [condition])
        rows = int(batch_size or 1 << 14)
        others = [kind for name in names if name not in tested and (kind := self._view.schema.get(name)) is not None]
        if tested and any(kind.may_be_file or kind.has_parts for kind in others):  # Values that may be large.
            ordered = [name for name in every if name in names]
            schema = arrow.arrow_schema(arrow.kinds_of(self._view, ordered, halves=False))
            found = pa.RecordBatchReader.from_batches(schema, self._selected(ordered, tested, condition, rows))
            return pads.Scanner.from_batches(found, columns=columns)
        batches = arrow.reader(self._view, [name for name in every if name in (*names, *tested)], rows, False, self._places)
        return pads.Scanner.from_batches(batches, columns=columns, filter=condition)

    def _selected(self, names: list[str], tested: list[str], condition: Any, rows: int) -> Iterator[pa.RecordBatch]:
        """Read the columns of a condition first, and then the others of those samples for which it is true."""
        found, held, first = list[pa.Table](), 0, 0
        for batch in arrow.reader(self._view, tested, rows, halves=False):
            places = pa.array(range(first, first + batch.num_rows), pa.int64())
            numbered = pa.Table.from_batches([batch.append_column(_PLACE, places)])
            # This runs in a thread of Arrow. Another scanner would wait for such threads, so the plan runs in this one.
            steps = [
                acero.Declaration("table_source", acero.TableSourceNodeOptions(numbered)),
                acero.Declaration("filter", acero.FilterNodeOptions(condition)),
                acero.Declaration("project", acero.ProjectNodeOptions([pc.field(_PLACE)], [_PLACE])),
            ]
            found.append(acero.Declaration.from_sequence(steps).to_table(use_threads=False))
            held, first = held + found[-1].num_rows, first + batch.num_rows
            if held >= rows:
                yield from self._at(names, found, rows)
                found, held = [], 0
        if held:
            yield from self._at(names, found, rows)

    def _at(self, names: list[str], found: list[pa.Table], rows: int) -> Iterator[pa.RecordBatch]:
        positions = pa.concat_tables(found).column(0).to_numpy()
        return iter(arrow.reader(self._view.select(positions), names, rows, halves=False, places=positions))

    def _needed(self, query: Mapping[str, Any], expressions: Sequence[Any]) -> list[str]:
        """Return the columns that the expressions of a query name: those without which it is invalid. If they name a column by its number, all
        are needed, because the numbers must not change.
        """
        schema = self.schema
        if any("FieldPath(" in str(expression) for expression in expressions):
            return list(schema.names)
        return [name for name in schema.names if not _is_valid(query, pa.schema([field for field in schema if field.name != name]))]

    def to_table(self, columns: Columns = None, filter: Any = None, **options: Any) -> pa.Table:
        """Read the samples that a filter selects."""
        return self.scanner(columns, filter, **options).to_table()

    def to_batches(self, columns: Columns = None, filter: Any = None, **options: Any) -> Iterator[pa.RecordBatch]:
        """Read the samples that a filter selects, in record batches."""
        yield from self.scanner(columns, filter, **options).to_batches()

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """Return the number of samples that a filter selects. Without a filter, it reads nothing."""
        if filter is None and self._condition is None:
            return len(self._view)
        return int(self.scanner([], filter, **options).count_rows())

    def head(self, num_rows: int, columns: Columns = None, filter: Any = None, **options: Any) -> pa.Table:
        """Read the first samples that a filter selects."""
        return self.scanner(columns, filter, max(1, min(num_rows, 1 << 14)), **options).head(num_rows)

    def take(self, indices: Any, columns: Columns = None, filter: Any = None, **options: Any) -> pa.Table:
        """Read samples by position, among those that a filter selects."""
        if filter is None and self._condition is None:
            positions = pa.array(indices).to_numpy(zero_copy_only=False)
            chosen = ArrowDataset(self._view.select(positions), columns=self._columns)
            chosen._places = np.where(positions < 0, positions + len(self._view), positions)
            return chosen.to_table(columns, **options)
        return self.to_table(columns, filter, **options).take(pa.array(indices))

    def filter(self, expression: Any) -> ArrowDataset:
        """Return a dataset of the samples that an expression selects, in addition to earlier filters."""
        return ArrowDataset(self._view, expression if self._condition is None else self._condition & expression, self._columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ArrowDataset, (self._view, self._condition, self._columns))

    def _unsupported(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "this method of pyarrow.dataset.Dataset needs files in a format that pyarrow reads", hint="use to_table() first"
        )

    get_fragments = _get_fragments = replace_schema = join = join_asof = sort_by = _unsupported
    partition_expression = property(_unsupported)


class _Scans(pads.Scanner):  # type: ignore[misc]
    """A scanner that can be used several times: each use begins another scan."""

    def __init__(self, begin: Callable[[], pads.Scanner]) -> None:
        self._begin = begin

    @property
    def projected_schema(self) -> pa.Schema:
        """The schema of the result."""
        return self._begin().projected_schema

    dataset_schema = projected_schema

    def to_reader(self) -> pa.RecordBatchReader:
        """Begin a scan, and return a reader of it."""
        return self._begin().to_reader()

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Begin a scan, and return its record batches."""
        return self._begin().to_batches()  # type: ignore[no-any-return]

    def scan_batches(self) -> Iterator[Any]:
        """Begin a scan, and return its tagged record batches."""
        return self._begin().scan_batches()  # type: ignore[no-any-return]

    def to_table(self) -> pa.Table:
        """Scan everything."""
        return self._begin().to_table()

    def take(self, indices: Any) -> pa.Table:
        """Scan, and select rows by their place in the result."""
        return self._begin().take(indices)

    def head(self, num_rows: int) -> pa.Table:
        """Scan the first rows."""
        return self._begin().head(num_rows)

    def count_rows(self) -> int:
        """Scan, and count rows."""
        return int(self._begin().count_rows())


def _is_valid(query: Mapping[str, Any], schema: pa.Schema) -> bool:
    try:
        pads.Scanner.from_batches([], schema=schema, **query)
    except pa.ArrowInvalid:
        return False
    return True
