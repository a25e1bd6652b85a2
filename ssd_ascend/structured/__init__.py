"""Structured output: from what a request allows its answer to be, to which tokens may come next. Torch-free."""
