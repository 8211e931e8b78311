"""Set each integer in a small dataset's objects to other values, recompute all checksums, and check how a reader responds.

test_crafted.py runs this file in a separate process. Each attempt runs in a forked child, so its caches start empty and a crash
counts as an outcome. The second reader (spec_reader.py) finds the positions of the integers. The script prints one JSON object.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import resource
import shutil
import sys

import numpy as np
import penstock as ps
import spec_reader
from google_crc32c import value as crc32c
from penstock import _core

WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i64": 8}


class Traced(spec_reader.Cursor):
    """A cursor that records each integer it reads as (offset, length in bytes, form), for example `(40, 4, "u32")`."""

    spans: list[tuple[int, int, str]] = []
    # Integers that are row ids. With other row ids, an overlay belongs to other samples, and the dataset has other values.
    choosing: set[tuple[int, int, str]] = set()
    base = 0

    def read(self, form):
        at, before = self.at, len(self.spans)
        found = super().read(form)
        if form in ("row_set", "bitmap", "run"):
            self.choosing.update(self.spans[before:])
        if form in WIDTHS:
            self.spans.append((self.base + at, WIDTHS[form], form))
        return found

    def varint(self):
        at, kept = self.at, len(self.spans)
        found = super().varint()
        del self.spans[kept:]  # Do not record the individual bytes of a varint as integers.
        self.spans.append((self.base + at, self.at - at, "varint"))
        return found

    def integers(self, width, count):
        at = self.at
        found = super().integers(width, count)
        self.spans += [(self.base + at + width * index, width, f"u{8 * width}") for index in range(count)]
        return found


def varint(value: int) -> bytes:
    out = b""
    while True:
        value, byte = value >> 7, value & 127
        out += bytes([byte | (128 if value else 0)])
        if not value:
            return out


def encoded(value: int, form: str) -> bytes:
    if form == "varint":
        return varint(value & (1 << 64) - 1)
    width = int(form[1:]) // 8
    return (value & (1 << 8 * width) - 1).to_bytes(width, "little")


def decoded(body: bytes, span: tuple[int, int, str]) -> int:
    at, length, form = span
    part = body[at : at + length]
    return sum((byte & 127) << 7 * place for place, byte in enumerate(part)) if form == "varint" else int.from_bytes(part, "little")


class Objects:
    """A dataset's objects by name, and the references between them."""

    def __init__(self, place: pathlib.Path) -> None:
        self.bodies = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}

    def spans(self, name: str, form: str) -> list[tuple[int, int, str]]:
        """Return the positions of all integers in an object. For a data file, include only those in the tail."""
        body, Traced.spans, Traced.choosing = self.bodies[name], [], set()
        if form == "hint":
            return [(4, 8, "u64")]
        if form == "data":
            begin = int.from_bytes(body[-32:-24], "little")
            cursor = Traced(body[begin:-32], name)
            cursor.base = begin
            samples = cursor.varint()
            assert cursor.varint() == 0
            for _ in range(cursor.varint()):
                spec_reader.Chunk(cursor, samples)
        else:
            cursor = Traced(body[8:-4], name)
            cursor.base = 8
            cursor.read(form)
        return sorted(set(Traced.spans))

    def changed(self, name: str, body: bytes) -> dict[str, bytes]:
        """Replace the body of `name`, correct the checksums and lengths in every object that refers to it, and return all objects."""
        bodies, waiting = dict(self.bodies), {name: body}
        while waiting:
            name, body = waiting.popitem()
            old = bodies[name]
            if name.endswith("hint"):
                bodies[name] = body[:-4] + crc32c(body[:-4]).to_bytes(4, "little")
                continue
            if name.startswith("d/"):
                old_tail, tail = self.tail_of(old), self.tail_of(body, len(body) - len(old))
                begin = int.from_bytes(old[-32:-24], "little")
                footer = begin.to_bytes(8, "little") + len(tail).to_bytes(4, "little") + crc32c(tail).to_bytes(4, "little")
                body = body[: begin + len(tail)] + footer + (begin + len(tail) + 32).to_bytes(8, "little") + old[-8:]
                word = lambda whole, tail: varint(len(whole)) + varint(len(tail)) + crc32c(tail).to_bytes(4, "little")  # noqa: E731
                before, after = bytes.fromhex(name[2:]) + word(old, old_tail), bytes.fromhex(name[2:]) + word(body, tail)
            else:
                body = body[:-4] + crc32c(body[:-4]).to_bytes(4, "little")
                before = after = b""
                if not name.startswith(("log/", "refs/")):
                    key = bytes.fromhex(name[2:])
                    before, after = key + varint(len(old)) + old[-4:], key + varint(len(body)) + body[-4:]
            bodies[name] = body
            for parent, content in bodies.items():
                if before and before != after and before in content and not parent.startswith("d/"):
                    waiting[parent] = content.replace(before, after)
        return bodies

    @staticmethod
    def tail_of(body: bytes, longer: int = 0) -> bytes:
        begin = int.from_bytes(body[-32:-24], "little")
        return body[begin:-32]


