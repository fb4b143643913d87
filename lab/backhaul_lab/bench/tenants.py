"""Compares a worker with 8 clients with the same worker with one client, of one credential and of two."""

import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from backhaul.demo.model import Block
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.tenant_client import CLIENT_S
from backhaul_lab.harness.processes import MODULE, ChildProcess
from backhaul_lab.harness.rounds import Alternative, Plan, Rounds, interleave, ratio_of
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import SMALL, WIDTH, compare_gradients
from backhaul_proto.v1 import program_pb2, segment_pb2, tensor_pb2
from backhaul_runtime.process.credentials import make_token
from backhaul_runtime.program.codec import address_of_program, encode_program, encode_state
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.tensors.digest import content_digest, tensor_address
from backhaul_runtime.tensors.layout import copy_exact, layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.splicing import encode_all
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver

CLIENTS = 8
LEAST_WORK_S = 0.010
PLAN = Plan(most=20, warm=1, limit_s=40.0)
_ANSWER_S = 60.0


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figures tenants and tenants_fair."""
    address = stage.tcp_worker()
    with TemporaryDirectory(prefix="backhaul-bench-") as directory:
        gradient = prepare(Path(directory))
        command = [*MODULE, "backhaul_lab.bench.tenant_client", address, directory]
        clients = [stage.start(command, stage.trainer)[0] for _ in range(CLIENTS)]
        received = answer(Path(directory))
        compare_gradients("a client and the trainer", [received], [gradient])
    fairness: list[float] = []

    def alone() -> float:
        return sum(_counts(clients[:1])) / CLIENT_S

    def together() -> float:
        answered = _counts(clients)
        fairness.append(min(answered) / max(answered))
        return sum(answered) / CLIENT_S

    rounds = interleave([Alternative("alone", alone), Alternative("together", together)], stage.cores, PLAN)
    work_s = 1 / rounds.spread(lambda taken: taken["alone"]).value
    if work_s < LEAST_WORK_S:
        raise RuntimeError(
            f"a request takes {work_s * 1e3:.1f} ms, which is too little work to measure a worker under load"
        )
    shares = Rounds()
    for (_, is_quiet), fair in zip(rounds.measured, fairness[PLAN.warm :], strict=True):
        shares.add({"fair": fair}, is_quiet=is_quiet)
    return [
        of_rounds("tenants", rounds, ratio_of("together", "alone")),
        of_rounds("tenants_fair", shares, lambda taken: taken["fair"]),
    ]


def measure_credentials(stage: Stage) -> list[Outcome]:
    """Measures the figure credentials_p99."""
    with TemporaryDirectory(prefix="backhaul-bench-") as directory:
        folder = Path(directory)
        prepare(folder)
        for name in ("few", "many"):
            make_token(folder / name)
        (folder / "credentials").write_text(
            "".join(f'[{name}]\ntoken_files = ["{name}"]\n' for name in ("few", "many"))
        )
        address = stage.tcp_worker("--credentials", str(folder / "credentials"))
        command = [*MODULE, "backhaul_lab.bench.tenant_client", address, directory]
        names = ["few", *["many"] * CLIENTS]
        clients = [stage.start([*command, str(folder / name)], stage.trainer)[0] for name in names]
        rounds = interleave(
            [
                Alternative("alone", lambda: _requests(clients[:1])[0][1]),
                Alternative("beside", lambda: _requests(clients)[0][1]),
            ],
            stage.cores,
            PLAN,
        )
    return [of_rounds("credentials_p99", rounds, ratio_of("beside", "alone"))]


def _counts(clients: Sequence[ChildProcess]) -> list[int]:
    """Returns how many requests of each client were answered."""
    return [count for count, _ in _requests(clients)]


def _requests(clients: Sequence[ChildProcess]) -> list[tuple[int, float]]:
    """Returns what each client prints for a window of CLIENT_S. All clients begin at the same time."""
    begin = time.time() + 0.05
    for client in clients:
        client.write(str(begin))
    lines = [client.read(_ANSWER_S).split() for client in clients]
    return [(int(count), float(slowest_s)) for count, slowest_s in lines]


def prepare(directory: Path) -> Tensor:
    """Writes the messages with which a client without torch requests a block's backward. Returns the exact gradient."""
    torch.manual_seed(0)
    block = Block(WIDTH, dropout=0.0).requires_grad_(False)
    x = torch.randn(*SMALL, WIDTH, requires_grad=True)
    gradient = torch.randn(*SMALL, WIDTH)

    def pack(tensor: Tensor) -> Tensor:
        recorder.note_saved(tensor)
        return tensor

    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout), pack)
    with saved_tensors_hooks(pack, lambda tensor: tensor), recorder:
        y = block(x)
    recorded = recorder.finish([y])
    assert recorded is not None, recorder.recording.refusal
    program = encode_program(recorded)
    sources = recorder.recording.sources
    layout = layout_of(gradient)
    address = tensor_address(layout, content_digest(gradient, layout))
    outgoing = {source.address: OutgoingTensor(source.value, source.layout, source.address) for source in sources}
    outgoing[address] = OutgoingTensor(gradient, layout, address)
    messages = {
        "program": program_pb2.PutProgramRequest(program=program),
        "segment": segment_pb2.SaveRequest(
            program=address_of_program(program),
            sources=[source.address for source in sources],
            generator_states=recorder.recording.generator_states,
            name="block",
        ),
        "backward": segment_pb2.BackwardRequest(
            start=segment_pb2.Start(
                gradients=[segment_pb2.OutputGradient(output=0, tensor=address)],
                ambient_state=encode_state(ambient_state.capture()),
            ),
            expected_s=0.05,
        ),
    }
    for name, message in messages.items():
        (directory / name).write_bytes(message.SerializeToString())
    empty = tensor_pb2.PutTensorsRequest()
    for number, data in enumerate(encode_all(batches(outgoing.values()), empty.TENSORS_FIELD_NUMBER, empty)):
        (directory / f"tensors-{number:04}").write_bytes(data)
    (expected,) = torch.autograd.grad(y, x, gradient)
    return expected


def answer(directory: Path) -> Tensor:
    """Returns the gradient that a client received."""
    receiver = TensorReceiver()
    for path in sorted(directory.glob("answer-*")):
        receiver.add(segment_pb2.Answer.FromString(path.read_bytes()).tensors)
    return reduce(torch.add, receiver.tensors())  # One gradient per use of the input, of which there are two.
