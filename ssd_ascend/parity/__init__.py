"""Golden runs that travel between machines: recorded on one device, checked on another that never met it."""
