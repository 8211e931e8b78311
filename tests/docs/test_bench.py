"""The benchmarks: their page is made from the results, every loss has a reason, and a rival that does not run is noted."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import waiting

ROOT = pathlib.Path(__file__).parent.parent.parent
BENCH = ROOT / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "adapters" / "common")]

import harness  # noqa: E402
import race  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import serving  # noqa: E402

ADAPTERS = sorted(path for path in (BENCH / "adapters").rglob("*.py") if path.parent.name != "common")


def compared(ours: list[float], theirs: list[float], best: str = "highest") -> dict[str, Any]:
    systems = {"penstock": ours, "rival": theirs, "limit: disk": [99.0], "(other work)": [98.0], "penstock, exact": [97.0]}
    return {"what": "reads", "unit": "1/s", "best": best, "systems": systems, "notes": ""}


def test_page_is_made_from_the_results() -> None:
    assert (BENCH / "README.md").read_text() == report.render(report.results())


def test_every_loss_has_a_reason_and_every_reason_a_loss() -> None:
    lost, told = [name for name, _ in report.losses(report.results())], report.reasons()
    assert [name for name in lost if report.reason(name, told) == "not known yet"] == []
    used = {report.reason(name, told) for name in lost}
    assert [pattern for pattern, text in told.items() if text not in used] == []


def test_results_are_those_of_the_benchmarks() -> None:
    found = report.results()
    assert {path.stem for path in report.RESULTS.glob("*.json")} == set(found) <= set(run.ALL)
    for name, result in found.items():
        assert result["machine"]["commit"], name
        assert all(bar["met"] == report._met(bar) for bar in result.get("bars", [])), name


@pytest.mark.parametrize(
    ("ours", "theirs", "best", "told"),
    [
        ([10, 11, 12], [5, 6, 7], "highest", "better"),
        ([5, 6, 7], [10, 11, 12], "highest", "worse"),
        ([5, 6, 7], [10, 11, 12], "lowest", "better"),
        ([5, 6, 11], [10, 11, 12], "highest", "tied"),
        ([100], [102], "highest", "tied"),
        ([100], [104], "highest", "worse"),
        ([0], [3], "lowest", "better"),
        ([100] * 8 + [200], [190] * 9, "highest", "worse"),  # One outlier does not make a tie.
        ([100, 101, 102, 180, 181], [170, 178, 179, 182, 183], "highest", "tied"),
    ],
)
def test_outcome(ours: list[float], theirs: list[float], best: str, told: str) -> None:
    found = report.outcome(compared(ours, theirs, best))
    assert found
    assert found[:2] == (told, "rival")


def test_any_rival_that_is_better_makes_a_loss() -> None:
    row = compared([90, 95, 100], [117, 118, 119])
    row["systems"]["noisy"] = [95, 120, 140]
    assert report.outcome(row) == ("worse", "rival", 95 / 118)
    counts = {**compared([101], [100], "lowest"), "unit": "requests"}  # Counts have no noise.
    assert report.outcome(counts) == ("worse", "rival", 100 / 101)


def test_penstock_that_fails_is_a_loss() -> None:
    assert report.outcome({**compared([], [5])}) == ("worse", "rival", 0.0)
    row = {"comparisons": [compared([], [5])]}
    assert report.losses({"x": row, "y": {"failed": "OSError"}}) == [
        ("y: the benchmark", "failed: OSError"),
        ("x: reads", "Penstock failed"),
    ]


def test_losses_are_told_with_both_values_and_missed_bars_with_the_limit() -> None:
    result = {
        "comparisons": [compared([5], [10])],
        "bars": [{"what": "ratio", "value": 0.5, "at_least": 1.0}, {"what": "fine", "value": 1, "at_most": 1}],
    }
    assert report.losses({"x": result}) == [("x: reads", "5 1/s, rival 10: 0.5 ×"), ("x: bar ratio", "0.5, wanted ≥ 1.0")]


def test_runs_agree_unless_a_winner_becomes_a_loser() -> None:
    first = {"x": {"comparisons": [compared([10], [5])], "bars": [{"what": "twice", "value": 2.0, "at_least": 2}]}}
    tied = {"x": {"comparisons": [compared([10], [10])], "bars": [{"what": "twice", "value": 1.0, "at_least": 2}]}}
    assert report.disagreements(first, first) == ([], [])
    assert report.disagreements(first, tied) == (
        [],
        ["x: reads: better (2 × rival) and tied (1 × rival)", "x: bar twice: 2, wanted ≥ 2 and 1, wanted ≥ 2"],
    )
    contradiction = ["x: reads: better (2 × rival) and worse (0.5 × rival)"]
    lost = {"x": {"comparisons": [compared([5], [10])], "bars": first["x"]["bars"]}}
    assert report.disagreements(first, lost) == (contradiction, [])
    assert report.disagreements(first, {}) == (["x: ran and absent"], [])
    assert report.disagreements({}, {"x": {"bars": []}}) == (["x: absent and ran"], [])
    assert report.disagreements({"x": {"bars": []}}, {"x": {"failed": "no disk"}}) == (["x: ran and failed"], [])


def test_runs_differ_in_bars_and_in_systems_that_ran() -> None:
    runs = [
        {
            "x": {
                "bars": [{"what": f"reads: penstock / best rival ({rival})", "value": value, "at_least": 1.0}],
                "comparisons": [harness.comparison("reads", "1/s", {"penstock": [3], "lmdb": [1], "lance": lance})],
            }
        }
        for rival, value, lance in (("lance", 1.5, [2]), ("lmdb", 0.5, []), ("lmdb", 1.2, [1]))
    ]
    assert report.disagreements(runs[0], runs[2]) == ([], [])
    changed = ["x: bar reads: penstock / best rival: 1.5, wanted ≥ 1.0 and 0.5, wanted ≥ 1.0", "x: reads: lance ran in one run only"]
    assert report.disagreements(runs[0], runs[1]) == ([], changed)
    one = {"x": {"bars": [], "comparisons": runs[0]["x"]["comparisons"]}}
    assert report.disagreements(runs[0], one) == ([], ["x: bar reads: penstock / best rival: 1.5, wanted ≥ 1.0 and not measured"])


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_adapter_pins_what_it_measures(path: pathlib.Path) -> None:
    wanted = serving.header(path)
    if not wanted:
        assert path.stem in ("penstock", "numpy")
        return
    names = [one for one in (*wanted["dependencies"], *wanted.get("tool", {}).get("bench", {}).get("build", [])) if "==" in one]
    assert names
    assert re.search(rf"{path.stem[:4]}|h5py|pylance|streaming|datasets|rocksdict|pyarrow", " ".join(names))


def test_environments_have_names_of_their_own() -> None:
    own = [path.stem for path in ADAPTERS if serving.header(path)]
    assert len(own) == len(set(own))


def adapter(folder: pathlib.Path, text: str, name: str = "made", **options: object) -> race.Entry:
    (folder / f"{name}.py").write_text(text)
    return race.Entry(name, str(folder / name), "read", {"size": 3, **options})


def test_turns_are_counted_and_touched(tmp_path: pathlib.Path) -> None:
    entry = adapter(
        tmp_path, "import numpy as np\ndef read(o):\n    return lambda: ({'x': np.full((o.size, 64), 7, np.uint8)} for _ in range(5))"
    )
    missing: dict[str, str] = {}
    found = race.race(race.start([entry], missing), missing, 3)
    assert missing == {}
    assert len(found["made"]["rates"]) == 3
    turn = race.once(entry)
    assert (turn["samples"], turn["digest"]) == (15, 0x0707070707070707)  # An odd number of batches of three rows of sevens.
    assert turn["kind"] == []
    system = race.System(entry)
    assert [system.turn("go 2")["samples"], system.turn("check")["digest"] != 0] == [6, True]
    system.close()


# A system whose memory has a size: its own, that of a worker, or memory that both share. `until` names a file until which a turn runs.
HOLDS = """
import mmap, os, pathlib
def fill(size):
    held = mmap.mmap(-1, size)
    for place in range(0, size, 4096): held[place] = 1
    return held
