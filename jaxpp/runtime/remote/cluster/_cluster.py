"""Places for a mesh's workers on the nodes of a Ray session, reserved all at once.

A worker is a process of a rank; a rank has one worker, or several of the same size.
"""

import concurrent.futures
import dataclasses
import itertools
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from jaxpp.runtime.remote.cluster._session import Session, answers, reopen_session

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
    """

    bundle: int
    node_id: str
    address: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Room for the workers of a mesh, held until `release_places`.

    Args:
        group: the placement group.
        places: for each rank, the place of each of its workers. Ranks fill node after node.
        cpus: CPUs of a worker.
        gpus: GPUs of a worker, or the part of one that it has.
    """

    group: PlacementGroup
    places: tuple[tuple[Place, ...], ...]
    cpus: float
    gpus: float


_numbers = itertools.count()


def reserve_places(
    session: Session,
    num_ranks: int,
    *,
    gpus_per_rank: float = 0,
    cpus_per_rank: float | None = None,
    processes_per_rank: int = 1,
    timeout: float = RESERVE_TIMEOUT,
    lost: Sequence[str] = (),
) -> Reservation:
    """Reserves room for all workers of a mesh at once, or for none.

    Each rank has its workers on one node where the nodes have room for all ranks in this way. Else
    ranks fill node after node, and some have workers on two.

    Args:
        session: the session, from `join_session`.
        num_ranks: as for `RemoteMpmdMesh`, as the next three are.
        gpus_per_rank: of a whole rank.
        cpus_per_rank: next to nothing by default in a session of our own, so that ranks may be more
            than a laptop's cores.
        processes_per_rank: workers of a rank, which share its CPUs and GPUs evenly.
        timeout: seconds to wait for what others hold.
        lost: descriptions of nodes that the ranks were on before, for errors.

    Raises:
        ValueError: if the session is too small, says what was asked for and what is there.
        TimeoutError: if it is large enough, but others hold too much of it for `timeout` seconds.
    """
    processes, gpus = processes_per_rank, gpus_per_rank
    cpus = processes * (UNCOUNTED_CPU if session.started else 1)
    cpus = cpus if cpus_per_rank is None else cpus_per_rank
    _check_request(processes, cpus, gpus)
    nodes, silent = _nodes()
    # Ray does not tell at once that bundles do not fit together, nor which of two ways does.
    whole = _resources(cpus, gpus)
    parts = 1 if _room(whole, nodes) >= num_ranks else processes
    bundles = [_resources(cpus / parts, gpus / parts)] * (parts * num_ranks)
    asked = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    asked += f" of {processes} processes" * (processes > 1) + f" with {_describe(whole)} each"
    there = f"The Ray session at {session.address}"
    if _room(bundles[0], nodes) < len(bundles):
        start = f"with `ray start --address={session.address}`"
        what, way = "is", f"Add a node {start}, or ask for less (several ranks share a GPU with "
        way += "gpus_per_rank=0.5, a core with cpus_per_rank=0.5)."
        if gpus and not any(node["Resources"].get("GPU") for node in nodes):
            way = "Ray sees no GPU: take gpus_per_rank=0, with which ranks run on CPU, or add a "
            way += f"node that has GPUs {start}."
        if lost:
            what = f"has lost {' and '.join(lost)}, and what is left is"
            way = f"Start Ray there again {start} and call mesh.restart() again, or load the last "
            way += "checkpoint on a new mesh of fewer ranks."
        found = _describe_nodes(nodes, silent)
        raise ValueError(f"{there} {what} too small for {asked}. It has:\n{found}\n{way}")
    # The name tells other waiting processes who holds the resources.
    name = f"jaxpp-{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
    names = ",".join(node["NodeID"] for node in silent)
    avoid = {"ray.io/node-id": f"!in({names})"} if silent else {}
    group = placement_group(bundles, "PACK", name, bundle_label_selector=[avoid] * len(bundles))
    try:
        if not group.wait(timeout):
            raise TimeoutError(
                f"{there} has no room for {asked}, and had none for {timeout:g} s. It has:\n"
                f"{_describe_nodes(nodes, silent)}\n"
                f"Shut down the mesh that holds it (mesh.shutdown()), or ask for less."
            )
        workers = _workers(group, processes // parts)
    except BaseException:
        remove_placement_group(group)
        raise
    places = tuple(workers[n : n + processes] for n in range(0, len(workers), processes))
    return Reservation(group, places, cpus / processes, gpus / processes)


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
    there = {node["NodeID"] for node in _nodes()[0]}
    lost = [
        f"the node {node.address} ({node.host}), which had rank {rank}"
        for rank, own in enumerate(reservation.places)
        for node in dict.fromkeys(dataclasses.replace(place, bundle=0) for place in own)
        if node.node_id not in there
    ]
    if not lost and placement_group_table(reservation.group).get("state") == "CREATED":
        return reservation
    if session.started and not there:
        reopen_session(session)
    else:
        release_places(reservation)
    processes = len(reservation.places[0])
    return reserve_places(
        session,
        len(reservation.places),
        gpus_per_rank=reservation.gpus * processes,
        cpus_per_rank=reservation.cpus * processes,
        processes_per_rank=processes,
        lost=lost,
    )


def _nodes() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the nodes of the session that answer, and those that only Ray believes to be there.

    Ray takes up to a minute to see that a node has crashed or is cut off, and would place workers
    there meanwhile.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in nodes]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(nodes))) as pool:
        found = list(zip(nodes, pool.map(answers, addresses), strict=True))
    return [node for node, there in found if there], [node for node, there in found if not there]


