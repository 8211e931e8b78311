"""Plant errors in the code, one at a time, and count how many the tests catch.

    .venv/bin/python tools/mutants.py --sample 40 --seed 1       # sampled from all cargo-mutants and cosmic-ray mutants
    .venv/bin/python tools/mutants.py --patches tests/planted --least 1    # chosen errors, one patch file per error

The script works in a clone under target/: the working tree is not touched, and uncommitted changes are not tested. It prints the score and
exits with status 1 if the tests catch fewer than 85 % of the mutants that build. In a patch, a line `Tests: name` names the proof that must catch it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target" / "mutants"
TREE = FOLDER / "tree"
LEAST = 0.85
RUST = [f"crates/dataset/src/{name}/**/*.rs" for name in ("commit", "log", "read", "snapshot", "store", "write")]
RUST += [f"crates/loader/src/{name}/**/*.rs" for name in ("order", "source", "engine")]
PYTHON = "python/penstock/importers/**/*.py"
# A quick build profile, passed as environment variables so that helpers built by the tests use it too.
QUICK = {"LTO": "false", "CODEGEN_UNITS": "16", "OPT_LEVEL": "1", "INCREMENTAL": "true", "DEBUG": "0"}
CARGO = ["--release", "--locked", "-q"]
STEP_SECONDS = 900


def tests_of(path: str, patch: str) -> list[list[str]]:
    """Return the test commands that may catch an error in a file, quickest first. A patch may name the proof that must catch it."""
    if named := re.search(r"^Tests: (\S+)$", patch, re.MULTILINE):
        return [["cargo", "test", *CARGO, "-p", "penstock-testkit", "--test", "proofs", named[1]]]
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not soak and not data"]
    of = lambda *names: [*pytest, *(str(path) for name in names for path in pathlib.Path("tests").glob(f"*/test_{name}.py"))]  # noqa: E731
    if path.startswith("python/penstock/importers/"):
        return [of("import_model", "importers", "import_faults", "manifests", "sources", "cli", "bad_input")]
    if path.startswith("crates/loader/"):
        return [
            of("loader_model", "loader", "epochs", "geometry", "forms", "functions", "files", "window_memory", "loader_limits"),
            ["cargo", "test", *CARGO, "-p", "penstock-loader"],
        ]
    if path.startswith("crates/dataset/"):
        first = of(
            "limits",
            "damage",
            "transactions",
            "database_model",
            "commits",
            "places",
            "copies",
            "columns",
            "reading",
            "tiles",
            "small_samples",
            "second_reader",
            "pins",
            "crafted",
        )
        away = [*of("limits", "damage", "columns", "reading", "tiles"), "--store", "buffered"]
        return [first, [*away[:-1], "s3"], away, ["cargo", "test", *CARGO, "-p", "penstock-dataset", "-p", "penstock-testkit"]]
    rust = ["cargo", "test", *CARGO, "--workspace", "--exclude", "penstock-python"]
    remote = [*pytest[:-1], "not soak and not data and not local", "tests", "--store", "s3"]
    if path.startswith("crates/storage/"):
        return [rust, of("stores", "commits", "places", "other_stores"), remote]
    if path.startswith("crates/codec/"):
        return [of("transforms", "image_modes", "loader_model", "loader", "epochs", "geometry", "training"), rust, [*pytest, "tests"]]
    return [[*pytest, "tests"], rust, remote]


# A mutant: its name, its path, and a function that returns its patch, or None if it changes nothing.
Mutant = tuple[str, str, Callable[[], str | None]]


def of_rust() -> Iterator[Mutant]:
    """Yield all mutants from cargo-mutants."""
    chosen = [arg for path in RUST for arg in ("-f", path)]
    listed = subprocess.run(
        ["cargo", "mutants", "--list", "--json", "--diff", *chosen], cwd=TREE, check=True, capture_output=True, text=True
    )
    for mutant in json.loads(listed.stdout):
        hunks = mutant["diff"].split("\n", 2)[2]  # The second line is the mutation's description, not a path.
        patch = f"--- a/{mutant['file']}\n+++ b/{mutant['file']}\n{hunks}"
        yield mutant["name"], mutant["file"], lambda patch=patch: patch


def means(code: str) -> str:
    """Return the AST of a file as text without annotations, which are never evaluated."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if hasattr(node, field):
                setattr(node, field, ast.Constant(None))
    return ast.dump(tree)


