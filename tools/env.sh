# Sourced by the other scripts: puts cargo on the PATH and sets the target folder.
# If PENSTOCK_BUILD_CACHE names a folder, compiled dependencies and test servers are kept there and shared by all checkouts.
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
  # The path must always be the same, because build scripts write absolute paths into their output.
  [ -L target ] && CARGO_TARGET_DIR="$PENSTOCK_BUILD_CACHE/target"
fi
# Tests start hundreds of interpreters. Without cached bytecode, each one compiles its imports, which takes a third of a test run.
unset PYTHONDONTWRITEBYTECODE

install_packages() { # install_packages NAME…: installs Debian packages. Scripts that run side by side wait for one another.
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: missing $*: install with: sudo apt-get install $* (Debian and Ubuntu)" >&2
    return 1
  fi
  echo "installing $*"
  (flock 9 && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@") 9> "${TMPDIR:-/tmp}/penstock-packages.lock" > /dev/null
}
