"""The OpenAI-compatible HTTP server: `python -m ssd_ascend.serve`. Holds no model; the engine is another process."""
