"""Points in time, durations and times of day: no digit is dropped, no unit is lost, and conditions do not depend on the machine's zone."""

import datetime
import json
import os
import subprocess
import sys
import uuid

import numpy as np
import pandas as pd
import penstock as ps
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.importers import import_data

pytestmark = pytest.mark.local
# Whole microseconds as nanoseconds, and one time with digits below them, in every form of each library.
WHOLE, FINE = 1_577_836_800_123_456_000, 1_577_836_800_123_456_800


def stamps(counts):
    return np.array(counts, "M8[ns]")


def spans(counts):
    return np.array(counts, "m8[ns]")


FORMS = {
    "timestamp": {
        "numpy": stamps,
        "picoseconds": lambda counts: (np.array(counts) // 10**9 * 10**6 + np.array(counts) % 10**9).view("M8[ps]"),
        "items": lambda counts: list(stamps(counts)),
        "masked": lambda counts: np.ma.MaskedArray(stamps(counts), [False] * len(counts)),
        "pandas": lambda counts: pd.Series(stamps(counts)),
        "pandas with a zone": lambda counts: pd.Series(stamps(counts)).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"),
        "pandas objects": lambda counts: pd.Series([pd.Timestamp(count) for count in counts], dtype=object),
        "pandas items": lambda counts: [pd.Timestamp(count, tz="Asia/Tokyo") for count in counts],
        "arrow": lambda counts: pa.array(stamps(counts)),
        "arrow with a zone": lambda counts: pa.array(stamps(counts)).cast(pa.timestamp("ns", "America/New_York")),
        "dictionary": lambda counts: pa.array(stamps(counts)).dictionary_encode(),
        "polars": lambda counts: pl.Series(stamps(counts)),
        "text": lambda counts: [str(time) for time in stamps(counts)],
        "text with a zone": lambda counts: [f"{time}+09:00" for time in stamps(counts)],
        "arrow text": lambda counts: pa.array([str(time) for time in stamps(counts)]),
    },
    "duration": {
        "numpy": spans,
        "items": lambda counts: list(spans(counts)),
        "pandas": lambda counts: pd.Series(spans(counts)),
        "pandas items": lambda counts: [pd.Timedelta(count, "ns") for count in counts],
        "arrow": lambda counts: pa.array(spans(counts)),
        "polars": lambda counts: pl.Series(spans(counts)),
    },
}


def new(kind):
    return ps.create(f"memory://times-{uuid.uuid4()}", {"c": kind})


def whole_and_fine(dtype, form):
    """Return values without and with digits below a microsecond; the latter in row 1."""
    if form == "picoseconds":
        return FORMS[dtype][form]([5_000_000, 7_000_000]), FORMS[dtype][form]([5_000_000, 7_000_800])
    return FORMS[dtype][form]([WHOLE, WHOLE]), FORMS[dtype][form]([WHOLE, FINE])


@pytest.mark.parametrize(("dtype", "form"), [(dtype, form) for dtype in FORMS for form in FORMS[dtype]])
def test_digits_below_a_microsecond_are_refused_by_their_row(dtype, form):
    whole, fine = whole_and_fine(dtype, form)
    ds = new(dtype)
    ds.append({"c": whole})
    assert len(ds) == 2
    with pytest.raises(ps.InvalidInputError, match=r"row 1 .*below a microsecond") as caught:
        ds.append({"c": fine})
    assert caught.value.rows == [1] and "first" in caught.value.hint and len(ds) == 2


@pytest.mark.parametrize("shape", [(2,), (None,)])
@pytest.mark.parametrize("form", ["numpy", "arrow", "list"])
def test_digits_within_tensors_are_refused(form, shape):
    ds = new(ps.Tensor(shape, "timestamp"))
    for last, fits in ((WHOLE, True), (FINE, False)):
        rows = np.stack([stamps([WHOLE, WHOLE]), stamps([WHOLE, last])])
        given = {"numpy": list(rows), "list": [[pd.Timestamp(time) for time in row] for row in rows]}.get(form)
        given = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 2) if given is None else given
        if fits:
            ds.append({"c": given})
            assert np.array_equal(np.stack(list(ds["c"][:])), rows)
        else:
            with pytest.raises(ps.InvalidInputError, match=r"row 1 .*below a microsecond"):
                ds.append({"c": given})


