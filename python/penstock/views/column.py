"""`Column`: one column of a view, indexed like the view."""

from __future__ import annotations

import datetime
import io
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock import _core
from penstock.columns.column_type import ColumnType
from penstock.columns.scalar import Scalar
from penstock.errors import InvalidInputError
from penstock.values.checks import shown, whole
from penstock.values.dtypes import numpy_dtype
from penstock.values.times import TIMES, one_time
from penstock.views.instead import missing
from penstock.views.keys import one_position, positions_of, slice_of, span_of
from penstock.views.sample import unwrap
from penstock.views.value_file import ValueFile

if TYPE_CHECKING:
    from penstock.views.view import View


_SIGNS: dict[Callable[[Any, Any], Any], str] = {
    operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip


def _one(position: Any) -> int:
    """Return the position of one sample."""
    place = one_position(position)
    if place is None:
        raise InvalidInputError(f"cannot read bytes of sample {shown(position)}: expected a whole number")
    return place


def _bound(bound: Any) -> int | None:
    """Return a bound of a part of a value."""
    if bound is not None and (isinstance(bound, bool) or not hasattr(bound, "__index__")):
        raise InvalidInputError(f"cannot read bytes from or to {shown(bound)}: expected a whole number or None")
    return None if bound is None else operator.index(bound)


def _words(value: object) -> list[Any] | None:
    """Return the value or values as words, or None if they are not text."""
    if isinstance(value, str):
        return [value]
    each = list(value) if isinstance(value, list | tuple | np.ndarray) and np.ndim(value) == 1 else []
    return [str(word) for word in each] if each and all(isinstance(word, str) for word in each) else None


def _times(value: object) -> list[Any] | None:
    """Return the value or values as times, or None if they are not Python's."""
    each = list(value) if isinstance(value, list | tuple) else [value]
    return each if each and all(isinstance(time, datetime.date | datetime.time | datetime.timedelta) for time in each) else None


class Column:
    """One column of a view, indexed like the view: `ds["image"][5]`, `ds["label"][:]`, `ds["volume"][7, 0:64, 10]`.

    Comparisons and `isin` read all values of the column and return a mask, as in `ds[ds["year"] < 2000]`. They work for scalars, text, labels and
    categories; `contains` works for lists. A null compares as False, and as True with `!=`, except with another null.

    >>> import penstock as ps
    >>> ds = ps.create("memory://column", {"year": "int32", "label": ps.Label(["cat", "dog"]), "boxes": ps.Boxes()})
    >>> receipt = ds.append({"year": [1999, 2001, None], "label": ["cat", "dog", "dog"]})
    >>> ds["year"].dtype, ds["year"].shape, ds["boxes"].shape
    (dtype('int32'), (3,), (3, None, 4))
    >>> (ds["label"] == "dog").tolist(), (ds["year"] < 2000).tolist()
    ([False, True, True], [True, False, False])
    """

    def __init__(self, view: View, name: str) -> None:
        if name not in view.schema and name not in ("_row_id", "_position"):
            view._view.take((0, 0), view._named([name]))  # Raises an error that lists the columns.
        self._view = view
        self.name = name

    @property
    def type(self) -> ColumnType:
        """The column's type, as in `ds.schema`."""
        return self._view.schema[self.name] if self.name in self._view.schema else Scalar("int64")

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy dtype of the values that reads return, or None for text, bytes, JSON, images and masks."""
        name = self.type.read_dtype()
        return None if name is None else numpy_dtype(name)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The number of samples, and the shape of one sample, with None for each dimension whose size differs between samples."""
        return (len(self), *self.type.sample_shape())

    def __len__(self) -> int:
        return len(self._view)

    __hash__ = object.__hash__
    __array_ufunc__ = None  # NumPy leaves comparisons with a column to the column.

    def __eq__(self, other: object) -> Any:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compared(operator.ne, other)

    def __lt__(self, other: object) -> Any:
        return self._compared(operator.lt, other)

    def __le__(self, other: object) -> Any:
        return self._compared(operator.le, other)

    def __gt__(self, other: object) -> Any:
        return self._compared(operator.gt, other)

    def __ge__(self, other: object) -> Any:
        return self._compared(operator.ge, other)

    def _compared(self, compare: Callable[[Any, Any], Any], other: object) -> Any:
        """Compare each value with one value, or with one value per sample."""
        sign = _SIGNS[compare]
        given, others, worded = self._given(sign, other)
        values, missing = self._fitting(sign, other, given, worded)
        if given.shape not in ((), (len(self),)):
            raise self._incomparable(sign, other)
        return np.where(missing | others, (compare is operator.ne) & (missing != others), compare(values, given).astype(bool))

    def _given(self, sign: str, other: object) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], bool]:
        """Return what to compare with as an array, which of it is null, and whether it has words."""
        kind = self.type
        if not kind.is_comparable:
            raise InvalidInputError(
                f"cannot compare column `{self.name}` with {sign}: it is {kind.describe()}",
                hint=f'compare its values one by one: [… for value in ds["{self.name}"]]',
            )
        if other is None:
            raise self._incomparable(sign, other, f'for nulls: [value is None for value in ds["{self.name}"]]')
        others = np.zeros((), bool)
        if isinstance(other, Column):
            worded = other.type.has_words
            given, others = other._plain(worded)
        else:
            words = _words(other)
            worded = words is not None
            dtype = kind.read_dtype() or ""
            if dtype in TIMES and (times := words if worded else _times(other)) is not None:
                times, worded = [one_time(time, dtype, row) for row, time in enumerate(times)], False
                other = np.array(times) if isinstance(other, list | tuple | np.ndarray) else times[0]
            elif worded and kind.classes is not None and (unknown := set(words or []) - set(names := self._view.vocabulary(self.name))):
                raise InvalidInputError(
                    f"cannot compare column `{self.name}` with {min(unknown)!r}: it is not one of its labels",
                    hint=f"labels: {', '.join(names[:20])}",
                )
            elif kind.classes is not None and type(other) is int and not 0 <= other < len(self._view.vocabulary(self.name)):
                raise InvalidInputError(
                    f"cannot compare column `{self.name}` with {other}: it is not the code of a label",
                    hint=f"compare with a word: {', '.join(self._view.vocabulary(self.name)[:20])}",
                )
            if isinstance(other, np.ma.MaskedArray):
                other, others = np.ma.getdata(other), np.ma.getmaskarray(other)
            given = np.asarray(other, object if worded else self._weakly(other))
        return given, others, worded

    def _fitting(self, sign: str, other: object, given: npt.NDArray[Any], worded: bool) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return all values and which of them are null. Refuse what values of this kind cannot be compared with."""
        values, missing = self._plain(worded)
        fits = given.dtype.kind in ("O" if worded else "biufcmM") and (
            given.dtype.kind == values.dtype.kind or not {given.dtype.kind, values.dtype.kind} & {"m", "M"}
        )
        if (values.dtype.kind == "O") != worded or not fits:
            raise self._incomparable(sign, other)
        return values, missing

    def isin(self, values: Any) -> npt.NDArray[np.bool_]:
        """Return a mask of the samples whose value is one of `values`, a list. It works for columns that can be compared.

        Shapes: (N,) bool. Cost: reads the column. A null is in no list. Words that a label does not have are refused.

        >>> import penstock as ps
        >>> ds = ps.create("memory://isin", {"label": ps.Label(["cat", "dog", "emu"])})
        >>> receipt = ds.append({"label": ["emu", "cat", None, "dog"]})
        >>> ds["label"].isin(["cat", "dog"]).tolist()
        [False, True, False, True]
        """
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise InvalidInputError(
                f"cannot look for {shown(values)} in column `{self.name}`: expected a list of values", hint="write isin([…])"
            )
        wanted = list(values)
        if any(value is None for value in wanted):
            raise self._incomparable("isin", None, f'for nulls: [value is None for value in ds["{self.name}"]]')
        given = [self._given("isin", value) for value in wanted]
        if not given:
            return np.zeros(len(self), bool)
        if any(one.shape != () for one, _, _ in given):
            raise self._incomparable("isin", wanted)
        worded = given[0][2]
        sought = np.array([one[()] for one, _, _ in given], object) if worded else np.array([one[()] for one, _, _ in given])
        values, missing = self._fitting("isin", wanted, sought, worded)
        return np.isin(values, sought) & ~missing

    def contains(self, value: Any) -> npt.NDArray[np.bool_]:
        """Return a mask of the samples whose list has a value. It works for labels and for tensors of one free dimension.

        Shapes: (N,) bool. Cost: reads the column. A null contains nothing. A word that the labels do not have is refused.

        >>> import penstock as ps
        >>> ds = ps.create("memory://list-contains", {"labels": ps.Labels(["cat", "dog"])})
        >>> receipt = ds.append({"labels": [["dog", "cat"], [], None, ["dog"]]})
        >>> ds["labels"].contains("dog").tolist()
        [True, False, False, True]
        """
        kind = self.type
        if kind.sample_shape() != (None,):
            hint = f"{self.name} LIKE '%part%'" if kind.has_words else f"list_contains({self.name}, 1)"
            raise InvalidInputError(
                f"cannot look into column `{self.name}`: it is {kind.describe()}, expected lists", hint=f'write ds.filter("{hint}")'
            )
        if kind.classes is not None and isinstance(value, str):
            if value not in (names := self._view.vocabulary(self.name)):
                raise InvalidInputError(
                    f"cannot look for {value!r} in column `{self.name}`: it is not one of its labels",
                    hint=f"labels: {', '.join(names[:20])}",
                )
            value = names.index(value)
        if not isinstance(value, int | float | complex | np.number | np.bool_):
            raise InvalidInputError(f"cannot look for {shown(value)} in column `{self.name}`: expected one of its values")
        found = np.zeros(len(self), bool)
        for start in range(0, len(self), 256):  # Few at a time, because lists may be long. A null has no values.
            lists = self[start : start + 256]
            found[start + np.searchsorted(lists.offsets, np.flatnonzero(lists.values == value), side="right") - 1] = True
        return found

    def __contains__(self, value: object) -> bool:
        return bool(np.any(self == value))

    if not TYPE_CHECKING:  # A type checker must know which names exist.

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name, f'write ds["{self.__dict__.get("name", "column")}"][:], which returns the values')

    def _weakly(self, other: object) -> np.dtype[Any] | None:
        """Return the dtype of Python's numbers in a comparison: that of a column of floats, as in NumPy. 0.1 is then equal to a stored 0.1."""
        dtype = None if self.dtype is None or self.dtype.kind == "V" else self.dtype
        numbers = other if isinstance(other, list | tuple) else [other]
        weak = all(type(number) in (int, float) for number in numbers)
        return dtype if weak and dtype is not None and np.issubdtype(dtype, np.floating) else None

    def _plain(self, worded: bool) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return all values, with words instead of codes if `worded` is true, and which of them are null."""
        values = self[:]
        if isinstance(values, list):
            missing = np.array([value is None for value in values], bool)
            return np.array(["" if value is None else value for value in values], object), missing
        if worded and self.type.is_coded:
            return np.array([*self._view.vocabulary(self.name), ""], object)[np.ma.filled(values, -1)], np.ma.getmaskarray(values)
        return np.ma.getdata(values), np.ma.getmaskarray(values)

    def _incomparable(self, sign: str, other: object, hint: str | None = None) -> InvalidInputError:
        kind = "text" if self.dtype is None else f"{self.dtype}"
        wanted = f"a list of {kind}" if sign == "isin" else f"one {kind}, or one for each of {len(self)} samples"
        return InvalidInputError(f"cannot compare column `{self.name}` with {sign} {shown(other)}: expected {wanted}", hint=hint)

    def __getitem__(self, key: Any) -> Any:
        """Read values. If the key is a tuple, its first item selects one or more samples, and the rest is an index into each tensor.

        Costs the same as `take` for this column. Of larger samples than 64 KiB, reads only the tiles or units that overlap the smallest
        contiguous slice around the key.
        """
        if isinstance(key, tuple):
            if len(key) < 2:
                return self[key[0] if key else slice(None)]
            kind = self._view.schema[self.name].type
            if kind in ("text", "json", "bytes"):
                raise InvalidInputError(
                    f"cannot read a part of column `{self.name}`: its values are {kind}",
                    hint=f'read bytes: ds["{self.name}"].read(0, 10, 20)',
                )
            return self._parts(key[0], key[1:])
        if isinstance(key, slice):
            return self._taken(key)
        position = one_position(key)
        if position is None:
            return self._taken(positions_of(key, len(self)))
        return unwrap(self._taken(np.array([position], dtype=np.int64)))

    def read(self, position: int, start: int | None = None, end: int | None = None) -> bytes:
        """Read the bytes `start` to `end` of one stored value, as `value[start:end]` would return them.

        It works for bytes, text and JSON (in UTF-8), images and masks (their files). Bounds are those of Python's slices: negative ones count
        from the end, and others are clipped. Cost: reads and verifies the checksum units of 64 KiB that overlap the part, in one request
        per 8 MiB; the first time, also the file's index (64 bytes per MiB). A value that is compressed, or shares a block with others, costs
        its whole block. Holds the result, and up to a sixteenth of the memory budget. Raises: InvalidInputError for a null and for other
        columns, OutOfRangeError, CorruptError if the part is damaged.

        >>> import penstock as ps
        >>> ds = ps.create("memory://parts", {"film": ps.Bytes()})
        >>> receipt = ds.append({"film": [bytes(range(100))]})
        >>> ds["film"].read(0, 10, 13), ds["film"].read(0, -2)
        (b'\\n\\x0b\\x0c', b'bc')
        """
        view, place = self._stored(position)
        part = view.part(place, self.name, slice(_bound(start), _bound(end)))
        if part is None:
            raise self._no_bytes(position)
        return part

    def open(self, position: int, *, buffer_bytes: int = 1 << 20) -> io.BufferedReader:
        """Open one stored value as a binary file that can be read and sought, for decoders that expect one.

        Cost: each time the buffer is filled, as for `read` of `buffer_bytes` bytes. A value that is compressed or small is read whole, once. Raises:
        as `read` does.

        >>> import penstock as ps
        >>> ds = ps.create("memory://opened", {"film": ps.Bytes()})
        >>> receipt = ds.append({"film": [b"moving pictures"]})
        >>> with ds["film"].open(0) as film:
        ...     film.seek(-8, 2), film.read(4)
        (7, b'pict')
        """
        view, place = self._stored(position)
        found = view.value_bytes(place, self.name)
        if found is None:
            raise self._no_bytes(position)
        size, in_parts = found
        all_of_it = None if in_parts else self.read(position)

        def read(start: int, end: int) -> bytes:
            return all_of_it[start:end] if all_of_it is not None else view.part(place, self.name, slice(start, end)) or b""

        return io.BufferedReader(ValueFile(size, read), whole(buffer_bytes, "buffer_bytes", 1))

    def _stored(self, position: Any) -> tuple[_core.View, int]:
        """Return the view that has a sample, and its position there."""
        return self._view._view, _one(position)

    def _no_bytes(self, position: Any) -> InvalidInputError:
        return InvalidInputError(f"cannot read bytes of sample {position} of column `{self.name}`: it is null")

    def _taken(self, key: slice | npt.NDArray[np.int64]) -> Any:
        """Read the values of a slice, or at positions."""
        return self._view._view.take(span_of(key, len(self)) if isinstance(key, slice) else key, [self.name])[self.name]

    def _shapes(self, positions: npt.NDArray[np.int64]) -> Any:
        """Return the shapes of large samples, whose parts are read alone. Returns None for others."""
        has_parts = self.name in self._view.schema and self._view.schema[self.name].has_parts
        return self._view._view.shapes(positions, self.name) if has_parts else None

    def _parts(self, which: Any, key: tuple[Any, ...]) -> Any:
        """Read a part of one sample, or of each of several samples."""
        position = one_position(which) if not isinstance(which, slice) else None
        if isinstance(which, slice):
            positions = np.arange(len(self), dtype=np.int64)[which]
        else:
            positions = positions_of(which if position is None else [position], len(self))
        shapes = self._shapes(positions)
        if shapes is None:
            values = self[positions]
            each = [unwrap(values, index) for index in range(len(values))]
            parts = [None if value is None else value[key] for value in each]
        else:
            slices = [([], ()) if shape is None else slice_of(key, shape) for shape in shapes]
            there = [index for index, shape in enumerate(shapes) if shape is not None]
            read = self._view._view.slices(positions[there], self.name, [slices[index][0] for index in there])
            parts = [None] * len(shapes)
            for index, array in zip(there, read, strict=True):
                part = array[slices[index][1]]
                # Copy a small part so that it does not keep the whole slice in memory.
                parts[index] = part.copy() if isinstance(part, np.ndarray) and 2 * part.nbytes < array.nbytes else part
        return parts if position is None else parts[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 256):
            values = self[start : start + 256]
            yield from (unwrap(values, index) for index in range(len(values)))

    def __repr__(self) -> str:
        return f"<penstock.Column {self.name!r} of {self._view!r}>"


class JoinedColumn(Column):
    """One column of views that `ps.concat` joined. Codes of labels and categories are places in the words of all views."""

    _view: Any

    def __init__(self, view: Any, name: str) -> None:
        view._named([name])  # Raises an error that lists the columns.
        self._view = view
        self.name = name

    def _taken(self, key: slice | npt.NDArray[np.int64]) -> Any:
        return self._view.take(key, columns=[self.name])[self.name]

    def _stored(self, position: Any) -> tuple[_core.View, int]:
        [place], [part] = self._view._found(np.array([_one(position)]), "read")
        return self._view.parts[part]._view, int(place - self._view._begins[part])

    def _shapes(self, positions: npt.NDArray[np.int64]) -> Any:
        return None  # Samples are read whole, also those that one of the views stores in tiles.
