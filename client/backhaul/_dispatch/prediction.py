"""Predicts a call from the last call at the same call site.

A program is known for certain only when its call has ended; a worker that waits for it is always one segment behind. So
the inputs of a call are sent before it runs, with the program and the captured tensors of the last call. The recording
then confirms or refutes the prediction. A wrong prediction only costs work on the worker.
"""

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from backhaul._dispatch.places import CapturedInputs, Place, at, place_of
from backhaul._dispatch.worker_handle import WorkerHandle
from backhaul._torch_api.fsdp import may_be_freed
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload.backward_chains import SpeculationHistory
from backhaul._worker_client.upload.segment_upload import SourceTensor
from backhaul_runtime.errors import Refusal, UnsupportedTensorError
from backhaul_runtime.program.codec import address_of_program, encode_program
from backhaul_runtime.program.program import Program, numbers_in
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.record.sources import MakeCopy
from backhaul_runtime.tensors.deferred_digest import Digest, read
from backhaul_runtime.tensors.digest import content_digest, tensor_address
from backhaul_runtime.tensors.durations import Duration
from backhaul_runtime.tensors.layout import Layout, device_of, layout_of
from backhaul_runtime.torch_internals.generators import default_generator
from backhaul_runtime.torch_internals.private import is_leaf, version_of

MAX_SITES = 1 << 12
"""The most call sites of functions that are kept; each takes about 16 kB."""


@dataclass(frozen=True, slots=True)
class EncodedProgram:
    """An encoded program.

    Attributes:
        numbers: The numbers in the program, see `numbers_in`.
    """

    program: Program
    numbers: str
    encoded: bytes
    address: bytes

    @classmethod
    def of(cls, program: Program) -> Self:
        """Encodes a program."""
        encoded = encode_program(program)
        return cls(program, numbers_in(program), encoded, address_of_program(encoded))


