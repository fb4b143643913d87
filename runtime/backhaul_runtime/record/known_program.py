"""Programs that are known before a call runs, because an earlier call of the same function was recorded.

NOTE [Known programs]
1. The function is a captured graph: it calls a fixed list of torch's functions on what it is given. Which ops run
   follows from its inputs (the layouts of tensors, whether they require gradients and are leaves, and numbers), and
   from the ambient state. Calls that agree in these are of one kind, and the first of a kind is recorded.
2. `known_program` refuses a program to which this does not apply: an op gave Python a value of a tensor, a size follows
   from values, or the call read what the kind does not show.
3. It also refuses programs that write to what autograd has saved before, because a later call would have to watch the
   memory of saved tensors. What a program writes to besides memory of its own, such as the statistics of BatchNorm, is
   copied before the call, and must share no memory with another input.
4. The layout of each tensor that a later call saves is compared with the recorded one. At a difference, which only an
   error in the rules above explains, that call keeps the rest of its activations. The nodes before it have run as
   recorded.
5. Values are taken anew in each call: the digests of its sources and of what it saves, and the generator's state.
6. If only outputs are compared, what the call saves has no digests, except where it lies in a source, which others may
   write to while backward runs. A call that ends early by Rule 4 then has nothing that shows whether the trainer's own
   recomputation of its beginning has forward's bits.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.op_list import resolve
from backhaul_runtime.program.program import FLEX_ATTENTION, GeneratorRef, Program
from backhaul_runtime.program.undefined_saves import UNDEFINED_CONTENT, UNDEFINED_SAVES
from backhaul_runtime.record.contents import FixedDigests, contents_key
from backhaul_runtime.record.op_recorder import INDEX
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.record.recording import RecordedSource, Recording, SavedTensor
from backhaul_runtime.record.sources import MakeCopy, SourceKind, note_write, recorded_source
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, digest_of
from backhaul_runtime.tensors.digest import content_digest, digest_of_memory, saved_digest, tensor_address
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.torch_internals.ambient_state import is_autocast
from backhaul_runtime.torch_internals.autocast_cache import CASTS, STALE_CAST
from backhaul_runtime.torch_internals.generators import default_generator
from backhaul_runtime.torch_internals.storages import storage_key

VALUE_READ = "it reads the value of a tensor in Python"
CHOICES_SENT = "a worker computes other bits, so its random draws and decisions are sent"
SHARED_WRITE = "an input that it writes to shares memory with another one"
CHANGED = "it saved other tensors than the recorded call of the same kind. Please report it"


class KnownSource(NamedTuple):
    """A source of each call.

    Attributes:
        layout: The layout of the tensor.
        kind: How the tensor is kept.
        is_parameter: Whether the tensor is a captured parameter, whose digest may hold for several calls.
        is_written: Whether the program writes to it.
    """

    layout: Layout
    kind: SourceKind
    is_parameter: bool
    is_written: bool

    @classmethod
    def of(cls, tensor: Tensor, recorded: RecordedSource, *, is_argument: bool) -> Self:
        """Returns what is known of a source from a recorded call, given with the tensor that it was there."""
        kind = SourceKind.of(tensor, recorded.layout, is_argument=is_argument)
        is_parameter = not is_argument and isinstance(tensor, torch.nn.Parameter)
        return cls(recorded.layout, kind, is_parameter, recorded.is_written)


class KnownSave(NamedTuple):
    """A tensor that autograd saves in each call.

    Attributes:
        shape: The sizes of the tensor, as in its layout. So are the strides and the dtype.
        strides: The strides of the tensor, in elements.
        dtype: The dtype of the tensor.
        saved: The tensor as it was recorded, without its digest.
        memory_at: Returns the memory of the tensor from the address of its first element, if an op of the call makes it
            densely on the host; else None.
        start_bytes: The bytes from the first element of the source that it lies in to its own; 0 if it lies in none.
        whole_source: The source whose bytes are all of its own; -1 if there is none.
        node: The number of nodes up to the one that saves it.
        position: The position of the tensor among those that the call saves.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    saved: SavedTensor
    memory_at: Callable[[int], Any] | None
    start_bytes: int
    whole_source: int
    node: int
    position: int

    @classmethod
    def of(cls, position: int, saved: SavedTensor, node: int, recording: Recording) -> Self:
        """Returns what calls save where one has saved this tensor, given with its node and the recording."""
        layout, known, start_bytes = saved.layout, replace(saved, noted=b""), 0  # a digest may refer to a device
        if saved.source >= 0:
            start_bytes = saved.offset * layout.dtype.itemsize - _offset_bytes(recording.sources[saved.source])
        is_made = layout.is_dense_on_host and saved.source < 0
        memory_at = layout.memory_type.from_address if is_made else None
        whole_source = _whole_source(saved, recording)
        shape, strides, dtype = layout.shape, layout.strides, layout.dtype
        return cls(shape, strides, dtype, known, memory_at, start_bytes, whole_source, node, position)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KnownProgram:
    """What calls of one kind have in common.

    Attributes:
        program: What a worker runs.
        inputs: The position of each source among the function's inputs.
        sources: What is known of each source.
        histories: The indices of the sources that take gradients and of which calls keep copies.
        written: The positions of the inputs that the program writes to.
        saves: The tensors that autograd saves, in order.
        draws_on: The device whose default generator all draws use; None if nothing draws.
        computes_on_host: Whether an op returns a tensor on the CPU.
        accelerators: The CUDA devices of sources and results, as in `Recording`.
        is_cast: Whether an op runs under autocast.
    """

    program: Program
    inputs: tuple[int, ...]
    sources: tuple[KnownSource, ...]
    histories: tuple[int, ...]
    written: tuple[int, ...]
    saves: tuple[KnownSave, ...]
    draws_on: torch.device | None
    computes_on_host: bool
    accelerators: tuple[torch.device, ...]
    is_cast: bool

    def up_to(self, saved_count: int) -> Program:
        """Returns the part of the program that saves its first tensors. A compiled program runs as a whole."""
        if self.program.compilation is not None:
            return self.program
        nodes = self.program.nodes[: self.saves[saved_count - 1].node if saved_count else 0]
        return replace(self.program, nodes=nodes, outputs=(), saved_count=saved_count)


