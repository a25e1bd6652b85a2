"""Frozen, strict dataclasses: all that can be chosen, and nothing that is derived twice. Torch-free at import."""