@pytest.mark.parametrize("kind", [ps.Tensor((None,), "time"), ps.Tensor((None, 1), "time"), ps.Tensor((1,), "time")])
def test_digits_of_times_of_day_within_lists_are_refused(kind):
    """Python's time has microseconds only, and Arrow cuts off the rest."""
    for fine in (0, 789):
        times = pa.array([1_000, 45_296_123_456_000 + fine], pa.time64("ns"))
        lists = pa.ListArray.from_arrays([0, 1, 2], times)
        lists = pa.ListArray.from_arrays([0, 1, 2], lists) if len(kind.shape) == 2 else lists
        ds = new(kind)
        if not fine:
            ds.append({"c": lists})
            assert ds["c"][1].reshape(-1).astype(np.int64).tolist() == [45_296_123_456]
            continue
        with pytest.raises(ps.InvalidInputError, match=r"row 1 .*below a microsecond"):
            ds.append({"c": lists})


def test_two_keys_of_one_microsecond_are_not_one_sample():
    ds = ps.create("memory://fine-keys", {"t": "timestamp", "n": "int32"})
    with ds.transaction() as tx, pytest.raises(ps.InvalidInputError, match="below a microsecond"):
        tx.upsert({"t": stamps([WHOLE, WHOLE + 800]), "n": [1, 2]}, key="t")
    assert len(ds) == 0
    with pytest.raises(ps.InvalidInputError, match="below a microsecond"):
        ds["t"] == "2020-01-01T00:00:00.1234568"  # noqa: B015


