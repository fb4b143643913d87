"""Trainers, workers and the connections between them."""

from backhaul_server.dashboard.collect.links import RATE_S, LinkRecord
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import Watched
from backhaul_server.dashboard.schemas.network import NodeState, Topology, TopologyLink, TopologyNode, run_id, worker_id

SHOWN_S = 300.0
"""Seconds for which a run that has ended or fallen silent stays in the picture."""


def topology(watch: Watch, now_s: float) -> Topology:
    """Returns all workers, the trainers that were heard lately, and the links between them."""
    runs = [run for run in watch.trainers if now_s - run.heard_at_s <= SHOWN_S]
    nodes = {
        worker.address.text: _worker(worker.address.text, worker.state, worker.answered_at_s)
        for worker in watch.workers
    }
    links = []
    for run in runs:
        matched = watch.workers_of(run)
        for address in sorted({*matched, *run.about.workers, *run.links}):
            worker = matched.get(address)
            shown = worker.address.text if worker is not None else address
            nodes.setdefault(shown, _worker(shown, "unwatched", 0.0))
            links.append(_link(run, shown, run.links.get(address), worker, now_s))
    return Topology(at_s=now_s, nodes=[*nodes.values(), *(_trainer(run, now_s) for run in runs)], links=links)


def _worker(address: str, state: NodeState, seen_at_s: float) -> TopologyNode:
    return TopologyNode(
        id=worker_id(address),
        kind="worker",
        label=address,
        state=state,
        seen_at_s=seen_at_s,
        run="",
        rank=0,
        world_size=0,
    )


def _trainer(run: TrainerRun, now_s: float) -> TopologyNode:
    return TopologyNode.of(
        run.about,
        id=run_id(run.id),
        kind="trainer",
        label=run.about.name or run.about.trainer or run.id,
        state=run.state(now_s),
        seen_at_s=run.heard_at_s,
        run=run.id,
    )


def _link(run: TrainerRun, address: str, link: LinkRecord | None, worker: Watched | None, now_s: float) -> TopologyLink:
    trainer = run_id(run.id)
    ends = {"id": f"{trainer} {worker_id(address)}", "trainer": trainer, "worker": worker_id(address)}
    is_unreachable = worker is not None and worker.state == "unreachable"
    if link is None:
        return TopologyLink.of(**ends, state="broken" if is_unreachable else "idle")
    up, down = link.rates(now_s)
    # Where reports that are missing may just not have reached the dashboard, their rate is unknown instead of zero.
    is_rate_known = not is_unreachable or now_s - link.heard_at_s <= RATE_S
    is_lost = not link.last.connected and run.state(now_s) == "running"
    return TopologyLink.of(
        link.clock,
        **ends,
        up_bytes_per_s=up if is_rate_known else None,
        down_bytes_per_s=down if is_rate_known else None,
        up_bytes=link.last.up_bytes,
        down_bytes=link.last.down_bytes,
        measured_at_s=link.heard_at_s,
        state="broken" if is_unreachable or is_lost else "active" if up or down else "idle",
    )
