"""Check the documentation: named paths and functions exist, and every public name has a docstring."""

import ast
import functools
import inspect
import os
import pathlib
import re
import runpy
import subprocess
import sys

import penstock as ps
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_paths_of_the_architecture_name_what_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`([\w:.]+)` in `([\w/.]+\.(?:rs|py))`", text)
    assert len(named) >= 12
    for name, file in named:
        source = (ROOT / file).read_text()
        for part in re.split(r"::|\.", name):
            assert re.search(rf"\b(fn|struct|class|def|impl|enum|trait)\s+{part}\b|impl.* {part}\b", source), f"{name} in {file}"


def rust_functions(source):
    """Yield each function's name and its body."""
    for found in re.finditer(r"\bfn (\w+)[^{;]*\{", source):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        yield found[1], source[found.end() : end]


@functools.cache
def bodies(name, file):
    """Return the bodies of all functions of this name in a file."""
    source, name = (ROOT / file).read_text(), re.split(r"::|\.", name)[-1]
    if file.endswith(".rs"):
        return [body for found, body in rust_functions(source) if found == name]
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    return ["\n".join(map(ast.unparse, node.body)) for node in nodes]


def missing_calls(text):
    """Return the functions of the call trees that the function above them does not call, or that are not in their file."""
    missing, walked = [], 0
    for tree in re.findall(r"```text\n([\w.:]+ +(?:crates|python)/.*?)\n```", text, re.S):
        above = {}
        for line in tree.splitlines():
            name, file = line.split()
            depth = (len(line) - len(line.lstrip())) // 2
            called = rf"\b{re.split(r'::|[.]', name)[-1]}(?:::<[^>]*>)?\(|[:.]{re.split(r'::|[.]', name)[-1]}\b"
            if not bodies(name, file) or (depth and not any(re.search(called, body) for body in bodies(*above[depth - 1]))):
                missing.append((name, file))
            above[depth] = (name, file)
            walked += 1
    return missing, walked


def test_each_function_in_the_call_trees_of_the_architecture_calls_those_below_it():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing, walked = missing_calls(text)
    assert walked > 100 and not missing
    # Each step that is left out above another one, and each pair that is swapped, is noticed.
    lines = text.splitlines(keepends=True)
    steps = [at for at, line in enumerate(lines[:-1]) if re.match(r" +[\w.:]+ +(crates|python)/", line)]
    below = [
        at
        for at in steps
        if at + 1 in steps and len(lines[at + 1]) - len(lines[at + 1].lstrip()) > len(lines[at]) - len(lines[at].lstrip())
    ]
    assert len(below) > 50
    for at in below:
        (indent, own), (deeper, called) = (re.match(r"( *)(.*\n)", line).groups() for line in lines[at : at + 2])
        if own.split()[0] != called.split()[0]:
            swapped = "".join([*lines[:at], indent + called, deeper + own, *lines[at + 2 :]])
            assert missing_calls(swapped)[0], (own, called)


def test_links_of_the_documents_lead_somewhere():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    links = [(name, link) for name in listed for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / name).read_text())]
    inside = [(name, link) for name, link in links if not link.startswith(("http://", "https://"))]
    assert len(inside) >= 10
    generated = {
        ROOT / "docs/site" / name for name in ("reference/commands.md", "reference/messages.md", "format.md", "benchmarks.md")
    }  # By docs/build.py.
    places = [(ROOT / name).parent.joinpath(link) for name, link in inside]
    assert not [place for place in places if place not in generated and not place.exists()]


# Code-font words that refer to the kernel, the processor or a library that we do not use.
OF_OTHERS = {"ConvertBoundingBoxFormat", "pread", "rayon", "rep", "movsb", "TCP_NOTSENT_LOWAT"}


def test_every_name_in_the_documents_exists():
    """Each word in code font must name a file or folder in this repository, or occur in the code."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = {part for name in listed for part in (*pathlib.Path(name).parts, pathlib.Path(name).stem)} | OF_OTHERS
    for name in listed:
        if pathlib.Path(name).suffix in (".rs", ".py", ".pyi", ".toml", ".sh", ".c", ".h") or name == "Makefile":
            known.update(re.findall(r"[A-Za-z_]\w*", (ROOT / name).read_text()))
    documents = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    unknown, seen = [], 0
    for document in documents:
        prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        if document.name.startswith("from-"):  # The first cells of tables name what other libraries have.
            prose = re.sub(r"^\|[^|]*\|", "|", prose, flags=re.M)
        for quoted in re.findall(r"`([^`\n]+)`", prose):
            seen += 1
            unknown += [(document.name, quoted) for word in re.findall(r"[A-Za-z_]\w*", quoted) if word not in known]
    assert seen > 300 and not unknown, unknown


def test_read_and_commit_paths_are_short():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for title in ("The read path", "The training step", "The commit path"):
        steps = re.findall(r"^\d\. (.*)", text.split(f"## {title}")[1].split("##")[0], re.M)
        assert len(steps) <= 8 and sum("python/penstock" in step for step in steps) <= 2


def test_each_code_of_an_error_has_messages_on_the_page_that_lists_them():
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))
    page = build["message_page"]()
    sections = dict(re.findall(r"^## `([a-z-]+)`\n\n```text\n(.*?)\n```", page, re.M | re.S))
    lacking = {code for code, _ in ps._core.CODES if code not in sections}
    assert lacking <= {"unknown-codec"}, lacking  # Its text has fewer than three words.
    assert "cannot open `{}`: it is not a dataset\nhint: check the path" in sections["dataset-not-found"]
    assert "cannot pickle or copy {what}" in page and "hint: pip install duckdb" in page
    # No call that makes an error is passed over.
    made = subprocess.run(
        ["git", "grep", "-cE", r"Error::new\(|s3_error!\(|raise \w+Error\(", "--", "crates/*/src/*", "python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    calls = sum(int(line.rpartition(":")[2]) for line in made.splitlines())
    assert calls > 500 and len(build["messages"]()) > calls


def test_every_public_name_has_a_docstring_that_begins_with_a_sentence():
    for name in ps.__all__:
        if name.startswith("__"):
            continue
        thing = getattr(ps, name)
        assert inspect.getdoc(thing), name
        for method, function in inspect.getmembers(thing, inspect.isfunction):
            if not method.startswith("_") and method in vars(thing):
                assert inspect.getdoc(function) or thing.__mro__[1].__name__ in ("ColumnType",), f"{name}.{method}"


def test_a_module_whose_library_is_missing_is_a_missing_attribute():
    program = """
