"""One file per model family, and the registry that finds it by the `model_type` of a checkpoint."""