def read(o):
    kept, (ready, filled), (end, go) = [fill(o.size)] if o.place == "shared" else [], os.pipe(), os.pipe()
    if o.place in ("worker", "shared"):
        if os.fork() == 0:
            os.close(go)
            held = fill(o.size) if o.place == "worker" else [kept[0][at] for at in range(0, o.size, 4096)]
            os.write(filled, b"x"); os.read(end, 1); os._exit(0)
        os.read(ready, 1)
    def turn():
        if o.place == "itself" and not kept: kept.append(fill(o.size))
        held = fill(o.size) if o.place == "a turn" else None
        while o.until and not pathlib.Path(o.until).exists(): pass
        return 1
    return turn
"""


def peak(folder: pathlib.Path, fresh: bool = False, **options: object) -> int:
    entry = dataclasses.replace(adapter(folder, HOLDS, **options), fresh=fresh)
    missing: dict[str, str] = {}
    found = race.race(race.start([entry], missing), missing, 1)
    assert missing == {}
    return int(found["made"]["peak_bytes"])


@pytest.mark.long
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("place", ["itself", "worker", "shared"])
def test_memory_is_that_of_a_system_and_its_workers(tmp_path: pathlib.Path, place: str, fresh: bool) -> None:
    held = bytearray(b"x") * (300 << 20)  # In `ru_maxrss`, the kernel keeps a parent's peak over fork and exec.
    small, large = (peak(tmp_path, fresh, size=size, place=place, until="") for size in (4096, 100 << 20))
    assert len(held) == 300 << 20 and 4 << 20 < small < 80 << 20, small >> 20
    assert 90 << 20 < large - small < 110 << 20, (large - small) >> 20


def test_memory_that_is_held_only_in_a_turn_is_seen(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, measured = tmp_path / "seen", race.System._measure

    def measure(system: race.System) -> None:
        measured(system)
        if system.peak_bytes > 100 << 20:
            seen.touch()

    monkeypatch.setattr(race.System, "_measure", measure)
    assert 100 << 20 < peak(tmp_path, size=100 << 20, place="a turn", until=str(seen)) < 180 << 20


def test_bytes_from_devices_include_those_of_workers(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1 << 20))
    text = """
