"""The NPU backend and its emulator. Needs torch_npu, so an environment of its own: `scripts/npu_lane.sh` makes it."""
