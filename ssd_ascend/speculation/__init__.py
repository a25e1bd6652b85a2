"""When and what to draft, and how the target judges it."""
