"""What `flashrec status` shows, as one JSON document."""

import json
import time
from typing import Any

from flashrec import __version__
from flashrec.protocol.phase import Phase
from flashrecd.core.detection import explain
from flashrecd.core.state import JobConfig
from flashrecd.jobrun import JobRun

DEFAULT_SUSPECT_AFTER_S = JobConfig(world_size=1).suspect_after_s


def document(
    job: JobRun | None, last: dict[str, Any] | None, started_at: float, pid: int, refused: int
) -> str:
    return json.dumps(
        {
            "release": __version__,
            "daemon": {
                "pid": pid,
                "uptime_s": round(time.monotonic() - started_at, 3),
                "refused_messages": refused,
            },
            "job": None if job is None else describe(job),
            "last_job": last,
            "timeouts": [
                timeout._asdict()
                for timeout in explain(job.core.config.suspect_after_s if job else DEFAULT_SUSPECT_AFTER_S)
            ],
        }
    )


def describe(job: JobRun) -> dict[str, Any]:
    """One job, whole."""
    state, pids = job.core.state, job.pids()
    ranks = []
    for rank, member in enumerate(state.members):
        tag = job.tag(rank)
        ranks.append(
            {
                "rank": rank,
                "process": member.proc,
                "pid": pids.get(member.proc),
                "status": "awaited" if member.proc in state.awaited else str(member.status),
                "phase": Phase(tag.phase).name.lower() if tag else None,
                "place": tag.place if tag else None,
                "step": tag.step if tag else None,
                "attempt": tag.attempt if tag else None,
                "generation": tag.generation if tag else None,
                "committed": tag.committed if tag else None,
                "committed_ns": tag.committed_ns if tag else None,
                "loss": None if tag is None or tag.loss != tag.loss else tag.loss,
            }
        )
    return {
        "job": job.name,
        "target": job.target,
        "status": str(state.status),
        "regime": "sealed" if state.why_sealed else "live",
        "why_sealed": state.why_sealed,
        "arena_bytes": sum(job.memory.arena_bytes.values()) if state.why_sealed else 0,
        "generation": state.generation,
        "world_size": job.core.config.world_size,
        "restarts": state.restarts,
        "ranks": ranks,
        "standbys": [{"process": p, "pid": pids.get(p), "depth": d or "starting"} for p, d in state.standbys],
        "shm_dir": str(job.shm_dir),
        **job.source.describe(),
        "recoveries": job.recoveries.to_json(),
        "outcome": None if state.outcome is None else {"code": state.outcome[0], "reason": state.outcome[1]},
    }
