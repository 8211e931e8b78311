#!/usr/bin/env bash
# Install the MinIO server that tests and benches start themselves into .tools/bin. Quick when it is there.
set -euo pipefail
source "$(dirname "$0")/env.sh"
version=v0.0.0-20260212201848-7aac2a2c5b7c
[ -x .tools/bin/minio ] && [ "$(cat .tools/bin/minio.version 2>/dev/null)" = "$version" ] && exit 0
[ -x /usr/local/go/bin/go ] && export PATH="$PATH:/usr/local/go/bin"
if ! command -v go >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing golang-go"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq golang-go; } >/dev/null
  else
    echo "error: missing go: install it (Debian and Ubuntu: sudo apt-get install golang-go)" >&2
    exit 1
  fi
fi
echo "building MinIO"
mkdir -p .tools/bin
# Its module asks for a newer Go than distributions have; the go command fetches that by itself.
GOTOOLCHAIN=auto GOBIN="$PWD/.tools/bin" go install "github.com/minio/minio@$version"
echo "$version" > .tools/bin/minio.version
