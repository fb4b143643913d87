"""Recomputation on the trainer: by the program where there is one, else by calling the function again."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from backhaul._value_check import CheckpointError, check_digests, check_values, with_traces
from backhaul_runtime import ambient
from backhaul_runtime.digest import address_of
from backhaul_runtime.errors import StaleTensorError, UnsupportedTensorError
from backhaul_runtime.generators import default_generator
from backhaul_runtime.layout import ALIGNMENT_BYTES, copy_exact, layout_of, unsupported_reason, view_at
from backhaul_runtime.op_list import allowed_ops
from backhaul_runtime.op_rules import hides_write
from backhaul_runtime.program import Program
from backhaul_runtime.recorder import Recorder
from backhaul_runtime.recording import RecordedSource, Recording, version_of
from backhaul_runtime.replay import Contribution, Replay, Saved, entry, isolated
from backhaul_runtime.storages import storage_key

_WHERE = "on the trainer"


def replay_here(
    name: str, program: Program, recording: Recording, values: Sequence[Tensor], *, keep_saved: bool
) -> Replay:
    """Replays a segment on the trainer's own devices and checks its values.

    Args:
        name: Of the segment.
        program: Of it.
        recording: Likewise.
        values: Of its sources.
        keep_saved: As for `Replay`.

    Raises:
        StaleTensorError: A captured tensor no longer holds what it held at forward.
        CheckpointError: The replay gave other values than forward.
    """
    try:
        for source in recording.sources:
            _check_unchanged(name, source)
    except UnsupportedTensorError as error:
        raise StaleTensorError(
            f"segment {name}: {error.message}, and no worker holds what it held. Keep parameters allocated until "
            "backward has run",
            segment=name,
        ) from error
    replay = Replay(program, values, recording.generator_states, keep_saved=keep_saved, is_own=True)
    check_values(name, _WHERE, recording.saved, replay.saved_digests)
    return replay


def _check_unchanged(name: str, source: RecordedSource) -> None:
    if not source.is_copy and address_of(source.value) != source.address:
        raise StaleTensorError(
            f"segment {name}: a captured tensor of shape {list(source.layout.shape)} changed between forward and "
            "backward, and no worker holds its earlier value. Run backward before optimizer.step() and other "
            "writes to parameters",
            segment=name,
        )


def gradients_here(
    name: str, program: Program, recording: Recording, values: Sequence[Tensor], gradients: Mapping[int, Tensor]
) -> list[Contribution]:
    """The contributions of a segment, computed on the trainer. Called in backward."""
    state = ambient.capture()
    with isolated(_devices(values)), torch.enable_grad():
        replay = replay_here(name, program, recording, values, keep_saved=False)
        ambient.apply(state, ambient.capture())
        return replay.backward(gradients)


def saved_here(
    name: str, program: Program, recording: Recording, values: Sequence[Tensor], positions: Sequence[int]
) -> dict[int, Callable[[], Tensor]]:
    """Gives saved tensors of a segment, computed on the trainer, by position."""
    with isolated(_devices(values)), torch.enable_grad():
        replay = replay_here(name, program, recording, values, keep_saved=True)
        return {position: replay.saved(position).unpack for position in positions}


def outputs_here(
    name: str, program: Program, recording: Recording, values: Sequence[Tensor], positions: Iterable[int]
) -> dict[int, Tensor]:
    """Outputs of a segment, computed on the trainer, by position. Detached; nothing else of the replay stays."""
    with isolated(_devices(values)), torch.enable_grad():
        replay = replay_here(name, program, recording, values, keep_saved=False)
        return {position: replay.output(position) for position in positions}


def saved_before(name: str, so_far: Program, recording: Recording, position: int) -> Tensor:
    """A saved tensor of a call that still runs, from the program recorded so far."""
    values = [source.value for source in recording.sources]
    with isolated(_devices(values)), torch.enable_grad():
        replay = Replay(so_far, values, recording.generator_states, keep_saved=True, is_own=True)
        check_digests(name, _WHERE, recording.saved, {position: replay.saved_digests[position]})
        return replay.saved(position).unpack()


def _devices(values: Sequence[Tensor]) -> list[torch.device]:
    return list(dict.fromkeys(value.device for value in values))


class Nesting(threading.local):
    """Whether the calling thread is inside a segment: calls within it belong to it."""

    active = False


nesting = Nesting()


@dataclass(slots=True)
class Call:
    """A call that can't be a program, kept so that it can be made again.

    Attributes:
        fn: The caller's function.
        leaves: Leaves of (args, kwargs); tensors among them are replaced by copies once the call has ended.
        spec: Rebuilds (args, kwargs), with containers of their own.
        state: Ambient settings when it began.
        generator_states: Of the devices of its tensors.
        device: New tensors are made there by default.
        context: To call it again in.
        trace: Of the ops of forward; None where nobody asked for it.
        parameters: Captured leaves that take gradients, as far as its ops showed them.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    state: ambient.State
    generator_states: dict[torch.device, Tensor]
    device: torch.device
    context: AbstractContextManager[Any] = field(default_factory=nullcontext)
    trace: list[str] | None = None
    parameters: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Takes the state a call starts from."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        devices = dict.fromkeys((torch.device("cpu"), *(leaf.device for leaf in leaves if isinstance(leaf, Tensor))))
        states = {device: default_generator(device).get_state() for device in devices if device.type in _RANDOM}
        return cls(fn, leaves, spec, ambient.capture(), states, torch.get_default_device())

    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def keep(self, tensors: Sequence[Tensor], recording: Recording) -> None:
        """Replaces the caller's tensors by copies of what they held, for the caller may change them now.

        Args:
            tensors: The caller's object behind each source of the recording.
            recording: Of this call.
        """
        held = {id(tensor): source for tensor, source in zip(tensors, recording.sources, strict=True)}
        kept = {id(leaf): _kept(leaf, held.get(id(leaf)), recording) for leaf in self.tensors()}
        self.leaves = [kept.get(id(leaf), leaf) for leaf in self.leaves]
        self.parameters = [
            tensor
            for tensor, source in zip(tensors, recording.sources, strict=True)
            if source.is_leaf and source.requires_grad and not source.is_argument
        ]

    def saved_again(self, name: str, recording: Recording) -> dict[int, Callable[[], Tensor]]:
        """Calls the function once more and gives everything autograd saved, by position.

        Buffers it writes to hold their earlier values meanwhile and their present ones afterwards; gradients it
        accumulates and hooks it registers are dropped, for they were accumulated and registered the first time.

        Raises:
            StaleTensorError: What it starts from is no longer there.
            CheckpointError: It gave other values than the first time.
        """
        self._check_repeatable(name, recording)
        saved: list[Saved] = []
        written = {storage_key(source.written) for source in recording.sources if source.written is not None}

        def pack(tensor: Tensor) -> Saved:
            recorder.note_saved(tensor)
            if unsupported_reason(tensor) is None and (
                storage_key(tensor) in written or hides_write(recorder.op, tensor)
            ):
                tensor = copy_exact(tensor)  # of what the call itself, or putting things back after it, overwrites
            saved.append(Saved(len(saved), tensor))
            return saved[-1]

        run = _Run()
        args, kwargs = pytree.tree_unflatten(_fresh(self.leaves, run), self.spec)
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        leaves = [tensor for tensor in arguments if tensor.is_leaf and tensor.requires_grad]
        was_active, nesting.active = nesting.active, True
        try:
            with (
                isolated(list(self.generator_states)),
                _as_before(recording.sources),
                _leaves_aside([*self.parameters, *leaves]),
            ):
                for device, state in self.generator_states.items():
                    default_generator(device).set_state(state)
                ambient.apply(self.state, ambient.capture())
                written.update(storage_key(tensor) for tensor in arguments if unsupported_reason(tensor) is None)
                # For its digests alone; nothing needs to be held.
                recorder = Recorder(
                    arguments, allowed_ops(), lambda tensor, *_: tensor.detach(), traces=self.trace is not None
                )
                hooks = torch.autograd.graph.saved_tensors_hooks(pack, Saved.unpack)
                with hooks, recorder, self.context, self.device:
                    self.fn(*args, **kwargs)
        finally:
            nesting.active = was_active
            run.has_ended = True
        try:
            again = recorder.recording.saved
            check_values(name, _WHERE, recording.saved, [found.digest for found in again], again)
        except CheckpointError as error:
            if self.trace is None or recorder.trace is None:
                raise
            raise with_traces(error, self.trace, recorder.trace) from error
        return {found.index: found.unpack for found in saved}

    def _check_repeatable(self, name: str, recording: Recording) -> None:
        if recording.once_only:
            raise StaleTensorError(
                f"segment {name} can't be recomputed: {recording.once_only}, and no copy of such a tensor is kept. "
                "Leave the write out of the segment",
                segment=name,
            )
        for source in recording.sources:
            with suppress(UnsupportedTensorError):  # freed memory, which FSDP fills again when the function is called
                _check_unchanged(name, source)
        for reference, version in recording.unchecked:
            tensor = reference()
            if tensor is not None and version_of(tensor) != version:
                raise StaleTensorError(
                    f"segment {name}: a {unsupported_reason(tensor)} that autograd saved changed between forward and "
                    "backward, and no copy of such a tensor is kept",
                    segment=name,
                )


