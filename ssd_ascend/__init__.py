"""ssd_ascend: speculative speculative decoding with EAGLE-3 heads on NVIDIA GPUs, Ascend NPUs and CPUs."""