_NAMED = attrgetter("named")
Predicted = tuple[EncodedProgram, list[SourceTensor], list[bytes]]
"""A program, its sources and generator states, as they were predicted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """Where a source of a call came from.

    Attributes:
        argument: Index of the tensor among the call's arguments, -1 for a captured tensor.
        place: Where the function captures the tensor; None for an argument, and for a place that is not known.
        layout: The layout when the call first used it.
        is_copy: Whether a copy is sent, because the tensor may change before it has been sent.
        is_transient: Whether no later segment will name it.
    """

    argument: int
    place: Place | None
    layout: Layout
    is_copy: bool
    is_transient: bool

    def find(self, arguments: Sequence[Tensor], fn: Callable[..., Any]) -> Tensor | None:
        """Returns the tensor of a call that begins now; None if there is none, or if nobody knows its place."""
        if self.place is not None:
            return at(fn, self.place)
        return arguments[self.argument] if 0 <= self.argument < len(arguments) else None

    def is_same(self, other: "_Origin") -> bool:
        """Whether both are the same argument, or are captured at the same place."""
        return self.argument == other.argument and self.place == other.place


class _Seen(NamedTuple):
    """What the sources of a call contained when it had ended.

    Attributes:
        places: Where the function captures each tensor; None for an argument, and for a place that is not known.
        versions: The version counters of the tensors.
        addresses: The addresses of their contents.
    """

    places: Sequence[Place | None] = ()
    versions: Sequence[int] = ()
    addresses: Sequence[Digest] = ()


@dataclass(slots=True)
class CallSite:
    """A call site: a module, or a function and its position among the segments of a pass.

    Attributes:
        key: The key in `CallSites`; None for a site that is kept by its module.
        last: The program of the last call at this site.
        speculation: How often the worker has predicted the gradients of this site's segments correctly.
        forward: What the forward of the last call at this site took; None before the first call.
    """

    key: Hashable = None
    last: EncodedProgram | None = None
    speculation: SpeculationHistory = field(default_factory=SpeculationHistory)
    forward: Duration | None = None
    _origins: list[_Origin] = field(default_factory=list)
    _seen: _Seen = field(default_factory=_Seen)
    _is_steady: bool = False
    _trusts_versions: bool = True
    # Guards what is known of the last call, because several threads may call one module.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(
        self,
        program: Program,
        recording: Recording,
        tensors: Sequence[Tensor],
        arguments: Sequence[Tensor],
        fn: Callable[..., Any],
        encoded: EncodedProgram | None = None,
    ) -> tuple[EncodedProgram, Callable[[], list[bytes]]]:
        """Learns from a call that has ended.

        Args:
            program: The program of the call.
            recording: The recording of the call.
            tensors: The caller's object behind each source.
            arguments: Tensors among the arguments.
            fn: The function that was called.
            encoded: The encoded program; None if it is not known yet.

        Returns:
            The encoded program, and a function that returns the addresses of captured tensors whose contents have
            changed since the last call. That function may wait for an accelerator.
        """
        with self._lock:
            before = last = self.last
            if encoded is not None:
                last = encoded if last is None or last.program is not program else last
            elif last is None or last.program != program or last.numbers != numbers_in(program):
                last = EncodedProgram.of(program)
            if encoded is not None and before is last:  # calls of a known program take their sources from equal places
                origins, is_steady = self._origins, True
            else:
                origins = self._origins_of(recording, tensors, arguments, fn)
                # A site where every call differs is not worth the work.
                is_steady = before is last and all(map(_Origin.is_same, origins, self._origins))
            places = self._seen.places if origins is self._origins else [origin.place for origin in origins]
            seen = _Seen(places, list(map(version_of, tensors)), list(map(_NAMED, recording.sources)))
            superseded = functools.partial(self._superseded, self._seen, seen, is_steady)
            # No call between these: Ctrl-C leaves all of them as they were, or none.
            self.last, self._origins, self._seen = last, origins, seen
            self._is_steady = before is None or is_steady
            return last, superseded

    def _origins_of(
        self, recording: Recording, tensors: Sequence[Tensor], arguments: Sequence[Tensor], fn: Callable[..., Any]
    ) -> list[_Origin]:
        positions = {id(tensor): index for index, tensor in enumerate(arguments)}
        return [
            _Origin(
                argument := positions.get(id(tensor), -1),
                self._place(fn, tensor, index) if argument < 0 else None,
                source.layout,
                source.is_copy,
                source.is_transient,
            )
            for index, (tensor, source) in enumerate(zip(tensors, recording.sources, strict=True))
        ]

    def _place(self, fn: Callable[..., Any], tensor: Tensor, index: int) -> Place | None:
        """Returns the place of a captured tensor, which usually is that of the last call."""
        last = self._origins[index] if index < len(self._origins) else None
        if last is not None and last.argument < 0 and (last.place is None or at(fn, last.place) is tensor):
            return last.place  # None if the last call has searched for it in vain
        return place_of(fn, tensor)

    def _superseded(self, before: _Seen, now: _Seen, is_steady: bool) -> list[bytes]:
        changed = [  # captured at the same place, with other contents
            (new_version == old_version, old)
            for new_place, new_version, new, old_place, old_version, old in zip(*now, *before, strict=is_steady)
            if new_place == old_place is not None and new != old and read(new) != read(old)
        ]
        if not changed:
            return []
        if is_steady and any(is_same_version for is_same_version, _ in changed):
            self._trusts_versions = False  # fused optimizers write without changing the counter
        named = set(map(read, now.addresses))
        return [address for _, old in changed if (address := read(old)) not in named]

    def predict(self, arguments: Sequence[Tensor], make_copy: MakeCopy, fn: Callable[..., Any]) -> "Predicted | None":
        """Predicts the call that begins now. Returns None if nothing is known.

        Args:
            arguments: The tensors among its arguments.
            make_copy: Copies a tensor that may change.
            fn: The function that is called.
        """
        with self._lock:
            if self.last is None or not self._is_steady:  # a call that changes would be predicted in vain
                return None
            program, sources = self.last.program, []
            seen = zip(self._seen.versions, self._seen.addresses, strict=True)
            for origin, (version, known), wanted in zip(self._origins, seen, program.sources, strict=True):
                tensor = origin.find(arguments, fn)
                if tensor is None or may_be_freed(tensor):  # it may have no contents before the function runs
                    return None
                try:
                    now = layout_of(tensor)
                except UnsupportedTensorError:  # from here it would count as an error of ours
                    return None
                # All of these are part of the program: what was sent for another one would be thrown away.
                here = now.header, tensor.requires_grad, is_leaf(tensor)
                if here != (origin.layout.header, wanted.requires_grad, wanted.is_leaf):
                    return None
                value: Tensor = tensor
                address: Digest = b""
                # The call may write to its arguments while they are sent. A digest would wait for an accelerator.
                if origin.is_copy and now.is_on_accelerator:
                    value = make_copy(tensor, now, None)
                elif origin.is_copy:
                    address = tensor_address(now, content_digest(tensor, now))
                    value = make_copy(tensor, now, address)
                # Unchanged since it was read, so reading it again would only cost time.
                elif self._trusts_versions and version == version_of(tensor) and now == origin.layout:
                    address = known
                sources.append(SourceTensor(address, now, value, origin.is_copy, origin.is_transient))
            draws = sum(node.draws for node in program.nodes)
            device = device_of(source.value for source in sources if source.value is not None)
            # Only the first state is known, and the generator continues from there.
            states = [default_generator(device).get_state().numpy().tobytes(), *[b""] * (draws - 1)] if draws else []
            return self.last, sources, states


@dataclass
class PendingCall:
    """A call in progress. A context manager: what was sent for a call without a segment is freed on exit.

    Attributes:
        site: The call site of the call.
        arguments: The tensors among its arguments.
        fn: The function that is called.
        encoded: The program that the call runs, encoded; None if it is not known yet.
        target: The worker, worker session and segment number of what was sent before the call; None if nothing was.
        refusal: Why nothing was sent, if no worker was to get the segment.
        is_saved: Whether the sent segment was confirmed.
        whole: For a whole micro-batch its position among those of the block that workers get, and their number.
    """

    site: CallSite
    arguments: list[Tensor]
    fn: Callable[..., Any]
    encoded: EncodedProgram | None = None
    target: tuple[WorkerHandle, WorkerSession, int] | None = None
    refusal: Refusal | None = None
    is_saved: bool = False
    whole: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.target is not None and not self.is_saved:
            worker, worker_session, number = self.target
            worker.uploader.release(worker_session, number)


@dataclass
class CallSites:
    """The call sites of a session. The site of a function is kept once backward has reached a call from it."""

    _by_module: "weakref.WeakKeyDictionary[nn.Module, CallSite]" = field(default_factory=weakref.WeakKeyDictionary)
    _others: OrderedDict[Hashable, CallSite] = field(default_factory=OrderedDict)

    def of(self, fn: Callable[..., Any], position: int) -> CallSite:
        """Returns the call site of a call.

        Args:
            fn: The function to call. A module is a site of its own; other functions may be created anew for each call.
            position: The position among the segments of its pass, which distinguishes calls of such functions.
        """
        while isinstance(fn, functools.partial):
            fn = fn.func
        owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        if isinstance(owner, nn.Module):
            site = self._by_module.get(owner)
            if site is None:
                site = self._by_module[owner] = CallSite()
            return site
        key = fn.site if isinstance(fn, CapturedInputs) else (getattr(fn, "__code__", type(fn)), position)
        return self._others.get(key) or CallSite(key)

    def keep(self, site: CallSite) -> None:
        """Keeps a site once backward has reached a call from it.

        Drops the least recently reached site if there are too many.
        """
        if site.key is not None:
            self._others[site.key] = site
            self._others.move_to_end(site.key)
            if len(self._others) > MAX_SITES:
                self._others.popitem(last=False)
