"""NVIDIA GPUs: Triton kernels whose bits do not depend on batching, captured graphs, one copy back a step."""
