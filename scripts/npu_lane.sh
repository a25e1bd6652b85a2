#!/bin/sh
# The NPU lane: an environment with torch_npu, and the NPU suites on the emulator. No NPU and no CANN needed.
#
#   scripts/npu_lane.sh [extra arguments of pytest]      knobs: VENV=.venv-npu  PYTHON=python3.11
set -eu
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv-npu}"
PYTHON="${PYTHON:-python3}"
PIP="$VENV/bin/python -m pip install --quiet --disable-pip-version-check"
STAMP="$VENV/.ready-$(cat pyproject.toml requirements/cpu.txt requirements/npu.txt | cksum | cut -d' ' -f1)"

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ] && [ "$(uname -s)-$(uname -m)" != Linux-aarch64 ]; then
  echo "npu lane skipped: torch_npu has wheels for Linux only"
  exit 0
fi
if ! command -v g++ >/dev/null 2>&1; then
  echo "npu lane skipped: the emulator needs g++"
  exit 0
fi
if [ ! -f "$STAMP" ]; then
  echo "setting up $VENV (a few minutes the first time)"
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
  $PIP -c requirements/cpu.txt "torch==2.13.0" hatchling editables
  $PIP -r requirements/npu.txt
  $PIP -c requirements/cpu.txt --no-build-isolation --editable '.[serve,dev]'
  rm -f "$VENV"/.ready-*
  touch "$STAMP"
fi
export SSD_NPU_EMULATOR=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0  # pytest may import torch before the package does
"$VENV/bin/python" -m pytest tests/npu "$@"
"$VENV/bin/python" -m pytest tests/backends --device npu --ignore tests/backends/test_cpu_kernels.py "$@"