_RANDOM = {"cpu", "cuda"}


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """An argument's value at forward.

    Attributes:
        value: A copy.
        requires_grad: As it was.
        is_leaf: As it was.
        storage: Names the storage it lay in; arguments that share one share memory.
        start_bytes: Where in it.
        original: A leaf that the function did not write to, as long as somebody has it.
        history: Leads to where any other came from; None where there is no way.
    """

    value: Tensor
    requires_grad: bool
    is_leaf: bool
    storage: int
    start_bytes: int
    original: Callable[[], Tensor | None]
    history: "_History | None"

    def unchanged(self) -> Tensor | None:
        """The original, if it is there and holds what it held."""
        found = self.original()
        with suppress(UnsupportedTensorError):  # its memory was freed
            if found is not None and address_of(found) == address_of(self.value):
                return found
        return None


def _kept(tensor: Tensor, source: RecordedSource | None, recording: Recording) -> Any:
    if unsupported_reason(tensor) is not None:
        recording.unchecked.append((weakref.ref(tensor), version_of(tensor)))
        return tensor
    value, was = (copy_exact(tensor), tensor) if source is None else (source.value, source)
    start = int(tensor.storage_offset()) * tensor.element_size()
    is_same = was.requires_grad and not (source is not None and source.is_written)
    return _Kept(
        value,
        was.requires_grad,
        was.is_leaf,
        storage_key(tensor),
        start,
        original=weakref.ref(tensor) if is_same and was.is_leaf else _nothing,
        history=_History(tensor) if is_same and not was.is_leaf else None,
    )


