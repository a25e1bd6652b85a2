"""Frozen, strict configuration. Our own files are strict; foreign ones (`config.json`) are read leniently."""
