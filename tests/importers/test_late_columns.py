"""Names that first occur behind the rows from which the columns are inferred."""

import json

import penstock as ps
import pytest
from penstock.importers import import_data

ROWS = [{"a": 1}] * 1500 + [{"a": 2, "late": 5}]


@pytest.fixture(params=["jsonl", "json", "rows"])
def source(request, tmp_path):
    if request.param == "rows":
        return ROWS
    text = json.dumps(ROWS) if request.param == "json" else "".join(json.dumps(row) + "\n" for row in ROWS)
    path = tmp_path / f"source.{request.param}"
    path.write_text(text)
    return path


def test_a_late_name_is_refused_dropped_or_imported(source, root):
    with pytest.raises(ps.InvalidInputError, match="`late` does not occur in the rows used to infer columns") as caught:
        import_data(source, root)
    assert 'drop=["late"]' in caught.value.hint and "--type late=" in caught.value.hint
    assert import_data(source, root.with_name("dropped"), drop=["late"]).samples == 1501
    assert ps.open(root.with_name("dropped")).columns == ["a"]
    import_data(source, root.with_name("typed"), types={"late": ps.Scalar("int64")})
    assert ps.open(root.with_name("typed"))[1500] == {"a": 2, "late": 5}
