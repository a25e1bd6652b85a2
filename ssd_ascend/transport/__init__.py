"""The line between two models, target and speculator: messages, their binary layout, and what carries them."""
