"""The wheel installs into an empty environment without a compiler, and runs the first block of the site's code page. Importing penstock loads few modules."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from test_site import SAID

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.long
def test_a_wheel_installs_without_a_compiler_and_runs_the_code(tmp_path):
    built = subprocess.run(["tools/wheel.sh", "release", str(tmp_path / "dist")], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.fullmatch(r"penstock-[\w.]+-cp311-abi3-manylinux_2_\d+_x86_64\.whl", wheel.name) and wheel.stat().st_size <= 20_000_000
    (debug,) = (tmp_path / "dist").glob("*.debug")
    assert debug.stat().st_size > 1_000_000, "debug information is stored in a separate file"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    uv = ROOT / ".venv/bin/uv"
    subprocess.run([uv, "pip", "install", "-q", "--python", python, f"{wheel}[torch]"], check=True)
    tour = re.search(r"```python\n(.*?)```", (ROOT / "docs/site/reference/code.md").read_text(), re.S).group(1)
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path)}
    done = subprocess.run([python, "-c", tour], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = [(behind or after).strip() for behind, after in SAID.findall(tour)]
    assert done.stdout.splitlines() == expected
    shown = subprocess.run([python.parent / "penstock", "--version"], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and wheel.name.split("-")[1].startswith(shown.stdout.strip().replace("-", "."))


def test_importing_and_helping_load_little():
    """Count modules, not milliseconds. The first `create` or `open` loads NumPy, and the first Arrow table loads pyarrow."""
    script = "import sys, penstock{}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(ROOT / "python")}

    def loaded(more: str) -> set[str]:
        run = subprocess.run([sys.executable, "-c", script.format(more)], env=environment, capture_output=True, text=True, check=True)
        return set(run.stdout.split())

    heavy = {"numpy", "pyarrow", "torch", "pandas", "ml_dtypes"}
    assert not loaded("") & {*heavy, "typer", "rich"}
    assert not loaded(", penstock.cli") & heavy
    assert loaded("; penstock.create") & heavy == {"numpy", "ml_dtypes"}
