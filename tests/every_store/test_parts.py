"""Parts of one value: ranges of its bytes, and bytes that are read from a source while they are appended."""

import http.server
import io
import os
import random
import threading
import urllib.request

import numpy as np
import penstock as ps
import pytest
from handles import newest

UNIT = 64 << 10
LENGTHS = [0, 1, 700, 5000, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT + 17, 1 << 20, (1 << 20) + 1, 20 * UNIT + 3]


class Body:
    """A source that returns fewer bytes than were asked for, like the body of an HTTP response. Counts the bytes that were read."""

    def __init__(self, content, seed=0, fails_at=None):
        self.content, self.at, self.fails_at = content, 0, fails_at
        self._random = random.Random(seed)

    def read(self, size):
        assert size > 0
        if self.fails_at is not None and self.at >= self.fails_at:
            raise ConnectionResetError("the other side hung up")
        piece = self.content[self.at : self.at + self._random.randint(1, size)]
        self.at += len(piece)
        return piece


def files(root):
    """Return the data files."""
    return sorted(root.glob("d/*"))


def source_of(rng, content):
    """Return the content as one of the values that a column of bytes accepts."""
    cut = max(1, rng.randrange(1 << 18))
    return rng.choice(
        [
            lambda: content,
            lambda: bytearray(content),
            lambda: io.BytesIO(content),
            lambda: Body(content, rng.random()),
            lambda: (content[at : at + cut] for at in range(0, len(content), cut)),
            lambda: iter([memoryview(content), b"", np.zeros(0, np.uint8)]),
        ]
    )()


def check_parts(rng, column, position, content, times=6):
    for _ in range(times):
        start, end = (rng.choice([None, rng.randint(-len(content) - 5, len(content) + 5)]) for _ in range(2))
        assert column.read(position, start, end) == content[start:end]


@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("PENSTOCK_MODEL_SEEDS", 2))))
def test_ranges_and_sources_against_a_model(root, codec, seed):
    rng = random.Random(seed)
    ds = ps.create(root, {"n": "int32", "blob": ps.Bytes(codec=codec)})
    model = {}

    def values(count):
        found = [None if rng.random() < 0.15 else rng.randbytes(rng.choice(LENGTHS) + rng.randrange(3)) for _ in range(count)]
        return found, [None if value is None else source_of(rng, value) for value in found]

    for step in range(12):
        what = rng.choice(["append", "append", "update", "delete", "transaction", "compact"]) if model else "append"
        if what == "append":
            found, given = values(rng.randint(1, 4))
            model |= dict(zip(ds.append({"n": [step] * len(found), "blob": given}).row_ids.tolist(), found, strict=True))
        elif what == "update":
            rows = rng.sample(list(model), min(len(model), 2))
            found, given = values(len(rows))
            ds.update({"blob": given}, row_ids=rows)
            model |= dict(zip(rows, found, strict=True))
        elif what == "delete" and len(model) > 2:
            [row] = rng.sample(list(model), 1)
            with ds.transaction() as tx:
                tx.delete(row_ids=[row])
            del model[row]
        elif what == "transaction":
            (new, given), row = values(2), rng.choice(list(model))
            later, again = values(1)
            with ds.transaction() as tx:
                ids = tx.append({"n": [step, step], "blob": given})
                tx.update({"blob": again}, row_ids=[row])
                assert tx.take(ids)["blob"] == new
            model[row] = later[0]
            model |= dict(zip(tx.receipt.row_ids.tolist(), new, strict=True))
        elif what == "compact":
            ds.compact()
        ids = ds.take(range(len(ds)), columns=["_row_id"])["_row_id"].tolist()
        assert sorted(ids) == sorted(model)
        fresh = newest(ps.open(root), len(ds))
        chosen = rng.sample(range(len(ids)), len(ids))
        for view, positions in ((fresh, range(len(ids))), (fresh.select(chosen), chosen)):
            for position, at in list(enumerate(positions))[-4:]:
                content = model[ids[at]]
                if content is None:
                    with pytest.raises(ps.InvalidInputError, match=f"sample {position} of column `blob`: it is null"):
                        view["blob"].read(position, 0, 1)
                else:
                    check_parts(rng, view["blob"], position, content)
    assert [ds[at]["blob"] for at in range(len(ids))] == [model[row] for row in ids]
    assert not ds.verify()["problems"]


