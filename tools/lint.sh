#!/usr/bin/env bash
# Check formatting, lints and types. CI runs this same script.
set -euo pipefail
source "$(dirname "$0")/env.sh"
cargo fmt --all --check
# With the variables that maturin sets, PyO3 is not compiled again: not here, and not when the wheel is built afterwards.
for config in "$CARGO_TARGET_DIR"/maturin/pyo3-config-*.txt; do [ -e "$config" ] && export PYO3_CONFIG_FILE=$config; done
PYO3_ENVIRONMENT_SIGNATURE=$(.venv/bin/python -c 'import sys; print("{0.name}-{1[0]}.{1[1]}-64bit".format(sys.implementation, sys.version_info))')
export PYO3_ENVIRONMENT_SIGNATURE PYO3_BUILD_EXTENSION_MODULE=1 PYO3_PYTHON=$PWD/.venv/bin/python
cargo clippy --release --workspace --locked -- -D warnings -D unused_crate_dependencies
.venv/bin/ruff check python tests bench examples tools docs
.venv/bin/ruff format --check python tests bench examples tools docs
.venv/bin/mypy
.venv/bin/python tools/check_layers.py
.venv/bin/python tools/check_sizes.py
.venv/bin/python tools/check_words.py
.venv/bin/typos