def _nothing() -> None:
    return None


@dataclass(slots=True)
class _Run:
    """Another call of the function; it has ended when a backward reaches what it left behind."""

    has_ended: bool = False

    def refuse(self, gradient: Tensor) -> None:
        """Hook of the copy of a leaf, which leads nowhere."""
        if self.has_ended:
            raise StaleTensorError(
                "a backward goes through a tensor that a segment's function kept when it was called again in backward, "
                "and the argument it came from is gone or was changed. Keep the argument, or run one backward over the "
                "sum of the losses"
            )


class _History:
    """The way to where an argument came from, without the argument: what calls leave behind leads there too."""

    def __init__(self, tensor: Tensor) -> None:
        self.gradients: list[tuple[int, Tensor]] = []  # each with the backward it is of: one may end in between
        with torch.enable_grad():
            self._stub = _Stub.apply(self, tensor)  # type: ignore[no-untyped-call]

    def joined(self, value: Tensor, run: _Run) -> Tensor:
        """A tensor that shares the value's memory and has the argument's history.

        A backward inside the call stops there: its gradients went on the first time.
        """
        with torch.enable_grad():
            return _Joined.apply(self, run, self._stub, (value,))  # type: ignore[no-any-return, no-untyped-call]


class _Stub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: _History, tensor: Tensor) -> Tensor:
        ctx.gradients = history.gradients
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        task = torch._C._current_graph_task_id()
        found = [gradient for made_by, gradient in ctx.gradients if made_by == task]
        ctx.gradients[:] = [(made_by, gradient) for made_by, gradient in ctx.gradients if made_by != task]
        return None, sum(found[1:], found[0]) if found else None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: _History, run: _Run, stub: Tensor, value: tuple[Tensor]) -> Tensor:
        ctx.gradients, ctx.run, ctx.stub = history.gradients, run, stub.detach()
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if not ctx.run.has_ended:
            return None, None, None, None
        ctx.gradients.append((torch._C._current_graph_task_id(), gradients[0]))
        return None, None, ctx.stub, None


