"""The CPU: plain torch as the oracle of every backend (`ops`, `attention`), C++ kernels for speed (`native`)."""