def known_program(
    recorder: Recorder,
    program: Program,
    inputs: Sequence[Tensor | None],
    arguments: Sequence[Tensor],
    values_read: int,
) -> KnownProgram:
    """Returns what later calls of the same kind have in common with a call that was recorded whole.

    Args:
        recorder: The recorder of the call, which has ended.
        program: The program that it returned.
        inputs: The inputs of the call; None for those that are no tensors.
        arguments: Those of the inputs that callers may change, so that copies are made.
        values_read: How often the function reads the value of an input whose value belongs to the kind.

    Raises:
        Refusal: Each call has to be recorded, for this reason.
    """
    recording, sources = recorder.recording, recorder.call.memory.sources
    positions = {id(tensor): position for position, tensor in enumerate(inputs) if tensor is not None}
    starts = [(storage_key(tensor), tensor.storage_offset()) for tensor in inputs if tensor is not None]
    if len(set(starts)) < len(starts):
        raise Refusal("two of its inputs share memory")
    if any(id(tensor) not in positions for tensor in sources.tensors):
        raise Refusal("it reads a tensor that is no input of the captured graph")
    if recorder.call.values_given != values_read:
        raise Refusal(VALUE_READ)
    if program.functions or program.types:
        raise Refusal("it runs custom functions")
    if recording.has_recorded_choices:
        raise Refusal(CHOICES_SENT)
    if recorder.call.builder.made_leaves:
        raise Refusal("it makes a leaf")
    positions_of_sources = tuple(positions[id(tensor)] for tensor in sources.tensors)
    written = _written(recorder, program, positions_of_sources, inputs)
    _check_nodes(recorder, program)
    argument_ids = set(map(id, arguments))
    known_sources = tuple(
        KnownSource.of(tensor, source, is_argument=id(tensor) in argument_ids)
        for tensor, source in zip(sources.tensors, recording.sources, strict=True)
    )
    return KnownProgram(
        program,
        positions_of_sources,
        known_sources,
        tuple(i for i, source in enumerate(known_sources) if source.kind.is_copy and source.kind.requires_grad),
        written,
        tuple(map(KnownSave.of, count(), recording.saved, recorder.call.builder.saving_nodes, repeat(recording))),
        _drawn_from(recording),
        recording.computes_on_host,
        tuple(recording.accelerators),
        any(map(is_autocast, program.ambient_states)),
    )


