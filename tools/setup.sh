#!/usr/bin/env bash
# Create .venv with the package, built in release mode, and its dev extra. Idempotent, and quick if nothing has changed.
# Usage: tools/setup.sh [bench | docs]   also installs the packages that benchmarks or the site need.
set -euo pipefail
source "$(dirname "$0")/env.sh"

missing=()
command -v cc >/dev/null || missing+=(build-essential)
command -v cmake >/dev/null || missing+=(cmake)
command -v nasm >/dev/null || missing+=(nasm)
[ ${#missing[@]} = 0 ] || install_packages "${missing[@]}"
if ! command -v cargo >/dev/null; then
  echo "error: cargo is missing: install Rust 1.92 or newer (https://rustup.rs)" >&2
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
# install [EXTRA…]: installs the extras' packages. Without extras, or with dev, also installs the package's dependencies.
install() {
  .venv/bin/uv pip install -q --python .venv/bin/python -r <(.venv/bin/python - "$@" <<'PY'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [name for extra in sys.argv[1:] for name in project["optional-dependencies"][extra]]
print("\n".join([] if extras and "dev" not in sys.argv else project["dependencies"]), *extras, sep="\n")
PY
)
}
# done_before NAME DIGEST: succeeds if this step has already completed with the same input.
done_before() { [ "$(cat ".venv/.stamp-$1" 2>/dev/null)" = "$2" ]; }

packages=$(sha256sum < pyproject.toml)
if ! done_before packages "$packages"; then
  echo "installing Python packages"
  install dev
  echo "$packages" > .venv/.stamp-packages
fi
# `release` builds quickly; `dist` is the build that users install and that benchmarks measure.
profile=${PENSTOCK_PROFILE:-release}
sources=$( { echo "$profile"; cat pyproject.toml Cargo.toml Cargo.lock; find crates -type f -not -path '*/tests/*' | sort | xargs sha256sum; } | sha256sum)
if ! done_before build "$sources" || ! .venv/bin/python -c 'import penstock' 2>/dev/null; then
  echo "building penstock ($profile)"
  VIRTUAL_ENV="$PWD/.venv" .venv/bin/maturin develop --profile "$profile" --uv -q >/dev/null
  echo "$sources" > .venv/.stamp-build
fi
if [ -n "${1:-}" ]; then install "$1"; fi
