"""Triton kernels and the functions that launch them; `ops.py` and `attention.py` of this backend are their callers."""
