"""Install the environments of the benchmarks' rivals in .tools/rivals: one each, from the packages that its adapter pins.

.venv/bin/python tools/rivals.py [ADAPTER…]   by default all, for example tables/lance

Also installs fio and wrk, which measure limits of the machine. A rival that cannot be installed is reported, and its rows in the benchmarks
say why. Quick if nothing has changed.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ADAPTERS, PLACE = ROOT / "bench" / "adapters", ROOT / ".tools" / "rivals"
sys.path.insert(0, str(ADAPTERS / "common"))

from serving import digest, header  # noqa: E402


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:4]))} … failed: {(done.stderr or done.stdout).strip()[-600:]}")


def system_packages(names: list[str]) -> None:
    missing = [name for name in names if subprocess.run(["dpkg", "-s", name], capture_output=True).returncode]
    if missing:
        run("bash", "-c", 'source "$0" && install_packages "$@"', ROOT / "tools" / "env.sh", *missing)


def install(path: pathlib.Path) -> None:
    """Make an adapter's environment anew, unless it was made from the same header."""
    wanted, place = header(path), PLACE / path.stem
    stamp = place / "made-from"
    if stamp.exists() and stamp.read_text() == digest(path):
        return
    uv, own = pathlib.Path(sys.executable).parent / "uv", wanted.get("tool", {}).get("bench", {})
    system_packages(own.get("apt", []))
    run(uv, "venv", "-q", "--clear", "--python", sys.executable, place)
    run(uv, "pip", "install", "-q", "--python", place / "bin" / "python", *wanted["dependencies"])
    if own.get("build"):  # Built against the packages above, which it does not name well itself.
        run(uv, "pip", "install", "-q", "--python", place / "bin" / "python", "--no-build-isolation", "--no-deps", *own["build"])
    stamp.write_text(digest(path))


def main() -> None:
    chosen = [ADAPTERS / f"{name}.py" for name in sys.argv[1:]] or sorted(ADAPTERS.rglob("*.py"))
    PLACE.mkdir(parents=True, exist_ok=True)
    try:
        system_packages(["fio", "wrk"])
    except (RuntimeError, OSError) as error:
        print(f"some limits are not measured: {error}")
    for path in chosen:
        problem = PLACE / f"{path.stem}.failed"
        problem.unlink(missing_ok=True)
        if header(path):
            try:
                install(path)
            except (RuntimeError, OSError) as error:
                problem.write_text(str(error))
                print(f"{path.stem} is not installed: {error}")


if __name__ == "__main__":
    main()
