"""What drafts: one file per drafter."""
