"""What a plan asks of this rank, carried out: keepers, serving, installing, forming. Main thread only."""

import time
from collections.abc import Callable
from pathlib import Path

from flashrec.assembly import Assembly
from flashrec.happenings import Plan
from flashrec.keeping import Keeper
from flashrec.link import Link
from flashrec.protected import ProtectedState
from flashrec.protocol import messages as msg
from flashrec.sources import Reach, Sources
from flashrec.state.pull import Puller


class Recovery:
    """Of one process; `reach` is set where there are other nodes."""

    def __init__(self, link: Link, assembly: Assembly) -> None:
        self.reach: Reach | None = None
        self.rehearsed_ns = 0
        self._pulled_ns = 0
        self._link = link
        self._assembly = assembly
        self._resume: msg.ResumePlan | None = None  # the newest

    def take(self, message: msg.ResumePlan) -> Plan:
        """What the rank's machine must know of it."""
        if self._resume is None or message.generation > self._resume.generation:
            self._resume = message
        return Plan(
            message.generation,
            message.version,
            message.replaced,
            message.served,
            message.sealing,
            message.watermark,
        )

    def set_keepers(self, keeper: Keeper, plan: Plan | None) -> None:
        """Of the plan's generation, which this rank is about to form."""
        resume = self._resume
        if plan is not None and resume is not None and resume.generation == plan.generation:
            sealed = plan.version if plan.sealing else None
            keeper.set_keepers(resume.keepers, plan.generation, sealed)

    def serve(self, keeper: Keeper, plan: Plan, rank: int) -> None:
        """Put what the plan wants of this rank where others can get it, and say so."""
        served = keeper.serve(plan)
        if served is not None:
            link = self._link
            link.send(msg.Exported(link.proc, plan.generation, rank, served, time.monotonic_ns()))

    def install(self, keeper: Keeper, plan: Plan, note: Callable[[str, str], None]) -> None:
        """Become the plan's version. `note(event, reason)` is told of sources that were refused. Raises what
        `Keeper.install` does, and GroupsAborted."""
        parts, welcome = self._link.parts, self._link.welcome
        servers = keeper.servers(plan)
        address = welcome.shard_address if welcome.pull == "zmq" else None

        def is_cancelled() -> bool:
            return parts.aborted(plan.generation)

        resume = self._resume
        places = {rank: (sealed, private) for rank, sealed, private in resume.sources} if resume else {}
        sources = Sources(
            Path(welcome.shm_dir), welcome.job, plan.version, address, is_cancelled, self.reach, places
        )
        puller = Puller(is_cancelled, own_server=welcome.shard_address if self.reach is not None else None)
        for refused in keeper.install(
            plan, lambda: parts.wait(plan.generation, servers), puller, address, sources
        ):
            note("source refused", refused)
        self._pulled_ns = time.monotonic_ns()

    def form(self, rank: int, plan: Plan, state: ProtectedState) -> None:
        """Meet the others, as one who is at the plan's version. GroupsAborted when it is given up meanwhile."""
        state.settle_buckets(plan.version)
        self._assembly.form(rank, plan.generation)
        times = (self._pulled_ns, self.rehearsed_ns, time.monotonic_ns())
        self._link.send(msg.Formed(self._link.proc, plan.generation, state.bucket_digests(), *times))
