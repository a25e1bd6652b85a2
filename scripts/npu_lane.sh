#!/bin/sh
# The NPU lane: the NPU suites on the real torch_npu over an emulated CANN. No NPU and no CANN needed.
#
#   scripts/npu_lane.sh [extra arguments of pytest]
#   knobs: VENV=.venv-npu  BASE=.venv  NPU=auto|required|off  SUITES="what to run instead"
#
# The environment is a thin one over BASE (which `make setup` makes): torch_npu wants exactly the torch that is there,
# and must not be seen by those who do not ask for it, because `import torch` would then look for CANN.
# NPU=auto skips with one line what this machine cannot do; NPU=required (CI) makes that an error.
set -eu
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv-npu}"
BASE="${BASE:-.venv}"
NPU="${NPU:-auto}"
STAMP="$VENV/.ready-$(cat "$0" requirements/cpu.txt requirements/npu.txt | cksum | cut -d' ' -f1)"

cannot() {
  if [ "$NPU" = required ]; then
    echo "npu lane: $1" >&2
    exit 1
  fi
  echo "npu lane skipped: $1"
  exit 0
}

[ "$NPU" != off ] || cannot "NPU=off"
case "$(uname -s)-$(uname -m)" in
  Linux-x86_64 | Linux-aarch64) ;;
  *) cannot "torch_npu has wheels for Linux only" ;;
esac
command -v g++ >/dev/null 2>&1 || cannot "the emulator needs g++ (Debian: apt install g++)"
[ -x "$BASE/bin/python" ] || cannot "$BASE is not there: run make setup"

if [ ! -f "$STAMP" ]; then
  echo "setting up $VENV"
  rm -rf "$VENV"
  "$BASE/bin/python" -m venv --without-pip "$VENV"
  packages=$("$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  own=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$packages')" >"$own/base.pth"
  "$BASE/bin/python" -m pip --python "$VENV/bin/python" install --quiet --disable-pip-version-check \
    --no-deps "$(sed -n 's/^torch-npu/&/p' requirements/npu.txt)" ||
    cannot "torch_npu could not be installed; its wheel comes from the package index that pip is set to"
  touch "$STAMP"
fi
export SSD_NPU_EMULATOR=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0  # pytest may import torch before the package does
EXACT=tests/engine/test_exactness.py  # of the engine's own tests a slice; all of them are `make npu-suites`
SLICE="$EXACT::test_preemption_loses_nothing $EXACT::test_prefix_hits_and_chunks tests/engine/test_eagle3_indices.py
  tests/engine/test_tensor_parallel.py::test_a_killed_rank_is_named_and_nothing_hangs"
SUITES="${SUITES:-tests/npu tests/backends $SLICE --ignore tests/backends/test_cpu_kernels.py}"
# shellcheck disable=SC2086  # several words on purpose
exec "$VENV/bin/python" -m pytest $SUITES --device npu \
  -n 2 --dist loadfile --durations 5 "$@"
