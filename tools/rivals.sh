#!/usr/bin/env bash
# Make .tools/rivals, a separate Python environment for the rival loaders: FFCV, DALI, LitData, torchvision.
set -euo pipefail
source "$(dirname "$0")/env.sh"
[ -x .tools/rivals/bin/python ] && .tools/rivals/bin/python -c 'import ffcv, nvidia.dali, litdata, torchvision' 2>/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libturbojpeg0-dev libopencv-dev pkg-config g++; } >/dev/null
fi
uv=.venv/bin/uv
$uv venv -q --clear --python .venv/bin/python .tools/rivals
install() { $uv pip install -q --python .tools/rivals/bin/python "$@"; }
install nvidia-dali-cuda120 litdata torch torchvision numba opencv-python-headless tqdm pytorch-pfn-extras fire psutil imgcat pandas assertpy terminaltables setuptools h5py
install --no-build-isolation --no-deps ffcv==1.0.2
