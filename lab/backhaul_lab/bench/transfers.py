"""Compares transfers of 64 MiB tensors over TCP, to a worker and back, with bare gRPC streams and a bare socket."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from backhaul import Session, Settings
from backhaul_lab.bench.bare import TENSOR_BYTES, BareGrpc, BareTcp
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.overlap import Lane, reported_calls, spans
from backhaul_lab.harness.core_times import Core, settle
from backhaul_lab.harness.processes import MODULE
from backhaul_lab.harness.rounds import Alternative, Plan, Rounds, interleave, ratio_of
from backhaul_lab.harness.stage import OVER_TCP, Stage
from backhaul_lab.harness.training import compare_gradients

REPEATS = 4
"""Transfers timed together, because one alone is too short to detect disturbances."""
PLAN = Plan(most=20, warm=2, limit_s=35.0)
# The worker tunes its allocator itself. The baseline gets the same tuning, so that the comparison is fair.
KEEPS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "268435456"}
# Autograd saves this one number instead of a tensor, and only the tensors have gradients.
_SCALE = torch.tensor(2.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the save_ and fetch_ figures.

    Each is the baseline's time for a tensor over Backhaul's, so it is Backhaul's bandwidth over the baseline's.
    """
    session = stage.session(stage.tcp_worker(), returns="gradients", settings=Settings(**OVER_TCP))
    _, ports = stage.start([*MODULE, "backhaul_lab.bench.bare"], environment=KEEPS_FREED_MEMORY)
    grpc_port, tcp_port = map(int, ports.split())
    bare, tcp = BareGrpc(grpc_port), BareTcp(tcp_port)
    x = torch.randn(TENSOR_BYTES // 4, requires_grad=True)
    bare_transfers = {"grpc_put": bare.put, "grpc_get": bare.get, "tcp_put": tcp.put, "tcp_get": tcp.get}
    variants = [
        Alternative("backhaul", there_and_back(session, [x], stage.cores, REPEATS)),
        *(Alternative(name, _repeated(transfer, stage)) for name, transfer in bare_transfers.items()),
    ]
    rounds = interleave(variants, stage.cores, PLAN)
    bare.close()
    tcp.close()
    rounds = with_spans(rounds, session.workers, PLAN.warm, REPEATS)
    note = f"TCP's congestion control is {tcp.congestion_control}"
    return [
        of_rounds("save_vs_grpc", rounds, ratio_of("grpc_put", "save")),
        of_rounds("fetch_vs_grpc", rounds, ratio_of("grpc_get", "fetch")),
        of_rounds("save_vs_tcp", rounds, ratio_of("tcp_put", "save"), note),
        of_rounds("fetch_vs_tcp", rounds, ratio_of("tcp_get", "fetch"), note),
    ]


def there_and_back(
    session: Session, tensors: Sequence[Tensor], cores: Sequence[Core] = (), repeats: int = 1
) -> Callable[[], None]:
    """Returns a function that sends new contents of tensors to a worker, gets their gradients back, and compares these.

    Args:
        session: The session with the worker.
        tensors: Tensors whose memory is used, and overwritten.
        cores: Cores whose processes become idle between the phases, so that none slows another; none to go on at once.
        repeats: How often that is done.
    """
    weights = nn.ParameterList(tensors)  # what a function captures in a list is not predicted, in a module it is

    def scaled() -> Tensor:
        if cores:
            settle(cores)  # The predicted upload ends before forward begins.
        return torch.stack([(x * _SCALE).sum() for x in weights]).sum()

    def transfer() -> None:
        for _ in range(repeats):
            with torch.no_grad():
                for x in weights:
                    x.add_(1.0)  # New contents, because the worker already stores the old ones.
                    x.grad = None
            y: Tensor = session.checkpoint(scaled)
            if cores:
                settle(cores)
            y.backward()  # type: ignore[no-untyped-call]
            compare_gradients("the transfer", [x.grad for x in weights], [torch.full_like(x, 2.0) for x in weights])

    return transfer


def _repeated(transfer: Callable[[], float], stage: Stage) -> Callable[[], float]:
    def after_settling() -> float:
        settle(stage.cores)  # As Backhaul's transfers do, because TCP is slower after a pause.
        return transfer()

    return lambda: sum(after_settling() for _ in range(REPEATS))


def with_spans(rounds: Rounds, worker: str, warm: int, repeats: int) -> Rounds:
    """Returns the rounds with the upload and download times that the session reported, as "save" and "fetch".

    Args:
        rounds: Rounds in which calls of the session were timed.
        worker: Address of the session's worker.
        warm: Number of warm-up rounds before them.
        repeats: Number of calls in each round.
    """
    calls = reported_calls(worker)[warm * repeats :]
    with_transfers = Rounds()
    for number, (taken, is_quiet) in enumerate(rounds.measured):
        round_calls = calls[number * repeats : (number + 1) * repeats]
        saved_s = sum(end - begin for call in round_calls for begin, end in spans(call, Lane.LANE_UPLOAD))
        fetched_s = sum(end - begin for call in round_calls for begin, end in spans(call, Lane.LANE_DOWNLOAD))
        with_transfers.add({**taken, "save": saved_s, "fetch": fetched_s}, is_quiet=is_quiet)
    return with_transfers