@pytest.mark.parametrize("on_error", ["raise", "skip", "null"])
@pytest.mark.parametrize("source", ["csv", "jsonl", "parquet", "int96", "text.parquet", "frame", "dicts"])
def test_digits_in_sources_are_refused_by_their_row(tmp_path, source, on_error):
    counts = [WHOLE, FINE, WHOLE]
    texts = [str(time) for time in stamps(counts)]
    place = tmp_path / f"t.{source.rpartition('.')[2]}"
    table = pa.table({"t": pa.array(stamps(counts)), "n": [0, 1, 2]})
    if source == "csv":
        place.write_text("t,n\n" + "".join(f"{text},{number}\n" for number, text in enumerate(texts)))
    elif source == "jsonl":
        place.write_text("".join(json.dumps({"t": text, "n": number}) + "\n" for number, text in enumerate(texts)))
    elif source == "int96":
        place = tmp_path / "t.parquet"
        pq.write_table(table, place, use_deprecated_int96_timestamps=True)
    elif source == "text.parquet":
        pq.write_table(table.set_column(0, "t", pa.array(texts)), place)
    elif source == "parquet":
        pq.write_table(table, place)
    given = {"frame": table.to_pandas(), "dicts": table.to_pylist()}.get(source, place)
    types = {"t": "timestamp"}
    if on_error == "raise":
        with pytest.raises(ps.InvalidInputError, match=r"(row|line) \d.*below a microsecond"):
            import_data(given, tmp_path / "set", types=types)
        return
    report = import_data(given, tmp_path / "set", types=types, on_error=on_error)
    ds = ps.open(tmp_path / "set")
    assert [refusal.path.rpartition(" ")[2] for refusal in report.refused] == ["2" if source in ("csv", "jsonl") else "1"]
    assert "below a microsecond" in report.refused[0].message
    assert ds["n"][:].tolist() == ([0, 1, 2] if on_error == "null" else [0, 2])
    kept = np.array([WHOLE // 1000], "M8[us]")[0]
    assert [None if time is None else np.datetime64(time) for time in ds["t"][:].tolist()] == [kept, *[None] * (on_error == "null"), kept]


def test_times_of_spark_beyond_nanoseconds_beside_fine_ones(tmp_path):
    """In nanoseconds, the year 9999 wraps around."""
    far = pa.array(np.array(["9999-12-31", "2024-01-01T00:00:00.000001", "0001-01-01"], "M8[us]"))
    pq.write_table(pa.table({"t": far}), tmp_path / "far.parquet", use_deprecated_int96_timestamps=True)
    import_data(tmp_path / "far.parquet", tmp_path / "set")
    assert ps.open(tmp_path / "set")["t"][:].tolist() == far.to_pylist()


# Values of each dtype in microseconds, and the same in the forms of other libraries.
TIMES = {
    "duration": [90_000_000, -1, 0, 86_400_000_000 * 400],
    "time": [90_000_000, 1, 0, 86_399_999_999],
}
GIVEN = {
    "duration": {
        "numpy": lambda us: np.array(us, "m8[us]"),
        "python": lambda us: [datetime.timedelta(microseconds=count) for count in us],
        "pandas": lambda us: pd.Series(np.array(us, "m8[us]")),
        "pandas nanoseconds": lambda us: pd.Series(np.array(us, "m8[us]").astype("m8[ns]")),
        "arrow": lambda us: pa.array(us, pa.duration("us")),
        "arrow nanoseconds": lambda us: pa.array(us, pa.duration("us")).cast(pa.duration("ns")),
        "polars": lambda us: pl.Series(np.array(us, "m8[us]")),
    },
    "time": {
        "numpy": lambda us: np.array(us, "m8[us]"),
        "python": lambda us: [(datetime.datetime.min + datetime.timedelta(microseconds=count)).time() for count in us],
        "text": lambda us: [(datetime.datetime.min + datetime.timedelta(microseconds=count)).time().isoformat() for count in us],
        "arrow": lambda us: pa.array(us, pa.time64("us")),
        "arrow nanoseconds": lambda us: pa.array([count * 1000 for count in us], pa.time64("ns")),
        "polars": lambda us: pl.from_arrow(pa.array(us, pa.time64("us"))),
        "pandas": lambda us: pa.array(us, pa.time64("us")).to_pandas(),
    },
}


@pytest.mark.parametrize(("dtype", "form"), [(dtype, form) for dtype in GIVEN for form in GIVEN[dtype]])
def test_durations_and_times_of_day_have_one_unit(dtype, form):
    counts = TIMES[dtype]
    given = GIVEN[dtype][form](counts)
    ds = new(dtype)
    ds.append({"c": given})
    assert ds["c"][:].astype(np.int64).tolist() == counts and ds["c"][:].dtype == "m8[us]"
    place = f"memory://times-{uuid.uuid4()}"
    import_data({"c": given}, place, types={"c": "time"} if form in ("text", "numpy") and dtype == "time" else None)
    assert ps.open(place).schema == {"c": ps.Scalar(dtype)} and ps.open(place)["c"][:].astype(np.int64).tolist() == counts


@pytest.mark.parametrize("kind", ["duration", "time32", "time64"])
def test_files_of_other_units_have_one_unit(tmp_path, kind):
    units = {"duration": ("s", "ms", "us", "ns"), "time32": ("s", "ms"), "time64": ("us", "ns")}[kind]
    (tmp_path / "source").mkdir()
    for unit in units:
        count = 90 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
        pq.write_table(pa.table({"d": pa.array([count, None], getattr(pa, kind)(unit))}), tmp_path / "source" / f"{unit}.parquet")
        import_data(tmp_path / "source" / f"{unit}.parquet", tmp_path / unit)
        assert ps.open(tmp_path / unit)["d"][:].astype(np.int64).tolist() == [90_000_000, None]
    import_data(tmp_path / "source", tmp_path / "set", format="parquet")
    assert ps.open(tmp_path / "set")["d"][:].astype(np.int64).tolist() == [90_000_000, None] * len(units)


@pytest.mark.parametrize(
    ("dtype", "value", "why"),
    [
        ("duration", 90, "expected duration"),
        ("duration", "00:01:30", "expected duration"),
        ("duration", np.timedelta64(90), "has no unit"),
        ("duration", np.timedelta64(3, "M"), "differ in length"),
        ("duration", np.timedelta64(2**62, "s"), "out of the range"),
        ("duration", datetime.time(1), "expected duration"),
        ("time", 90, "expected time"),
        ("time", "24:00:00", "expected time"),
        ("time", "12:00:00.0000001", "below a microsecond"),
        ("time", datetime.time(12, tzinfo=datetime.UTC), "time"),
        ("time", datetime.timedelta(days=1), "not a time of day"),
        ("time", datetime.timedelta(microseconds=-1), "not a time of day"),
        ("time", datetime.datetime(2020, 1, 1), "expected time"),
        ("timestamp", datetime.timedelta(1), "timestamp"),
        ("timestamp", datetime.time(1), "timestamp"),
        ("int64", datetime.timedelta(1), "expected int64"),
        ("float64", datetime.timedelta(1), "expected float64"),
    ],
    ids=str,
)
def test_values_without_a_unit_or_of_another_kind_are_refused(dtype, value, why):
    ds = new(dtype)
    with pytest.raises(ps.InvalidInputError, match=why) as caught:
        ds.append({"c": [None, value]})
    assert caught.value.rows == [1] and len(ds) == 0


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int64", np.array([90], "m8[s]")),
        ("float64", np.array([90], "m8[s]")),
        ("int64", pa.array([90], pa.duration("s"))),
        ("int64", pa.array([90], pa.time32("s"))),
        ("int64", pl.Series([datetime.timedelta(seconds=90)])),
        ("int64", pd.Series(np.array([90], "m8[s]"))),
        ("duration", np.array([90])),
        ("duration", pa.array([90])),
        ("duration", np.array(["2020"], "M8[s]")),
        ("time", np.array([90])),
        ("timestamp", np.array([90], "m8[s]")),
        ("timestamp", pa.array([90], pa.time32("s"))),
        ("time", pa.array([86_400_000_000], pa.duration("us"))),
    ],
    ids=str,
)
def test_arrays_never_lose_or_gain_a_unit(dtype, values):
    ds = new(dtype)
    with pytest.raises(ps.InvalidInputError) as caught:
        ds.append({"c": values})
    assert len(ds) == 0 and (caught.value.hint or "time of day" in str(caught.value))