import os
def fetch(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file); os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.read(file, 1 << 20)
def read(o):
    def turn():
        worker = os.fork()
        if worker == 0: fetch(o.path); os._exit(0)
        os.waitpid(worker, 0)
        return 1
    return turn
"""
    before = serving.device_bytes()
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.read(descriptor, 1 << 20)
    os.close(descriptor)
    if serving.device_bytes() == before:
        return  # This file system has no device, or its device counts nothing.
    turn = race.once(adapter(tmp_path, text, path=str(path)))
    assert turn["device_bytes"] >= 1 << 20


def test_system_that_dies_in_a_race_is_noted_and_not_counted(tmp_path: pathlib.Path) -> None:
    entry = adapter(tmp_path, "turns = [1, 1, 1]\ndef read(o):\n    return turns.pop")
    missing: dict[str, str] = {}
    assert race.race(race.start([entry], missing), missing, 5) == {}
    assert missing == {"made": "in round 3: failed with exit code 1: IndexError: pop from empty list"}


def test_system_that_does_not_answer_is_noted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "ANSWER_SECONDS", 0.5)
    missing: dict[str, str] = {}
    assert race.start([adapter(tmp_path, "import threading\ndef read(o):\n    threading.Event().wait()")], missing) == []
    assert missing == {"made": "no answer in 0.5 seconds"}


def test_slow_systems_stop_but_not_limits_or_penstock() -> None:
    system = lambda name, **own: type("Running", (), {"entry": race.Entry(name, "", "", **own)})()  # noqa: E731
    running = [
        system("penstock"),
        system("fast"),
        system("near"),
        system("slow"),
        system("limit", rival=False),
        system("alone", group="two threads"),
    ]
    seconds = {"penstock": 9, "fast": 2, "near": 4, "slow": 4.1, "limit": 1, "alone": 50}
    turns = {name: [{"seconds": value}] for name, value in seconds.items()}
    names = lambda found: [one.entry.name for one in found]  # noqa: E731
    both = {name: 2 * turn for name, turn in turns.items()}
    assert names(race._contenders(running, both, 2)) == ["penstock", "fast", "near", "limit", "alone"]
    # After one round, only a long turn shows that a system is slow.
    assert names(race._contenders(running, turns, 2)) == ["penstock", "fast", "near", "limit", "alone"]
    short = {name: [{"seconds": turn[0]["seconds"] / 10}] for name, turn in turns.items()}
    assert names(race._contenders(running, short, 2)) == names(running)


def test_the_fastest_choice_is_that_of_the_best_median(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of each turn are given, so that this test does not depend on the machine's load."""
    turn, turns = race.System.turn, dict.fromkeys(range(2), 0)

    def given(system: race.System, request: str = "go", watch: bool = False) -> dict[str, Any]:
        seconds = system.entry.options["seconds"]
        turns[system.entry.options["number"]] += 1
        return {**turn(system, request, watch), "seconds": seconds[turns[system.entry.options["number"]] - 1]}

    monkeypatch.setattr(race.System, "turn", given)
    choices = [
        adapter(tmp_path, "def read(o):\n    return lambda: 1", name=f"made{number}", number=number, seconds=seconds)
        for number, seconds in enumerate(([0, 0.2, 0, 0.2], [0, 0.1, 0.1, 0.3]))
    ]
    missing: dict[str, str] = {}
    best = race.fastest(choices, missing)
    assert best and best.options["seconds"][1] == 0.1
    fails = adapter(tmp_path, "def read(o):\n    raise ValueError('broken')", name="broken")
    turns[0] = 0
    found = race.fastest([fails, choices[0]], missing)
    assert found and found.options == choices[0].options
    assert missing == {}
    assert race.fastest([fails, fails], missing) is None
    assert "broken" in str(missing)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_package\ndef read(o): pass", "No module named 'no_such_package'"),
        ("def read(o):\n    def turn(): raise ValueError('broken file')\n    return turn", "ValueError: broken file"),
        ("import os\ndef read(o): os._exit(3)", "failed with exit code 3"),
        ("print('loading', flush=True)\ndef read(o): pass", "it printed `loading`, which is not an answer"),
        ("import os\ndef read(o): os.write(2, b'\\xff\\n'); os._exit(3)", "failed with exit code 3"),
        ("# /// script\n# dependencies = ['x==1']\n# ///\ndef read(o): pass", "not installed: run tools/rivals.py"),
    ],
)
def test_system_that_fails_is_noted(tmp_path: pathlib.Path, text: str, reason: str) -> None:
    missing: dict[str, str] = {}
    assert race.start([adapter(tmp_path, text)], missing) == []
    assert reason in missing["made"]


