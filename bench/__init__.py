"""Benchmarks: command lines of their own, not part of the wheel."""
