#!/usr/bin/env bash
# Make .venv with the package in release mode and its dev extra. Idempotent and quick when nothing changed.
# Usage: tools/setup.sh [bench]   bench also installs the rivals.
set -euo pipefail
source "$(dirname "$0")/env.sh"

missing=()
command -v cc >/dev/null || missing+=(build-essential)
command -v cmake >/dev/null || missing+=(cmake)
command -v nasm >/dev/null || missing+=(nasm)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } >/dev/null
  else
    echo "error: missing ${missing[*]}: install them (Debian and Ubuntu: sudo apt-get install ${missing[*]})" >&2
    exit 1
  fi
fi
if ! command -v cargo >/dev/null; then
  echo "error: cargo is missing: install Rust 1.88 or newer (https://rustup.rs)" >&2
  exit 1
fi
python=""
for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python="$candidate"
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: Python 3.11 or newer with venv is missing (Debian and Ubuntu: sudo apt-get install python3-venv)" >&2
  exit 1
fi

[ -x .venv/bin/python ] || { echo "making .venv"; "$python" -m venv .venv; }
[ -x .venv/bin/uv ] || .venv/bin/python -m pip install -q --disable-pip-version-check uv
stamp=.venv/.stamp
digest() { cat pyproject.toml Cargo.toml Cargo.lock crates/*/Cargo.toml $(find crates -name '*.rs' | sort) | sha256sum; }
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$(digest)" ] || ! .venv/bin/python -c 'import penstock' 2>/dev/null; then
  echo "installing Python packages"
  .venv/bin/uv pip install -q --python .venv/bin/python -r <(.venv/bin/python - <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["dev"]))
PY
)
  echo "building penstock (release)"
  VIRTUAL_ENV="$PWD/.venv" .venv/bin/maturin develop --release --uv -q >/dev/null
  digest > "$stamp"
fi
if [ "${1:-}" = bench ]; then
  .venv/bin/uv pip install -q --python .venv/bin/python -r <(.venv/bin/python - <<'PY'
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"]))
PY
)
fi
