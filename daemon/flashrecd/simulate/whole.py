"""A world in which nothing is folded: every rank is a member, every node is there, and every heartbeat comes."""

from __future__ import annotations

from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import Fault, Scope
from flashrecd.core.state import NodeSpec
from flashrecd.simulate.fold import Cluster
from flashrecd.simulate.world import World


def whole_world(scenario: FailureScenario, *, beats: bool = True) -> World:
    """At the start, all of it. `beats`: False leaves heartbeats out where nothing can follow from them."""
    layout = scenario.layout
    cluster = Cluster(scenario)
    nodes = layout.nodes + scenario.spare_nodes
    specs = tuple(
        NodeSpec(f"node-{node}", f"rack-{cluster.rack_of(node)}", layout.devices_per_node)
        for node in range(nodes)
    )
    num_sets = max(layout.nodes // scenario.data_parallel, 1)
    sets = tuple(seat % num_sets for seat in range(layout.nodes))
    world = World(scenario, specs, layout.nodes, layout.devices_per_node, not beats, sets=sets)
    if scenario.replicas:
        world.place(tuple(keepers for keepers in cluster.keepers for _ in range(layout.devices_per_node)))
    return world


def strike(world: World, fault: Fault) -> None:
    """Let it happen at its time, to whoever is there by then. Nodes do not come back."""
    per_node, per_rack = world.per_node, world.scenario.layout.nodes_per_rack

    def happen() -> None:
        members = world.core.state.members
        if fault.scope is Scope.RANK:
            world.lose_rank(fault.index, fault.index % per_node)
        elif fault.scope is Scope.NODE:
            world.lose_nodes((members[fault.index * per_node].node,), fault.is_silent)
        else:
            homes = {member.node for member in members}
            nodes = tuple(sorted(node for node in homes if node // per_rack == fault.index))
            if nodes:
                world.lose_nodes(nodes, fault.is_silent)

    world.at(fault.at_s, happen)


def play_whole(scenario: FailureScenario) -> World:
    """Until the scenario's end, or that of the job."""
    world = whole_world(scenario)
    for fault in scenario.faults():
        strike(world, fault)
    world.run(scenario.duration_s)
    return world
