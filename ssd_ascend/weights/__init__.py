"""Checkpoints on disk into models: safetensors (sharded or not) and gguf, strictly. `loader` is the way in."""