def _fresh(leaves: Sequence[Any], run: _Run) -> list[Any]:
    """Arguments for another call, sharing memory and being the same object where they did and were."""
    groups: dict[int, dict[_Kept, Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, _Kept):
            groups.setdefault(leaf.storage, {})[leaf] = leaf.value
    for members in groups.values():
        alone = len(members) == 1
        made = [copy_exact(kept.value) for kept in members] if alone else _together(list(members))
        for kept, value in zip(list(members), made, strict=True):
            members[kept] = _argument(value, kept, run, alone=alone)
    return [groups[leaf.storage][leaf] if isinstance(leaf, _Kept) else leaf for leaf in leaves]


def _argument(value: Tensor, kept: _Kept, run: _Run, *, alone: bool) -> Tensor:
    if not kept.requires_grad:
        return value
    if alone and (original := kept.unchanged()) is not None:
        return original
    if kept.history is not None:
        return kept.history.joined(value, run)
    made = entry(value, kept.is_leaf)
    made.register_hook(run.refuse)  # type: ignore[no-untyped-call]
    return made


def _together(members: Sequence[_Kept]) -> list[Tensor]:
    """Copies in one piece of memory, each where it lay."""
    low = min(kept.start_bytes for kept in members) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    high = max(kept.start_bytes + kept.value.untyped_storage().nbytes() for kept in members)
    memory = torch.zeros(high - low, dtype=torch.uint8, device=members[0].value.device)
    made = [view_at(memory, kept.start_bytes - low, layout_of(kept.value)) for kept in members]
    for view, kept in zip(made, members, strict=True):
        view.copy_(kept.value)
    return made


@contextmanager
def _leaves_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Leaves without their gradients meanwhile, and without hooks of meanwhile afterwards."""
    gradients = [leaf.grad for leaf in leaves]
    first_hook = RemovableHandle.next_id
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
            for hooks in (leaf._backward_hooks or {}, leaf._post_accumulate_grad_hooks or {}):
                for key in [key for key in hooks if key >= first_hook]:
                    del hooks[key]


@contextmanager
def _as_before(sources: Sequence[RecordedSource]) -> Iterator[None]:
    """Puts the values from before the call into captured tensors, past their version counters, and back."""
    written = [(source.written, source.value) for source in sources if source.written is not None]
    present = [tensor.detach().clone() for tensor, _ in written]
    try:
        for tensor, before in written:
            tensor.data.copy_(before)
        yield
    finally:
        for (tensor, _), after in zip(written, present, strict=True):
            tensor.data.copy_(after)
