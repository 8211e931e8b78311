#!/usr/bin/env bash
# Check formatting, lints and types. CI runs this same script.
set -euo pipefail
source "$(dirname "$0")/env.sh"
cargo fmt --all --check
cargo clippy --release --workspace --locked -- -D warnings -D unused_crate_dependencies
.venv/bin/ruff check python tests bench examples tools
.venv/bin/ruff format --check python tests bench examples tools
.venv/bin/mypy
.venv/bin/python tools/check_layers.py
.venv/bin/python tools/check_sizes.py
.venv/bin/python tools/check_words.py
.venv/bin/typos
