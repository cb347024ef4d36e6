"""The engine: one local loop, one round loop, and the back ends that run clients."""
