"""The daemon's decisions: pure, without sockets, clock or randomness."""
