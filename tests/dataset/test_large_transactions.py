"""Transactions whose overlays and fragments exceed a commit record are committed with a root that has them."""

import numpy as np
import penstock as ps
import pytest
from handles import newest

pytestmark = pytest.mark.processes


@pytest.fixture
def small_budget():
    before = ps.configure()["memory_bytes"]
    ps.configure(memory_bytes=16 << 20)
    yield
    ps.configure(memory_bytes=before)


@pytest.mark.long
@pytest.mark.parametrize("between", ["nothing", "appends", "conflict", "schema"])
def test_a_transaction_with_many_overlays_is_committed(root, small_budget, between):
    rng, samples = np.random.default_rng(0), 1600
    ds = ps.create(root, {"e": ps.Tensor((16_000,), "uint8"), "n": "int64"})
    values = rng.integers(0, 255, (samples, 16_000), np.uint8)
    ids = ds.append({"e": values, "n": range(samples)}).row_ids
    other = newest(ps.open(root), samples)
    expected = values.copy()
    tx = ds.transaction("an epoch")
    new = tx.append({"n": [-1, -2]})
    for step in range(50):
        picked = rng.permutation(samples)[:100]
        read = tx.take(ids[picked], columns=["e"])["e"]
        assert (read == expected[picked]).all(), step
        expected[picked] = read + 1
        tx.update({"e": read + 1}, row_ids=ids[picked])
    tx.update({"n": [7]}, row_ids=new[:1])
    gone = rng.permutation(samples)[:40]
    tx.delete(row_ids=ids[gone])
    if between == "schema":
        tx.add_column("score", "float32", fill=0.5)
    if between == "appends":
        for number in range(40):
            other.append({"n": [number]})
    elif between == "conflict":
        with other.transaction() as rival:
            rival.update({"e": values[:1]}, row_ids=ids[:1])
        with pytest.raises(ps.ConflictError, match="column `e`"):
            tx.commit()
        assert (newest(ps.open(root), samples)["e"][:] == values).all()
        return
    tx.commit()
    kept = np.setdiff1d(np.arange(samples), gone)
    final = newest(ps.open(root), len(kept) + 2 + 40 * (between == "appends"))
    assert (final["e"][: len(kept)] == expected[kept]).all() and final.structure()["overlays"] > 1
    appended = list(range(40)) if between == "appends" else []
    assert final["n"][: len(kept)].tolist() == kept.tolist() and final["n"][len(kept) :].tolist() == [*appended, 7, -2]
    assert final.log()[0].samples_deleted == 40 and final.log()[0].samples_added == 2 and not final.verify()["problems"]
    if between == "schema":
        assert final["score"][:].tolist() == [0.5] * len(final)
    # Others see what the transaction changed.
    stale = other if between != "appends" else ps.open(root, snapshot=final.log()[1].snapshot)
    with pytest.raises(ps.ConflictError), stale.transaction() as late:
        late.update({"e": values[:1]}, row_ids=ids[kept[:1]])
    for number in range(70):
        final.append({"n": [number]})
    assert (final["e"][: len(kept)] == expected[kept]).all() and not final.verify()["problems"]
