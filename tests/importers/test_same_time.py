"""Imports of one source at the same time, and sources that have grown: no sample is imported twice, and none is left out."""

import pathlib
import shutil
import threading

import numpy as np
import penstock as ps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from penstock.importers import import_data
from PIL import Image as Pillow
from test_manifests import png, write
from tqdm import tqdm


def while_importing(other):
    """Return a progress function that runs another import once, before the first one commits."""
    waiting = [other]
    return lambda *_: waiting and waiting.pop()()


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("mode", [None, "skip-existing", "append"])
def test_a_table_that_somebody_else_imports(tmp_path, root, mode, exists):
    path = write(tmp_path, {"n.csv": "n\n1\n2\n3\n"}) / "n.csv"
    if exists:
        ps.create(root, {"n": "int64"})
    # The commit to notice is not the newest one.
    other = while_importing(lambda: (import_data(path, root), ps.open(root).append({"n": [4]})))
    if mode is None:
        with pytest.raises(ps.AlreadyExistsError, match="already imported the same files") as caught:
            import_data(path, root, progress=other)
        assert caught.value.code == "already-imported"
    else:
        report = import_data(path, root, mode=mode, progress=other)
        assert (report.samples, report.skipped) == ((3, 0) if mode == "append" else (0, 3))
    assert ps.open(root)["n"][:].tolist() == [1, 2, 3, 4] + ([1, 2, 3] if mode == "append" else [])


def test_images_that_somebody_else_imports(tmp_path, root):
    """The folders differ, but have an image in common."""
    one = write(tmp_path / "one", {"1.png": png(1), "2.png": png(2)})
    two = write(tmp_path / "two", {"2.png": png(2), "3.png": png(3)})
    report = import_data(one, root, mode="skip-existing", progress=while_importing(lambda: import_data(two, root)))
    assert (report.samples, report.skipped) == (1, 1)
    assert sorted(ps.open(root)["path"][:]) == ["1.png", "2.png", "3.png"]
    three = write(tmp_path / "three", {"4.png": png(4)})
    four = write(tmp_path / "four", {"4.png": png(4), "5.png": png(5)})
    with pytest.raises(ps.AlreadyExistsError, match=r"`4.png`: the dataset already has a sample with this path"):
        import_data(four, root, progress=while_importing(lambda: import_data(three, root)))
    assert sorted(ps.open(root)["path"][:]) == ["1.png", "2.png", "3.png", "4.png"]


def test_other_sources_do_not_disturb_an_import(tmp_path, root):
    path = write(tmp_path, {"n.csv": "n\n1\n", "m.csv": "n\n2\n"}) / "n.csv"
    calls = []
    other = while_importing(lambda: (calls.append(0), import_data(tmp_path / "m.csv", root), ps.open(root).append({"n": [3]})))
    assert import_data(path, root, mode="skip-existing", progress=lambda *state: (calls.append(1), other(*state))).samples == 1
    assert calls == [1, 0] and ps.open(root)["n"][:].tolist() == [2, 3, 1]


def test_rows_that_cannot_be_read_again(root):
    ps.create(root, {"id": "int64"})
    taken = while_importing(lambda: ps.open(root).append({"id": [2]}))
    with pytest.raises(ps.ConflictError, match=r"added the key 2 in column `id`"):
        import_data(iter([{"id": 1}, {"id": 2}]), root, key="id", progress=taken)
    assert ps.open(root)["id"][:].tolist() == [2]
    taken = while_importing(lambda: ps.open(root).append({"id": [3]}))
    report = import_data([{"id": 1}, {"id": 3}], root, key="id", mode="skip-existing", progress=taken)
    assert (report.samples, report.skipped, ps.open(root)["id"][:].tolist()) == (1, 1, [2, 3, 1])


class Once:
    """An iterable that is not an iterator, and can be read only once."""

    def __init__(self, rows):
        self.rows = iter(rows)

    def __iter__(self):
        return self.rows


