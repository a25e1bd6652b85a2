"""When drafting happens: one file per speculator."""
