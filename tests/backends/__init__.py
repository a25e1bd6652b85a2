"""The conformance suite: what every backend must answer, whatever it runs on, and the CPU's own kernels."""
