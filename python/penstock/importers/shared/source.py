"""Defines what an importer returns: a schema and chunks of rows. Each row has a name for the report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import importlib
import pathlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

from penstock.columns.column_type import ColumnType
from penstock.errors import InvalidInputError
from penstock.importers.shared.content import Content
from penstock.importers.shared.naming import Naming

Result = TypeVar("Result")


def import_pandas() -> None:
    """Import pandas, if it is installed, before pyarrow does.

    pyarrow imports pandas when it first converts an array to NumPy, and ignores any exception. A Ctrl-C during that import would be lost.
    """
    with contextlib.suppress(Exception):
        importlib.import_module("pandas")


def ahead(tasks: Iterable[Callable[[], Result]], threads: int) -> Iterator[Result]:
    """Run tasks in threads, `threads` at a time, and yield the results in order. Up to `threads + 1` results are computed ahead."""
    with ThreadPoolExecutor(threads, "penstock-import") as pool:
        waiting: collections.deque[Future[Result]] = collections.deque()
        try:
            for task in tasks:
                waiting.append(_submitted(pool, task))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _submitted(pool: ThreadPoolExecutor, task: Callable[[], Result]) -> Future[Result]:
    try:
        return pool.submit(task)
    except RuntimeError:  # Python is shutting down and waiting for this thread, so pools no longer accept tasks.
        done: Future[Result] = Future()
        try:
            done.set_result(task())
        except Exception as error:
            done.set_exception(error)
        return done


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that all importers share. Importers with more options define a subclass.

    `defaults` are the column types of an existing destination. They apply to source columns that `types` does not name. `root` is the
    folder of the files that a manifest names; by default, that of the manifest. `naming` chooses columns, and `ignore` lists the kinds of
    annotations that are left out. `boxes` says what happens to wrong boxes: see `Dataset.append`. Importers need not look at `validate` and
    those that follow it.
    """

    types: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_error: str = "raise"
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    root: pathlib.Path | None = None
    shuffle_seed: int | None = None
    naming: Naming = dataclasses.field(default_factory=Naming)
    ignore: Sequence[str] = ()
    boxes: str = "refuse"
    validate: str = "header"
    mode: str | None = None
    key: str | None = None
    limit: int | None = None
    files: Sequence[str] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        check_one_of("on_error", self.on_error, "raise", "skip", "null")
        check_one_of("validate", self.validate, "header", "decode")
        check_one_of("mode", self.mode, "append", "skip-existing", "create", None)
        if not isinstance(self.name, str | None) or self.name == "":
            raise InvalidInputError(f"name={self.name!r}, expected text that names the source")
        if not isinstance(self.key, str | None):
            raise InvalidInputError(f"key={self.key!r}, expected the name of a column", hint='write key="id"')

    def named(self, found: Sequence[str], source: object, all_found: bool = True) -> tuple[Self, dict[str, str]]:
        """Return options whose types go by the names of the source, which has the columns `found`. Also returns the columns to import, each
        with its name in the dataset.
        """
        names = self.naming.names_of(found, source, all_found)
        return self._by_source(names), names

    def check_types(self, columns: Collection[str], source: object, *others: str) -> None:
        """Refuse types of columns that the source lacks. It may also have `others`."""
        if unknown := [name for name in self.types if name not in columns and name not in others]:
            hint = f"columns: {', '.join(columns)}"
            raise InvalidInputError(f"cannot import `{source}`: it has no column `{unknown[0]}`", hint=hint)

    def renamed(self) -> Self:
        """Return options whose types go by the names of the source, for a source whose columns are not known yet."""
        return self._by_source(self.naming.rename)

    def _by_source(self, names: Mapping[str, str]) -> Self:
        new = {old: name for old, name in names.items() if old != name and old not in names.values()}
        if lost := next((name for name in self.types if name in new), None):
            raise InvalidInputError(
                f"types has `{lost}`, which is named `{new[lost]}` in the dataset",
                hint=f'use the new name: types={{"{new[lost]}": …}} (--type {new[lost]}=…)',
            )
        types, defaults = (self.naming.source_names(given, names) for given in (self.types, self.defaults))
        return dataclasses.replace(self, types=types, defaults=defaults)


@dataclasses.dataclass(frozen=True)
class FolderOptions(Options):
    """Options for importers that read folders: lists of patterns, such as "*.jpg" or "train/*", that select files."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def selects(self, name: str) -> bool:
        """Return whether a file is selected. A pattern can match the file's path within the folder, or its name."""

        def matches(patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name.rpartition("/")[2], pattern) for pattern in patterns)

        return (not self.include or matches(self.include)) and not matches(self.exclude)


