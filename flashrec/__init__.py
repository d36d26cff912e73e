"""flashrec: PyTorch training that survives failures without checkpoints."""

__version__ = "0.1.0"
