#!/usr/bin/env bash
# Formatting, lints and types; the same in CI and by hand.
set -euo pipefail
source "$(dirname "$0")/env.sh"
cargo fmt --all --check
cargo clippy --release --workspace --locked -- -D warnings
.venv/bin/ruff check python tests bench examples tools
.venv/bin/ruff format --check python tests bench examples tools
.venv/bin/mypy
.venv/bin/python tools/check_layers.py
