"""Using the preloaded shim faults.c, kill commits of every kind, imports and changes of names before each file call, or make the calls fail."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from anything import ROTATION

FOLDER = pathlib.Path(__file__).parent.parent
JOBS = [
    "create",
    "append",
    "append-pages",
    "append-root",
    "import",
    "pin",
    "branch",
    "delete-branch",
    "merge",
    "merge-root",
    "reset",
    "add-column",
]
# With `:1000000`, all later calls of the job fail too. EINTR occurs only once, because the standard library would retry forever.
ERRORS = ["EIO", "ENOSPC", "EACCES", "EINTR", "EIO:2", "EIO:1000000", "ENOSPC:1000000", "EACCES:1000000"]


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    library = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(FOLDER / "faults.c"), "-ldl"], check=True)
    return library


def run(shim, tmp_path, job, kinds, stride):
    command = [sys.executable, str(FOLDER / "fault_runner.py"), job, ",".join(kinds), str(tmp_path / "tries"), str(stride), str(ROTATION)]
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PENSTOCK_AUTHOR": "test"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(answer.stdout)
    assert found["calls"] > 10 and found["tries"] >= len(kinds) * (found["calls"] // stride), found
    assert not found["wrong"], "\n".join(found["wrong"])


@pytest.mark.local
@pytest.mark.parametrize("job", JOBS)
def test_kill_at_a_file_call_leaves_a_place_that_works(shim, tmp_path, job):
    run(shim, tmp_path, job, ["kill"], 3)


@pytest.mark.local
@pytest.mark.parametrize("job", JOBS)
def test_a_failing_file_call_is_an_error_or_no_matter(shim, tmp_path, job):
    run(shim, tmp_path, job, ERRORS, 20)


@pytest.mark.soak
@pytest.mark.local
@pytest.mark.parametrize("job", JOBS)
def test_every_failing_file_call_is_an_error_or_no_matter(shim, tmp_path, job):
    run(shim, tmp_path, job, ["kill", *ERRORS], 1)
