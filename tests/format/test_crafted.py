"""Read datasets with one changed integer and valid checksums.

Each integer is set in turn to 0, 1, its largest value, nearby values and the values of neighbouring integers. A read must use bounded
memory, and either raise a Penstock error or return the values that were written. `verify` must report each dataset that a read refuses.
"""

import contextlib
import json
import pathlib
import subprocess
import sys

import crafted_runner
import penstock as ps
import pytest
import spec_reader
from google_crc32c import value as crc32c

pytestmark = pytest.mark.usefixtures("separate_files")

FOLDER = pathlib.Path(__file__).parent.parent


def run(share, tmp_path):
    command = [sys.executable, str(FOLDER / "crafted_runner.py"), str(share), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    print({name: value for name, value in found.items() if name != "wrong"})
    assert found["tries"] >= found["integers"] // share and found["outcomes"]["refused"] > found["tries"] // 2
    assert not found["wrong"], "\n".join(found["wrong"])


@pytest.mark.long
@pytest.mark.local
def test_some_integers_of_every_object_changed(tmp_path):
    run(61, tmp_path)


@pytest.mark.soak
@pytest.mark.local
def test_every_integer_of_every_object_changed(tmp_path):
    run(1, tmp_path)


@pytest.mark.local
@pytest.mark.parametrize("io", ["mapped", "buffered", "direct"])
@pytest.mark.parametrize("first", [[0], [10], [0, 10], [10, 0]])
def test_two_fragments_that_name_one_data_file(tmp_path, io, first):
    """File metadata that is cached for one fragment must not be used for the other fragment, whichever is read first."""
    varint = crafted_runner.varint
    ds = ps.create(tmp_path / "set", {"a": "int64", "b": "int64", "t": ps.Text()})
    ds.append({"a": range(10), "b": range(10), "t": ["x"] * 10})
    ds.append({"a": range(100, 105), "b": range(200, 205), "t": ["y"] * 5})

    def fragment(samples, first, files):
        """Encode a fragment according to section 5 of the spec."""
        body = varint(samples) + b"\0" + varint(1) + first.to_bytes(8, "little") + varint(samples) + varint(len(files))
        for file in files:
            columns = varint(len(file.columns)) + b"".join(map(varint, file.columns))
            crc = file.tail_crc.to_bytes(4, "little")
            body += b"\0" + bytes.fromhex(file.id) + varint(file.length) + varint(file.tail_length) + crc + columns
        return body

    one, two = spec_reader.Dataset(tmp_path / "set").fragments[:2]
    written = [fragment(10, 0, one.files), fragment(5, 10, two.files)]
    records = [path for path in (tmp_path / "set" / "log").rglob("*") if path.is_file()]
    [record] = [path for path in records if all(part in path.read_bytes() for part in written)]
    body = record.read_bytes().replace(written[0], fragment(10, 0, two.files))[:-4]
    record.write_bytes(body + crc32c(body).to_bytes(4, "little"))
    ds = ps.open(tmp_path / "set", io=io)
    for rows in (first, [7], range(10), [10, 3]):
        for columns in (["a"], ["t"], ["b", "a"]):
            if list(rows) == [10]:
                assert ds.take([10], columns=columns)
                continue
            with pytest.raises(ps.CorruptError):
                ds.take(rows, columns=columns)
    with pytest.raises(ps.CorruptError):
        list(ds.loader(batch_size=5, columns=["a"]))
    assert ds.verify()["problems"]


@pytest.mark.local
@pytest.mark.parametrize(("io", "codec"), [("buffered", "none"), ("direct", "none"), ("mapped", "zstd")])
@pytest.mark.parametrize("other", ["as many", "few large", "few small"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_two_datasets_that_name_one_data_file(tmp_path, io, codec, other, order):
    """Blocks cached for one dataset must not be used for the other."""
    values = {
        "a": {"n": list(range(60_000)), "t": [f"good {i}" for i in range(60_000)]},
        "b": {
            "as many": {"n": [-i for i in range(60_000)], "t": [f"evil {i}" for i in range(60_000)]},
            "few large": {"n": [-i for i in range(20)], "t": [f"{i}" * 30_000 for i in range(20)]},
            "few small": {"n": [-i for i in range(20)], "t": [""] * 20},
        }[other],
    }
    files = {}
    for name, columns in values.items():
        ds = ps.create(tmp_path / name, {"n": "int64", "t": ps.Text(codec=codec)})
        ds.append(columns)
        [files[name]] = (tmp_path / name / "d").iterdir()
    mine, theirs = (bytes.fromhex(files[name].name) for name in "ba")
    for record in (tmp_path / "b" / "log").rglob("*"):
        if record.is_file() and mine in record.read_bytes():
            body = record.read_bytes().replace(mine, theirs)[:-4]
            record.write_bytes(body + crc32c(body).to_bytes(4, "little"))
    files["b"].with_name(files["a"].name).write_bytes(files["b"].read_bytes().replace(mine, theirs, 1))
    files["b"].unlink()
    for name in order:
        ds, count = ps.open(tmp_path / name, io=io), len(values[name]["n"])
        assert ds.verify()["problems"] == []
        for rows in ([3, count - 1], range(0, count, 3)):
            batch = ds.take(rows)
            assert list(batch["n"]) == [values[name]["n"][row] for row in rows]
            assert list(batch["t"]) == [values[name]["t"][row] for row in rows]


def test_random_takes_of_changed_tails(tmp_path):
    """Random rows are announced to the kernel before their blocks are checked."""
    ps.create(tmp_path / "set", {"t": ps.Text()}).append({"t": [f"number {index}" for index in range(400)]})
    objects = crafted_runner.Objects(tmp_path / "set")
    [name] = [name for name in objects.bodies if name.startswith("d/")]
    body, refused = objects.bodies[name], 0
    for at, length, form in objects.spans(name, "data"):
        for value in (0, 1, 1 << 32):
            try:
                changed = objects.changed(name, body[:at] + crafted_runner.encoded(value, form) + body[at + length :])
            except (OverflowError, IndexError):
                continue
            for path, new in changed.items():
                (tmp_path / "set" / path).write_bytes(new)
            with contextlib.suppress(ps.Error):
                ps.open(tmp_path / "set").take([0, 399, *range(0, 400, 37)])
                refused -= 1
            refused += 1
    assert refused > 10


# Read a crafted dataset as `diff`, `merge` and `cherry_pick` do, and print the code of the error and the peak of memory in MiB.
CHILD = """
import sys
import penstock as ps
path, verb, before, after = sys.argv[1:]
ds = ps.open(path, branch="exp")
try:
    list(ds.diff(before, after)) if verb == "diff" else getattr(ds, verb)(after, on_conflict="theirs")
    print("none", end=" ")
except ps.Error as error:
    print(error.code, end=" ")
# Unlike `ru_maxrss`, this is not the peak of the parent before the fork.
print(int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1]) // 1024)
"""


@pytest.mark.local
@pytest.mark.parametrize("verb", ["diff", "merge", "cherry_pick"])
@pytest.mark.parametrize("what", ["update", "delete", "append"])
def test_commits_that_claim_2_to_the_39_samples(tmp_path, verb, what):
    """Their counts are refused in little memory, whatever compares snapshots."""
    varint, many, most = crafted_runner.varint, 1 << 39, (1 << 40) - 1
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    before = ds.append({"n": range(113)}).snapshot
    exp = ds.create_branch("exp")
    exp.append({"n": [1]})
    with exp.transaction() as tx:
        tx.update({"n": [5]}, row_ids=[5])
    with ds.transaction() as tx:
        if what == "update":
            tx.update({"n": range(77)}, row_ids=range(20, 97))
        elif what == "delete":
            tx.delete(row_ids=range(20, 97))
        else:
            tx.append({"n": range(77)})
    after = ds.snapshot
    first = (113 if what == "append" else 20).to_bytes(8, "little")
    path = tmp_path / "set" / "log" / f"{0:016x}" / f"{(1 << 64) - 3:020d}"
    body = path.read_bytes()
    pairs = [(b"\1" + first + varint(77), b"\1" + first + varint(many))]
    if what == "append":
        old, new = (varint(count) + b"\0" + varint(1) + first + varint(count) for count in (77, many))
        pairs = [(old, new)]
        # The counter of row ids, the samples and the live ones.
        pairs.append((varint(0) + 3 * varint(190), varint(0) + 3 * varint(113 + many)))
    else:
        # The counter of row ids, so that all of them seem to be assigned. The samples of the record remain.
        pairs.append((varint(0) + 2 * varint(113), varint(0) + varint(most) + varint(113)))
    for old, new in pairs:
        assert old in body
        body = body.replace(old, new)
    body = body[:-4]
    path.write_bytes(body + crc32c(body).to_bytes(4, "little"))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "set"), verb, before, after]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    code, peak = answer.stdout.split()
    assert int(peak) < 250, answer.stdout
    assert code == "object-malformed", answer.stdout
