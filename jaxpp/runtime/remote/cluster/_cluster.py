"""Places for a mesh's workers on the nodes of a Ray session, reserved all at once.

A worker is a process of a rank; a rank has one worker, or several of the same size.
"""

import concurrent.futures
import dataclasses
import itertools
import math
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from jaxpp.runtime.remote.cluster._session import Session, accepts

#: Seconds to wait for resources that another mesh or task holds, before an error.
RESERVE_TIMEOUT = 15.0

#: CPUs that a worker takes in a session of our own, where cores are not counted: so little that
#: any number of workers fits in the one CPU that such a session has above the machine's.
UNCOUNTED_CPU = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place of a worker on a node.

    Args:
        bundle: the number of its bundle in the placement group.
        node_id: Ray's id of the node. Nodes of one machine, in containers or network namespaces of
            their own, have the same host name and differ in this.
        address: the node's IP address.
        host: the node's host name.
        local_index: the worker's number among the reservation's workers on its node.
    """

    bundle: int
    node_id: str
    address: str
    host: str
    local_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Room for the workers of a mesh, held until `release`.

    Args:
        group: the placement group.
        places: for each rank, the place of each of its workers. Ranks fill node after node.
        cpus: CPUs of a worker.
        gpus: for each rank the GPUs of a worker, or the part of one that it has.
    """

    group: PlacementGroup
    places: tuple[tuple[Place, ...], ...]
    cpus: float
    gpus: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Need:
    """CPUs and GPUs of a rank, or of a bundle of its workers."""

    cpus: float
    gpus: float

    def part(self, count: int) -> "_Need":
        """Gives the share of each of `count` workers or bundles that divide this need evenly."""
        return _Need(self.cpus / count, self.gpus / count)

    def resources(self) -> dict[str, float]:
        """Gives the need as Ray's resources, which may not have zeros."""
        both = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: float(amount) for name, amount in both.items() if amount > 0}


_numbers = itertools.count()


def reserve_places(
    session: Session,
    ranks: int,
    *,
    processes_per_rank: int = 1,
    cpus_per_rank: float | None = None,
    gpus_per_rank: float | Sequence[float] = 0,
    timeout: float = RESERVE_TIMEOUT,
) -> Reservation:
    """Reserves room for all workers of a mesh at once, or for none.

    Each rank has its workers on one node where the nodes have room for all ranks in this way. Else
    ranks fill node after node, and some have workers on two.

    Args:
        session: the session, from `join`.
        ranks: the number of pipeline ranks.
        processes_per_rank: the number of workers of a rank, which share its CPUs and GPUs evenly.
        cpus_per_rank: CPUs to count for a rank. By default one for each of its workers, but next to
            nothing in a session of our own, so that ranks may be more than a laptop's cores.
        gpus_per_rank: GPUs of a rank; below 1, ranks share one. Where ranks of one worker differ in
            them, those of each.
        timeout: seconds to wait for what others hold.

    Raises:
        ValueError: if the session is too small, says what was asked for and what is there.
        TimeoutError: if it is large enough, but others hold too much of it for `timeout` seconds.
    """
    if cpus_per_rank is None:
        cpus_per_rank = processes_per_rank * (UNCOUNTED_CPU if session.started else 1)
    own = gpus_per_rank if isinstance(gpus_per_rank, Sequence) else [gpus_per_rank] * ranks
    for gpus in own or [0]:
        _check_request(ranks, processes_per_rank, cpus_per_rank, gpus)
    needs = [_Need(cpus_per_rank, gpus) for gpus in own]
    nodes, silent = _nodes()
    workers_per_bundle = processes_per_rank if _all_fit(needs, nodes) else 1
    bundles_per_rank = processes_per_rank // workers_per_bundle
    bundles = [need.part(bundles_per_rank) for need in needs for _ in range(bundles_per_rank)]
    asked = _describe_needs(needs, processes_per_rank)
    if not _all_fit(bundles, nodes):
        raise ValueError(
            f"The Ray session at {session.address} is too small for {asked}. It has:\n"
            f"{_describe_nodes(nodes, silent)}\n"
            f"Add a node with `ray start --address={session.address}`, or ask for less (several "
            f"ranks share a GPU with gpus_per_rank=0.5, a core with cpus_per_rank=0.5)."
        )
    # The name tells other waiting processes who holds the resources.
    name = f"jaxpp-{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
    names = ",".join(node["NodeID"] for node in silent)
    avoid = {"ray.io/node-id": f"!in({names})"} if silent else {}
    asks = [bundle.resources() for bundle in bundles]
    group = placement_group(asks, "PACK", name, bundle_label_selector=[avoid] * len(asks))
    try:
        if not group.wait(timeout):
            raise TimeoutError(
                f"The Ray session at {session.address} has no room for {asked}, and had none for "
                f"{timeout:g} s. It has:\n{_describe_nodes(nodes, silent)}\n"
                f"Shut down the mesh that holds it (mesh.shutdown()), or ask for less."
            )
        places = _places(group, bundles, workers_per_bundle, processes_per_rank)
    except BaseException:
        remove_placement_group(group)
        raise
    worker = [need.part(processes_per_rank) for need in needs]
    return Reservation(group, places, worker[0].cpus, tuple(w.gpus for w in worker))


def release_places(reservation: Reservation) -> None:
    """Gives the reserved room back; ends the workers that still run there."""
    if ray.is_initialized():
        remove_placement_group(reservation.group)


