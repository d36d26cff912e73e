"""The messages rank, daemon and command line exchange, and their msgpack codec (torch-free)."""
