"""What the cluster agrees on: one contract, several implementations."""
