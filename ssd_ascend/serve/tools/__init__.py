"""Tool calls: what a request offers, how a model writes calls down, and how they are read back from its text."""