def _check_nodes(recorder: Recorder, program: Program) -> None:
    """Raises Refusal for a node that may do something else in another call."""
    for node in program.nodes:
        if node.op == FLEX_ATTENTION and is_autocast(program.ambient_states[node.ambient]):
            raise Refusal("flex_attention runs under autocast")
        if node.op == FLEX_ATTENTION:
            continue
        op = resolve(node.op)
        if node.op in UNDEFINED_SAVES:
            raise Refusal(f"{node.op} saves memory that it does not write")
        if node.op == INDEX and not recorder.call.selects_by_masks:  # by numbers, of which the result has as many
            continue
        if not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(op.tags):
            raise Refusal(f"the size of what {node.op} returns depends on values")
        if any(isinstance(part, GeneratorRef) for part in node.parts):
            raise Refusal(f"{node.op} draws from a generator of its own")


def _written(
    recorder: Recorder, program: Program, positions: Sequence[int], inputs: Sequence[Tensor | None]
) -> tuple[int, ...]:
    """Returns the positions of the inputs that a program writes to. Raises Refusal by Rule 3."""
    if recorder.call.memory.has_overwritten_saved:
        raise Refusal("it writes to memory that autograd has saved before")
    sources = [index for index, source in enumerate(program.sources) if source.is_written]
    if any(program.sources[index].requires_grad for index in sources):
        raise Refusal("it writes to an input that takes gradients")
    written = tuple(positions[index] for index in sources)
    if shares_memory(written, inputs):
        raise Refusal(SHARED_WRITE)
    return written


def shares_memory(positions: Sequence[int], inputs: Sequence[Any]) -> bool:
    """Whether one of the inputs at these positions lies in the storage of another input."""
    if not positions:
        return False
    keys = Counter(storage_key(value) for value in inputs if isinstance(value, Tensor))
    return any(keys[storage_key(inputs[position])] > 1 for position in positions)


def _offset_bytes(source: RecordedSource) -> int:
    return source.offset * source.layout.dtype.itemsize


def _whole_source(saved: SavedTensor, recording: Recording) -> int:
    """Returns the source that has the same bytes in the same order as a saved tensor, so the same content; else -1."""
    if saved.source < 0 or saved.is_undefined:
        return -1
    source = recording.sources[saved.source]
    if source.is_written:
        return -1
    parts = (source.layout.dtype, source.offset, source.layout.span_bytes)
    is_whole = (saved.layout.dtype, saved.offset, saved.layout.span_bytes) == parts
    is_ordered = saved.layout.memory_order == source.layout.memory_order is not None
    return saved.source if is_whole and is_ordered else -1


def _drawn_from(recording: Recording) -> torch.device | None:
    """Returns the device whose default generator a call has drawn from. Raises Refusal if there may be two."""
    if not recording.generator_states:
        return None
    if len(recording.accelerators) + recording.computes_on_host > 1:
        raise Refusal("it draws random numbers, and computes on two devices")
    if recording.accelerators:
        return next(iter(recording.accelerators))
    if len(recording.continuing) < len(recording.generator_states) - 1:
        raise Refusal("something besides its ops changes the generator")
    return torch.device("cpu")


class KnownSaves(Sequence[SavedTensor]):
    """The tensors that a call of a known program has saved. Each is made when it is read, which mostly is in backward.

    Args:
        expected: What calls of its kind save.
        sources: The sources of the call.

    Attributes:
        contents: The digests of the contents of the tensors that it has saved so far; empty where none was taken.
    """

    def __init__(self, expected: Sequence[KnownSave], sources: Sequence[RecordedSource]) -> None:
        self._expected, self._sources = expected, sources
        self.contents: list[Digest] = []

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[one] for one in range(len(self))[position]]
        position = range(len(self))[position]
        expected = self._expected[position]
        known, layout, offset = expected.saved, expected.saved.layout, expected.saved.offset
        if known.source >= 0:  # which may lie elsewhere in its storage than in the recorded call
            offset = (_offset_bytes(self._sources[known.source]) + expected.start_bytes) // layout.dtype.itemsize
        content = self.contents[position]
        noted = digest_of(saved_digest, layout, content) if content else b""
        return SavedTensor(noted, known.op, layout, known.source, offset, known.is_undefined)


