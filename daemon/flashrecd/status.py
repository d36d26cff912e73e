"""What `flashrec status` shows, as one JSON document."""

import json
import time
from typing import Any

from flashrec import __version__
from flashrec.protocol.phase import Phase
from flashrecd.core.detection import explain
from flashrecd.core.state import JobConfig, Status
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
    seals = state.why_sealed or not state.why_unsealed
    ranks = []
    for rank, member in enumerate(state.members):
        tag = job.tag(rank)
        ranks.append(
            {
                "rank": rank,
                "node": job.hosts[member.node].name,
                "kept_on": [job.hosts[node].name for node in member.keepers],
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
        "nodes": _nodes(job),
        "links": job.links,
        "replicas": _replicas(job),
        "waits_for": state.waits_for,
        "target": job.target,
        "status": str(state.status),
        "regime": "sealed" if state.why_sealed else "live",
        "why_sealed": state.why_sealed,
        "why_unsealed": "" if state.why_sealed else state.why_unsealed,
        "arena_bytes": sum(job.arena_bytes.values()) if seals else 0,
        "generation": state.generation,
        "world_size": job.core.config.world_size,
        "restarts": state.restarts,
        "ranks": ranks,
        "standbys": [
            {
                "process": s.proc,
                "node": job.hosts[s.node].name,
                "pid": pids.get(s.proc),
                "depth": s.depth or "starting",
            }
            for s in state.standbys
        ],
        "shm_dir": str(job.shm_dir),
        **job.source.describe(),
        "recoveries": job.recoveries.to_json(),
        "outcome": None if state.outcome is None else {"code": state.outcome[0], "reason": state.outcome[1]},
    }


def _nodes(job: JobRun) -> list[dict[str, Any]]:
    """Those of the job. `unheard`: why one may be lost, "" while it is heard."""
    state = job.core.state
    ranks: list[list[int]] = [[] for _ in state.nodes]
    keeps: list[list[int]] = [[] for _ in state.nodes]
    for rank, member in enumerate(state.members):
        ranks[member.node].append(rank)
        for keeper in member.keepers:
            keeps[keeper].append(rank)
    return [
        {
            "name": node.name,
            "domain": node.domain,
            "life": str(node.life),
            "spare": node.spare,
            "unheard": node.unheard,
            "ranks": ranks[number],
            "keeps": keeps[number],
            "shard_address": job.hosts[number].shard_address,
        }
        for number, node in enumerate(state.nodes)
    ]


def _has_voted(job: JobRun) -> bool:
    """Whether a vote of the newest generation has passed. Nodes regroup without anybody having failed, too."""
    state = job.core.state
    tags = [job.tag(rank) for rank in range(len(state.members))]
    return all(
        tag is not None and tag.generation == state.generation and tag.committed > state.version
        for tag in tags
    )


def _replicas(job: JobRun) -> dict[str, Any]:
    """`losses`: of how many of its nodes every rank's state stands the loss, one after the other. No vote passes before
    all keepers of a generation have acknowledged; so while there has been none, `being_made` says whose copies are."""
    state = job.core.state
    is_whole = state.status is Status.RUNNING and job.recoveries.open is None and _has_voted(job)
    return {
        "wanted": job.core.config.replicas,
        "too_few": state.too_few,
        "losses": min((len(member.keepers) for member in state.members), default=0) if is_whole else 0,
        "being_made": [] if is_whole else [rank for rank, m in enumerate(state.members) if m.keepers],
    }
