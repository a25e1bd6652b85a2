"""A draft worker that dies while it is imported, before anything slow is."""

raise SystemExit(7)
