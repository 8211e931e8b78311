"""An independent reader (spec_reader.py), based only on the specification, reads the same values as Penstock."""

import io
import os
import pathlib
import shutil

import numpy as np
import penstock as ps
import pytest
import spec_reader
from anything import SCHEMA, values

GOLDEN = pathlib.Path(__file__).parent.parent.parent / "spec" / "golden" / "v1"


def same(ours, theirs):
    if ours is None or theirs is None:
        return ours is theirs
    if isinstance(theirs, bytes):
        return (ours.encode() if isinstance(ours, str) else bytes(ours)) == theirs
    if isinstance(theirs, str):
        return ours == theirs
    ours = np.asarray(ours)
    return ours.shape == theirs.shape and ours.tobytes() == np.ascontiguousarray(theirs).tobytes()


def compare(place):
    ds, other = ps.open(place), spec_reader.Dataset(place)
    assert (len(ds), ds.snapshot) == (len(other), other.snapshot)
    assert ds.take(range(len(ds)), columns=["_row_id"])["_row_id"].tolist() == other.row_ids()
    assert [commit.message for commit in ds.log()] == [commit["message"] for commit in other.commits()]
    stored = ds.take(range(len(ds)), decode=False)
    for name, kind in ds.schema.items():
        ours, theirs = stored[name], other.column(name)
        if isinstance(kind, ps.Label | ps.Category):
            words = ds.vocabulary(name)
            missing = np.ma.getmaskarray(ours)
            ours = [None if missing[row] else words[int(code)] for row, code in enumerate(np.ma.getdata(ours))]
            theirs = [None if code is None else code if isinstance(code, str) else words[int(code)] for code in theirs]
        elif isinstance(ours, np.ma.MaskedArray):
            missing = np.ma.getmaskarray(ours).reshape(len(ours), -1).any(axis=1)
            ours = [None if missing[row] else np.ma.getdata(ours)[row] for row in range(len(ours))]
        for row, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            assert same(one, two), f"`{name}`, sample {row}: {one!r}, but the second reader returns {two!r}"
    assert not ds.verify()["problems"]


@pytest.mark.local
def test_golden_files_read_the_same():
    compare(GOLDEN)


def write_names(golden):
    """Write the golden names anew."""
    shutil.rmtree(golden, ignore_errors=True)
    ds, random = ps.create(golden, {"n": "int32"}), np.random.default_rng(7)
    tags = set()
    for number in random.integers(0, 400, 1400):
        name = "größe / ✓ " * (number % 5) + str(number)
        if name in tags and random.random() < 0.7:
            ds.delete_tag(name)
            tags.remove(name)
        elif name not in tags:
            ds.create_tag(name)
            tags.add(name)
    (golden / "contents.txt").write_text("".join(f"{name}\n" for name in sorted(tags)), "utf-8")
    [newest, *earlier] = sorted(path for path in (golden / "refs").iterdir() if path.name != "hint")
    for path in [*earlier, *(path for path in (golden / "n").iterdir() if bytes.fromhex(path.name) not in newest.read_bytes())]:
        path.unlink()


@pytest.mark.local
def test_golden_names_read_the_same(tmp_path):
    """The newest names record of a dataset with its object, after hundreds of operations. Earlier records and objects are not there.

    With `PENSTOCK_GOLDEN=write`, they are written anew first, as after a change of the format.
    """
    golden = GOLDEN.with_name("names")
    if os.environ.get("PENSTOCK_GOLDEN") == "write":
        write_names(golden)
    shutil.copytree(golden, tmp_path / "set")
    (tmp_path / "set" / "contents.txt").unlink()
    expected = sorted((golden / "contents.txt").read_text("utf-8").splitlines())
    assert sorted(ps.open(tmp_path / "set").tags()) == expected
    assert sorted(name for _, name in spec_reader.Dataset(tmp_path / "set").names()) == expected


WIDER = {
    "int8": "int16", "int16": "int32", "int32": "int64", "uint8": "int16", "uint16": "uint32", "uint32": "int64", "uint64": None, "int64": None,
    "float16": "float32", "bfloat16": "float32", "float32": "float64", "complex64": "complex128",
}  # fmt: skip