def test_without_penstock_there_is_no_race(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="penstock: failed with exit code 1: ValueError: broken"):
        race.start([adapter(tmp_path, "def read(o): raise ValueError('broken')", name="penstock")], {})


def test_a_system_that_fails_does_not_run_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import time\ndef read(o):\n    turns = iter([0, 0, 60])\n    return lambda: time.sleep(next(turns)) or 1"  # A slow system.
    systems = race.start([adapter(tmp_path, text, name="hangs"), adapter(tmp_path, "def read(o): return lambda: 1", name="runs")], {})
    missing: dict[str, str] = {}
    settled: list[tuple[str, int | None]] = []

    def settle(system: race.System) -> None:
        """Only the turn that hangs has a short deadline: the others answer, however busy the machine is."""
        settled.append((system.entry.name, systems[0].process.poll()))
        hangs = [name for name, _ in settled].count("hangs") == 2 and system.entry.name == "hangs"
        monkeypatch.setattr(race, "ANSWER_SECONDS", 0.5 if hangs else 300)

    found = race.race(systems, missing, 3, settle)
    assert list(found) == ["runs"] and missing == {"hangs": "in round 2: no answer in 0.5 seconds"}
    assert settled[-1][1] is not None


@pytest.mark.parametrize("call", ["race.start([entry], {})", "race.fastest([entry, entry], {})"])
def test_interrupt_in_a_first_turn_leaves_no_process(tmp_path: pathlib.Path, call: str) -> None:
    text = "import os, pathlib, time\ndef read(o):\n    pathlib.Path(o.note).write_text(str(os.getpid()))\n    return lambda: time.sleep(3600)"  # A slow system.
    entry = adapter(tmp_path, text, note=str(tmp_path / "note"))
    script = f"import sys; sys.path[:0] = [{str(BENCH)!r}, {str(BENCH / 'adapters' / 'common')!r}]; import race; entry = race.Entry({entry.name!r}, {entry.adapter!r}, 'read', {entry.options!r}); {call}"
    running = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    waiting.until(lambda: (tmp_path / "note").exists() and (tmp_path / "note").read_text(), "an adapter's first turn")
    running.send_signal(signal.SIGINT)
    running.wait(300)
    assert not pathlib.Path("/proc", (tmp_path / "note").read_text()).exists()


