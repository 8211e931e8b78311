"""Crafted objects: every integer of every object set to 0, 1, the largest and its neighbours' values, with all checksums right again.

Reading gives an error of ours or the values that were written, in bounded memory; and what reading refuses, `verify` reports.
"""

import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent


def run(share, tmp_path):
    command = [sys.executable, str(FOLDER / "crafted_runner.py"), str(share), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    print({name: value for name, value in found.items() if name != "wrong"})
    assert found["tries"] >= found["integers"] // share and found["outcomes"]["refused"] > found["tries"] // 2
    assert not found["wrong"], "\n".join(found["wrong"])


@pytest.mark.local
def test_some_integers_of_every_object_changed(tmp_path):
    run(61, tmp_path)


@pytest.mark.soak
@pytest.mark.local
def test_every_integer_of_every_object_changed(tmp_path):
    run(1, tmp_path)
