#!/usr/bin/env bash
# Makes .venv in the repository and installs deltafuse with the extras named as arguments.
# DELTAFUSE_TORCH picks the PyTorch requirement; without it a machine with an NVIDIA driver gets the newest build and
# any other one a fixed release. The package itself never pins PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$(IFS=,; echo "$*")
venv=${DELTAFUSE_VENV:-.venv}
python=${PYTHON:-python3}
if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv"
fi
torch=${DELTAFUSE_TORCH:-}
if [ -z "$torch" ]; then
  if command -v nvidia-smi >/dev/null 2>&1; then torch="torch"; else torch="torch==2.13.0"; fi
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
if ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
  echo "installing $torch"
  pip install "$torch"
fi
echo "installing deltafuse[$extras]"
pip install -e ".[$extras]"