import sys
sys.modules["torch"] = None  # As if it were not installed.
from penstock import *
import penstock as ps
assert Dataset is ps.Dataset and "importers" not in globals()
assert not hasattr(ps, "torch") and hasattr(ps, "importers")
assert {"torch", "importers", "transforms"} < set(dir(ps))
try: ps.torch
except AttributeError as error: assert "torch" in str(error) and isinstance(error.__cause__, ModuleNotFoundError)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_source_files_open_with_what_they_are():
    missing = [
        str(file) for file in (ROOT / "crates").rglob("src/**/*.rs") if not file.read_text().startswith("//!") and file.name != "tests.rs"
    ]
    missing += [str(file) for file in (ROOT / "python").rglob("*.py") if not file.read_text().startswith('"""')]
    assert not missing


def test_the_project_contains_no_path_of_a_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".rs", ".md", ".sh", ".toml", ".yml") and path.exists():
            assert not re.search(r"/work/|/home/\w|/root/", path.read_text()) or name == os.path.relpath(__file__, ROOT), name


def test_keywords_of_loaders_are_known_to_type_checkers(tmp_path):
    """Type checkers find misspelled or unknown keywords and invalid values without running the code."""
    lines = {
        "batch_size=2": None,
        "batchsize=2": "batchsize",
        'batch_size=2, last_batch="keep"': "last_batch",
        "batch_size=2, num_workers=4": "num_workers",
    }
    for source in ("ds", 'ps.mix({"a": ds})'):
        body = "".join(f"{source}.loader({keywords})\n" for keywords in lines)
        (tmp_path / "user.py").write_text(f'import penstock as ps\nds = ps.open("x")\n{body}')
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "user.py")]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        for number, (keywords, wrong) in enumerate(lines.items(), 3):
            errors = [line for line in found.splitlines() if f"user.py:{number}: error" in line]
            assert bool(errors) == (wrong is not None) and all(wrong in error for error in errors), (keywords, found)


def test_tests_sleep_only_for_a_stated_reason_and_assert_no_times():
    """Each line that sleeps must have a comment or be in tools/waiting.py. No assertion may read a clock. A guard against hanging waits for
    at least 300 seconds, because a busy machine needs long for anything."""
    files = [*(ROOT / "tests").rglob("*.py"), *ROOT.glob("crates/**/*.rs")]
    bare, timed, hasty = [], [], []
    for path in files:
        lines = path.read_text().splitlines()
        if "src" in path.parts and "testkit" not in path.parts:  # Only the test module counts: production code may wait before a retry.
            first = lines.index("mod tests {") if "mod tests {" in lines else len(lines)
        else:
            first = 0
        for number, line in enumerate(lines[first:], first + 1):
            place = f"{path.relative_to(ROOT)}:{number}"
            if re.search(r"\bsleep\(", line) and not re.search(r"(#|//) \S", line) and path.name != "waiting.py":
                bare.append(place)
            if re.search(r"assert.*(monotonic\(|perf_counter\(|(?<!date)time\.time\(|elapsed\()", line):
                timed.append(place)
            starting = path.name == "servers.py"  # Its requests are repeated until a server answers.
            guard = re.search(r"(?<!connect_)\btimeout=(\d+)\b|\.(?:wait|join|settimeout)\((\d+)\)", line) if path.suffix == ".py" else None
            if guard and not starting and int(guard[1] or guard[2]) < 300 and not re.search(r"# \S", line):
                hasty.append(place)
    assert len(files) > 50 and not bare and not timed and not hasty, (bare, timed, hasty)


def test_tests_import_no_tests_of_other_folders():
    """Such a module could be imported only after the other folder was collected, so it would not run alone."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(), re.M):
            assert path.with_name(f"{name}.py").exists(), f"{path} imports {name} from another folder: move what both need to tests/"


@pytest.mark.parametrize("tool", sorted(path.name for path in (ROOT / "tools").glob("check_*.py")))
def test_the_examples_of_a_tool_run(tool):
    done = subprocess.run([sys.executable, "-m", "doctest", str(ROOT / "tools" / tool)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_only_columns_ask_which_type_a_column_has():
    """Other files ask what a column can do, so that a new type needs none of them."""
    from penstock.columns import TYPES

    names = {name for kind in TYPES.values() for name in (kind.__name__, kind.__base__.__name__)} - {"ColumnType"}
    found = [
        f"{path}:{node.lineno}"
        for path in (ROOT / "python" / "penstock").rglob("*.py")
        if path.parent.name != "columns"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node.args[1]))
    ]  # fmt: skip
    assert len(names) >= 14 and not found
