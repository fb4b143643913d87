"""Saves segments: checks what a trainer names, charges it, and hands the segment to the engine. Event loop only."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from backhaul_runtime.errors import ProgramError, SegmentUnknownError
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.compiled_programs import check_layouts
from backhaul_runtime.tensors.deferred_digest import KnownDigests
from backhaul_runtime.tensors.layout import Layout, allocate, layout_of
from backhaul_server.worker.engine.bounds import Bounds, ExecutionMemory
from backhaul_server.worker.engine.device_memory import DeviceMemory
from backhaul_server.worker.engine.executions import Derivation, SegmentInputs
from backhaul_server.worker.engine.segment import Segment, SessionState
from backhaul_server.worker.engine.segment_engine import SegmentEngine
from backhaul_server.worker.engine.store import ENTRY_BYTES, Store
from backhaul_server.worker.engine.stored_values import ReadProgram, StoredValue
from backhaul_server.worker.limits import ALL_SEGMENTS, NAMED, SEGMENTS

_PASS_BYTES = 512
"""Bytes for each segment of the largest number that a session ever had at once, because the schedule remembers the last
pass."""

_SEGMENT_BYTES, _NAMED_BYTES = 4 << 10, 256
"""Bytes of a segment without its name and generator states, and for each of its sources, predecessors and states."""


class SegmentSaver:
    """Saves the segments of all sessions of a worker.

    Args:
        store: The worker's memory accounts, and the programs and tensors that segments name.
        engine: Gets the saved segments.
        device: The device on which programs run.
        execution_limit_s: Seconds that an execution may take.
        execution_memory: The memory of executions on the device; None to leave it to the store's accounts.
        check_draining: Raises DrainingError if the worker accepts nothing new.
    """

    def __init__(
        self,
        store: Store[StoredValue],
        engine: SegmentEngine,
        device: torch.device,
        execution_limit_s: float,
        execution_memory: ExecutionMemory | DeviceMemory | None,
        check_draining: Callable[[], None],
    ) -> None:
        self._store = store
        self._engine = engine
        self._device = device
        self._execution_limit_s = execution_limit_s
        self._execution_memory = execution_memory
        self._check_draining = check_draining
        self._known = KnownDigests()

    def save(
        self,
        session: SessionState,
        segment_id: int,
        program_address: bytes,
        addresses: Sequence[bytes],
        transient: Sequence[int],
        generator_states: Sequence[bytes],
        name: str,
        wants_projections: bool,
        predecessors: Mapping[int, tuple[int, int]] = {},
        derived: Mapping[int, Layout] = {},
        *,
        compares_outputs: bool = False,
        is_predicted: bool = False,
        after_release: int = 0,
    ) -> tuple[bool, list[bytes]]:
        """Saves a segment and schedules its replay. A repeated save changes nothing.

        A predicted segment cannot be requested until another save has confirmed or replaced it.

        Args:
            session: The session of the trainer.
            segment_id: The trainer's number for the segment.
            program_address: Address of a stored program.
            addresses: Addresses of stored tensors, one for each source of the program.
            transient: Positions of the sources that the store may free together with the session's last segment.
            generator_states: One state for each node that draws; empty if the draw before leaves the generator in it,
                and unknown if it is not the first of a predicted segment.
            name: The checkpointed call's name, for logs.
            wants_projections: Whether runs return random projections of what autograd saves.
            predecessors: The field of `Segment`.
            derived: The layouts of sources that were not sent, because the worker computes them from a predecessor.
            compares_outputs: Whether runs return digests of the program's outputs instead of saved tensors.
            is_predicted: Whether the call has not ended yet.
            after_release: The number of the last release request that the trainer had sent before this save.

        Returns:
            Whether the program is missing, and which tensors are missing. The segment is saved only if neither is.

        Raises:
            BudgetError: The store has no room for the segment.
            LimitError: The session or the worker has too many segments.
            ProgramError: The lists do not fit the program.
            SegmentUnknownError: A later release has overtaken the save.
        """
        self._check_draining()
        # A trainer that gave up a save, and released the segment over another connection, never releases it again.
        if after_release < session.last_release:
            raise SegmentUnknownError(
                f"segment {segment_id} was sent after release {after_release}, and release {session.last_release} "
                "arrived before it: its trainer has given it up"
            )
        present = session.segments.get(segment_id)
        # A repeated save, or a prediction that its confirmation has overtaken, must not replace what may run already.
        if present is not None and (is_predicted or present.is_confirmed):
            return False, []
        all_addresses = (program_address, *addresses)
        # Replays of the predicted segment made digests of saved tensors, so a confirmation can ask for nothing else.
        if present is not None and (present.addresses != all_addresses or wants_projections or compares_outputs):
            self._engine.reject(present)
            present = None
        origins: dict[int, tuple[Segment, int]] = {}
        if present is None:
            SEGMENTS.check(len(session.segments) + 1)
            ALL_SEGMENTS.check(len(self._engine) + 1)
            NAMED.check(session.named_sources + len(addresses))
            if not is_predicted:  # what a call follows is known only when it has ended
                origins = self._origins(session, predecessors, derived, addresses)
        stored_addresses = [address for source, address in enumerate(addresses) if source not in origins]
        missing = self._store.missing(session, stored_addresses)
        program_missing = bool(self._store.missing(session, [program_address]))
        if program_missing or missing:  # nothing is charged yet, so the trainer may send it and save again
            return program_missing, missing
        program, stored = self._stored(session, program_address, stored_addresses)
        _check_lists(program, addresses, transient, generator_states, predecessors, is_predicted=is_predicted)
        own_bytes = _SEGMENT_BYTES + 4 * len(name) + sum(map(len, generator_states))
        own_bytes += _NAMED_BYTES * (len(addresses) + len(generator_states) + len(predecessors))
        if present is not None:  # its replay may have begun, or even ended: a new segment would begin it again
            self._store.resize(present.key, own_bytes)
            self._engine.confirm(present, generator_states, predecessors)
            return False, []
        remaining = iter(stored)
        # What the worker derives has no contents yet, so the store has neither its layout nor its bytes.
        layouts = [derived[i] if i in origins else layout_of(next(remaining)) for i in range(len(addresses))]
        check_layouts(program, layouts)
        need = program.execution_bytes([layout.gradient_bytes for layout in layouts])
        segment = Segment(session, segment_id, None, name, predecessors, all_addresses, not is_predicted)
        transient_addresses = [addresses[position] for position in transient if position not in origins]
        own_bytes += sum(ENTRY_BYTES + layouts[source].span_bytes for source in origins)
        added = self._attach(segment, [program_address, *stored_addresses], transient_addresses, need, own_bytes)
        try:
            sources, derivations = self._sources(stored, layouts, addresses, origins)
        except BaseException:  # out of memory
            self._store.detach(segment.key)
            raise
        kind = sha256(program_address + b"".join(layout.full_header for layout in layouts)).digest()
        segment.inputs = SegmentInputs(
            program,
            sources,
            generator_states,
            wants_projections,
            compares_outputs,
            kind,
            segment.bounds,
            self._known,
            derivations,
        )
        for derivation in derivations:
            assert derivation.origin.inputs is not None
            derivation.origin.inputs.successors.append(derivation)
        session.segments[segment_id] = segment
        session.named_sources += len(addresses)
        session.most_segments = max(session.most_segments, len(session.segments))
        # Such a replay would draw from the wrong states again, which only the end of its call corrects.
        is_expected = not is_predicted or program_address not in session.unpredictable
        self._engine.add(segment, need, added, is_expected=is_expected)
        return False, []

    def _sources(
        self,
        stored: Sequence[Tensor],
        layouts: Sequence[Layout],
        addresses: Sequence[bytes],
        origins: Mapping[int, tuple[Segment, int]],
    ) -> tuple[list[Tensor], list[Derivation]]:
        """Returns all sources of a new segment, and the derivations of those that do not have their contents yet."""
        remaining, sources, derivations = iter(stored), list[Tensor](), list[Derivation]()
        for index, layout in enumerate(layouts):
            if index in origins:
                derivation = Derivation(*origins[index], addresses[index], allocate(layout, self._device))
                derivations.append(derivation)
                sources.append(derivation.value)
            else:
                sources.append(next(remaining))
        return sources, derivations

    def _attach(
        self, segment: Segment, names: Sequence[bytes], transient: Sequence[bytes], need_bytes: int, own_bytes: int
    ) -> int:
        """Attaches a new segment to the store. See `Store.attach` for the arguments and the result."""
        session, segment.bounds = segment.session, Bounds(self._execution_limit_s, self._execution_memory)
        pass_bytes = _PASS_BYTES if len(session.segments) == session.most_segments else 0
        # The bytes of the pass are charged with the segment first, so that one check covers both.
        added = self._store.attach(segment.key, session, names, transient, need_bytes, own_bytes + pass_bytes)
        if pass_bytes:
            self._store.resize(segment.key, own_bytes)
            # The schedule still remembers the pass when the segment is gone, so it is charged to the session.
            self._store.charge(session, f"{pass_bytes} bytes of a session", pass_bytes)
            session.own_bytes += pass_bytes
        return added

    def _origins(
        self,
        session: SessionState,
        predecessors: Mapping[int, tuple[int, int]],
        derived: Mapping[int, Layout],
        addresses: Sequence[bytes],
    ) -> dict[int, tuple[Segment, int]]:
        """Returns the segment and the output that each derived source follows from.

        Leaves out sources that the worker stores, and those whose segment it does not have. The latter are then
        reported as missing, so that the trainer sends them.
        """
        origins = {}
        for source in derived:
            number, output = predecessors[source]
            origin = session.segments.get(number)
            if origin is None or origin.inputs is None or not origin.is_confirmed or source >= len(addresses):
                continue
            if output < len(origin.inputs.program.outputs) and self._store.missing(session, [addresses[source]]):
                origins[source] = origin, output
        return origins

    def _stored(
        self, session: SessionState, program_address: bytes, addresses: Sequence[bytes]
    ) -> tuple[Program, list[Tensor]]:
        """Returns a stored program and stored tensors. Raises ProgramError for an address of the wrong type."""
        stored = self._store.value(session, program_address)
        values = [self._store.value(session, address) for address in addresses]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not isinstance(stored, ReadProgram) or len(tensors) < len(values):
            raise ProgramError("a segment names a tensor as its program, or a program as a source")
        return stored.program, tensors


def _check_lists(
    program: Program,
    addresses: Sequence[bytes],
    transient: Sequence[int],
    generator_states: Sequence[bytes],
    predecessors: Mapping[int, tuple[int, int]],
    *,
    is_predicted: bool,
) -> None:
    """Raises ProgramError if the lists of a segment do not fit its program. The arguments are those of `save`."""
    if len(addresses) != len(program.sources) or max(transient, default=-1) >= len(addresses):
        raise ProgramError(f"{len(addresses)} tensors are named for a program of {len(program.sources)} sources")
    if len(generator_states) != program.draws:
        raise ProgramError(f"{len(generator_states)} generator states came for {program.draws} draws")
    if not is_predicted and not next(iter(generator_states), b"first"):
        raise ProgramError("the first generator state is empty")
    if max(predecessors, default=-1) >= len(addresses):
        raise ProgramError(f"predecessors are named for sources {sorted(predecessors)} of {len(addresses)}")
