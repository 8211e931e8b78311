#!/usr/bin/env bash
# Check the licences of all Rust dependencies against deny.toml. Installs cargo-deny (about 6 minutes) if it is missing.
set -euo pipefail
source "$(dirname "$0")/env.sh"
export PATH="$PWD/.tools/bin:$PATH"
if ! command -v cargo-deny >/dev/null; then
  cargo install -q --locked --root .tools cargo-deny
fi
cargo deny --locked check licenses