class KnownCall:
    """Makes the recording of a call whose program is known, in the place of a recorder.

    Args:
        known: The program that the call runs.
        inputs: The tensors of the program's sources, in their order.
        make_copy: Makes copies of those that may change before backward.
        fixed: Digests of parameters that do not change during the call; None to compute all digests.
        compares_outputs: Whether only outputs are compared with a recomputation (Rule 6).

    Raises:
        Refusal: Autocast would not cast one of the inputs anew.

    Attributes:
        recording: The recording. Sources and the generator's state are complete, saved tensors are added.
    """

    def __init__(
        self,
        known: KnownProgram,
        inputs: Sequence[Tensor],
        make_copy: MakeCopy,
        fixed: FixedDigests | None,
        *,
        compares_outputs: bool,
    ) -> None:
        self._takes_none = compares_outputs
        self.recording = Recording(
            computes_on_host=known.computes_on_host, accelerators=dict.fromkeys(known.accelerators)
        )
        if compares_outputs:
            self.recording.returned = []
        self.recording.saved = saved = KnownSaves(known.saves, self.recording.sources)
        self._saved, self._expected = saved.contents, iter(known.saves)
        self._known, self._digests = known, ContentDigests()
        self._contents: list[Digest] = []  # of the sources
        self._node, self._of_this_node = 0, list[Tensor]()
        take, contents, sources = self._digests.take, self._contents, self.recording.sources
        for tensor, (layout, kind, is_parameter, is_written) in zip(inputs, known.sources, strict=True):
            if fixed is not None and is_parameter:
                content = self._fixed(tensor, layout, fixed)
            else:
                content = content_digest(tensor, layout) if layout.is_dense_on_host else take(tensor, layout)
            contents.append(content)
            address = digest_of(tensor_address, layout, content)
            if known.is_cast and CASTS.has_stale_cast(tensor, address):
                raise Refusal(STALE_CAST)
            source = recorded_source(tensor, layout, address, make_copy, kind)
            if is_written:
                note_write(source, tensor)
            sources.append(source)
        if known.draws_on is not None:
            state = default_generator(known.draws_on).get_state().numpy().tobytes()
            self.recording.generator_states += [state, *[b""] * (known.program.draws - 1)]
            self.recording.continuing.update(range(1, known.program.draws))

    def _fixed(self, parameter: Tensor, layout: Layout, fixed: FixedDigests) -> Digest:
        content = fixed.get(key := contents_key(parameter, layout))
        if content is None:
            content = self._digests.take(parameter, layout)
        fixed.add(parameter, key, content)
        return content

    def note_saved(self, tensor: Tensor) -> int:
        """Records a tensor that autograd saves. Returns its position among them.

        Raises:
            Refusal: It is not the tensor that the program saves.
        """
        if (expected := next(self._expected, None)) is None:
            raise Refusal(CHANGED)
        shape, strides, dtype, known, memory_at, _, whole_source, node, position = expected
        if tensor.shape != shape or tensor.stride() != strides or tensor.dtype is not dtype:
            raise Refusal(CHANGED)
        if whole_source >= 0:
            content = self._contents[whole_source]
        elif self._takes_none and known.source < 0:
            content = b""
        elif known.is_undefined:
            content = UNDEFINED_CONTENT
        elif memory_at is not None:  # an op of the call has just made it, as in the recorded one
            content = digest_of_memory(memory_at(tensor.data_ptr()))
        else:
            content = self._digests.take(tensor, known.layout)
        self._saved.append(content)
        if node != self._node:
            self._node = node
            self._of_this_node.clear()
        self._of_this_node.append(tensor)
        return position

    def note_returned(self, outputs: Sequence[Tensor]) -> None:
        """Records the outputs of the program, once the call has ended, if these are compared."""
        if (returned := self.recording.returned) is None:
            return
        for output in outputs:
            layout = layout_of(output)
            noted = digest_of(saved_digest, layout, self._digests.take(output, layout))
            returned.append(SavedTensor(noted, "", layout, -1, 0, is_returned=True))

    def end(self) -> Sequence[Tensor]:
        """Ends the call. If it has saved too few tensors, what counts as recorded ends before the node that saved last.

        Returns:
            What that node has saved, in the place of which the recording has nothing. A replay runs nodes as a whole.
        """
        last, self._of_this_node = self._of_this_node, []
        if len(self._saved) == len(self._known.saves):
            return []
        self.recording.refuse("it saved fewer tensors than the recorded call of the same kind")
        del self._saved[len(self._saved) - len(last) :]
        return last