def test_durations_and_times_in_every_other_use(tmp_path):
    """Comparisons, conditions, keys, fills, updates, tensors, torch, and the formats of other libraries."""
    ds = ps.create(tmp_path / "set", {"d": "duration", "t": "time", "v": ps.Tensor((2,), "duration"), "r": ps.Tensor((None,), "time")})
    second = np.timedelta64(1, "s")
    ds.append({
        "d": [second, -second, None], "t": ["00:00:01", None, "23:59:59.999999"], "v": [[second, second], None, [second, -second]],
        "r": [[datetime.time(1)], [], None],
    })  # fmt: skip
    assert (ds["d"] < np.timedelta64(0, "s")).tolist() == [False, True, False] == (ds["d"] == datetime.timedelta(seconds=-1)).tolist()
    assert (ds["t"] > "12:00").tolist() == [False, False, True] == (ds["t"] >= datetime.time(12)).tolist()
    with ds.transaction() as tx:
        tx.delete(where="t >= '23:00' AND d IS NULL")
    with ds.transaction() as tx:
        tx.delete(where="d < INTERVAL 0 SECONDS")
    with ds.transaction() as tx:
        tx.upsert({"d": [second], "t": ["12:00"]}, key="d")
        tx.add_column("opens", "time", fill="09:30")
    assert ds["t"][:].astype(np.int64).tolist() == [43_200_000_000] and ds["opens"][0] == np.timedelta64(34_200, "s")
    assert ds["v"][0].tolist() == [datetime.timedelta(seconds=1)] * 2 and ds["r"][0].tolist() == [datetime.timedelta(hours=1)]
    assert ds.to_torch(["d"])["d"].tolist() == [1_000_000]
    assert [batch["d"].tolist() for batch in ds.loader(batch_size=1, output="torch")] == [[1_000_000]]
    assert ds.to_pandas()["d"][0] == pd.Timedelta(1, "s") and ds.to_pandas()["t"][0] == datetime.time(12)
    assert ds.to_polars()["d"].dtype == pl.Duration("us") and ds.to_polars()["t"].to_list() == [datetime.time(12)]
    assert ds.verify()["problems"] == []