def _check_request(processes: int, cpus: float, gpus: float) -> None:
    if cpus <= 0 or gpus < 0:
        raise ValueError(f"A rank takes some CPU and no less than no GPU, got {cpus} and {gpus}.")
    share = gpus / processes
    if share > 1 and share % 1:
        fewer = int(share) * processes
        raise ValueError(
            f"A process has a part of one GPU or whole GPUs, got {gpus:g} GPUs for a rank of "
            f"{processes}; use {fewer} or {fewer + processes}."
        )


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}


def _room(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many such bundles fit on nodes that nothing else uses."""
    there = [node["Resources"] for node in nodes]
    return sum(min(int((own.get(n, 0) + 1e-6) / a) for n, a in bundle.items()) for own in there)


def _workers(group: PlacementGroup, each: int) -> tuple[Place, ...]:
    """Returns the places of all workers, `each` in a bundle: node after node, this process's first.

    So the workers of a rank, and neighbouring ranks, are together.
    """
    node_of = {int(b): n for b, n in placement_group_table(group)["bundles_to_node_id"].items()}
    here = ray.get_runtime_context().get_node_id()
    order = sorted(dict.fromkeys(node_of[b] for b in sorted(node_of)), key=lambda n: n != here)
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    places: list[Place] = []
    for number in sorted(node_of, key=lambda b: (order.index(node_of[b]), b)):
        node = nodes[node_of[number]]
        where = node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]
        places += [Place(number, *where)] * each
    return tuple(places)


def _describe(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{a:g} {n}" for n, a in resources.items() if n in ("CPU", "GPU") and a > 0)


def _describe_nodes(nodes: Sequence[Mapping[str, Any]], silent: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each node: its resources, and the part that each placement group holds."""
    held: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for group in placement_group_table().values():
        if group["state"] in ("CREATED", "RESCHEDULING"):
            for bundle, node in group["bundles_to_node_id"].items():
                name = group["name"] or group["placement_group_id"]
                held[node, name].update(group["bundles"][bundle])
    lines = []
    for node in (*nodes, *silent):
        line = f"  {node['NodeManagerAddress']} ({node['NodeManagerHostname']}): "
        line += "does not answer" if node in silent else _describe(node["Resources"]) or "no CPU"
        for (holder, name), total in held.items():
            if holder == node["NodeID"] and node not in silent:
                line += f"; {_describe(total)} held by the placement group {name}"
        lines.append(line)
    return "\n".join(lines) or "  no node"
