"""A background thread writes data files from the second piece on. Its errors reach the caller. Forks and aborts leave no files."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.local

FULL = """
import os, resource, signal, sys
import numpy as np
import penstock as ps
place, limit = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # A write beyond the limit then fails with EFBIG.
values = np.random.default_rng(0).integers(0, 256, (40, 1 << 20), dtype=np.uint8)
ds = ps.create(place, {"x": ps.Tensor((1 << 20,), "uint8")})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
try:
    ds.append({"x": values})
    print("appended")
except ps.Error as error:
    print(error.code)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert len(ps.open(place)) == 0 and not any(os.scandir(os.path.join(place, "d"))), "no partial data file remains"
ds.append({"x": values})
assert np.array_equal(ps.open(place)[:]["x"], values) and ps.open(place).verify()["problems"] == []
print("again", len(os.listdir("/proc/self/task")) <= 2)
"""


@pytest.mark.parametrize("limit", [1 << 20, 3 << 20, 5 << 20, 20 << 20, (40 << 20) - 1000])
def test_a_write_that_fails_in_the_thread_fails_the_append(tmp_path, limit):
    command = [sys.executable, "-c", "import os\nos.environ['OPENBLAS_NUM_THREADS'] = '1'" + FULL, str(tmp_path / "ds"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["no-space", "again", "True"], done.stdout + done.stderr


FORKED = """
import gc, os, sys
import numpy as np
import penstock as ps
place = sys.argv[1]
values = np.random.default_rng(0).integers(0, 256, (40, 1 << 20), dtype=np.uint8)
ds = ps.create(place, {"x": ps.Tensor((1 << 20,), "uint8")})
tx = ds.transaction()
tx.__enter__()
tx.append({"x": values})
child = os.fork()
if child == 0:
    code = 1
    try:
        tx.append({"x": values})
    except ps.Error as error:
        code = 0
    del tx, ds
    gc.collect()  # This must not wait for a thread that the fork did not copy.
    os._exit(code)
assert os.waitpid(child, 0)[1] == 0
tx.append({"x": values})
tx.__exit__(None, None, None)
assert np.array_equal(ps.open(place)[:]["x"], np.concatenate([values, values]))
print("both")
"""


def test_a_fork_in_the_middle_of_a_file_hurts_neither_side(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path / "ds")], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["both"], done.stdout + done.stderr


def test_an_abort_in_the_middle_of_a_file_leaves_nothing(tmp_path):
    ds = ps.create(tmp_path / "ds", {"x": ps.Tensor((1 << 20,), "uint8")})
    with pytest.raises(RuntimeError, match="enough"), ds.transaction() as tx:
        for _ in range(4):
            tx.append({"x": np.ones((16, 1 << 20), np.uint8)})
        assert any((tmp_path / "ds" / "d").iterdir())
        raise RuntimeError("enough")
    assert not any((tmp_path / "ds" / "d").iterdir()) and len(ps.open(tmp_path / "ds")) == 0


def test_files_of_many_columns_do_not_have_a_thread_each(tmp_path):
    columns = {f"c{number}": ps.Tensor((100_000,), "uint8") for number in range(12)}
    ds = ps.create(tmp_path / "ds", columns)
    values = np.random.default_rng(0).integers(0, 256, (60, 100_000), dtype=np.uint8)

    def threads():
        return sum(path.read_text().strip() == "penstock-write" for path in pathlib.Path("/proc/self/task").glob("*/comm"))

    with ds.transaction() as tx:
        for _ in range(4):
            tx.append(dict.fromkeys(columns, values))
        assert 1 <= threads() <= 2
    assert threads() == 0
    batch = ps.open(tmp_path / "ds")[:]
    assert all(np.array_equal(batch[name], np.concatenate([values] * 4)) for name in columns)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_all_sizes_lie_in_their_order(tmp_path, seed):
    """The background thread writes small pieces. The caller writes large pieces, after waiting for the thread."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 100, 50_000, 1 << 20, 3 << 20, 5 << 20, 11 << 20], 24, p=[0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1])
    bodies = [rng.bytes(int(size)) for size in sizes]
    ds = ps.create(tmp_path / "set", {"b": ps.Bytes(), "t": ps.Text(), "v": ps.Tensor((1 << 18,), "float32")})
    with ds.transaction("mixed") as tx:
        for at in range(0, len(bodies), 6):
            part = bodies[at : at + 6]
            tx.append(
                {
                    "b": part,
                    "t": [f"text {number}" * 1000 for number in range(len(part))],
                    "v": np.full((len(part), 1 << 18), at, np.float32),
                }
            )
    ds = ps.open(tmp_path / "set")
    assert not ds.verify()["problems"]
    assert ds["b"][:] == bodies and (ds["v"][:][:, 7] == np.repeat(np.arange(0, 24, 6), 6)).all()
