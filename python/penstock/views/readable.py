"""`Readable`: what views and joined views have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidInputError, NotFoundError
from penstock.schema import Schema
from penstock.values.checks import whole
from penstock.views.exports import Exports
from penstock.views.keys import names_of, one_position
from penstock.views.sample import Sample

Batch = dict[str, Any]
# Columns that every view has, in addition to those of its schema.
EXTRAS = ("_row_id", "_position")


class Readable(Exports):
    """Samples that are read by position, in columns. Subclasses say what they read from."""

    # The form that batches use for each column.
    _forms: Mapping[str, str]

    @property
    def schema(self) -> Schema:
        """The column types by name."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def _read(self, key: Any) -> Batch:
        """Read a batch: a slice, a mask or positions."""
        raise NotImplementedError

    def _one(self, position: int) -> Batch:
        """Read a batch of one sample."""
        return self._read([position])

    def _column(self, name: str) -> Any:
        """Return a column."""
        raise NotImplementedError

    def select_columns(self, columns: Sequence[str]) -> Readable:
        """Choose columns."""
        raise NotImplementedError

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema)

    def _checked(self, columns: Sequence[str] | None, chosen: Sequence[str]) -> list[str]:
        """Return the columns to read, of those that were chosen. Refuses others."""
        names = list(chosen) if columns is None else names_of(columns) or []
        for name in names:
            if name not in chosen and name not in EXTRAS:
                raise NotFoundError(
                    f"cannot read column `{name}`: the view has no such column",
                    code="column-not-found",
                    hint=f"columns: {', '.join(chosen)}",
                )
        return names

    def __getitem__(self, key: Any) -> Any:
        """Read a sample (`ds[5]`) or a batch (`ds[5:10]`, `ds[[9, 2]]`, a mask), or return a column (`ds["image"]`, see `Column`) or a view
        with some columns (`ds[["image", "label"]]`, see `select_columns`).
        """
        if isinstance(key, str):
            return self._column(key)
        if isinstance(key, list) and key and all(isinstance(name, str) for name in key):
            return self.select_columns(key)
        position = None if isinstance(key, slice) else one_position(key)
        return self._read(key) if position is None else self._sample(self._one(position), 0)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a column with this name.

        >>> import penstock as ps
        >>> ds = ps.create("memory://contains", {"year": "int32"})
        >>> "year" in ds, "month" in ds
        (True, False)
        """
        if not isinstance(name, str):
            raise InvalidInputError(
                f"cannot search for a {type(name).__name__}: expected the name of a column",
                hint='to search for a value, compare a column: (ds["year"] == 1999).any()',
            )
        return name in self.schema

    def _ipython_key_completions_(self) -> list[str]:
        return self.columns

    def _sample(self, batch: Batch, index: int) -> Sample:
        return Sample.of(batch, index, self._forms)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._of()._as_it_is()._samples()

    def _samples(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), 64):
            batch = self[start : start + 64]
            for index in range(min(64, len(self) - start)):
                yield self._sample(batch, index)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Read all samples in order, as batches of `batch_size` samples; the last one may be shorter. For training, use `loader`.

        >>> import penstock as ps
        >>> ds = ps.create("memory://batches", {"number": "int32"})
        >>> receipt = ds.append({"number": range(5)})
        >>> [batch["number"].tolist() for batch in ds.batches(2)]
        [[0, 1], [2, 3], [4]]
        """
        size, view = whole(batch_size, "batch_size", 1), self._of()._as_it_is()
        return (view[start : start + size] for start in range(0, len(view), size))

    def _repr_html_(self) -> str:
        """Show the first samples in a notebook. Samples that cannot be read are shown as null."""
        from penstock.views import html

        return html.page(self._of())
