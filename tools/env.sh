# Sourced by the other scripts: puts cargo on the PATH and sets one target folder.
# PENSTOCK_BUILD_CACHE, a folder, keeps compiled dependencies and test servers from one checkout to the next.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! command -v cargo >/dev/null && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
  export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
fi
export CARGO_TARGET_DIR="$PWD/target"
if [ -n "${PENSTOCK_BUILD_CACHE:-}" ]; then
  for folder in target .tools; do
    mkdir -p "$PENSTOCK_BUILD_CACHE/$folder"
    [ -e "$folder" ] || ln -s "$PENSTOCK_BUILD_CACHE/$folder" "$folder"
  done
  # Always the same path: build scripts write absolute paths into their output.
  [ -L target ] && CARGO_TARGET_DIR="$PENSTOCK_BUILD_CACHE/target"
fi
# Tests start hundreds of interpreters. Without kept bytecode, each compiles what it imports, which takes a third of the time of a test run.
unset PYTHONDONTWRITEBYTECODE
