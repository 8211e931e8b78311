"""What tests share: a folder each, the test data if it is at hand, hostile images from the testkit."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def root(tmp_path):
    """A place for a dataset that does not exist yet."""
    return tmp_path / "dataset"


@pytest.fixture(scope="session")
def data():
    """The folder of real test data; tests that need it are marked `data` and deselected when it is unset."""
    return pathlib.Path(os.environ["PENSTOCK_TEST_DATA"])


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A folder of hostile images that the testkit makes."""
    folder = tmp_path_factory.mktemp("hostile")
    command = ["cargo", "run", "--release", "--quiet", "--locked", "-p", "penstock-testkit", "--bin", "make-hostile", "--", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")})
    return folder
