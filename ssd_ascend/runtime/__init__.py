"""One model on one rank, role-blind: inputs, forward, sampling law."""
