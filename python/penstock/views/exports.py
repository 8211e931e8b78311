"""`Exports`: what converts a view to the tables and tensors of other libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from penstock.loadable import Loadable
from penstock.values.checks import storage_pairs
from penstock.views.instead import missing

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from penstock.views.view import View


class Exports(Loadable):
    """The base class of views. Libraries are imported when they are needed."""

    if not TYPE_CHECKING:  # A type checker must know which names exist.

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)

    def _of(self) -> View:
        return cast("View", self)

    def scan(self, columns: Sequence[str] | None = None, *, batch_size: int = 1024) -> pa.RecordBatchReader:
        """Read all samples in order as record batches of `batch_size` rows. Samples appended during the scan are not included.

        Returns a `pyarrow.RecordBatchReader`: iterate over it, or pass it to any library that reads Arrow.

        A batch has fewer rows if it would otherwise take more than an eighth of the memory budget. Labels and categories become
        dictionary<string>, images become binary, and ragged tensors become struct{data, shape}. The view is also an Arrow C stream,
        so `duckdb.from_arrow`, `polars.from_arrow` and `pyarrow.table(ds)` accept it directly.
        Cost: one copy. Holds one batch or, if files are not mapped, three groups, two of which are read ahead. A group takes 8 MiB or
        more, up to 1/32 of the memory budget. If another thread is in a pyarrow call during a fork, pyarrow's allocator may deadlock in
        the child. To avoid this, spawn children or set ARROW_DEFAULT_MEMORY_POOL=system. `take` does not have this limitation.
        """
        from penstock.frameworks import arrow

        return arrow.reader(self._of(), columns, batch_size)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.scan(batch_size=4096).__arrow_c_stream__(requested_schema)

    def torch(self, columns: Sequence[str] | None = None) -> Any:
        """Return a map-style torch Dataset of these samples, for use with `ps.torch.collate`."""
        from penstock.torch import TorchDataset

        return TorchDataset(self._of(), columns)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read all samples as a `pyarrow.Table`, with the types of `scan`.

        >>> import penstock as ps
        >>> ds = ps.create("memory://to-arrow", {"year": "int32"})
        >>> receipt = ds.append({"year": [1999, None]})
        >>> ds.to_arrow()["year"].to_pylist()
        [1999, None]
        """
        return self.scan(columns, batch_size=1 << 16).read_all()

    def to_arrow_dataset(self, columns: Sequence[str] | None = None) -> Any:
        """Return a `pyarrow.dataset.Dataset` of this view. DuckDB, Polars and pyarrow read from it only the columns that a query needs.

        `columns` may also name `_row_id` and `_position`, which lead from the answer of a query back to the samples. The position is that in
        the dataset, or in joined views the place among all samples.

        Your connection of DuckDB reads dates and times without a zone in the time zone of the machine, unless you write
        `SET TimeZone = 'UTC'`. Conditions that Penstock runs, as in `tx.delete(where=…)`, are in UTC.

        >>> import duckdb, penstock as ps
        >>> ds = ps.create("memory://to-arrow-dataset", {"path": ps.Text(), "image": ps.Image()})
        >>> receipt = ds.append({"path": ["a.jpg", "bc.jpg"]})
        >>> photos = ds.to_arrow_dataset()
        >>> duckdb.sql("SELECT max(length(path)) FROM photos").fetchall()
        [(6,)]
        >>> photos = ds.to_arrow_dataset(["_position", "path"])
        >>> ds.select([row[0] for row in duckdb.sql("SELECT _position FROM photos WHERE path LIKE 'b%'").fetchall()])["path"][:]
        ['bc.jpg']
        """
        from penstock.frameworks.arrow_dataset import ArrowDataset

        return ArrowDataset(self._of()._as_it_is(), columns=columns)

    def to_pandas(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read all samples as a pandas frame. Labels and categories become categoricals, and numbers with nulls become nullable.

        Whole numbers and bools with nulls get types such as Int32. Floats with nulls get those of Arrow, in which NaN is not a null.

        Tensors and boxes become arrays, one per sample. Images become their stored bytes, and JSON becomes objects.

        >>> import penstock as ps
        >>> ds = ps.create("memory://to-pandas", {"year": "int32", "label": ps.Label(["cat", "dog"])})
        >>> receipt = ds.append({"year": [1999, None], "label": ["dog", "cat"]})
        >>> ds.to_pandas()
           year label
        0  1999   dog
        1  <NA>   cat
        """
        from penstock.frameworks import tables

        return tables.to_pandas(self._of(), columns)

    def to_polars(self, columns: Sequence[str] | None = None) -> Any:
        """Read all samples as a Polars frame, with the types of `scan`. JSON is text.

        >>> import penstock as ps
        >>> ds = ps.create("memory://to-polars", {"year": "int32"})
        >>> receipt = ds.append({"year": [1999, None]})
        >>> ds.to_polars()["year"].to_list()
        [1999, None]
        """
        from penstock.frameworks import tables

        return tables.to_polars(self._of(), columns)

    def to_torch(self, columns: Sequence[str] | None = None, *, ragged: Sequence[str] = ()) -> dict[str, Any]:
        """Read all samples as one batch of torch tensors; see `ps.torch.collate`. Nulls in columns of fixed shape are refused, and images of
        unequal size unless `ragged` names their column.

        >>> import penstock as ps
        >>> ds = ps.create("memory://to-torch", {"x": ps.Tensor((2,), "float32")})
        >>> receipt = ds.append({"x": [[0, 1], [2, 3]]})
        >>> ds.to_torch()["x"].shape
        torch.Size([2, 2])
        """
        from penstock.torch import collate

        return collate(self._of().take(range(len(self._of())), columns=columns), ragged=ragged)

    def to_parquet(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        *,
        tensors: str = "arrow",
        file_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> int:
        """Write all samples to Parquet, and return their number. `import_data` restores the column types.

        `path` is a path or a URI of any store, with its `storage_options` as in `ps.open`. With `file_bytes`, it is a new or empty folder, and each
        file in it, such as `part-00000.parquet`, has about so many bytes. Local files appear when all are complete, and a replaced file keeps its
        mode. In a store, each file is complete or absent, and names of parts have a random id of the call. After an error, its files are deleted.

        Tensors and boxes have Arrow's types. With `tensors="list"`, they are lists of lists, which all readers of Parquet know, and images are
        structs that `datasets.load_dataset("parquet", …)` takes for images. Labels are text. Sizes behind an empty dimension, as in (0, 2, 7), are lost.

        Cost: as for `scan`; holds a row group of 64 MiB. Raises: InvalidInputError.

        >>> import pathlib, tempfile, penstock as ps
        >>> ds = ps.create("memory://to-parquet", {"label": ps.Label(["cat", "dog"])})
        >>> receipt = ds.append({"label": ["dog", None]})
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> ds.to_parquet(folder / "labels.parquet")
        2
        >>> report = ps.importers.import_data(folder / "labels.parquet", folder / "dataset")
        >>> ps.open(folder / "dataset").schema["label"].names
        ('cat', 'dog')
        """
        from penstock.frameworks import parquet

        options = storage_pairs(storage_options)
        return parquet.to_parquet(self._of(), path, columns, tensors, file_bytes, options)