def test_what_can_be_read_only_once_is_never_read_in_part(root):
    ps.create(root, {"id": "int64"})
    taken = while_importing(lambda: ps.open(root).append({"id": [2]}))
    with pytest.raises(ps.ConflictError, match="added the key 2") as caught:
        import_data(Once([{"id": 1}, {"id": 2}]), root, key="id", progress=taken)
    assert "import it again" in caught.value.hint and ps.open(root)["id"][:].tolist() == [2]
    assert import_data(tqdm(iter([{"id": 7}])), root, key="id").samples == 1


def test_many_imports_at_the_same_moment(tmp_path, root):
    """Nobody has created the dataset before."""
    files = [{f"{row}.png": png(row) for row in range(first, first + 4)} for first in range(4)]
    folders = [write(tmp_path / str(place), some) for place, some in enumerate(files)]
    tables = [write(tmp_path, {"n.csv": "n\n" + "\n".join(map(str, range(50)))}) / "n.csv"] * 4
    reports, errors = [], []

    def work(source, into):
        try:
            reports.append(import_data(source, into, mode="skip-existing"))
        except Exception as error:
            errors.append(error)

    calls = [(folder, root) for folder in folders] + [(table, root.with_name("n")) for table in tables]
    threads = [threading.Thread(target=work, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(ps.open(root)["path"][:]) == sorted(f"{row}.png" for row in range(7))
    assert ps.open(root.with_name("n"))["n"][:].tolist() == list(range(50))
    assert sum(report.samples for report in reports) == 57 and sum(report.skipped for report in reports) == 9 + 150


TABLES = {"csv": "id,n\n1,a\n2,b\n", "jsonl": '{"id": 1, "n": "a"}\n{"id": 2, "n": "b"}\n'}
MORE = {"csv": "3,c\n1,z\n", "jsonl": '{"id": 3, "n": "c"}\n{"id": 1, "n": "z"}\n'}


@pytest.mark.parametrize("form", TABLES)
def test_a_table_that_has_grown(tmp_path, root, form):
    path = tmp_path / f"rows.{form}"
    path.write_text(TABLES[form])
    assert import_data(path, root, key="id").samples == 2
    path.write_text(TABLES[form] + MORE[form])
    for mode in (None, "skip-existing"):
        with pytest.raises(ps.AlreadyExistsError, match=r"with different contents, and it is unknown which rows are new") as caught:
            import_data(path, root, mode=mode)
        assert "--key id" in caught.value.hint
    with pytest.raises(ps.AlreadyExistsError, match="cannot import `1`: the dataset already has a sample with this id"):
        import_data(path, root, key="id")
    report = import_data(path, root, mode="skip-existing", key="id")
    assert (report.samples, report.skipped) == (1, 3)
    assert ps.open(root).to_arrow().to_pydict() == {"id": [1, 2, 3], "n": ["a", "b", "c"]}
    again = import_data(path, root, mode="skip-existing", key="id")
    assert (again.samples, again.skipped) == (0, 4)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (["a", "b", "a"], r"'a' is also the key of an earlier sample"),
        (["a", None, "b"], "is null, but a key must not be null"),
        ([3, 4, 3], r"3 is also the key of an earlier sample"),
    ],
)
@pytest.mark.parametrize("frame", ["pandas", "polars", "arrow", "dicts"])
def test_keys_that_are_not_unique(root, ids, match, frame):
    rows = {"id": ids, "n": [1, 2, 3]}
    source = {
        "pandas": lambda: __import__("pandas").DataFrame(rows),
        "polars": lambda: __import__("polars").DataFrame(rows),
        "arrow": lambda: __import__("pyarrow").table(rows),
        "dicts": lambda: [{"id": key, "n": n} for key, n in zip(ids, [1, 2, 3], strict=True)],
    }[frame]()
    with pytest.raises(ps.InvalidInputError, match=match.replace("'a'", '"a"')):
        import_data(source, root, key="id")
    report = import_data(source, root, key="id", on_error="skip")
    assert (report.samples, len(report.refused)) == (2, 1)
    assert import_data(source, root, key="id", on_error="skip", mode="skip-existing").samples == 0