def test_a_value_opens_as_a_file(root):
    content = random.Random(1).randbytes(5 * UNIT + 9)
    ds = ps.create(root, {"film": ps.Bytes(), "text": ps.Text(), "data": ps.Json()})
    ds.append({"film": [b"", io.BytesIO(content), None], "text": ["", "é" * UNIT, "x"], "data": [{"a": [1]}, None, [2]]})
    with ds["film"].open(1, buffer_bytes=UNIT) as film:
        assert film.seekable() and film.readable() and not film.writable()
        assert film.read(10) == content[:10] and film.tell() == 10
        assert film.seek(-UNIT, io.SEEK_END) == 4 * UNIT + 9 and film.read() == content[-UNIT:] and film.read() == b""
        assert film.seek(3) == 3 and film.seek(4, io.SEEK_CUR) == 7 and film.read(2 * UNIT) == content[7 : 7 + 2 * UNIT]
        assert film.seek(10 * UNIT) == 10 * UNIT and film.read(5) == b""
        with pytest.raises(ValueError, match="cannot seek to -1"):
            film.seek(-1)
    assert ds["film"].open(0).read() == b"" and ds["film"].open(-2).read() == content
    assert ds["text"].read(1, 1, 4) == "é".encode()[1:] + "é".encode() and ds["data"].read(0) == b'{"a":[1]}'
    both = ps.concat([ds, ds.select([1])])
    assert both["film"].read(3, 5, 9) == content[5:9] == both["film"].read(-1, 5, 9) and both["film"].open(1).read() == content
    for read in (both["film"].read, ds["film"].read, ds["film"].open):
        with pytest.raises(ps.InvalidInputError, match="sample 2 of column `film`: it is null"):
            read(2)
        with pytest.raises(ps.OutOfRangeError):
            read(4)
        with pytest.raises(ps.InvalidInputError, match="expected a whole number"):
            read([1])
    with pytest.raises(ps.InvalidInputError, match="expected a whole number or None"):
        ds["film"].read(1, 0.5)
    assert ds["film"].read(1, -(10**30), 10**30) == content


def test_other_columns_have_no_bytes(root):
    ds = ps.create(root, {"n": "int32", "v": ps.Tensor((None,), "uint8"), "boxes": ps.Boxes()})
    ds.append({"n": [1], "v": [[1, 2]], "boxes": [np.zeros((1, 4), np.float32)]})
    for name in ds.schema:
        with pytest.raises(ps.InvalidInputError, match=f"cannot read bytes of column `{name}`"):
            ds[name].read(0)
    with pytest.raises(ps.NotFoundError):
        ds["_row_id"].read(0)


def unlike_bytes():
    yield bytes(3 << 20)
    yield "text"


class TooMuch:
    def read(self, size):
        return bytes(size + 1)


def breaks(after):
    yield bytes(after)
    raise ConnectionResetError("the other side hung up") from OSError("a cable")


@pytest.mark.parametrize(
    "source,message",
    [
        (lambda: unlike_bytes(), "row 1 is a source of bytes, but it yielded a str"),
        (lambda: io.StringIO("text"), r"row 1 is a source of bytes, but `read` returned a str\nhint: open the file in binary mode"),
        (lambda: iter([np.arange(3)]), "row 1 is a source of bytes, but it yielded a ndarray"),
        (lambda: iter([None]), "row 1 is a source of bytes, but it yielded a NoneType"),
        (TooMuch, "row 1 is a source whose `read(1048576)` returned 1048577 bytes".replace("(", r"\(").replace(")", r"\)")),
    ],
)
def test_a_source_of_anything_else_is_refused(root, source, message):
    ds = ps.create(root, {"film": ps.Bytes()})
    before = files(root)
    with pytest.raises(ps.InvalidInputError, match=f"^cannot append to column `film`: {message}"):
        ds.append({"film": [b"a", source()]})
    assert files(root) == before and len(ds) == 0
    with pytest.raises(ps.InvalidInputError, match=r"write \[file\]"):
        ds.append({"film": io.BytesIO(b"one")})


@pytest.mark.parametrize("after", [10, 3 << 20, 20 << 20])
@pytest.mark.parametrize("source", [breaks, lambda after: Body(bytes(after + 1), fails_at=after)])
def test_an_error_of_a_source_leaves_nothing(root, after, source):
    ds = ps.create(root, {"n": "int32", "film": ps.Bytes()})
    ids = ds.append({"n": [1], "film": [b"first"]}).row_ids
    before = files(root)
    calls = [
        lambda: ds.append({"n": [2, 3], "film": [None, source(after)]}),
        lambda: ds.update({"film": [source(after)]}, row_ids=ids),
        lambda: ds.stage({"n": [2], "film": [source(after)]}),
    ]
    for call, row in zip(calls, (1, 0, 0), strict=True):
        with pytest.raises(ConnectionResetError, match="hung up") as caught:
            call()
        [note] = caught.value.__notes__
        assert caught.value.__context__ is None or str(caught.value.__cause__) == "a cable"
        assert note.endswith(f"column `film`, row {row}: its source raised this error")
    # A transaction continues only if nothing of the call had been written.
    tx = ds.transaction()
    with pytest.raises(ConnectionResetError):
        tx.append({"n": [2], "film": [source(after)]})
    if after > 1 << 20:
        with pytest.raises(ps.ClosedError):
            tx.commit()
    tx.abort()
    assert files(root) == before and ds.refresh()[0]["film"] == b"first" and len(ds) == 1
    assert not ds.verify()["problems"]


