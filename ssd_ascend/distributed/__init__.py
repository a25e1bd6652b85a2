"""The ranks of one model: `collectives` is how they talk."""
