"""Test what changes of wide schemas cost: the work in Python does not grow with the number of changes that nobody looks at."""

import json

import penstock as ps
import penstock.schema
import pytest

pytestmark = pytest.mark.local


@pytest.fixture
def parsed(monkeypatch):
    """Count the columns that are parsed from JSON."""
    counted, loads = [], json.loads

    def counting(text, **options):
        found = loads(text, **options)
        counted.append(len(found))
        return found

    monkeypatch.setattr(penstock.schema.json, "loads", counting)
    return counted


def test_many_changes_in_a_transaction_parse_the_schema_once(root, parsed):
    ds = ps.create(root, {f"c{number}": "int32" for number in range(300)})
    ds.append({"c0": [7]})
    parsed.clear()
    with ds.transaction() as tx:
        for number in range(300):
            tx.rename_column(f"c{number}", f"d{number}")
        tx.add_column("more", "int8", fill=1)
        tx.drop_column("d299")
        tx.append({"d0": [8], "more": [2]})
    assert sum(parsed) <= 2 * 300 + 10, "once when values are appended, and once for the handle"
    assert list(ps.open(root).schema) == [*(f"d{number}" for number in range(299)), "more"] and ds["d0"][:].tolist() == [7, 8]


def test_columns_of_one_type_share_it(root):
    ds = ps.create(root, {"a": "int32", "b": "int32", "c": ps.Tensor((2,), "int8"), "d": ps.Label(["x"]), "e": ps.Label(["x"])})
    schema = ps.open(root).schema
    assert schema["a"] is schema["b"] and schema == ds.schema and schema["d"] == schema["e"]
