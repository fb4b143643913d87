"""Calls and backwards of a directory of evidence, decoded. All of it is checked, as what arrives over a network is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul._evidence.files import EvidenceName, EvidenceReader, UnusableError
from backhaul._evidence.objects import tensor_of
from backhaul_proto.v1 import evidence_pb2, tensor_pb2
from backhaul_runtime.errors import ProgramError, TransferError
from backhaul_runtime.program.codec import MAX_PROGRAM_BYTES, decode_program, decode_state
from backhaul_runtime.program.program import Program
from backhaul_runtime.tensors.layout import MAX_SPAN_BYTES, Layout
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.layout_codec import decode_layout

_MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class StoredCall:
    """A call, with all that its recomputation needs.

    Attributes:
        label: The name of the function or module.
        program: The program of the call.
        encoded: The encoding of the program.
        sources: The sources on the devices where they were in forward, each with its layout there.
        generator_states: One state for each draw; empty for one that the draw before has left.
        compared: The tensors of forward that are compared.
        compares_outputs: Whether these are the program's outputs, and not what autograd saved.
        uses: The number of contributions, and their layout, of each source, cast and output; None if no gradients come
            from a recomputation of the call.
        fingerprint: What the numbers of the trainer depended on.
        computes_on_host: Whether the facts about the CPU beside a GPU count.
        device: The device that the call ran on.
    """

    label: str
    program: Program
    encoded: bytes
    sources: Sequence[tuple[Tensor, Layout]]
    generator_states: Sequence[bytes]
    compared: Sequence[evidence_pb2.EvidenceCompared]
    compares_outputs: bool
    uses: Sequence[tuple[int, Layout]] | None
    fingerprint: Mapping[str, str]
    computes_on_host: bool
    device: torch.device

    @property
    def due(self) -> list[tuple[int, Layout]]:
        """The source and the layout of each contribution of a backward, in order."""
        return [(number, layout) for number, (count, layout) in enumerate(self.uses or ()) for _ in range(count)]


@dataclass(frozen=True, slots=True, eq=False)
class StoredBackward:
    """A backward of a call.

    Attributes:
        gradients: The gradients of the program's outputs, by the output's position, on the call's device.
        state: The ambient settings under which it ran.
        summed: The sources whose contributions were added up.
        contributions: What it has returned.
        worker: The address of the worker that computed it; empty for the trainer.
        has_other_bits: Whether that worker computes other bits than the trainer.
    """

    gradients: Mapping[int, Tensor]
    state: ambient_state.State
    summed: frozenset[int]
    contributions: Sequence[evidence_pb2.EvidenceContribution]
    worker: str
    has_other_bits: bool


def stored_call(reader: EvidenceReader, name: EvidenceName, message: evidence_pb2.EvidenceCall) -> StoredCall:
    """Returns a call.

    Args:
        reader: The reader of the directory with its files.
        name: The name of the call's file.
        message: What the file says.

    Raises:
        UnusableError: Something of it is missing, was changed, or can't be verified on this machine.
    """
    _check_place(name, (message.step, message.call))
    if message.why_missing:
        raise UnusableError(message.why_missing)
    origin = reader.message_object(message.origin, evidence_pb2.EvidenceOrigin)
    if origin.session != name.session:
        raise UnusableError(f"steps/{name} was written by the session {origin.session!r:.40}")
    encoded = reader.object(message.program, MAX_PROGRAM_BYTES)
    layouts = [_layout(source.spec) for source in message.sources]
    uses = [(use.count, _layout(use.spec)) for use in message.uses] if message.has_backwards else None
    device = _device(layouts)
    try:
        program = decode_program(encoded, device)
    except ProgramError as error:
        raise UnusableError(f"its program is refused: {error.message}") from None
    if len(layouts) != len(program.sources):
        raise UnusableError(f"its program has {len(program.sources)} sources, and {len(layouts)} are there")
    expected = len(program.outputs) if message.compares_outputs else program.saved_count
    if len(message.compared) != expected:
        raise UnusableError(
            f"its program computes {expected} tensors to compare, and {len(message.compared)} are there"
        )
    if without := [number for number, one in enumerate(message.compared) if not one.digest]:
        raise UnusableError(f"forward has no digest of the tensors {without[:8]}, so they can't be compared")
    if uses is not None and len(uses) != len(program.sources) + len(program.casts) + len(program.outputs):
        raise UnusableError(f"steps/{name} says of {len(uses)} sources, casts and outputs how they are used")
    return StoredCall(
        label=message.name,
        program=program,
        encoded=encoded,
        sources=[
            (_tensor(reader, source.object, layout, device), layout)
            for source, layout in zip(message.sources, layouts, strict=True)
        ],
        generator_states=[
            reader.object(state, _MAX_STATE_BYTES) if state else b"" for state in message.generator_states
        ],
        compared=message.compared,
        compares_outputs=message.compares_outputs,
        uses=uses,
        fingerprint=dict(origin.fingerprint),
        computes_on_host=message.computes_on_host,
        device=device,
    )


def stored_backward(reader: EvidenceReader, name: EvidenceName, call: StoredCall) -> StoredBackward:
    """Returns a backward of a call. Raises UnusableError as `stored_call` does.

    Args:
        reader: The reader of the directory with its files.
        name: The name of the backward's file.
        call: The call to which the backward belongs.
    """
    message = reader.message(name, evidence_pb2.EvidenceBackward)
    _check_place(name, (message.step, message.call, message.number))
    if message.why_missing:
        raise UnusableError(message.why_missing)
    try:
        state = decode_state(message.ambient_state)
    except ProgramError as error:
        raise UnusableError(f"the settings of backward {name.backward} are refused: {error.message}") from None
    positions = [gradient.output for gradient in message.gradients]
    if len({*positions}) < len(positions) or any(position >= len(call.program.outputs) for position in positions):
        raise UnusableError(f"steps/{name} has gradients of the outputs {positions[:8]}")
    if [one.source for one in message.contributions] != [source for source, _ in call.due]:
        raise UnusableError(f"steps/{name} has other gradients than the call's graph uses")
    return StoredBackward(
        gradients={
            gradient.output: _tensor(reader, gradient.tensor.object, _layout(gradient.tensor.spec), call.device)
            for gradient in message.gradients
        },
        state=state,
        summed=frozenset(message.summed_sources),
        contributions=message.contributions,
        worker=message.worker,
        has_other_bits=message.has_other_bits,
    )


def _check_place(name: EvidenceName, numbers: tuple[int, ...]) -> None:
    """Raises UnusableError for a file that has the name of another one."""
    if numbers != tuple([name.step, name.call, name.backward][: len(numbers)]):
        raise UnusableError(f"steps/{name} is the file of another place: it says {'-'.join(map(str, numbers))}")


def _layout(spec: tensor_pb2.TensorSpec) -> Layout:
    try:
        return decode_layout(spec)
    except TransferError as error:
        raise UnusableError(f"a layout is refused: {error.message}") from None


def _device(layouts: Sequence[Layout]) -> torch.device:
    """Returns the device that a call ran on. Raises UnusableError if this machine has none of its kind."""
    kind = next((layout.device for layout in layouts if layout.device != "cpu"), "cpu")
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise UnusableError(f"it ran on {kind}, and this machine has no such device that backhaul can use")
    return torch.device(kind)


def _tensor(reader: EvidenceReader, digest: bytes, layout: Layout, device: torch.device) -> Tensor:
    size_bytes = layout.payload_bytes
    return tensor_of(reader.object(digest, min(size_bytes, MAX_SPAN_BYTES), size_bytes), layout, device)