ZONES = ["UTC", "Asia/Tokyo", "America/New_York"]
# Conditions with literals and functions of all kinds, and the rows of the four times that they select, in UTC.
CONDITIONS = {
    "t < '2020-01-01'": [0, 1],
    "t < DATE '2020-01-01'": [0, 1],
    "t < TIMESTAMP '2020-01-01 00:00:00'": [0, 1],
    "t < TIMESTAMPTZ '2020-01-01 00:00:00'": [0, 1],
    "t < TIMESTAMPTZ '2020-01-01 10:00:00+09'": [0, 1],
    "t BETWEEN '2019-12-31 20:00:00' AND '2020-01-01 06:00:00'": [1, 2],
    "t IN ('2019-12-31 18:00:00', '2020-01-01 12:00:00')": [0, 3],
    "t::DATE = '2019-12-31'": [0, 1],
    "CAST(t AS VARCHAR) LIKE '2019-12-31%'": [0, 1],
    "CAST(t AS TIMESTAMP) >= '2020-01-01'": [2, 3],
    "CAST(CAST(t AS TIMESTAMP) AS TIME) < '13:00'": [2, 3],
    "year(t) = 2019": [0, 1],
    "extract(hour FROM t) = 18": [0],
    "date_part('day', t) = 1": [2, 3],
    "date_trunc('day', t) = '2019-12-31'": [0, 1],
    "date_diff('day', t, TIMESTAMPTZ '2020-01-02 00:00:00') = 2": [0, 1],
    "strftime(t, '%Y-%m-%d %H') = '2019-12-31 23'": [1],
    "dayname(t) = 'Tuesday'": [0, 1],
    "t >= make_timestamptz(2020, 1, 1, 0, 0, 0)": [2, 3],
    "t >= strptime('2020-01-01', '%Y-%m-%d')": [2, 3],
    "t - INTERVAL 1 DAY < '2019-12-31'": [0, 1],
    "timezone('Asia/Tokyo', t) >= '2020-01-01'": [0, 1, 2, 3],
    "CASE WHEN hour(t) < 13 THEN true ELSE false END": [2, 3],
    "current_setting('TimeZone') = 'UTC'": [0, 1, 2, 3],
}
PROGRAM = """
import json, sys, penstock as ps
times = ["2019-12-31T18:00", "2019-12-31T23:00", "2020-01-01T01:00", "2020-01-01T12:00"]
found = {}
for number, condition in enumerate(json.loads(sys.argv[1])):
    ds = ps.create(f"memory://zone-{number}", {"t": "timestamp", "n": "int32"})
    ds.append({"t": times, "n": range(4)})
    with ds.transaction() as tx:
        tx.delete(where=condition)
    found[condition] = sorted(set(range(4)) - set(ds["n"][:].tolist()))
print(json.dumps(found))
"""


@pytest.mark.parametrize("zone", ZONES)
def test_a_condition_selects_the_same_samples_in_every_time_zone(zone):
    """A child is needed, because a process reads its time zone once."""
    environment = {**os.environ, "TZ": zone, "LC_ALL": "C"}
    program = [sys.executable, "-c", PROGRAM, json.dumps(list(CONDITIONS))]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == CONDITIONS
