"""A job as it is submitted from this process: what the terminal gives, and what was asked for."""

import os
import sys
from collections.abc import Mapping, Sequence

from flashrec import __version__
from flashrec.protocol import messages as msg

# Variables that describe the submitting terminal rather than the job.
NOT_PASSED_ON = ("FLASHREC_DIR",)


def submit_from_here(
    target: str,
    *,
    world_size: int,
    module: bool = False,
    args: Sequence[str] = (),
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    num_standbys: int = 1,
    max_restarts: int | None = None,
    log_dir: str | None = None,
    start_method: str = "fork",
    preload: Sequence[str] = ("flashrec.warm",),
    pull: str = "shm",
    suspect_after_s: float = 3.0,
    num_nodes: int = 1,
    num_spare_nodes: int = 0,
    num_replicas: int = 0,
) -> msg.Submit:
    """The job runs in this interpreter and, unless told otherwise, this directory and environment."""
    variables = os.environ if env is None else env
    return msg.Submit(
        release=__version__,
        pid=os.getpid(),
        target=target,
        module=module,
        args=tuple(args),
        cwd=os.getcwd() if cwd is None else cwd,
        umask=_umask(),
        python=sys.executable,
        env=tuple((key, value) for key, value in variables.items() if key not in NOT_PASSED_ON),
        world_size=world_size,
        num_standbys=num_standbys,
        max_restarts=max_restarts,
        log_dir=log_dir,
        start_method=start_method,
        preload=tuple(preload),
        pull=pull,
        suspect_after_s=suspect_after_s,
        num_nodes=num_nodes,
        num_spare_nodes=num_spare_nodes,
        num_replicas=num_replicas,
    )


def _umask() -> int:
    """The one of this process; there is no asking for it without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
