"""Places for a mesh's workers on the nodes of a Ray session, reserved all at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from jaxpp.runtime.remote._session import Session, answers, reopen_session

#: CPUs of a worker in a session of our own, where cores are not counted: any number of workers fit.
UNCOUNTED_CPU = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place of a worker: its bundle in the placement group, and Ray's id of the node.

    Nodes that share a machine, and its name, differ in that.
    """

    bundle: int
    node_id: str
    address: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Room for the workers of a mesh, held until `release_places`.

    Each `worker` has these resources. `places` has for each rank the place of each of its workers;
    ranks of one worker have the same. The `request` was to `reserve_places`.
    """

    group: PlacementGroup
    worker: Mapping[str, float]
    places: tuple[tuple[Place, ...], ...]
    request: Mapping[str, Any]


def reserve_places(
    session: Session,
    num_ranks: int,
    *,
    gpus_per_rank: float = 0,
    cpus_per_rank: float | None = None,
    processes_per_rank: int = 1,
    ranks_per_process: int = 1,
    timeout: float = 60.0,
    lost: Sequence[str] = (),
) -> Reservation:
    """Reserves room for all workers of a mesh at once, or for none.

    A worker is the process of a rank, one of several of a rank, or one of several ranks. Workers
    fill node after node in the order of ranks. No rank has workers on two nodes, if the nodes have
    room for all ranks in this way.

    The arguments are those of `RemoteMpmdMesh`; `gpus_per_rank` are those of a whole rank, and by
    default `cpus_per_rank` is next to nothing in a session of our own, so that ranks may be more
    than a laptop's cores. `lost` describes nodes that the ranks were on before, for errors.

    Raises:
        ValueError: if the session is too small, says what was asked for and what is there.
        TimeoutError: if it is large enough, but others hold too much of it for `timeout` seconds.
    """
    processes, ranks = processes_per_rank, ranks_per_process
    request = {"gpus_per_rank": gpus_per_rank, "cpus_per_rank": cpus_per_rank, "timeout": timeout}
    request |= {"processes_per_rank": processes, "ranks_per_process": ranks}
    if cpus_per_rank is None:
        cpus_per_rank = processes * (UNCOUNTED_CPU if session.started else 1)
    if cpus_per_rank <= 0 or gpus_per_rank < 0:
        given = f"cpus_per_rank={cpus_per_rank:g} and gpus_per_rank={gpus_per_rank:g}"
        raise ValueError(f"A rank takes some CPU and no less than no GPU, got {given}.")
    rank = {"CPU": cpus_per_rank} | ({"GPU": gpus_per_rank} if gpus_per_rank else {})
    worker = {name: amount * ranks / processes for name, amount in rank.items()}
    nodes = _nodes()
    # A bundle is on one node: all workers of a rank, or one worker where those do not fit.
    each = processes if _room(rank, nodes) >= num_ranks else 1
    bundles = [{name: amount * each for name, amount in worker.items()}]
    bundles *= num_ranks * processes // ranks // each
    asked = f"{num_ranks} rank{'s' * (num_ranks > 1)} with {_describe(rank)} each"
    asked += f" in {processes} processes" * (processes > 1)
    asked += f", {ranks} in a process" * (ranks > 1)
    if _room(bundles[0], nodes) < len(bundles):  # Ray would wait for more nodes
        raise ValueError(_too_small(session.address, asked, nodes, lost))
    names = ",".join(node["NodeID"] for node in nodes if not node["Answers"])
    avoid = {"ray.io/node-id": f"!in({names})"} if names else {}
    group = placement_group(bundles, "PACK", bundle_label_selector=[avoid] * len(bundles))
    try:
        if not group.wait(timeout):
            raise TimeoutError(
                f"The Ray session at {session.address} has had no room for {asked}, for "
                f"{timeout:g} s. It has:\n{_describe_nodes(nodes)}\nof which "
                f"{_describe(ray.available_resources()) or 'nothing'} is free. Shut down the mesh "
                f"that holds the rest (mesh.shutdown()), or ask for less."
            )
        workers = _workers(group, each)
    except BaseException:
        remove_placement_group(group)
        raise
    numbers = [[(r * processes + p) // ranks for p in range(processes)] for r in range(num_ranks)]
    places = tuple(tuple(workers[n] for n in own) for own in numbers)
    return Reservation(group, worker, places, request)


def ranks_of_a_node(num_ranks: int, gpus_per_rank: float) -> int:
    """Finds the most ranks that a process can have: a divisor of all, for which nodes have GPUs."""
    nodes = _nodes()

    def fit(ranks: int) -> bool:
        whole = num_ranks % ranks == 0
        return whole and _room({"GPU": gpus_per_rank * ranks}, nodes) >= num_ranks // ranks

    return next((ranks for ranks in range(num_ranks, 1, -1) if fit(ranks)), 1)


def release_places(reservation: Reservation) -> None:
    """Gives the reserved room back; ends the workers that still run there."""
    if ray.is_initialized():
        remove_placement_group(reservation.group)


def renew_places(session: Session, reservation: Reservation) -> Reservation:
    """Replaces a reservation that has lost a node; returns one that is whole unchanged.

    One that is not whole is released, which ends its workers. A session of our own that has lost
    its only node is started anew.

    Raises:
        ValueError, TimeoutError: as `reserve_places`; then the reservation can be renewed later.
        RuntimeError: as `reopen_session`.
    """
    there = {node["NodeID"] for node in _nodes() if node["Answers"]}
    lost = {
        f"the node {place.address} ({place.host}), which had rank {rank}": None
        for rank, own in enumerate(reservation.places)
        for place in own
        if place.node_id not in there
    }
    if not lost and placement_group_table(reservation.group).get("state") == "CREATED":
        return reservation
    if session.started and not there:
        reopen_session(session)
    else:
        release_places(reservation)
    num_ranks = len(reservation.places)
    return reserve_places(session, num_ranks, **reservation.request, lost=tuple(lost))


def _nodes() -> list[dict[str, Any]]:
    """Returns the nodes of the session as Ray describes them, and whether each `Answers`.

    Ray takes up to a minute to see that a node is cut off, and would place workers there meanwhile.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    where = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in nodes]
    return [{**node, "Answers": answers(at)} for node, at in zip(nodes, where, strict=True)]