def everything(place: pathlib.Path) -> list[bytes]:
    """Read the dataset in every possible way and return the values of each column as bytes."""
    ds = ps.open(place)
    found = []
    batch = ds.take(range(len(ds)))
    for values in batch.values():
        found.append(b"".join(map(flat, values)))
    for table in ds.scan(batch_size=7):
        table.to_pydict()
    for commit in ds.log():
        str(commit)
    for name, kind in ds.schema.items():
        if isinstance(kind, ps.Label | ps.Category):
            found.append(repr(ds.vocabulary(name)).encode())
    ds.take(range(len(ds)), columns=["_row_id"])
    ds.pins()
    for _ in ds.loader(batch_size=5, columns=["n"]):
        pass
    if "tiled" in ds.schema:
        ds["tiled"][0, 0:2, 1:3]
    found += [one["object"].encode() + one["content"] for one in _core.attachments(ds._snapshot)]
    return found


def statistics(place: pathlib.Path) -> list[object]:
    """Return what the dataset says about its columns. A reader cannot compare it with the values, but `verify` does."""
    ds = ps.open(place)
    return [_core.statistics(ds._snapshot, name) for name in ds.schema]


def flat(value: object) -> bytes:
    if value is np.ma.masked:
        return b"null"
    return value.tobytes() if isinstance(value, np.ndarray | np.generic) else repr(value).encode()


