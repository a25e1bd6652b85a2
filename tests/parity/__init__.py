"""Golden runs: what they hold, how damage shows, and which differences pass."""