def _room(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many such bundles fit on nodes that nothing else uses."""
    there = [node["Resources"] for node in nodes if node["Answers"]]
    return sum(min(int((own.get(n, 0) + 1e-6) / a) for n, a in bundle.items()) for own in there)


def _workers(group: PlacementGroup, each: int) -> list[Place]:
    """Returns the places of all workers, `each` in a bundle: node after node, this process's first.

    So the workers of a rank, and neighbouring ranks, are together.
    """
    bundles: dict[str, list[int]] = {ray.get_runtime_context().get_node_id(): []}
    for bundle, node in sorted(placement_group_table(group)["bundles_to_node_id"].items()):
        bundles.setdefault(node, []).extend([bundle] * each)
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    return [
        Place(bundle, n, nodes[n]["NodeManagerAddress"], nodes[n]["NodeManagerHostname"])
        for n, own in bundles.items()
        for bundle in own
    ]


def _too_small(address: str, asked: str, nodes: Sequence[Any], lost: Sequence[str]) -> str:
    what = f"has lost {' and '.join(lost)}, and what is left is" if lost else "is"
    again = " there again, call mesh.restart() again and go on from a checkpoint" if lost else ""
    return (
        f"The Ray session at {address} {what} too small for {asked}. It has:\n"
        f"{_describe_nodes(nodes)}\nStart a node with `ray start --address={address}`{again}, or "
        f"ask for less: gpus_per_rank=0 lets ranks run on CPU, and several share a GPU with "
        f"gpus_per_rank=0.5, a core with cpus_per_rank=0.5."
    )


def _describe_nodes(nodes: Sequence[Mapping[str, Any]]) -> str:
    there = {True: "", False: " (does not answer)"}
    return "\n".join(
        f"  {node['NodeManagerAddress']} ({node['NodeManagerHostname']}): "
        f"{_describe(node['Resources']) or 'no CPU'}{there[node['Answers']]}"
        for node in nodes
    )


def _describe(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{a:g} {n}" for n, a in resources.items() if n in ("CPU", "GPU") and a > 0)