def benchmarks(*arguments: str, replaced: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run bench/run.py with benchmarks whose results are given."""
    script = f"import sys, types; sys.path.insert(0, {str(BENCH)!r}); import run; {replaced}; sys.argv[1:] = {list(arguments)!r}; sys.exit(run.main())"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})


BAR = "{'what': 'rate', 'value': VALUE, 'at_least': 1}"
MADE = "run.ALL = {'a': 'made', 'b': 'made'}; m = types.ModuleType('workloads.made'); sys.modules['workloads.made'] = m; "
GIVEN = MADE + f"m.a = lambda *_: {{'what': '', 'lines': ['line of a'], 'bars': [{BAR}]}}; m.b = lambda *_: SECOND"


@pytest.mark.parametrize(
    ("value", "second", "strict", "code"),
    [
        ("1", "{'what': '', 'lines': []}", True, 0),
        ("0.5", "{'what': '', 'lines': []}", True, 1),
        ("0.5", "{'what': '', 'lines': []}", False, 0),
        ("1", "1 / 0", True, 1),
    ],
)
def test_strict_fails_for_missed_bars_and_failures(tmp_path: pathlib.Path, value: str, second: str, strict: bool, code: int) -> None:
    done = benchmarks("--results", str(tmp_path), *["--strict"] * strict, replaced=GIVEN.replace("VALUE", value).replace("SECOND", second))
    assert done.returncode == code, done.stderr
    assert "line of a" in done.stdout
    assert json.loads((tmp_path / "a.json").read_text())["bars"][0]["met"] == (value == "1")
    assert ("FAILED ZeroDivisionError" in done.stdout) == (second == "1 / 0")


def test_interrupt_keeps_earlier_results(tmp_path: pathlib.Path) -> None:
    raised = "(_ for _ in ()).throw(KeyboardInterrupt)"
    done = benchmarks("--results", str(tmp_path), replaced=GIVEN.replace("VALUE", "1").replace("SECOND", raised))
    assert done.returncode == 130
    assert f"interrupted: the results of the benchmarks above are in {tmp_path}" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_full_disk_is_reported(tmp_path: pathlib.Path) -> None:
    full = "(_ for _ in ()).throw(OSError(28, 'No space left on device'))"
    done = benchmarks("--results", str(tmp_path), replaced=GIVEN.replace("VALUE", "1").replace("SECOND", full))
    assert done.returncode == 0
    assert "FAILED OSError: [Errno 28] No space left on device" in done.stdout


def test_results_that_cannot_be_saved_are_reported_and_others_run(tmp_path: pathlib.Path) -> None:
    """A folder stands where the first result belongs."""
    (tmp_path / "a.json").mkdir()
    given = GIVEN.replace("VALUE", "1").replace("SECOND", "{'what': '', 'lines': ['line of b']}")
    done = benchmarks("--results", str(tmp_path), "--strict", replaced=given)
    assert done.returncode == 1 and "line of b" in done.stdout and "not saved: " in done.stdout, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_broken_result_is_named(tmp_path: pathlib.Path) -> None:
    for body in ("", "{", "null", "[1]"):
        (tmp_path / "calls.json").write_text(body)
        with pytest.raises(SystemExit, match=r"calls\.json is not a result: .*run the benchmark again"):
            report.results(tmp_path)


def test_names_and_folders_are_checked(tmp_path: pathlib.Path) -> None:
    assert "there is no benchmark `cifa`" in benchmarks("--only", "cifa").stderr
    for photos in (tmp_path / "none", tmp_path):
        assert "is not a folder with JPEGs" in benchmarks("calls", "--photos", str(photos)).stderr
    assert "is not a folder" in benchmarks("calls", "--scratch", str(tmp_path / "none")).stderr


def test_photographs_are_the_same_on_every_machine() -> None:

    import photographs

    made = photographs._make("small", 5)
    assert made == photographs._make("small", 5)
    assert made != photographs._make("small", 6)
    assert 60_000 < len(made) < 150_000, len(made)