def of_python() -> Iterator[Mutant]:
    """Yield all mutants from cosmic-ray. Making one takes long, so only those that are chosen are made."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    for path in sorted(TREE.glob(PYTHON)):
        name, code = str(path.relative_to(TREE)), path.read_text()
        nodes = list(ast_nodes(get_ast(code)))
        for operator_name in plugins.operator_names():
            operator = plugins.get_operator(operator_name)
            if operator.arguments():
                continue  # Skip operators that need variable names as arguments.
            places = sum(len(list(operator().mutation_positions(node))) for node in nodes)
            for place in range(places):
                yield f"{name}: {operator_name} {place}", name, functools.partial(made, name, code, operator, place)


def made(name: str, code: str, operator: Any, place: int) -> str | None:
    from cosmic_ray.mutating import mutate_code

    try:
        changed = mutate_code(code, operator(), place)
        if not changed or means(changed) == means(code):
            return None
    except (AttributeError, SyntaxError):  # cosmic-ray fails on dotted exception names, and puts `not` before `:=`.
        return None
    return "".join(difflib.unified_diff(code.splitlines(True), changed.splitlines(True), f"a/{name}", f"b/{name}"))


def of_patches(folder: pathlib.Path) -> Iterator[Mutant]:
    for patch in sorted(folder.glob("*.patch")):
        text = patch.read_text()
        path = next(line[6:].strip() for line in text.splitlines() if line.startswith("+++ b/"))
        yield patch.name, path, lambda text=text: text


def chosen(mutants: list[Mutant], count: int) -> list[tuple[str, str, str]]:
    """Make the first `count` mutants that change anything."""
    able = ((name, path, patch) for name, path, make in mutants if (patch := make()) is not None)
    return list(itertools.islice(able, count))


def run(command: Sequence[str], log: pathlib.Path) -> int:
    """Run a command in the tree and return its exit status; a command that times out is killed and returns 124."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(TREE / "python"),
        "CARGO_TARGET_DIR": str(TREE / "target"),
        "PYTHONDONTWRITEBYTECODE": "1",
        **{f"CARGO_PROFILE_RELEASE_{name}": value for name, value in QUICK.items()},
    }
    with log.open("ab") as out:
        started = subprocess.Popen(command, cwd=TREE, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return started.wait(STEP_SECONDS)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # Also kills servers and workers that a failed test left behind.
            started.wait()


def build(log: pathlib.Path) -> bool:
    if run(["cargo", "build", *CARGO, "-p", "penstock-python", "--features", "pyo3/abi3-py311"], log):
        return False
    shutil.copy(TREE / "target" / "release" / "lib_core.so", TREE / "python" / "penstock" / "_core.abi3.so")
    return True


def caught_by(path: str, patch: str, log: pathlib.Path) -> str | None:
    """Return what caught the error: the last failure line of the first failing command, or None if all commands pass."""
    for command in tests_of(path, patch):
        if code := run(command, log):
            failed = [
                line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR", "test result: FAILED"))
            ]
            ended = "timed out" if code == 124 else f"exit {code}"
            return failed[-1][:160] if failed else f"{' '.join(command[:3])}: {ended}"
    return None


def prepare() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not TREE.exists():
        subprocess.run(["git", "clone", "-q", ROOT, TREE], check=True)
        (TREE / ".tools").symlink_to(ROOT / ".tools")
    subprocess.run(["git", "fetch", "-q", ROOT, "HEAD"], cwd=TREE, check=True)
    subprocess.run(["git", "reset", "-q", "--hard", "FETCH_HEAD"], cwd=TREE, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no mutant after so many minutes")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--patches", type=pathlib.Path)
    parser.add_argument("--least", type=float, default=LEAST, help="the share that the tests must catch")
    parser.add_argument("--trust", action="store_true", help="skip the initial check that the tests pass with no error planted")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "report.json")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells make background jobs ignore SIGINT, but tests need this signal.
    prepare()
    given = list(of_patches(options.patches.resolve()) if options.patches else [*of_rust(), *of_python()])
    total = len(given)
    if not options.patches:
        random.Random(options.seed).shuffle(given)
    mutants = chosen(given, total if options.patches else options.sample)
    logs = FOLDER / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    if not build(logs / "build.log"):
        raise SystemExit(f"the code does not build: see {logs / 'build.log'}")
    commands = {tuple(command) for _, path, patch in mutants for command in tests_of(path, patch)}
    for command in () if options.trust else sorted(commands):
        if run(command, logs / "tests.log"):
            raise SystemExit(f"`{' '.join(command)}` fails with no error planted: see {logs / 'tests.log'}")
    report: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    for number, (name, path, patch) in enumerate(mutants):
        if options.minutes and time.monotonic() > end:
            break
        log, began = logs / f"{number:03}.log", time.monotonic()
        log.write_text(f"{name}\n{patch}\n")
        subprocess.run(["git", "apply", "--recount", "-"], cwd=TREE, input=patch, text=True, check=True)
        try:
            built = path.endswith(".py") or build(log)
            by = caught_by(path, patch, log) if built else None
        finally:
            subprocess.run(["git", "checkout", "-q", "."], cwd=TREE, check=True)
            if not path.endswith(".py") and number + 1 < len(mutants) and mutants[number + 1][1].endswith(".py"):
                build(logs / "build.log")  # The next mutant is in Python and needs the unmodified core.
        outcome = "does not build" if not built else "caught" if by else "SURVIVED"
        report.append({"name": name, "outcome": outcome, "by": by, "patch": patch})
        print(f"{number + 1}/{len(mutants)} {outcome}, {time.monotonic() - began:.0f} s: {name}{f' by {by}' if by else ''}", flush=True)
        options.out.write_text(json.dumps(report, indent=1))
    viable = [one for one in report if one["outcome"] != "does not build"]
    caught = sum(one["outcome"] == "caught" for one in viable)
    print(
        f"{len(report)} of {total} mutants (seed {options.seed}): tests caught {caught} of {len(viable)} that build, {caught / max(1, len(viable)):.1%}"
    )
    return int(caught < options.least * len(viable) or not viable)


if __name__ == "__main__":
    raise SystemExit(main())
