"""Starts, asks and ends the workers of fleets, in a process that has joined the Ray cluster (NOTE [Fleets])."""

from collections.abc import Iterable, Mapping
from time import monotonic, sleep
from typing import Any

from backhaul_runtime.process.ray_fleet import NAMESPACE, actor_name, actor_of, fleets
from backhaul_server.fleet.spec import WorkerSpec
from backhaul_server.fleet.worker_actor import FleetWorker, FleetWorkerStatus
from backhaul_server.worker.config import DRAIN_S, END_S

ANSWER_S = 3.0
"""Seconds that actors have to answer."""
_POLL_S = 0.25
_LATE_S = 10.0
"""Seconds that an actor may need beyond those that its worker needs to drain."""

Actors = Mapping[int, Any]
"""Handles of a fleet's actors, by the numbers of the workers."""


def actors_of(fleet: str) -> Actors:
    """Returns the actors that there are now."""
    workers = {number: actor_of(fleet, number) for number in fleets().get(fleet, [])}
    return {number: actor for number, actor in workers.items() if actor is not None}


def start(fleet: str, numbers: Iterable[int], spec: WorkerSpec) -> Actors:
    """Creates actors, which Ray places when it has the resources. Raises ValueError if one of them exists already."""
    import ray

    kind = ray.remote(FleetWorker)
    return {
        number: kind.options(
            name=actor_name(fleet, number),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            scheduling_strategy="SPREAD",
        ).remote(actor_name(fleet, number), spec)
        for number in numbers
    }


def statuses(fleet: str, actors: Actors) -> list[FleetWorkerStatus]:
    """Asks all actors at once. One that does not answer within `ANSWER_S` is pending."""
    import ray

    questions = {number: actor.status.remote() for number, actor in actors.items()}
    if questions:
        ray.wait(list(questions.values()), num_returns=len(questions), timeout=ANSWER_S)
    workers = []
    for number, question in sorted(questions.items()):
        try:
            workers.append(ray.get(question, timeout=0))
        except ray.exceptions.GetTimeoutError:
            trouble = "Ray has not placed its actor yet, or is restarting it: see `ray status`"
            workers.append(FleetWorkerStatus(actor_name(fleet, number), "pending", trouble=trouble))
        except ray.exceptions.RayError as error:
            trouble = " ".join(str(error).split())
            workers.append(FleetWorkerStatus(actor_name(fleet, number), "pending", trouble=trouble))
    return workers


def wait_until_settled(fleet: str, actors: Actors, timeout_s: float) -> list[FleetWorkerStatus]:
    """Waits until each worker serves or has failed to start. Returns the statuses at the end, or after the timeout."""
    deadline = monotonic() + timeout_s
    while True:
        workers = statuses(fleet, actors)
        if all(status.state in {"serving", "restarting"} for status in workers) or monotonic() >= deadline:
            return workers
        sleep(_POLL_S)


def spec_of(actors: Actors) -> WorkerSpec | None:
    """Returns what the workers were started with; None if no actor answers."""
    import ray

    answered, _ = ray.wait([actor.spec.remote() for actor in actors.values()], timeout=ANSWER_S)
    try:
        return ray.get(answered[0]) if answered else None
    except ray.exceptions.RayError:
        return None


def drain(fleet: str, actors: Actors, grace_s: float) -> list[str]:
    """Drains workers and waits until their actors are gone. Kills actors that do not answer or do not end in time.

    A worker ends with its actor, so a kill is only less considerate.

    Args:
        fleet: The name of the fleet.
        actors: The actors to drain.
        grace_s: Seconds in which trainers may use what the workers hold, after they were told to use others.

    Returns:
        The names of the workers whose actors were killed.
    """
    import ray

    questions = {actor.drain.remote(grace_s): number for number, actor in actors.items()}
    answered, _ = ray.wait(list(questions), num_returns=len(questions), timeout=ANSWER_S)
    draining = {questions[question] for question in answered}
    deadline = monotonic() + grace_s + DRAIN_S + END_S + _LATE_S
    while monotonic() < deadline and draining.intersection(fleets().get(fleet, [])):
        sleep(_POLL_S)
    killed = [number for number in fleets().get(fleet, []) if number in actors]
    for number in killed:
        ray.kill(actors[number], no_restart=True)
    return [actor_name(fleet, number) for number in killed]
