"""Run the command line as a user does, and check exit codes, tables, --json and help."""

import json
import os
import subprocess
import sys

import commands
import numpy as np
import penstock as ps
import pytest

VERBS = ("create", "import", "info", "log", "head", "verify", "tag", "diff", "branch", "merge", "cherry-pick", "reset", "stats", "doctor")

pytestmark = pytest.mark.processes


def run(*arguments, code=0):
    done = commands.penstock(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("name,age\nada,36\nalan,41\n")
    return path


@pytest.mark.long
def test_every_verb_in_turn(root, table):
    assert "created" in run("create", root, "name=text", "age=int64", "vector=tensor:float32:3x?", "label=label:cat,dog").stdout
    assert "imported 2 samples" in run("import", table, root).stdout
    info = json.loads(run("info", root, "--json").stdout)
    assert info["samples"] == 2 and [column["name"] for column in info["columns"]] == ["name", "age", "vector", "label"]
    assert ps.open(root).schema["vector"] == ps.Tensor((3, None), "float32")
    assert "people.csv" in run("log", root).stdout and "alan" in run("head", root).stdout and "2" in run("info", root).stdout
    log = json.loads(run("log", root, "--json", "-n", 1).stdout)
    assert len(log) == 1 and log[0]["samples_added"] == 2
    lines = [json.loads(line) for line in run("head", root, "--json", "-n", 1, "-c", "name").stdout.splitlines()]
    assert lines == [{"name": "ada"}]
    first = ps.open(root).log()[-1].snapshot
    assert json.loads(run("info", root, "--snapshot", first, "--json").stdout)["samples"] == 0
    assert f"empty names snapshot {first}" in run("tag", root, "empty", "--snapshot", first).stdout
    run("tag", root, "both")
    assert (
        json.loads(run("tag", root, "--json").stdout) == {"both": ps.open(root).snapshot, "empty": first}
        and "both" in run("tag", root).stdout
    )
    assert [entry["tags"] for entry in json.loads(run("log", root, "--json").stdout)] == [["both"], ["empty"]]
    assert "(empty)" in run("log", root).stdout and "(both) import" in run("log", root, "--graph").stdout
    for at in (["--tag", "empty"], ["--as-of", ps.open(root).log()[-1].time.isoformat()]):
        assert json.loads(run("info", root, *at, "--json").stdout)["samples"] == 0
        assert run("head", root, *at, "--json").stdout == "" and len(json.loads(run("log", root, *at, "--json").stdout)) == 1
        assert json.loads(run("verify", root, *at, "--json").stdout)["samples"] == 0
    with ps.open(root).transaction("remove ada") as tx:
        tx.delete(row_ids=[0])
    assert "-1" in run("log", root).stdout and json.loads(run("verify", root, "--json").stdout)["samples"] == 1
    assert json.loads(run("head", root, "--tag", "both", "--json", "-n", 1, "-c", "name").stdout) == {"name": "ada"}
    entries = [json.loads(line) for line in run("diff", root, "empty", "--json").stdout.splitlines()]
    assert entries == [{"kind": "added", "column": None, "row_ids": [1]}]
    assert "deleted" in run("diff", root, "both").stdout and "same samples" in run("diff", root, "both", "both").stderr
    assert "error[name-not-found]" in run("diff", root, "nowhere", code=1).stderr
    assert "deleted tag both" in run("tag", root, "both", "--delete").stdout
    assert "error[name-not-found]" in run("tag", root, "both", "--delete", code=1).stderr
    assert "error[name-exists]" in run("tag", root, "empty", code=1).stderr
    for wrong in (["--delete"], ["--snapshot", first], ["x", "--delete", "--snapshot", first]):
        run("tag", root, *wrong, code=2)
    report = json.loads(run("verify", root, "--json").stdout)
    assert report["samples"] == 1 and report["problems"] == []


@pytest.mark.long
def test_verbs_of_branches(root, table):
    run("create", root, "name=text", "age=int64")
    run("import", table, root)
    first = ps.open(root).snapshot
    assert "branch exp begins at snapshot 1-0-" in run("branch", root, "exp").stdout
    run("import", table, root, "--branch", "exp", "-m", "again", "--mode", "append")
    assert "error[branch-not-found]" in run("import", table, root, "--branch", "nothing", code=1).stderr
    assert not root.with_name("new").exists() and "not a dataset" in run("import", table, root.with_name("new"), "-b", "x", code=1).stderr
    assert [json.loads(run("info", root, *at, "--json").stdout)["samples"] for at in ([], ["-b", "exp"])] == [2, 4]
    for verb in ("head", "log", "verify", "stats"):
        run(verb, root, "--branch", "exp")
        assert "error[branch-not-found]" in run(verb, root, "--branch", "nothing", code=1).stderr
    run("tag", root, "v1", "--branch", "exp")
    assert len(ps.open(root, tag="v1")) == 4 and set(json.loads(run("branch", root, "--json").stdout)) == {"exp", "main"}
    assert "exp" in run("branch", root).stdout and json.loads(run("diff", root, "main", "exp", "--json").stdout)["row_ids"][0] >> 40 == 1
    merged = json.loads(run("merge", root, "exp", "-m", "both", "--json").stdout)
    assert merged == {"snapshot": ps.open(root).snapshot, "commit": True, "samples_added": 2, "samples_deleted": 0}
    again = run("merge", root, "exp", "--json")
    assert json.loads(again.stdout) == {**merged, "commit": False, "samples_added": 0}
    assert "already" in run("cherry-pick", root, "v1").stderr
    assert json.loads(run("log", root, "--json").stdout)[0]["transactions"][0]["message"] == "both"
    assert "column" in run("diff", root, first, "--branch", "exp").stdout and run("diff", root, "v1", "--tag", "v1").returncode == 0
    for wrong in (
        ["diff", root, first, "main", "--tag", "v1"],
        ["verify", root, "--tag", "v1", "--branch", "exp"],
        ["tag", root, "--branch", "exp"],
    ):
        run(*wrong, code=2)
    run("branch", root, "past", "--as-of", "2100-01-01")
    run("branch", root, "past", "--delete")
    for branch, age in (("main", 1), ("exp", 2)):
        with ps.open(root, branch=branch).transaction() as tx:
            tx.update({"age": [age]}, row_ids=[0])
    refused = run("merge", root, "exp", "--json", code=1)
    assert json.loads(refused.stdout)["error"]["code"] == "conflict" and "column `age`" in refused.stderr
    for wrong in (["mine"], ["age=mine"], ["ours", "--on-conflict", "theirs"]):
        run("merge", root, "exp", "--on-conflict", *wrong, code=2)
    assert "merged exp: 0 samples added" in run("merge", root, "exp", "--on-conflict", "fail", "--on-conflict", "age=theirs").stdout
    assert ps.open(root)[0]["age"] == 2
    drawn = run("log", root, "--graph").stdout.splitlines()
    assert drawn[0].startswith("*  0-") and drawn[1] == "|\\" and drawn[-1].endswith("create") and "| *  1-2-" in "\n".join(drawn)
    assert f"reset to {first}: 2 samples" in run("reset", root, first).stdout
    assert json.loads(run("reset", root, "v1", "--json").stdout)["samples"] == 4
    numbers = json.loads(run("stats", root, "--json").stdout)
    assert (numbers["samples"], numbers["fragments"], numbers["branches"], numbers["tags"]) == (4, 2, 2, 1)
    assert "deleted branch exp" in run("branch", root, "exp", "--delete").stdout
    for wrong, code in ((["exp", "-d"], 1), (["main", "-d"], 1), (["v1"], 1), (["-d"], 2), (["x", "-d", "--start", "v1"], 2)):
        run("branch", root, *wrong, code=code)


def test_exit_codes_and_errors(root, table, tmp_path):
    for wrong in (
        [],
        ["nonsense"],
        ["create"],
        ["create", root, "x"],
        ["create", root, "x=int33"],
        ["create", root, "x=tensor:int8:axb"],
        ["create", root, "x=tensor:int8:3x"],
        ["create", root, "x=tensor:int8:3xx4"],
        ["log", root, "-n", 0],
    ):
        run(*wrong, code=2)
    gone = run("info", tmp_path / "gone", code=1)
    assert "error[dataset-not-found]" in gone.stderr and "hint:" in gone.stderr and "Traceback" not in gone.stderr
    assert json.loads(run("info", tmp_path / "gone", "--json", code=1).stdout)["error"]["code"] == "dataset-not-found"
    run("create", root, "x=int32")
    run("create", root, "x=int32", code=1)
    assert "no column" in run("import", table, root, code=1).stderr


def test_import_reports_refusals_and_verify_finds_damage(root, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\nnope\n{"x": 2}\n')
    run("import", tmp_path / "a.jsonl", root, code=1)
    done = run("import", tmp_path / "a.jsonl", root, "--on-error", "skip", "--type", "x=int16", "--json")
    report = json.loads(done.stdout)
    assert report["samples"] == 2 and [set(refusal) for refusal in report["refused"]] == [{"path", "code", "message", "hint"}]
    assert "refused" in run("import", tmp_path / "a.jsonl", root.with_name("b"), "--on-error", "skip").stderr
    ds = ps.open(root)
    ds.append({"x": np.arange(1000)})
    data = max(root.glob("d/*"), key=lambda path: path.stat().st_size)
    body = bytearray(data.read_bytes())
    body[100] ^= 1
    data.write_bytes(bytes(body))
    assert "problems" in run("verify", root, code=1).stdout
    assert len(json.loads(run("verify", root, "--json", code=1).stdout)["problems"]) == 1


def test_help_of_every_verb():
    top = run("--help").stdout
    for verb in VERBS:
        assert verb in top and "Usage" in run(verb, "--help").stdout
    assert run("--version").stdout.strip()


@pytest.mark.long
def test_output_that_cannot_show_or_take_everything(root):
    ds = ps.create(root, {"text": ps.Text()})
    ds.append({"text": ["zwölf ☃"]}, message="für später")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for verb in ("head", "log", "info", "verify", "branch", "stats"):
        for as_json in ([], ["--json"]):
            command = [sys.executable, "-m", "penstock", verb, str(root), *as_json]
            done = subprocess.run(command, capture_output=True, text=True, env=ascii_only)
            assert done.returncode == 0 and done.stdout.isascii() and not done.stderr, done.stderr
            if as_json and verb == "head":
                assert json.loads(done.stdout) == {"text": "zwölf ☃"}
            with open("/dev/full", "w") as full:
                done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
            assert done.returncode == 1 and done.stderr.splitlines() == ["error: cannot print: [Errno 28] No space left on device"]


@pytest.mark.long
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["full", "closed"])
def test_an_import_that_cannot_report_is_done_all_the_same(root, tmp_path, stream, how):
    """The command must exit with 0, because a script that sees a failure would import the file again."""
    (tmp_path / "a.csv").write_text("n,t\n1,x\nbad,y\n2,z\n")
    command = f"{sys.executable} -m penstock import {tmp_path}/a.csv {root} --type n=int64 --on-error skip --mode append"
    number = {"stdout": 1, "stderr": 2}[stream]
    closed = f" {number}>&-" if how == "closed" else f" {number}>/dev/full"
    for times in (1, 2):
        done = subprocess.run(["sh", "-c", command + closed], capture_output=True, text=True)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert len(ps.open(root)) == 2 * times
    if how == "full" and stream == "stdout":
        assert "imported 2 samples" in done.stderr and "cannot be printed" in done.stderr
    missing = subprocess.run(["sh", "-c", f"{sys.executable} -m penstock info {root}-none{closed}"], capture_output=True, text=True)
    assert missing.returncode == 1 and "Traceback" not in missing.stderr


def test_what_data_says_does_not_command_the_terminal(root):
    ds = ps.create(root, {"text": ps.Text()})
    ds.append({"text": ["a\x1b[2Jb"]}, message="m\x1b]0;x\x07")
    for verb in ("head", "log"):
        done = run(verb, root)
        assert "\x1b" not in done.stdout and "\\x1b[2J" in run("head", root).stdout
    assert "text" in commands.penstock("head", root, COLUMNS="0").stdout


def test_the_graph_joins_lanes_above_their_common_parent():
    from types import SimpleNamespace

    from penstock.cli.versions import graph

    commits = [SimpleNamespace(snapshot=name, parents=tuple(parents)) for name, parents in (
        ("r", "mb"), ("m", "ce"), ("e", "b"), ("c", "b"), ("b", "a"), ("a", ""),
    )]  # fmt: skip
    lines = [part for drawing in graph.lanes(commits) for part in drawing if part]
    assert lines == ["*", "|\\", "* |", "|_|\\", "| | *", "* | |", "|/_/", "*", "*"]


def test_snapshot_ids_are_whole_at_80_columns_and_their_beginnings_are_accepted(tmp_path, monkeypatch):
    root = tmp_path / "set"
    ds = ps.create(root, {"n": "int32"})
    receipts = [ds.append({"n": range(1_000_000)}, message="a long message, " * 9), ds.append({"n": [1]})]
    exp = ds.create_branch("exp")
    exp.append({"n": [2]})
    monkeypatch.setenv("COLUMNS", "80")
    for branch in ("main", "exp"):
        printed = run("log", root, "--branch", branch).stdout
        assert (
            all(commit.snapshot in printed for commit in ps.open(root, branch=branch).log()) and max(map(len, printed.splitlines())) <= 80
        )
    for short in (receipts[0].snapshot[:3], receipts[0].snapshot[:10], receipts[0].snapshot):
        assert json.loads(run("info", root, "--snapshot", short, "--json").stdout)["samples"] == 1_000_000
        assert json.loads(run("diff", root, short, "--json").stdout)["row_ids"] == [1_000_000]
    run("tag", root, "old", "--snapshot", "0-1")
    run("reset", root, "0-1")
    assert ps.open(root, tag="old").snapshot == receipts[0].snapshot and len(ps.open(root)) == 1_000_000
    assert "no such commit" in run("info", root, "--snapshot", "0-1-ffff", code=1).stderr
    assert "expected <branch>-<number>" in run("info", root, "--snapshot", "newest", code=1).stderr


def test_head_names_labels_and_shows_thumbnails_where_the_terminal_can(tmp_path, monkeypatch):
    root = tmp_path / "set"
    ds = ps.create(root, {"image": ps.Image(), "label": ps.Label(["cat", "dog"]), "kind": ps.Category()})
    image = np.zeros((40, 60, 3), np.uint8)
    image[:20] = (255, 0, 0)
    ds.append({"image": [image, None], "label": ["dog", None], "kind": ["x", "y"]})
    plain = run("head", root).stdout
    assert "dog" in plain and "uint8 (40, 60, 3)" in plain and "▀" not in plain and "null" in plain
    assert json.loads(run("head", root, "--json", "-n", 1).stdout)["label"] == 1
    for name, value in (
        ("FORCE_COLOR", "1"),
        ("COLORTERM", "truecolor"),
        ("TERM", "xterm-256color"),
        ("COLUMNS", "80"),
        ("PYTHONUTF8", "1"),
    ):
        monkeypatch.setenv(name, value)
    shown = run("head", root).stdout
    assert shown.count("▀") == 15 * 5 and "38;2;255;0;0" in shown and "48;2;0;0;0" in shown and "dog" in shown
    # With many columns, thumbnails keep their width, because a broken line would scramble them.
    many = ps.create(tmp_path / "many", {"image": ps.Image(), **{f"column_{number}": ps.Text() for number in range(6)}})
    many.append({"image": [image], **{f"column_{number}": ["words of some length"] for number in range(6)}})
    lines = [line.count("▀") for line in run("head", tmp_path / "many").stdout.splitlines() if "▀" in line]
    assert lines == [15] * 5
