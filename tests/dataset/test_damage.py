"""Damaged data files and records raise the right error, which names the affected samples."""

import crafted_runner
import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.usefixtures("separate_files")

UNIT = 64 << 10


LOCAL = ["mapped", "buffered", "direct"]


def damage(root, body, at):
    """Flip one bit in byte `at` of a value that is stored contiguously in a data file."""
    needle = bytes(body[at - 32 : at] + body[at : at + 8])
    [(path, content)] = [(path, path.read_bytes()) for path in root.rglob("d/*") if needle in path.read_bytes()]
    place = content.index(needle) + 32
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("kind", ["bytes", "fixed", "ragged", "tiled"])
@pytest.mark.parametrize("unit", ["first", "middle", "last, partial"])
def test_every_checksum_unit_of_a_value_is_verified(tmp_path, io, kind, unit):
    rng = np.random.default_rng(3)
    count = 3 * UNIT + 1000
    body = rng.integers(0, 256, count, dtype=np.uint8)
    column = {
        "bytes": ps.Bytes(), "fixed": ps.Tensor((count,), "uint8"), "ragged": ps.Tensor((None,), "uint8"),
        "tiled": ps.Tensor((None,), "uint8", tile=(2 * UNIT,)),
    }[kind]  # fmt: skip
    root = tmp_path / "set"
    other = rng.integers(0, 256, count, dtype=np.uint8)
    values = [other, body, other]
    ps.create(root, {"v": column}).append({"v": [value.tobytes() for value in values] if kind == "bytes" else values})
    damage(root, body.tobytes(), {"first": 100, "middle": UNIT + 100, "last, partial": count - 50}[unit])
    ds = ps.open(root, io=io)
    assert len(ds.take([0, 2])["v"]) == 2, "the neighbouring samples are intact"
    for read in (lambda: ds.take([1]), lambda: ds[0:3], lambda: list(ds.scan(batch_size=2)), lambda: list(ds.loader(batch_size=3))):
        with pytest.raises(ps.CorruptError) as caught:
            read()
        assert caught.value.code == "block-checksum"
    assert len(ds.verify()["problems"]) == 1
    taken = ds.take([0, 1, 2], on_corrupt="null")["v"]
    missing = taken.mask.reshape(3, -1).all(axis=1).tolist() if isinstance(taken, np.ma.MaskedArray) else [value is None for value in taken]
    assert missing == [False, True, False]
    doubles = ds.take([1, 0, 1, 1], on_corrupt="null")["v"]
    missing = (
        doubles.mask.reshape(4, -1).all(axis=1).tolist() if isinstance(doubles, np.ma.MaskedArray) else [value is None for value in doubles]
    )
    assert missing == [True, False, True, True]


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("what", ["removed", "tail", "first byte", "cut"])
@pytest.mark.parametrize("size", [100, 100_000])
def test_verify_reads_files_again(tmp_path, io, what, size):
    values = np.random.default_rng(0).integers(0, 256, (10, size), dtype=np.uint8)
    ps.create(tmp_path / "set", {"v": ps.Tensor((size,), "uint8")}).append({"v": values})
    ds = ps.open(tmp_path / "set", io=io)
    assert np.array_equal(ds[:]["v"], values) and not ds.verify()["problems"]
    [path] = (tmp_path / "set" / "d").iterdir()
    body = path.read_bytes()
    path.unlink()  # Write a new file instead of changing the mapped one.
    if what != "removed":
        at = len(body) - 40 if what == "tail" else 0
        path.write_bytes(body[:-7] if what == "cut" else body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
    assert ds.verify()["problems"], what


@pytest.mark.local
def test_verify_names_all_damage_at_once(tmp_path):
    """Damaged words hide neither other damaged words nor a damaged block of a file that uses them. Intact files are not named."""
    root = tmp_path / "set"
    ds = ps.create(root, {"k": ps.Category(), "x": ps.Bytes()})
    bodies = [np.random.default_rng(number).bytes(5000) for number in range(4)]
    for number, body in enumerate(bodies):
        ds.append({"k": [f"word {number}"], "x": [body]})
    words = {path.name for path in (root / "w").iterdir() if b"word 1" in path.read_bytes() or b"word 3" in path.read_bytes()}
    for name in words:
        (root / "w" / name).unlink()
    [block] = [path.name for path in (root / "d").iterdir() if bodies[2][:100] in path.read_bytes()]
    damage(root, bodies[2], 2000)
    problems = ps.open(root).verify()["problems"]
    assert len(words) == 2 and len(problems) == 3
    assert all(any(name in str(problem) for problem in problems) for name in (*words, block))


@pytest.mark.local
@pytest.mark.parametrize("io", LOCAL)
@pytest.mark.parametrize("kind", [ps.Text(), ps.Json()])
def test_invalid_text_is_damage_of_its_sample(tmp_path, kind, io):
    words = ["w0", "w1", "w2", "w3", "w4", "w5"]
    ps.create(tmp_path / "set", {"word": kind}).append({"word": words})
    crafted_runner.resealed(tmp_path / "set", lambda block: block.replace(b"w3", b"\xff3"))
    ds = ps.open(tmp_path / "set", io=io)
    assert len(ds.verify()["problems"]) == 1
    with pytest.raises(ps.CorruptError, match="sample 3 of column `word`") as caught:
        ds.take(range(6))
    assert caught.value.column == "word" and caught.value.row_ids == [3]
    assert ds.take(range(6), on_corrupt="null")["word"] == [None if word == "w3" else word for word in words]
    for on_corrupt in ("mask", "substitute"):
        for batch in ds.loader(batch_size=4, columns=["word", "_valid"], on_corrupt=on_corrupt).stream(2):
            assert None not in batch["word"] and "w3" not in batch["word"]
            assert batch["_valid"].tolist() == [
                on_corrupt == "substitute" or word != 3 for word in range(4 if len(batch["word"]) == 4 else 2)
            ]
    with pytest.raises(ps.CorruptError):
        list(ds.loader(batch_size=4))


@pytest.mark.local
@pytest.mark.parametrize("kind", [ps.Category(), ps.Label(["a", "b", "c"])])
def test_an_unknown_code_is_damage_of_its_sample(tmp_path, kind):
    """Recompute the checksum, as if a faulty writer had stored the code."""
    words = ["a", "b", "c", "b", "a", "c"]
    ps.create(tmp_path / "set", {"word": kind}).append({"word": words})

    def wrong(block):
        codes = bytearray(block)
        codes[3 * (len(codes) // 6)] = 77
        return bytes(codes)

    crafted_runner.resealed(tmp_path / "set", wrong)
    ds = ps.open(tmp_path / "set")
    with pytest.raises(ps.CorruptError, match="sample 3 of column `word`: it has code 77") as caught:
        ds.take([2, 3])
    assert caught.value.rows == [1] and ds.verify()["problems"]
    found = ds.take(range(6), on_corrupt="null")["word"]
    assert [None if code is np.ma.masked else ds.vocabulary("word")[code] for code in found] == [*words[:3], None, *words[4:]]


@pytest.mark.local
def test_a_forged_record_breaks_the_chain_of_hashes(tmp_path):
    ds = ps.create(tmp_path / "set", {"n": "int64"})
    for message in ("first one", "second one", "third one"):
        ds.append({"n": [1]}, message=message)
    objects = crafted_runner.Objects(tmp_path / "set")
    [name] = [name for name, body in objects.bodies.items() if name.startswith("log/") and b"first one" in body]
    changed = objects.changed(name, objects.bodies[name].replace(b"first one", b"forged it"))
    (tmp_path / "set" / name).write_bytes(changed[name])
    ds = ps.open(tmp_path / "set")
    assert ds.verify()["problems"]
    with pytest.raises(ps.CorruptError) as caught:
        list(ds.log())
    assert caught.value.code == "object-checksum"
