"""Measures a model and its workers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from backhaul._config import Config
from backhaul.doctor.profile.costs import PlainProfile, SegmentTimes
from backhaul.doctor.profile.disturbance import disturbed_share, times
from backhaul.doctor.profile.link import LinkMeasurement, LinkProfile
from backhaul.doctor.profile.observed import ObservedSession
from backhaul.doctor.profile.plain import ROUNDS, PlainMeasurement
from backhaul.doctor.profile.remote import (
    RemoteMeasurement,
    compute_threads,
    has_free_transport,
)
from backhaul.doctor.profile.target import Target
from backhaul_runtime.errors import BackhaulError, SettingError, WorkerLostError
from backhaul_runtime.process.fingerprint import differences, fingerprint


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """A worker, and what it does with a model.

    Attributes:
        address: The address that `connect` took; empty for a worker that the session started.
        version: The worker's version of Backhaul.
        memory_bytes: The memory budget, in bytes.
        differences: What differs between the fingerprints, each with the trainer's value and the worker's.
        link: The link; None if the worker did not run the segments that measure it.
        segment_times: The costs of segments of one length or of two.
        graph_times: The costs of segments of one layer with graphs="eager"; None if these were not measured.
        compile_s: Seconds that torch.compile took for these.
    """

    address: str
    version: str
    memory_bytes: int
    differences: dict[str, tuple[str, str]]
    link: LinkProfile | None
    segment_times: tuple[SegmentTimes, ...]
    graph_times: SegmentTimes | None = None
    compile_s: float = 0.0

    @property
    def crosses_network(self) -> bool:
        """Whether the worker is reached over TCP."""
        return self.link is not None and self.link.crosses_network

    def speed(self, plain: PlainProfile) -> float:
        """Returns the speed relative to the trainer; 0 if the worker computed no backward."""
        times = self.segment_times[-1]
        took_s = times.replay_s + times.replay_backward_s
        if not times.replay_backward_s or took_s <= 0:
            return 0.0
        layers = plain.layers / times.segments
        return layers * (plain.forward_s + plain.backward_s) / took_s


@dataclass(frozen=True, slots=True)
class ModelMeasurement:
    """A measured model and its workers.

    Attributes:
        plain: What the model costs on the trainer alone.
        workers: The workers, at least one.
        disturbed: The share of the time in which other programs had the core of a computing thread, from 0 to 1.
    """

    plain: PlainProfile
    workers: tuple[WorkerProfile, ...]
    disturbed: float = 0.0

    @property
    def has_free_transport(self) -> bool:
        """Whether sending to the first worker and receiving from it leave the cores that compute free."""
        # A worker on this machine takes the cores that would be free otherwise.
        return has_free_transport() and self.workers[0].crosses_network


def measure_model(
    target: Target,
    config: Config,
    rounds: int = ROUNDS,
    *,
    with_graphs: bool = False,
    on_part: Callable[[str], None] = lambda part: None,
) -> ModelMeasurement:
    """Measures a model without a worker, and then with each worker by itself.

    Args:
        target: The model to measure. Its parameters are changed a little.
        config: The settings of the sessions. `worker` names the workers; empty starts one on this machine.
        rounds: Number of measured steps of each kind.
        with_graphs: Whether segments are also measured with graphs="eager".
        on_part: Called at the beginning of each part of the measurement, with its name.

    Raises:
        BackhaulError: A worker cannot be used.
        SettingError: The model raises an error.
    """
    before = times()
    plain = PlainMeasurement(target)
    on_part("the model without a worker")
    with _named(target):
        plain.run(rounds)
    computing = compute_threads()
    workers = tuple(
        _measure_worker(one, target, plain, computing, rounds, with_graphs, on_part) for one in _each(config)
    )
    return ModelMeasurement(plain.profile(), workers, disturbed_share(before, times()))


def _measure_worker(
    config: Config,
    target: Target,
    plain: PlainMeasurement,
    computing: frozenset[int],
    rounds: int,
    with_graphs: bool,
    on_part: Callable[[str], None],
) -> WorkerProfile:
    """Measures a worker, and what a segment of a model costs.

    Args:
        config: The settings of the session with one worker.
        target: The model to measure. Its parameters are changed a little.
        plain: What the model costs without a worker. It is measured again after each length of segments.
        computing: What `compute_threads` returned before the session was opened.
        rounds: Number of measured steps of each length of segments.
        with_graphs: Whether segments of one layer are also measured with graphs="eager".
        on_part: Called at the beginning of each part of the measurement, with its name.

    Raises:
        BackhaulError: The worker cannot be used.
        SettingError: The model raises an error.
    """
    device, where = target.device, f"worker {config.worker}" if config.worker else "a worker on this machine"
    on_part(f"the link to {where}")
    measured: list[RemoteMeasurement] = []
    with ObservedSession(replace(config, returns="gradients", telemetry=True)) as session:
        worker_session = session._workers[0].connection.up
        if worker_session is None:
            raise WorkerLostError(f"worker {config.worker} takes no session: {session._workers[0].connection.why_down}")
        link = LinkMeasurement(session, device)
        link.run()
        for length in dict.fromkeys((1, max(1, len(target.layers) // 2))):
            measured.append(remote := RemoteMeasurement(target, session, length, computing))
            on_part(f"segments of {length} of {len(target.layers)} layers on {where}")
            with _named(target):
                remote.run(rounds)
                plain.run(rounds)
        graphs = RemoteMeasurement(target, session, 1, computing, "eager") if with_graphs else None
        if graphs is not None:
            on_part(f'segments of one layer on {where}, with graphs="eager"')
            with _named(target):
                graphs.run(rounds)
                plain.run(rounds)
        compile_s = sum(segment.compile_s for segment in session.report().segments)
    times = [remote.times(plain.profile()) for remote in measured]
    # Layers that cannot be joined are measured once.
    distinct = {one.segments: one for one in reversed(times)}
    return WorkerProfile(
        config.worker,
        worker_session.version,
        worker_session.budget_bytes,
        differences(fingerprint(device), worker_session.fingerprint),
        link.profile(),
        tuple(reversed(distinct.values())),
        None if graphs is None else graphs.times(plain.profile()),
        compile_s,
    )


def _each(config: Config) -> list[Config]:
    """Returns the settings for each worker by itself."""
    addresses = [address.strip() for address in config.worker.split(",") if address.strip()]
    files = [file.strip() for file in config.token_file.split(",") if file.strip()]
    if len(addresses) < 2:  # noqa: PLR2004  one worker, which may be one that the session starts
        return [config]
    if len(files) not in {0, 1, len(addresses)}:
        raise SettingError(f"{len(files)} token files were given for {len(addresses)} workers")
    return [
        replace(config, worker=address, token_file=files[number if len(files) > 1 else 0] if files else "")
        for number, address in enumerate(addresses)
    ]


@contextmanager
def _named(target: Target) -> Iterator[None]:
    """Turns an error that the user's model raises into a message that names it."""
    try:
        yield
    except BackhaulError:
        raise
    except Exception as error:  # the model may raise anything
        first = next(iter(str(error).splitlines()), "")
        raise SettingError(f"--model {target.name}: the model raised {type(error).__name__}: {first}") from error
