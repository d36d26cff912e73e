"""What the supervised processes of test_supervise.py run; imported by them, by this name."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashrec.protocol.spawn import ProcSpec


def run_code(spec: ProcSpec) -> int | None:
    """Execute program["code"]; what it binds to `code` is the exit code."""
    names: dict[str, object] = {"spec": spec}
    exec(compile(str(spec.program["code"]), "<script>", "exec"), names)
    result = names.get("code")
    assert result is None or isinstance(result, int)
    return result


# Importing this module in a fork server may do what a careless library does at import.
if "SUPERVISED_THREAD" in os.environ:
    threading.Thread(target=threading.Event().wait, name="careless", daemon=True).start()
if "SUPERVISED_BROKEN" in os.environ:
    raise RuntimeError("broken on purpose")
if "SUPERVISED_NOISE" in os.environ:
    print("said while importing", file=sys.stderr, flush=True)