def renew_places(session: Session, reservation: Reservation) -> Reservation:
    """Replaces a reservation that has lost a node; returns one that is whole unchanged.

    Args:
        session: the session, from `join`.
        reservation: from `reserve`. If it is not whole it is released, which ends its workers.

    Raises:
        ValueError, TimeoutError: as `reserve`; then the reservation can be renewed later.
    """
    state = placement_group_table(reservation.group).get("state")
    answering = {node["NodeID"] for node in _nodes()[0]}
    needed = {place.node_id for own in reservation.places for place in own}
    if state == "CREATED" and needed <= answering:
        return reservation
    release_places(reservation)
    processes = len(reservation.places[0])
    return reserve_places(
        session,
        len(reservation.places),
        processes_per_rank=processes,
        cpus_per_rank=reservation.cpus * processes,
        gpus_per_rank=[gpus * processes for gpus in reservation.gpus],
    )


def _nodes() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Gives the nodes of the session that answer, and those that only Ray believes to be there.

    Ray takes up to a minute to see that a node has crashed or is cut off.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in nodes]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(nodes))) as pool:
        answers = dict(zip(addresses, pool.map(accepts, addresses), strict=True))
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for node, address in zip(nodes, addresses, strict=True):
        found[0 if answers[address] else 1].append(node)
    return found


def _check_request(ranks: int, processes: int, cpus: float, gpus: float) -> None:
    if ranks < 1 or processes < 1:
        raise ValueError(f"A mesh has 1 rank of 1 process at least, got {ranks} of {processes}.")
    if cpus <= 0 or gpus < 0:
        raise ValueError(f"A rank takes some CPU and no less than no GPU, got {cpus} and {gpus}.")
    share = gpus / processes
    if share > 1 and share != int(share):
        raise ValueError(
            f"A process has a part of one GPU or whole GPUs, got {gpus:g} GPUs for a rank of "
            f"{processes}; use {math.floor(share) * processes} or {math.ceil(share) * processes}."
        )


def _all_fit(needs: Sequence[_Need], nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether nodes that nothing else uses have room; the largest needs are placed first."""
    left = [{n: node["Resources"].get(n, 0) + 1e-6 for n in ("CPU", "GPU")} for node in nodes]
    for need in sorted(needs, key=lambda need: (-need.gpus, -need.cpus)):
        asks = need.resources()
        room = next((n for n in left if all(n[x] >= a for x, a in asks.items())), None)
        if room is None:
            return False
        for name, amount in asks.items():
            room[name] -= amount
    return True


def _places(
    group: PlacementGroup,
    needs: Sequence[_Need],
    workers_per_bundle: int,
    processes_per_rank: int,
) -> tuple[tuple[Place, ...], ...]:
    """Gives each rank the places of its workers: ranks fill node after node, this process's first.

    Ranks of different needs fill the nodes separately, each kind by itself.
    """
    table = placement_group_table(group)
    node_of = {int(bundle): node for bundle, node in table["bundles_to_node_id"].items()}
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    order = sorted(dict.fromkeys(node_of[b] for b in sorted(node_of)), key=lambda n: n != here)
    bundles = sorted(node_of, key=lambda bundle: (order.index(node_of[bundle]), bundle))
    seen: dict[str, int] = {}
    workers: dict[_Need, list[Place]] = {need: [] for need in needs}
    for bundle in bundles:
        node = nodes[node_of[bundle]]
        for _ in range(workers_per_bundle):
            index = seen.get(node["NodeID"], 0)
            seen[node["NodeID"]] = index + 1
            address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
            workers[needs[bundle]].append(Place(bundle, node["NodeID"], address, host, index))
    left = {need: iter(own) for need, own in workers.items()}
    of_ranks = needs[:: processes_per_rank // workers_per_bundle]
    return tuple(tuple(itertools.islice(left[n], processes_per_rank)) for n in of_ranks)


def _describe_needs(needs: Sequence[_Need], processes: int) -> str:
    """Describes in words what ranks need."""
    size = f" of {processes} processes" if processes > 1 else ""
    kinds = [
        f"{count} rank{'s' * (count > 1)}{size} with {_describe(need.resources())} each"
        for need, count in Counter(needs).items()
    ]
    return " and ".join(kinds)


def _describe(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{a:g} {n}" for n, a in resources.items() if n in ("CPU", "GPU") and a > 0)


def _describe_nodes(nodes: Sequence[Mapping[str, Any]], silent: Sequence[Mapping[str, Any]]) -> str:
    """Gives a line for each node: its resources, and the part that each placement group holds."""
    lines = {
        node["NodeID"]: f"  {node['NodeManagerAddress']} ({node['NodeManagerHostname']}): "
        f"{_describe(node['Resources']) or 'no CPU'}"
        for node in nodes
    }
    held: dict[tuple[str, str], dict[str, float]] = {}
    for group in placement_group_table().values():
        if group["state"] not in ("CREATED", "RESCHEDULING"):
            continue
        for bundle, node in group["bundles_to_node_id"].items():
            total = held.setdefault((node, group["name"] or group["placement_group_id"]), {})
            for name, amount in group["bundles"][bundle].items():
                total[name] = total.get(name, 0) + amount
    for (node, name), total in held.items():
        if node in lines:  # not one that has gone
            lines[node] += f"; {_describe(total)} held by the placement group {name}"
    for node in silent:
        lines[node["NodeID"]] = (
            f"  {node['NodeManagerAddress']} ({node['NodeManagerHostname']}): does not answer"
        )
    return "\n".join(lines.values())
