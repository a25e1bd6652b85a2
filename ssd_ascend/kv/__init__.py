"""Blocks and tensors of the paged KV cache."""
