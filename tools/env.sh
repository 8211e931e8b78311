# Sourced by the other scripts: changes to the repository root, puts cargo on PATH, and sets the target folder.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! command -v cargo >/dev/null && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
  export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
fi
export CARGO_TARGET_DIR="$PWD/target"
