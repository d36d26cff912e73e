"""One fault per file; `base` is what they have in common."""
