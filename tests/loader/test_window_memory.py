"""If files are not mapped, an accepted window stays within its budget, as measured by the kernel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import numpy as np
import penstock as ps
import pytest

pytestmark = pytest.mark.local
SAMPLES = 60_000

WINDOW = """
import json, sys
import penstock as ps

def anonymous():
    return int(next(line for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:")).split()[1]) << 10

uri, access, column, window, budget = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
ps.configure(memory_bytes=8 << 20, threads=2)
ds = ps.open(uri, io=access)
for _ in ds.select(range(64)).loader(batch_size=8, columns=[column]).stream(1):
    pass
loader = ds.loader(batch_size=64, shuffle=ps.Window(bytes=window), columns=[column], memory_bytes=budget, threads=2)
before, peak, seen = anonymous(), 0, 0
for batch in loader.stream(1):
    peak, seen = max(peak, anonymous()), seen + len(batch[column])
print(json.dumps([peak - before, loader.stats()["peak_bytes"], seen]))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Create small samples: fixed, packed, and packed with a codec."""
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(1000)])
    texts = [" ".join(part) for part in words[rng.integers(0, 1000, (SAMPLES, 16))]]
    schema = {"vector": ps.Tensor((64,), "float32"), "text": ps.Text(), "packed": ps.Text(codec="zstd")}
    ds = ps.create(tmp_path_factory.mktemp("small") / "dataset", schema)
    ds.append({"vector": rng.random((SAMPLES, 64), np.float32), "text": texts, "packed": texts})
    return ds


@pytest.mark.long
@pytest.mark.parametrize("window", [1 << 20, 3 << 20])
@pytest.mark.parametrize("column", ["vector", "text", "packed"])
@pytest.mark.parametrize("access", ["buffered", "direct"])
def test_an_accepted_window_takes_its_budget_at_most(small, access, column, window):
    options = {"batch_size": 64, "shuffle": ps.Window(bytes=window), "columns": [column]}
    with pytest.raises(ps.InvalidInputError, match="the window takes up to") as caught:
        ps.open(small.uri, io=access).loader(**options, memory_bytes=2 << 20)
    budget = int(re.search(r"memory_bytes=(\d+)", str(caught.value)).group(1))
    command = [sys.executable, "-c", textwrap.dedent(WINDOW), small.uri, access, column, str(window), str(budget)]
    grown, peak, seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert seen == SAMPLES
    assert peak <= budget and grown <= budget, (grown / budget, peak / budget)
