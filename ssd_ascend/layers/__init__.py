"""The parts models are made of; each takes a `BuildContext` and nothing else from outside."""
