"""Forwarding objects: a data file that was taken away is read from the one that takes its place."""

import shutil

import numpy as np
import penstock as ps
import pytest
from crafted_runner import varint
from google_crc32c import value as crc32c
from spec_reader import Dataset

pytestmark = [pytest.mark.local, pytest.mark.usefixtures("separate_files")]


def forwarding(before, after, length, tail_length, tail_crc):
    """Encode a forwarding object (section 7 of the spec)."""
    body = (
        b"PNSF\2\0\0\0"
        + bytes.fromhex(before)
        + bytes.fromhex(after)
        + varint(length)
        + varint(tail_length)
        + tail_crc.to_bytes(4, "little")
    )
    return body + crc32c(body).to_bytes(4, "little")


def files_of(path):
    """Return the data files of a dataset: id, length, length and checksum of the tail."""
    second = Dataset(path)
    return [(file.id, file.length, file.tail_length, file.tail_crc) for part in second.fragments for file in part.files]


@pytest.fixture
def redacted(tmp_path):
    """A dataset, a copy of it in which some values are null, and the data files of both."""
    ds = ps.create(tmp_path / "set", {"n": "int64", "text": ps.Text(), "image": ps.Bytes()})
    ds.append({"n": range(100), "text": [f"name {n}" for n in range(100)], "image": [bytes([n]) * 3000 for n in range(100)]})
    ds.append({"n": [100], "text": ["later"], "image": [b"z"]})
    other = ps.create(tmp_path / "other", {"n": "int64", "text": ps.Text(), "image": ps.Bytes()})
    other.append({
        "n": range(100), "text": [None if n == 7 else f"name {n}" for n in range(100)],
        "image": [None if n == 7 else bytes([n]) * 3000 for n in range(100)],
    })  # fmt: skip
    return tmp_path / "set", tmp_path / "other", files_of(tmp_path / "set")[0], files_of(tmp_path / "other")[0]


def move(path, other, before, after):
    shutil.copy(other / "d" / after[0], path / "d" / after[0])
    (path / "f").mkdir(exist_ok=True)
    (path / "f" / before[0]).write_bytes(forwarding(before[0], *after))
    (path / "d" / before[0]).unlink()


@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
def test_readers_follow_it(redacted, io):
    path, other, before, after = redacted
    move(path, other, before, after)
    ds = ps.open(path, io=io)
    for _ in range(2):
        assert ds[7] == {"n": 7, "text": None, "image": None} and ds[8]["text"] == "name 8" and ds[100]["text"] == "later"
        assert ds.take(range(0, 101, 3))["n"].tolist() == list(range(0, 101, 3))
        assert [len(batch["n"]) for batch in ds.loader(batch_size=50, columns=["n"], shuffle=True)] == [50, 50, 1]
        assert sum(table.num_rows for table in ds.scan()) == 101
    report = ds.verify()
    assert not report["problems"] and not report["unreferenced_objects"]
    assert Dataset(path).column("text")[:9] == [b"name %d" % n if n != 7 else None for n in range(9)]
    # It stays after changes and compaction.
    ds.update({"n": [-7]}, row_ids=[7])
    ds.compact()
    assert ds[7] == {"n": -7, "text": None, "image": None} and not ds.verify()["problems"]


def test_it_may_lead_to_another_one_but_not_in_a_circle(redacted):
    path, other, before, after = redacted
    move(path, other, before, after)
    steps = [f"{step:032x}" for step in range(8)]
    names = [before[0], *steps]
    for one, two in zip(names[:7], [*names[1:7], after[0]], strict=True):
        (path / "f" / one).write_bytes(forwarding(one, two, *after[1:]))
    assert ps.open(path)[8]["text"] == "name 8"  # Seven of them.
    assert Dataset(path).column("n")[8] == 8
    (path / "f" / names[6]).write_bytes(forwarding(names[6], before[0], *after[1:]))
    for damaged in (True, False):
        if not damaged:  # One that does not lead to itself, but is missing.
            (path / "f" / names[6]).unlink()
        error = ps.CorruptError if damaged else ps.NotFoundError
        with pytest.raises(error, match="more than 8 forwarding objects" if damaged else before[0]):
            ps.open(path)[8]
        assert any(before[0] in name for name, _ in ps.open(path).verify()["problems"])
        assert ps.open(path)[100]["text"] == "later"


@pytest.mark.parametrize("what", ["of another file", "damaged", "other columns", "other samples", "other checksum"])
def test_a_wrong_one_is_refused(redacted, what):
    path, other, before, after = redacted
    move(path, other, before, after)
    object = path / "f" / before[0]
    if what == "of another file":
        object.write_bytes(forwarding(after[0], *after))
    elif what == "damaged":
        body = bytearray(object.read_bytes())
        body[30] ^= 1
        object.write_bytes(body)
    elif what == "other checksum":
        object.write_bytes(forwarding(before[0], *after[:3], after[3] ^ 1))
    else:
        third = ps.create(
            path.parent / "third", {"n": "int64"} if what == "other columns" else {"n": "int64", "text": ps.Text(), "image": ps.Bytes()}
        )
        count = 100 if what == "other columns" else 99
        third.append({name: {"n": range(count), "text": ["x"] * count, "image": [b"x" * 3000] * count}[name] for name in third.schema})
        move_to = files_of(path.parent / "third")[0]
        shutil.copy(path.parent / "third" / "d" / move_to[0], path / "d" / move_to[0])
        object.write_bytes(forwarding(before[0], *move_to))
    ds = ps.open(path)
    with pytest.raises(ps.CorruptError):
        ds[8]
    with pytest.raises(ps.CorruptError):
        list(ds.loader(batch_size=5, columns=["n"]))
    assert np.array_equal(ds.take([100])["n"], [100]) and ds.verify()["problems"]