def attempt(place: pathlib.Path, bodies: dict[str, bytes], original: dict[str, bytes], expected: list[bytes], bounds: list[object]) -> str:
    """Read the changed dataset in a child process and return the outcome. The returned text starts with the kind of outcome."""
    changed = [name for name in bodies if bodies[name] != original[name]]
    for name in changed:
        (place / name).write_bytes(bodies[name])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "lost"
        try:
            try:
                said = "equal" if everything(place) == expected else "other values"
                if statistics(place) != bounds and not ps.open(place).verify()["problems"]:
                    said = "other statistics, and verify found no problems"
            except ps.Error as error:
                said = f"refused {error.code}" if error.code != "internal" else f"foreign {error}"
            if said.startswith("refused"):
                try:
                    if not ps.open(place).verify()["problems"]:
                        said = f"verify found no problems, but reading was {said}"
                except ps.Error as error:
                    said = "refused " + error.code
        except BaseException as error:
            said = f"foreign {type(error).__name__}: {error}"
        os.write(writer, said.encode()[:1000])
        os._exit(0)
    os.close(writer)
    _, status, usage = os.wait4(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    for name in changed:
        (place / name).write_bytes(original[name])
    if os.WIFSIGNALED(status):
        return f"died from signal {os.WTERMSIG(status)}"
    memory = usage.ru_maxrss >> 10
    return said if memory < attempt.most_mib else f"{memory} MiB of memory, {said}"


def make(place: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    schema = {
        "n": "int32", "flag": "bool", "packed": ps.Tensor((4,), "int16", codec="lz4"), "text": ps.Text(), "zstd": ps.Text(codec="zstd"), "meta": ps.Json(),
        "label": ps.Label(["a", "b"]), "word": ps.Category(), "cloud": ps.Tensor((None, 2), "float32"), "large": ps.Tensor((None,), "uint8"),
        "tiled": ps.Tensor((None, 6), "int16", tile=(2, 3)), "image": ps.Image(),
    }  # fmt: skip
    ds = ps.create(place, schema)

    def rows(count: int, first: int) -> dict[str, object]:
        return {
            "n": [first + row for row in range(count)], "flag": [row % 2 == 0 for row in range(count)], "packed": rng.integers(0, 3, (count, 4)),
            "text": ["é" * (row + 1) if row else None for row in range(count)], "zstd": [f"text {row}" * 9 for row in range(count)],
            "meta": [{"row": row} for row in range(count)], "label": ["a", "b"] * (count // 2), "word": [f"w{first + row % 3}" for row in range(count)],
            "cloud": [rng.random((row % 3, 2), dtype=np.float32) for row in range(count)],
            "large": [rng.integers(0, 256, 70_000 if row == 1 else 2000, dtype=np.uint8) for row in range(count)],
            "tiled": [None if row == 2 else np.full((row + 1, 6), row, np.int16) for row in range(count)],
            "image": [np.full((2, 3, 3), row, np.uint8) for row in range(count)],
        }  # fmt: skip

    ds.append(rows(6, 0))
    for number in range(40):
        ds.append({"n": [number]})
    with ds.transaction() as tx:  # The row ids have so many runs that they are in objects, and the next root refers to them.
        tx.update({"n": range(20), "word": ["w1", "w9"] * 10}, row_ids=range(2, 42, 2))
        tx.update({"text": ["new", None]}, row_ids=[0, 3])
        tx.delete(row_ids=range(7, 45, 2))
    for number in range(40):
        ds.append({"n": [number]})
    ds.append(rows(4, 50))
    with ds.transaction() as tx:
        tx.update({name: values[:2] for name, values in rows(2, 9).items()}, row_ids=[1, 87])
        tx.delete(row_ids=[5, 60, 61])
    given = "attach", "test", "{}"
    ds._move(_core.attach(ds._snapshot, "index", b"content", ["n"], None, "{}", [], given))
    for number in range(40):  # Until a root is written.
        ds.append({"n": [number]})
    ds._move(_core.attach(ds._snapshot, "sketch", b"more", ["text"], np.arange(2, 5), '{"size": 7}', [], given))
    with ds.transaction() as tx:
        tx.update({"text": ["newer"]}, row_ids=[3])
    ds._snapshot.pin("kept")


def main() -> None:
    share, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    place = folder / "set"
    make(place)
    expected, bounds = everything(place), statistics(place)
    objects = Objects(place)
    record = max((name for name in objects.bodies if name.startswith("log/") and name[-1].isdigit()), key=lambda name: -int(name[-20:]))
    parsed = spec_reader.Dataset(place)
    root = f"r/{parsed.record.root.id}"
    forms = {record: "record", root: "root", "log/0000000000000000/hint": "hint", "refs/18446744073709551615": "names"}
    forms |= {f"p/{page.object.id}": "fragment*" for page in parsed.root.pages}
    forms |= {f"o/{overlay.rows.object.id}": "bitmap" for overlay in parsed.overlays if not isinstance(overlay.rows, list)}
    forms |= {
        f"w/{segment.object.id}": "words" for segment in [*parsed.root.segments, *parsed.record.deltas] if hasattr(segment, "first_code")
    }
    forms |= {f"s/{page.statistics.id}": "statistics" for page in parsed.root.pages if page.statistics}
    forms |= {f"a/{attachment.object.id}": "content" for attachment in parsed.attachments}
    assert len([name for name in forms if name.startswith("o/")]) >= 2
    assert parsed.root.attachments and {"s", "a"} <= {name.split("/")[0] for name in forms}
    files = [file for part in [*parsed.fragments, *parsed.overlays] for file in part.files]
    stored = [file for file in files if file.kind == 0]
    assert {file.kind for file in files} == {0, 1, 2}
    forms |= {f"d/{file.id}": "data" for file in sorted(stored, key=lambda file: -file.tail_length)[:4]}
    tries, choosing = [], set()
    for name, form in sorted(forms.items()):
        spans, body = objects.spans(name, form), objects.bodies[name]
        choosing |= {(name, *span) for span in Traced.choosing}
        values = [decoded(body, span) for span in spans]
        for index, (span, value) in enumerate(zip(spans, values, strict=True)):
            at, length, kind = span
            most = (1 << 64) - 1 if kind == "varint" else (1 << 8 * length) - 1
            near = values[max(0, index - 1) : index] + values[index + 1 : index + 2]
            for other in {0, 1, most, most >> 1, *near, value + 1, max(0, value - 1)} - {value}:
                tries.append((name, at, length, kind, value, other))
    random.Random(share).shuffle(tries)
    chosen = tries[:: max(1, share)]
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    attempt.most_mib = start + 300
    outcomes: dict[str, int] = {}
    wrong = []
    for name, at, length, kind, value, other in chosen:
        body = objects.bodies[name]
        bodies = objects.changed(name, body[:at] + encoded(other, kind) + body[at + length :])
        said = attempt(place, bodies, objects.bodies, expected, bounds)
        word = said.split(" ")[0]
        word = "equal" if word == "other" and (name, at, length, kind) in choosing else word
        outcomes[word] = outcomes.get(word, 0) + 1
        if word not in ("equal", "refused"):
            wrong.append(f"{name} at {at}: {kind} {value} -> {other}: {said}")
    shutil.rmtree(place)
    print(json.dumps({"integers": len(tries), "tries": len(chosen), "outcomes": outcomes, "wrong": wrong}))


def resealed(root, change):
    """Change the only block of the only data file, and recompute all checksums."""
    root = pathlib.Path(root)
    objects = Objects(root)
    [name] = [name for name in objects.bodies if name.startswith("d/")]
    body = objects.bodies[name]
    tail = int.from_bytes(body[-32:-24], "little")
    checksum = lambda part: varint(crc32c(part))  # noqa: E731
    assert checksum(body[24:tail]) in body[tail:]
    block = change(body[24:tail])
    changed = body[:24] + block + body[tail:].replace(checksum(body[24:tail]), checksum(block))
    for path, content in objects.changed(name, changed).items():
        (root / path).write_bytes(content)


if __name__ == "__main__":
    main()