def test_a_source_is_read_once_however_often_a_commit_is_tried(root):
    """Other commits are made while the source is read and before the commit. A conflict does not read it again."""
    ds = ps.create(root, {"n": "int32", "film": ps.Bytes()})
    ids = ds.append({"n": [1], "film": [None]}).row_ids
    other = newest(ps.open(root), 1)
    content = random.Random(2).randbytes(3 << 20)

    def slow():
        for at in range(0, len(content), 1 << 20):
            other.append({"n": [at], "film": [None]})
            yield content[at : at + (1 << 20)]

    receipt = ds.append({"n": [2], "film": [slow()]})
    newest(ds, 5)
    assert len(ds) == 5 and ds.take(row_ids=receipt.row_ids)["film"] == [content]
    body = Body(content)
    tx = ds.transaction()
    tx.update({"film": [body]}, row_ids=ids)
    other.refresh().update({"film": [b"won"]}, row_ids=ids)
    before = files(root)
    with pytest.raises(ps.ConflictError):
        tx.commit()
    assert body.at == len(content) and body.read(1) == b""
    assert len(files(root)) == len(before) - 1, "the film of the lost transaction is deleted"
    assert ds.refresh().take(row_ids=ids)["film"] == [b"won"]
    with pytest.raises(ps.ClosedError, match="while it is reading a value"), ds.transaction() as tx:
        tx.append({"n": [1], "film": [(bytes(2 << 20) if first else tx.append({"n": [1]}) for first in (True, False))]})
    assert len(ds) == 5


def test_upserts_stages_and_streams_of_rows_take_sources(root):
    rng = random.Random(3)
    films = [rng.randbytes(length) for length in (10, 2 << 20, 5 << 20, 2 << 20, 3 << 20)]
    ds = ps.create(root, {"key": "int32", "film": ps.Bytes()})
    ds.append({"key": number, "film": io.BytesIO(film)} for number, film in enumerate(films[:3]))
    with ds.transaction() as tx:
        tx.upsert({"key": [1, 3], "film": [io.BytesIO(films[4]), Body(films[3])]}, key="key")
        assert tx.update({"key": [2, 9], "film": [io.BytesIO(films[0]), io.BytesIO(films[0])]}, on="key") == [9]
    before = files(root)
    with ds.transaction() as tx:
        tx.append({"key": [8], "film": [Body(films[2])]})
        assert len(files(root)) >= len(before)
        tx.abort()
    assert files(root) == before
    stage = ds.stage({"key": [4], "film": [iter([films[2]])]})
    with ds.transaction() as tx:
        tx.add([stage])
    expected = {0: films[0], 1: films[4], 2: films[0], 3: films[3], 4: films[2]}
    assert dict(zip(ds["key"][:].tolist(), ds["film"][:], strict=True)) == expected
    for place, key in enumerate(ds["key"][:].tolist()):
        check_parts(rng, ds["film"], place, expected[key])
    assert not ds.verify()["problems"]


def test_two_columns_of_sources_share_samples(root):
    rng = random.Random(4)
    films = {name: [None, rng.randbytes(3 << 20), b"", rng.randbytes(70), rng.randbytes(2 << 20)] for name in ("film", "sound")}
    films["sound"].reverse()
    ds = ps.create(root, {"film": ps.Bytes(), "n": "int32", "sound": ps.Bytes(codec="zstd")})
    given = {name: [None if film is None else Body(film, 1) for film in column] for name, column in films.items()}
    ds.append({**given, "n": range(5)})
    ds.append({"n": [5], "sound": [b"last"]})
    for name, column in films.items():
        assert ds[name][:5] == column
        for place, film in enumerate(column):
            if film is not None:
                check_parts(rng, ds[name], place, film)
    assert ds[5] == {"film": None, "n": 5, "sound": b"last"} and not ds.verify()["problems"]


def test_a_response_that_ends_early_is_refused(root):
    """Reads of a response in parts return nothing after a lost connection, as at its end."""

    class Short(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(3 << 20))
            self.end_headers()
            self.wfile.write(bytes((3 << 20) - (9 if "short" in self.path else 0)))

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Short) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            ds = ps.create(root, {"film": ps.Bytes()})
            address = f"http://127.0.0.1:{server.server_port}"
            with urllib.request.urlopen(f"{address}/whole", timeout=300) as answer:
                ds.append({"film": [answer]})
            early = pytest.raises(ps.InvalidInputError, match="column `film`: row 0 is an HTTP response that ended 9 bytes early")
            with early, urllib.request.urlopen(f"{address}/short", timeout=300) as answer:
                ds.append({"film": [answer]})
        finally:
            server.shutdown()
            thread.join()
    assert [len(film) for film in ds["film"][:]] == [3 << 20]
