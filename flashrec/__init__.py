"""flashrec: PyTorch training that survives failures without checkpoints.

Importing this costs no torch; the first call that needs it imports it.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flashrec.session import (
        current_step,
        init,
        protect,
        rank,
        report_loss,
        section,
        step,
        steps,
        world_size,
    )

__all__ = [
    "__version__",
    "current_step",
    "init",
    "protect",
    "rank",
    "report_loss",
    "section",
    "step",
    "steps",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from flashrec import session

        return getattr(session, name)
    raise AttributeError(f"module 'flashrec' has no attribute {name!r}")
