"""A cluster of any size, and the small world in which one failure of it is played.

A *seat* is a node's share of ranks; it moves to a spare node when its node is lost. Faults name seats (who is struck is
who sits there now) and racks by their number. Only those seats can come to differ that are struck, that a struck node
kept replicas of, or that keep theirs; the world for an episode has these, each as one member, on their own nodes and
with their own keepers, a few others that stand for all the rest, and as many spares as may be needed. What the core
decides for them is written back. Keepers at the start: the same seat in the next racks, an even placement by the
rules of flashrecd.core.placement, which would take long to compute for thousands of nodes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import Fault, Scope
from flashrecd.core.state import NodeSpec
from flashrecd.simulate.world import World

NUM_OTHERS = 3  # that stand for all the rest


@dataclass(slots=True)
class Cluster:
    """By seat, its node and who keeps its replicas; spares; and when lost nodes are back."""

    scenario: FailureScenario
    homes: list[int] = field(init=False)
    keepers: list[tuple[int, ...]] = field(init=False)
    spares: list[int] = field(init=False)
    _kept_at: dict[int, set[int]] = field(init=False, default_factory=dict)
    _seat_at: dict[int, int] = field(init=False, default_factory=dict)
    _away: list[tuple[float, int]] = field(init=False, default_factory=list)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        nodes = self.scenario.layout.nodes
        self.homes = list(range(nodes))
        self.spares = list(range(nodes, nodes + self.scenario.spare_nodes))
        self.place_anew()

    def place_anew(self) -> None:
        """Every seat's keepers: the seats of its number in the next racks, or the next nodes where racks are too
        few."""
        layout, replicas = self.scenario.layout, self.scenario.replicas
        nodes, racks = layout.nodes, layout.racks
        is_ragged = nodes % layout.nodes_per_rack > 0
        stride = layout.nodes_per_rack if racks > replicas + is_ragged else 1
        self.keepers = [
            tuple(self.homes[(seat + stride * (k + 1)) % nodes] for k in range(replicas))
            for seat in range(nodes)
        ]
        self._kept_at = {}
        for seat, keepers in enumerate(self.keepers):
            for node in keepers:
                self._kept_at.setdefault(node, set()).add(seat)
        self._seat_at = {home: seat for seat, home in enumerate(self.homes)}

    def rack_of(self, node: int) -> int:
        return node // self.scenario.layout.nodes_per_rack

    def struck(self, fault: Fault) -> tuple[int, ...]:
        """The seats that a fault strikes."""
        if fault.scope is not Scope.RACK:
            return self.scenario.strikes(fault)
        first = fault.index * self.scenario.layout.nodes_per_rack
        nodes = range(first, first + self.scenario.layout.nodes_per_rack)
        return tuple(self._seat_at[node] for node in nodes if node in self._seat_at)

    def repaired(self, now: float) -> None:
        while self._away and self._away[0][0] <= now:
            self.spares.append(heapq.heappop(self._away)[1])

    def next_repair_s(self) -> float:
        return self._away[0][0]

    def lost(self, nodes: Sequence[int], now: float) -> None:
        for node in nodes:
            heapq.heappush(self._away, (now + self.scenario.repair_s, node))

    def move(self, seat: int, node: int) -> None:
        if self._seat_at.get(self.homes[seat]) == seat:
            del self._seat_at[self.homes[seat]]
        self.homes[seat] = node
        self._seat_at[node] = seat

    def keep(self, seat: int, keepers: tuple[int, ...]) -> None:
        for node in self.keepers[seat]:
            self._kept_at.get(node, set()).discard(seat)
        for node in keepers:
            self._kept_at.setdefault(node, set()).add(seat)
        self.keepers[seat] = keepers

    def fold(self, faults: Sequence[Fault]) -> Episode:
        """The world for these faults, which overlap."""
        struck = {seat for fault in faults for seat in self.struck(fault)}
        nodes = {self.homes[seat] for seat in struck}
        kept = {seat for node in nodes for seat in self._kept_at.get(node, ())}
        true = struck | kept
        keeping = {self._seat_at[k] for seat in true for k in self.keepers[seat] if k in self._seat_at}
        seats = true | keeping | self._others(struck)
        if not self.scenario.is_sealed:
            seats |= self._mates(seats, struck)
        # The leader's node is the first, whoever sits there.
        order = [0, *sorted(seats - {0})]
        keepers_elsewhere = sorted(
            {k for seat in true for k in self.keepers[seat]} - {self.homes[seat] for seat in order}
        )
        spares = [node for node in self.spares if node not in keepers_elsewhere][: len(struck) + 1]
        places = [self.homes[seat] for seat in order] + keepers_elsewhere + spares
        return Episode(self, order, places, true, struck)

    def _others(self, struck: set[int]) -> set[int]:
        """Seats in racks that are not struck, other ones each time, so that not always the same get new replicas."""
        nodes = self.scenario.layout.nodes
        racks = {self.rack_of(self.homes[seat]) for seat in struck}
        found: set[int] = set()
        wanted = NUM_OTHERS + self.scenario.replicas
        for strict in (True, False):
            for number in range(min(nodes, 64)):
                if len(found) >= wanted:
                    break
                seat = (self._turn + number * (self.scenario.layout.nodes_per_rack + 1)) % nodes
                if seat not in struck and not (strict and self.rack_of(self.homes[seat]) in racks):
                    found.add(seat)
        self._turn = (self._turn + 7) % nodes
        return found

    def _mates(self, seats: set[int], struck: set[int]) -> set[int]:
        """For each, another that holds the same bytes, and lives."""
        num_sets = self.scenario.layout.nodes // self.scenario.data_parallel
        mates = set()
        for seat in seats:
            others = range(seat % num_sets, self.scenario.layout.nodes, num_sets)
            free = [o for o in others if o != seat and o not in struck]
            mates.update(free[:2])
        return mates


@dataclass(slots=True)
class Episode:
    """`seats`: by member; `places`: by node of the world, the cluster's. `true`: the seats that are as in the
    cluster, not stand-ins."""

    cluster: Cluster
    seats: list[int]
    places: list[int]
    true: set[int]
    struck: set[int]

    def play(self, faults: Sequence[Fault], version: int, began_s: float) -> World:
        """From the last state of rest, `version` at `began_s`, until all is settled."""
        scenario = self.cluster.scenario
        specs = tuple(
            NodeSpec(f"node-{place}", f"rack-{self.cluster.rack_of(place)}", 1) for place in self.places
        )
        num_sets = max(scenario.layout.nodes // scenario.data_parallel, 1)
        world = World(
            scenario,
            specs,
            len(self.seats),
            1,
            True,
            sets=tuple(seat % num_sets for seat in self.seats),
            version=version,
            began_s=began_s,
        )
        if scenario.replicas:
            world.place(self._keepers(world))
        world.counted = frozenset(m for m, seat in enumerate(self.seats) if seat in self.true)
        world.warm(faults[0].at_s)
        member_of = {seat: member for member, seat in enumerate(self.seats)}
        per_node = scenario.layout.devices_per_node
        for fault in faults:
            seats = self.cluster.struck(fault)
            if fault.scope is Scope.RANK:
                member, local = member_of[seats[0]], fault.index % per_node
                world.at(fault.at_s, lambda m=member, i=local: world.lose_rank(m, i))  # type: ignore[misc]
            elif seats:
                members = tuple(member_of[seat] for seat in seats)
                world.at(fault.at_s, lambda ms=members, f=fault: self._lose(world, ms, f))  # type: ignore[misc]
        world.settle()
        return world

    @staticmethod
    def _lose(world: World, members: tuple[int, ...], fault: Fault) -> None:
        """The nodes where these members are by now."""
        nodes = tuple(sorted({world.core.state.members[member].node for member in members}))
        world.lose_nodes(nodes, fault.is_silent)

    def _keepers(self, world: World) -> tuple[tuple[int, ...], ...]:
        index = {place: node for node, place in enumerate(self.places)}
        struck = {index[self.cluster.homes[seat]] for seat in self.struck}
        racks = [self.cluster.rack_of(place) for place in self.places]
        free = [n for n in range(len(self.seats)) if n not in struck]
        keepers = [
            tuple(index[k] for k in self.cluster.keepers[seat]) if seat in self.true else ()
            for seat in self.seats
        ]
        load = Counter(node for mine in keepers for node in mine)
        for member, seat in enumerate(self.seats):
            if seat in self.true:
                continue
            mine: list[int] = []
            while len(mine) < min(world.core.config.replicas, len(free) - 1):
                taken = {racks[member], *(racks[n] for n in mine)}
                options = [n for n in free if n != member and n not in mine]
                mine.append(min(options, key=lambda n: (racks[n] in taken, load[n])))
            load.update(mine)
            keepers[member] = tuple(mine)
        return tuple(keepers)

    def write_back(self, world: World) -> None:
        """Where seats are now, and who keeps what, as the core decided."""
        cluster = self.cluster
        gone = [self.places[node] for node in world.dead_nodes]
        for member, seat in zip(world.core.state.members, self.seats, strict=True):
            place = self.places[member.node]
            if place != cluster.homes[seat]:
                cluster.move(seat, place)
                if place in cluster.spares:
                    cluster.spares.remove(place)
        if cluster.scenario.replicas:
            for member, seat in zip(world.core.state.members, self.seats, strict=True):
                if seat in self.true:
                    cluster.keep(seat, tuple(self.places[k] for k in member.keepers))
        cluster.spares = [node for node in cluster.spares if node not in gone]
        cluster.lost(gone, world.now)
