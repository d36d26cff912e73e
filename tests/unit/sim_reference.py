"""One training step, simulated rank by rank with a heap of events: what the engine's sweep is compared with.

It shares no code with `flashrec.sim`: a rank performs its list of operations ("F0", "B1.1"), each when the rank is
idle and the message it needs has come. Times are integers. Slow, and meant to be plain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass
class Rank:
    stage: int
    replica: int
    todo: list[tuple[str, int, int]]  # letter, micro-batch, virtual stage
    inbox: set[tuple[str, int, int]] = field(default_factory=set)
    busy: bool = False
    next: int = 0
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    free: int | None = None
    optimizer: tuple[int, int] | None = None


class Reference:
    """`lists[stage]` are the operations; `costs` is read like StepCosts, one column a replica (no weights)."""

    def __init__(self, lists: Sequence[Sequence[str]], costs: Any, num_replicas: int) -> None:
        self.costs, self.num_stages, self.num_replicas = costs, len(lists), num_replicas
        self.num_parts = len(costs.forward)
        self.num_buckets = len(costs.grad_sync[0])
        todo = [[self.parsed(text, stage) for text in ops] for stage, ops in enumerate(lists)]
        self.ranks = [
            Rank(stage, replica, todo[stage])
            for stage in range(self.num_stages)
            for replica in range(num_replicas)
        ]
        self.final = {}  # which operation completes the gradients of a virtual stage
        self.bucket_queue: list[list[tuple[int, int]]] = []
        for ops in todo:
            for op in ops:
                self.final[op[2]] = op
            parts = sorted({op[2] for op in ops}, key=lambda part: ops.index(self.final[part]))
            self.bucket_queue.append([(part, bucket) for part in parts for bucket in range(self.num_buckets)])
        self.votes: dict[tuple[int, int], int] = {}
        self.link_busy = [False] * self.num_stages
        self.sync: dict[tuple[int, int], tuple[int, int]] = {}
        self.synced: set[int] = set()
        self.tied_done = not costs.tied_sync
        self.finish: dict[int, tuple[int, int]] = {}
        self.now = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.tickets = count()

    def parsed(self, text: str, stage: int) -> tuple[str, int, int]:
        micro_batch, _, chunk = text[1:].partition(".")
        return text[0], int(micro_batch), int(chunk or 0) * self.num_stages + stage

    def at(self, moment: int, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (int(moment), next(self.tickets), what))

    def run(self) -> int:
        """The time of the step."""
        for rank in self.ranks:
            self.try_start(rank)
        while self.heap:
            self.now, _, what = heapq.heappop(self.heap)
            what()
        assert len(self.finish) == self.num_stages, "the step never ended"
        return max(end for _, end in self.finish.values())

    def try_start(self, rank: Rank) -> None:
        if rank.busy:
            return
        if rank.next == len(rank.todo):
            if rank.free is None:
                rank.free = self.now
                if not self.costs.overlap_grad_sync:
                    for part, bucket in list(self.bucket_queue[rank.stage]):
                        self.vote(part, bucket)
                self.try_optimizers()
            return
        letter, micro_batch, part = rank.todo[rank.next]
        first = part == (0 if letter == "F" else self.num_parts - 1)
        if letter != "W" and not first and (letter, micro_batch, part) not in rank.inbox:
            return
        table = {"F": self.costs.forward, "B": self.costs.backward, "W": self.costs.weight}[letter]
        lasts = int(table[part][rank.replica])
        rank.busy = True
        rank.starts.append(self.now)
        self.at(self.now + lasts, lambda: self.performed(rank, letter, micro_batch, part))
        if self.costs.overlap_grad_sync and self.final[part] == (letter, micro_batch, part):
            for bucket in range(self.num_buckets):
                share = -(-lasts * (bucket + 1) // self.num_buckets)  # rounded up
                self.at(self.now + share, lambda bucket=bucket: self.vote(part, bucket))  # type: ignore[misc]

    def performed(self, rank: Rank, letter: str, micro_batch: int, part: int) -> None:
        rank.ends.append(self.now)
        rank.next += 1
        to = {"F": part + 1, "B": part - 1, "W": -1}[letter]
        if 0 <= to < self.num_parts:
            if letter == "F":
                lasts = int(self.costs.send_forward[part][rank.replica])
            else:
                lasts = int(self.costs.send_backward[to][rank.replica])
            receiver = self.ranks[to % self.num_stages * self.num_replicas + rank.replica]

            def arrives() -> None:
                receiver.inbox.add((letter, micro_batch, to))
                self.try_start(receiver)

            self.at(self.now + lasts, arrives)
            if self.costs.sends_block:
                self.at(self.now + lasts, lambda: self.release(rank))
                return
        self.release(rank)

    def release(self, rank: Rank) -> None:
        rank.busy = False
        self.try_start(rank)

    def vote(self, part: int, bucket: int) -> None:
        """One replica has this bucket's gradients."""
        self.votes[part, bucket] = self.votes.get((part, bucket), 0) + 1
        self.try_bucket(part % self.num_stages)

    def try_bucket(self, stage: int) -> None:
        queue = self.bucket_queue[stage]
        if queue and not self.link_busy[stage] and self.votes.get(queue[0], 0) == self.num_replicas:
            part, bucket = queue.pop(0)
            self.link_busy[stage] = True
            over = self.now + int(self.costs.grad_sync[part][bucket])
            self.sync[part, bucket] = (self.now, over)
            self.at(over, lambda: self.bucket_over(stage))

    def bucket_over(self, stage: int) -> None:
        self.link_busy[stage] = False
        if not self.bucket_queue[stage]:
            self.synced.add(stage)
            self.try_optimizers()
        self.try_bucket(stage)

    def try_optimizers(self) -> None:
        ends = (0, self.num_stages - 1)
        idle = all(rank.free is not None for rank in self.ranks if rank.stage in ends)
        if not self.tied_done and idle and self.synced.issuperset(ends):
            self.tied_done = True
            self.at(self.now + int(self.costs.tied_sync), lambda: self.start_optimizers(ends))
        tied = ends if self.costs.tied_sync else ()
        self.start_optimizers([stage for stage in self.synced if stage not in tied])

    def start_optimizers(self, stages: Sequence[int]) -> None:
        for rank in self.ranks:
            if rank.stage in stages and rank.free is not None and rank.optimizer is None:
                over = self.now + int(self.costs.optimizer[rank.stage][rank.replica])
                rank.optimizer = (self.now, over)
                self.at(over, lambda rank=rank: self.optimized(rank.stage))  # type: ignore[misc]

    def optimized(self, stage: int) -> None:
        optimizers = [rank.optimizer for rank in self.ranks if rank.stage == stage]
        if stage not in self.finish and all(o is not None and o[1] <= self.now for o in optimizers):
            self.finish[stage] = (self.now, self.now + int(self.costs.finish[stage]))