@pytest.mark.parametrize("ids", [list(np.arange(3)), list(torch.arange(3)), [np.str_("a"), np.str_("b"), np.str_("c")]])
def test_keys_of_other_libraries_are_known(root, ids):
    source = [{"id": key, "n": row} for row, key in enumerate(ids)]
    import_data(source, root, key="id")
    assert import_data(source, root, key="id", mode="skip-existing").skipped == 3
    with pytest.raises(ps.AlreadyExistsError, match="the dataset already has a sample with this id"):
        import_data(iter(source), root, key="id")
    assert len(ps.open(root)) == 3


def test_binary_keys_are_those_of_a_text_column(tmp_path, root):
    pq.write_table(pa.table({"id": [b"a", b"b"]}), tmp_path / "rows.parquet")
    import_data(tmp_path / "rows.parquet", root, types={"id": ps.Text()}, key="id")
    pq.write_table(pa.table({"id": [b"a", b"b", b"c"]}), tmp_path / "rows.parquet")
    assert import_data(tmp_path / "rows.parquet", root, key="id", mode="skip-existing").samples == 1
    assert ps.open(root)["id"][:] == ["a", "b", "c"]


def test_nulls_and_repeated_values_among_the_keys_of_the_dataset(root):
    ps.create(root, {"id": "int64"}).append({"id": [1, None, None]})
    assert import_data([{"id": 1}, {"id": 2}], root, key="id", mode="skip-existing").samples == 1
    ps.open(root).append({"id": [2] * 5000})
    with pytest.raises(ps.InvalidInputError, match="two samples in the dataset have 2"):
        import_data([{"id": 2}] + [{"id": row} for row in range(5, 500)], root, key="id", mode="skip-existing")
    assert import_data([{"id": 3}], root, key="id", mode="skip-existing").samples == 1


def test_images_beside_keys_are_compared_if_they_are_bytes(tmp_path, root):
    image = {"image": ps.Image()}
    for count in (1, 2):
        pq.write_table(pa.table({"id": list(range(count)), "image": [png(row) for row in range(count)]}), tmp_path / "rows.parquet")
        report = import_data(tmp_path / "rows.parquet", root, types=image, key="id", mode="skip-existing")
        assert (report.samples, report.refused) == (1, [])
    for given in (np.zeros((4, 4, 3), np.uint8), Pillow.new("RGB", (4, 4))):
        rows = [{"id": 1, "image": given}, {"id": 2 + len(ps.open(root)), "image": given}]
        assert import_data(rows, root, key="id", mode="skip-existing").samples == 1
    with pytest.raises(ps.InvalidInputError, match="a different image with this id"):
        import_data([{"id": 0, "image": png(9)}], root, types=image, key="id", mode="skip-existing")


def test_a_limit_does_not_count_what_is_left_out(root):
    for source in (lambda: [{"id": row} for row in range(20)], lambda: iter([{"id": row} for row in range(20)])):
        place = root.with_name(f"limited-{len(list(source()))}-{type(source()).__name__}")
        import_data(({"id": row} for row in range(10)), place, key="id")
        for done in (15, 20, 20):
            import_data(source(), place, key="id", mode="skip-existing", limit=5)
            assert len(ps.open(place)) == done


def test_a_destination_whose_creator_failed(tmp_path, root):
    """The creator removes it while this import is running, which then begins again."""
    path = write(tmp_path, {"n.csv": "n\n1\n2\n"}) / "n.csv"
    ps.create(root, {"n": "int64"})
    gone = while_importing(lambda: shutil.rmtree(root))
    if isinstance(root, pathlib.Path):
        assert import_data(path, root, progress=gone).samples == 2 and ps.open(root)["n"][:].tolist() == [1, 2]


def test_a_column_that_is_no_key(tmp_path, root):
    path = write(tmp_path, {"n.csv": "n,x\n1,0.5\n"}) / "n.csv"
    for key, match in (
        ("m", "the source has no such column"),
        ("x", "expected text or whole numbers"),
        (3, "expected the name of a column"),
    ):
        with pytest.raises(ps.InvalidInputError, match=match):
            import_data(path, root, key=key)
