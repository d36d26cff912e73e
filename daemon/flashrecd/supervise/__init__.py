"""Rank processes: how they start, are watched, and end without a trace."""
