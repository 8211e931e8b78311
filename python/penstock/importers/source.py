"""What an importer gives: a schema and chunks of rows, each row with a name for the report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import importlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.schema import ColumnType

Result = TypeVar("Result")


def import_pandas() -> None:
    """Import pandas, where it is there, before pyarrow does.

    pyarrow imports it with the first array that it gives to NumPy, and drops what that raises: a Ctrl-C too, so the import would go on.
    """
    with contextlib.suppress(Exception):
        importlib.import_module("pandas")


def ahead(tasks: Iterable[Callable[[], Result]], threads: int) -> Iterator[Result]:
    """Run tasks in threads before their results are wanted, at most `threads + 1` of them; give results in order."""
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
    except RuntimeError:  # The main thread is done, and Python waits for this one: pools take nothing more.
        done: Future[Result] = Future()
        try:
            done.set_result(task())
        except Exception as error:
            done.set_exception(error)
        return done


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may set. `types` gives columns a type by name; `include` and `exclude` are of folders; the rest are of CSV.

    `defaults` are the types of the dataset that is appended to: they hold for columns that the source has, and `types` says nothing of.
    """

    types: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_error: str = "raise"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    encoding: str = "utf-8"
    delimiter: str | None = None
    quote: str = '"'
    header: bool = True
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def chosen(name: str, options: Options) -> bool:
    """Tell whether a file is to be imported: include and exclude are compared with its path in the folder and with its name."""

    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name.rpartition("/")[2], pattern) for pattern in patterns)

    return (not options.include or matches(options.include)) and not matches(options.exclude)


@dataclasses.dataclass
class Refusal:
    """One item that was not imported: where it came from, the error's code, and its message."""

    path: str
    code: str
    message: str

    @classmethod
    def of_value(cls, path: str, column: str, why: str) -> Refusal:
        """Refuse a value that its column cannot take."""
        return cls(path, "invalid-value", f"cannot append to column `{column}`: {why}")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; what would lose something as Python's own values is an error.

    Raises: ValueError, RecursionError.
    """
    return json.loads(text, parse_float=_finite, object_pairs_hook=_object)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:80]} is beyond float64")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"two values of the name {twice[:80]!r}")
    return made


@dataclasses.dataclass
class Chunk:
    """Some rows: column → values; `name(i)` tells where row i came from. `refused` were never rows at all.

    `problems` are (row, column, refusal) of values that the source could not read, and gives as None.
    """

    columns: dict[str, Any]
    rows: int
    name: Callable[[int], str]
    refused: Sequence[Refusal] = ()
    problems: Sequence[tuple[int, str, Refusal]] = ()


@dataclasses.dataclass
class Source:
    """An opened source. `total` is in `unit` (files, bytes, rows), for the progress bar; `done()` tells how far it is.

    `left_out` are files of other kinds, or that were not chosen. Whoever takes `chunks` closes them: the collector of garbage must not do so, since
    it may run where a thread that they wait for starts.
    """

    schema: dict[str, ColumnType]
    chunks: Generator[Chunk, None, None]
    total: int | None
    unit: str
    done: Callable[[], int]
    left_out: list[str] = dataclasses.field(default_factory=list)