@dataclasses.dataclass(frozen=True)
class TextOptions(Options):
    """Options for importers that read text."""

    encoding: str = "utf-8"


def check_one_of(name: str, given: Any, *valid: str | None) -> None:
    """Refuse an option that has none of the valid values."""
    if given not in valid:
        raise InvalidInputError(f"{name}={given!r}, expected {', '.join(map(str, valid[:-1]))} or {valid[-1]}")


def checked_patterns(name: str, given: Any) -> tuple[str, ...]:
    """Check and return the patterns given for the option `name`. None means no patterns."""
    if isinstance(given, str):
        raise InvalidInputError(f"{name}={given!r}, expected a list of patterns", hint=f"write {name}=[{given!r}]")
    if given is not None and not isinstance(given, Iterable):
        raise InvalidInputError(f"{name}={given!r}, expected a list of patterns")
    patterns = () if given is None else tuple(given)
    wrong = [pattern for pattern in patterns if not isinstance(pattern, str)]
    if wrong:
        raise InvalidInputError(f"{name}={given!r}: {wrong[0]!r} is not a pattern", hint='patterns are str, such as "*.jpg"')
    return patterns


@dataclasses.dataclass
class Refusal:
    """One refused item or value: where it came from, the error code, the message, and the remedy if there is one."""

    path: str
    code: str
    message: str
    hint: str | None = None

    @classmethod
    def of_value(cls, path: str, column: str, why: str) -> Refusal:
        """Build the refusal for a value that does not fit its column."""
        return cls(path, "invalid-value", f"cannot append to column `{column}`: {why}")


@dataclasses.dataclass
class Report:
    """The result of an import: the number of samples in the commit, and every refused item. Together they account for every item offered.

    With `on_error="null"`, an item with a refused value still becomes a sample, with a null in that column. `left_out` lists the files in a
    folder that were not offered: files of other kinds, such as README.md, and files not selected by include and exclude. `left_out_kinds`
    counts by kind what was left out: these files, and annotations that were ignored, such as polygons. `skipped` counts
    the samples that the dataset has already, if the import was to leave them out. `renamed` maps the names of columns that a dataset cannot
    have to those that they got. `corrected_boxes` counts the boxes that were clipped or dropped.
    """

    samples: int
    refused: list[Refusal]
    snapshot: str | None
    left_out: list[str] = dataclasses.field(default_factory=list)
    skipped: int = 0
    left_out_kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    corrected_boxes: int = 0


@dataclasses.dataclass(frozen=True)
class Unread:
    """Annotations that a source has and its importer does not store. `kind` is what the option `ignore` accepts. `what` describes them with
    their number, and `remedy` what to do instead. `files` counts those that are files of their own.
    """

    kind: str
    count: int
    what: str
    remedy: str = ""
    example: str = ""
    files: int = 0


@dataclasses.dataclass
class Chunk:
    """Some rows. `columns` maps names to values; `name(i)` returns where row i came from; `refused` lists input that did not become rows.

    `problems` lists (row, column, refusal) for each value that the source could not read. In `columns`, these values are None.
    `dropped_boxes` counts those that were wrong, and that the source has left out. `done` is how far the source is, in its unit.
    """

    columns: dict[str, Any]
    rows: int
    name: Callable[[int], str]
    refused: Sequence[Refusal] = ()
    problems: Sequence[tuple[int, str, Refusal]] = ()
    dropped_boxes: int = 0
    done: int = 0


def numbered(prefix: str, first: int = 0) -> Callable[[int], str]:
    """Return a function that names rows by their numbers, of which row 0 has the number `first`."""
    return lambda row: f"{prefix} {first + row}"


@dataclasses.dataclass
class OpenedSource:
    """An opened source. For the progress bar, `total` and the chunks count in `unit`: files, bytes or rows.

    `left_out` lists files that are of other kinds or were not selected, and `files` those that are read. `root` is the folder
    of the files that text in image columns names; None means the usual one. `by_path` says whether the column `path` identifies samples.
    `unread` are the annotations that are not imported. `names` maps the columns to import to their names in the dataset; None means all.
    `content` identifies rows in memory that have no file.
    The consumer of `chunks` must close the generator instead of
    leaving it to the garbage collector. The collector may run while a thread that the generator waits for is starting.
    """

    schema: dict[str, ColumnType]
    chunks: Generator[Chunk, None, None]
    total: int | None
    unit: str
    left_out: list[str] = dataclasses.field(default_factory=list)
    files: list[pathlib.Path] = dataclasses.field(default_factory=list)
    root: pathlib.Path | None = None
    by_path: bool = False
    unread: list[Unread] = dataclasses.field(default_factory=list)
    names: dict[str, str] | None = None
    content: Content | None = None