def widen(rng, tx):
    """Give one of the columns of numbers a wider dtype."""
    numbers = [name for name, kind in tx._schema.items() if WIDER.get(getattr(kind, "dtype", None))]
    if numbers:
        name = str(rng.choice(numbers))
        tx.widen_column(name, WIDER[tx._schema[name].dtype])


def add_classes(rng, tx):
    """Add classes to all label columns, rename one, and append a sample of each."""
    labels = {name: kind for name, kind in tx._schema.items() if isinstance(kind, ps.Label | ps.Labels)}
    for name in labels:
        tx.add_classes(name, [f"class {number}" for number in rng.integers(0, 30, 3)])
        tx.rename_class(name, str(rng.choice(tx._schema[name].names[3:])), f"renamed {rng.integers(1 << 40)}")
        many = isinstance(tx._schema[name], ps.Labels)
        tx.append({name: [[word] if many else word for word in tx._schema[name].names]})


@pytest.mark.local
@pytest.mark.parametrize("seed", range(4))
def test_random_datasets_read_the_same(tmp_path, seed):
    rng = np.random.default_rng(seed)
    names = list(SCHEMA) if seed % 2 else [str(name) for name in rng.choice(list(SCHEMA), 6, replace=False)]
    ds = ps.create(tmp_path / "set", {name: SCHEMA[name] for name in names})
    for _ in range(3 if seed % 2 else 80):  # 80 commits are enough to create roots and pages.
        count = int(rng.integers(0, 40 if seed % 2 else 4))
        stage = ds.stage({name: values(rng, name, SCHEMA[name], 1 + count) for name in names[:5]}) if rng.random() < 0.3 else None
        chosen = [name for name in names if rng.random() < 0.8]
        with ds.transaction() as tx:
            new = tx.append({name: values(rng, name, SCHEMA[name], count) for name in chosen})
            new = np.concatenate([new, tx.add([stage] if stage else [])])
            known = [*ds.take(range(len(ds)), columns=["_row_id"])["_row_id"].tolist(), *new.tolist()]
            if known and rng.random() < 0.7:
                # Half of the samples have many runs of row ids, a few have few.
                ids = rng.choice(known, len(known) // 2 if rng.random() < 0.5 else min(3, len(known)), replace=False)
                changed = [name for name in names if rng.random() < 0.4] or names[:1]
                tx.update({name: values(rng, name, SCHEMA[name], len(ids)) for name in changed}, row_ids=ids)
            if known and rng.random() < 0.5:
                tx.delete(row_ids=rng.choice(known, len(known) // 5 + 1, replace=False))
            if rng.random() < 0.2:
                added = str(rng.choice(list(SCHEMA)))
                [fill] = values(rng, added, SCHEMA[added], 1)
                tx.add_column(f"{added} {len(ds.log())}", SCHEMA[added], fill=fill)
            if rng.random() < 0.3:
                widen(rng, tx)
            if rng.random() < 0.2:
                add_classes(rng, tx)
            if rng.random() < 0.05 and len(ds.schema) > len(names):
                tx.drop_column(list(ds.schema)[-1], force=True)
        if rng.random() < 0.1:
            branch = ds.create_branch(f"branch {len(ds.log())}")
            branch.append({name: values(rng, name, SCHEMA[name], 3) for name in chosen})
            if rng.random() < 0.5:
                ds.append({})
            ds.merge(branch)
    compare(tmp_path / "set")


# Each append mixes several of these extreme shapes, and must refuse unsupported ones before it commits.

EXTREMES = [
    (0, 0),
    (1, 1),
    (1, 200_001),
    (200_001, 1),
    (3, 0),
    (0, 1 << 20),
    (300, 700),
    (1, 9_000_001),
    (9_000_001, 1),
    (2, 2),
    (2900, 3000),
]


@pytest.mark.local
@pytest.mark.parametrize("seed", range(12))
def test_what_an_append_takes_a_fresh_reader_reads(tmp_path, seed):
    """Append random mixtures of extreme shapes. Each append either commits nothing or can be read in full by a fresh reader."""
    rng = np.random.default_rng(seed)
    kinds = {
        "v": ps.Tensor((None, None), "uint8"),
        "w": ps.Tensor((None, None), "uint8", tile=(int(rng.choice([1, 64, 4096])), 64)),
        "t": ps.Text(),
    }
    ds = ps.create(tmp_path / "set", kinds)
    shapes = [EXTREMES[int(index)] for index in rng.integers(0, len(EXTREMES), 5)]
    if seed == 0:
        shapes = [(1, 9_000_001), (9_000_001, 1)]
    rows = {
        "v": [None if rng.random() < 0.2 else np.full(shape, index + 1, np.uint8) for index, shape in enumerate(shapes)],
        "w": [None if rng.random() < 0.2 else np.full(shape, 7, np.uint8) for shape in reversed(shapes)],
        "t": [None] * len(shapes) if seed % 3 == 0 else [str(rng.choice(["", "x", "y" * 100_000])) for _ in shapes],
    }  # fmt: skip
    try:
        ds.append(rows)
    except ps.InvalidInputError:
        assert len(ps.open(tmp_path / "set")) == 0 and not list((tmp_path / "set").rglob("d/*"))
        return
    fresh = ps.open(tmp_path / "set")
    for row in range(len(shapes)):
        sample = fresh[row]
        assert sample["t"] == rows["t"][row]
        for name in ("v", "w"):
            wanted = rows[name][row]
            assert (sample[name] is None) == (wanted is None)
            assert wanted is None or (sample[name].shape == wanted.shape and np.array_equal(sample[name], wanted))
    assert sum(len(batch) for batch in fresh.scan(batch_size=2)) == len(shapes) and not fresh.verify()["problems"]


@pytest.mark.local
@pytest.mark.parametrize("kind", ["text", "bytes", "json", "image", "mask", "tensor"])
def test_nulls_beside_tiles_keep_their_form(tmp_path, kind):
    """A column that is null throughout a batch keeps its usual type, even if another column is tiled."""
    column = {
        "text": ps.Text(),
        "bytes": ps.Bytes(),
        "json": ps.Json(),
        "image": ps.Image(),
        "mask": ps.Mask(),
        "tensor": ps.Tensor((None, 2), "int8"),
    }
    ds = ps.create(tmp_path / "set", {"tiled": ps.Tensor((None, None), "int16", tile=(4, 4)), "other": column[kind]})
    ds.append({"tiled": [np.ones((9, 9), np.int16)] * 4, "other": [None] * 4})
    batch = ds.take([0, 1])
    assert isinstance(batch["other"], ps.Ragged if kind == "tensor" else list) and [value is None for value in batch["other"]] == [
        True,
        True,
    ]
    assert ds[0]["other"] is None and all(value is None for value in ds["other"][:])
    [table] = ds.scan(batch_size=10)
    assert table.column("other").null_count == 4
    with_values = ps.create(tmp_path / "more", {"tiled": ps.Tensor((None, None), "int16", tile=(4, 4)), "other": column[kind]})
    with_values.append({"tiled": [None] * 3, "other": [None] * 3})
    assert all(value is None for value in with_values.take([0, 1, 2])["other"])


@pytest.mark.local
def test_bytes_of_sources_read_the_same(tmp_path):
    """A column with a codec has chunks with it and without it."""
    ds = ps.create(tmp_path / "set", {"plain": ps.Bytes(), "packed": ps.Bytes(codec="zstd"), "n": "int32"})
    long = bytes(range(256)) * (3 << 13)

    def films():
        return [None, io.BytesIO(long), b"short", (part for part in [b"", long, long[:9]]), None]

    ids = ds.append({"plain": films(), "packed": films(), "n": range(5)}).row_ids
    ds.append({"plain": [b"a" * 5000] * 2, "packed": [long, b"b"], "n": [5, 6]})
    ds.update({"packed": films()[:2]}, row_ids=ids[2:4])
    compare(tmp_path / "set")
    ds.compact()
    compare(tmp_path / "set")
