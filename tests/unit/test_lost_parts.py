"""A node that is lost leaves nothing with the leader but its number in the job, however often nodes are lost."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from flashrec.cli.submit import submit_from_here
from flashrec.protocol import agents as ag
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import encode
from flashrecd.cluster.info import NodeInfo
from flashrecd.conversation import Conversation
from flashrecd.core import events as ev
from flashrecd.core.state import Status
from flashrecd.hosts import Described, Versions
from flashrecd.ledparts import LedParts
from flashrecd.remotehost import RemoteHost

SUBMIT = submit_from_here("script.py", world_size=2, num_nodes=2)


class Job:
    """A leader's, of two nodes."""

    name = "job"

    def __init__(self, folder: Path) -> None:
        self.shm_dir = folder
        self.hosts: list[Any] = [None]
        self.fed: list[ev.Event] = []
        self.core = SimpleNamespace(
            state=SimpleNamespace(status=Status.RUNNING), config=SimpleNamespace(ranks_per_node=1)
        )

    def feed(self, event: ev.Event) -> None:
        self.fed.append(event)

    def log(self, *what: object) -> None:
        pass


class Cluster:
    """Answers that a part has begun as soon as it is asked."""

    def __init__(self) -> None:
        self.parts: Any = None
        self.sent: list[Any] = []

    def send(self, node: str, message: Any) -> bool:
        self.sent.append(message)
        if isinstance(message, ag.Envelope) and message.number == 1:
            begun = encode(ag.PartBegun("tcp://127.0.0.3:1", "/dev/shm/x", "/logs", 1))
            self.parts.message(node, ag.Envelope(message.part, 1, 1, begun))
        return True


def info(name: str, incarnation: int) -> NodeInfo:
    return NodeInfo(
        name=name, domain=name, data_address="127.0.0.3", incarnation=f"{incarnation:016x}", memory_bytes=0
    )


def lose(host: RemoteHost) -> None:
    """As the job does, once there is something to forget."""
    host.take(ag.RankKept(1, (3, 4), (3,)))
    host.take(ag.RankDescribed(1, "", "none", "", "twice as much"))
    host.take(ag.ProcessEnded("p3", 1, None, "out of memory"))
    host.lost()


def test_lost_nodes_leave_nothing_but_their_numbers(tmp_path: Path) -> None:
    async def live() -> None:
        job, cluster = Job(tmp_path), Cluster()
        job.exited = lambda *what: None  # type: ignore[attr-defined]
        conversations: list[weakref.ref[Conversation]] = []
        parts = cluster.parts = LedParts(cast(Any, cluster), lambda: cast(Any, job), SUBMIT)
        await parts.begin(cast(Any, job), [info("b", 0)])
        for number in range(1, 4):
            conversations.append(weakref.ref(parts._by_node["b"].conversation))
            lose(job.hosts[-1])
            parts.joined(info("b", number))
            for _ in range(5):  # it is taken in by a task
                await asyncio.sleep(0)
            assert len(job.hosts) == number + 2
        assert job.fed == [ev.NodeJoined("b", "b", 1)] * 3
        assert len(parts._parts) == len(parts._by_node) == 1
        gc.collect()
        assert [one() for one in conversations] == [None] * 3
        for host in job.hosts[1:-1]:
            assert host.kept(1) == Versions()
            assert host.describe(1, 0) == Described()
            assert host.needs() == ""
            assert host._last_words == {}
        # What it still says is answered as from any stranger.
        cluster.sent.clear()
        parts.message("b", ag.Envelope("job.old", 7, 0, encode(msg.Present("job", 0))))
        assert cluster.sent == [ag.Unknown("job.old")]

    asyncio.run(live())
