"""Runs a program again: the forward of a recorded call on given sources, and its backward.

The worker does this, and the trainer where no worker can. Both run this code, so both give the same bits.

NOTE [Lent memory]
1. The sources of a replay are lent: on a worker they lie in the store, where other segments and other sessions use the
   same memory; on the trainer they are parameters and kept copies. Nothing that a program does may change them.
2. A source that the program declares as written is copied first, into memory of the replay's own.
3. Before an op runs, the storages of all that it will write to are looked up. If one of them is lent, the program is
   refused. What an op writes to is known from its schema, and from HIDDEN_WRITES where the schema does not say so: a
   test runs every op of the list and compares all that it was given before and after. Where a tensor lies is read off
   the tensor itself, so it does not matter which ops return an alias of an argument.
4. Ops that count from the start of a storage would reach past a lent tensor, and are refused it.
5. So a stored tensor has the same digest in every replay, and a worker keeps it (`KnownDigests`). It computes it
   again once in `KNOWN_USES` uses, which finds memory that a fault of the machine has damaged.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul_runtime.errors import BackhaulError, ProgramError, Refusal, ReplayError
from backhaul_runtime.program import unsafe_arguments
from backhaul_runtime.program.op_list import resolve
from backhaul_runtime.program.op_rules import (
    ABSOLUTE,
    UNDEFINED_SAVES,
    UNWRITTEN_RESULTS,
    rules,
    tensors_in,
    written_tensors,
)
from backhaul_runtime.program.op_trace import describe_op
from backhaul_runtime.program.program import GeneratorRef, Node, Program, ResultRef, SourceRef
from backhaul_runtime.replay.footprint import FootprintMeter
from backhaul_runtime.replay.recorded_choices import ChoiceReplay
from backhaul_runtime.replay.saved_tensors import SavedTensorPacker, VersionedTensor, unpacking
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.tensors.deferred_digest import ContentDigests, KnownDigests, read
from backhaul_runtime.tensors.digest import read_digest
from backhaul_runtime.tensors.layout import copy_exact, with_memory
from backhaul_runtime.tensors.random_projection import projections
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.autocast_cache import cached_casts
from backhaul_runtime.torch_internals.generators import default_generator, drawing_device
from backhaul_runtime.torch_internals.graph_entries import with_history_of, with_own_history
from backhaul_runtime.torch_internals.graph_uses import Target, Use, find_casts, find_uses
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, OpOverload, next_sequence_number, version_of
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key

_CHECKED_NODES = 64
"""Backward calls `check` when it unpacks a saved tensor, and in one of so many nodes, as some nodes save nothing."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one use of a source, of a cast or of an output adds to its gradient; None where that use got no gradient.

    Attributes:
        source: Index of the source; sources are followed by casts, see `Program.casts`, and these by outputs.
        gradient: The tensor that it adds; None for no gradient.
    """

    source: int
    gradient: Tensor | None


class Replay:
    """One run of a program, forward on construction. Its graph and saved tensors live as long as it does.

    Uses the calling thread's default generators and ambient settings; see `isolated` for a thread that has its own.

    Args:
        program: Recorded; each op must be on the list.
        sources: One per program source, on the device to run on, of the recorded layout. Not written to.
        generator_states: One per node that draws; empty for one that goes on from where the draw before it ended.
        keep_saved: Hold every saved tensor, for `saved`; else only autograd holds them, and frees them in `backward`.
        is_own: This process recorded the program, so its values did no harm then, and `hostile` need not look at them.
        wants_sketches: Take sketches of what autograd saves.
        is_measured: Whether to measure its `footprint`.
        histories: By number of a source that takes gradients, or of an output that others follow from, a tensor whose
            history ops see in its place; see `Contribution.source`. For contributions that are to be differentiated.
        context: Ops run in it.
        trace: Gets a line per op, for people.
        check: Called between ops, forward and backward, in the thread that runs them. What it raises ends the run.
        watched: Positions of outputs. The last node that writes to each is noted.
        known: Digests of sources from the replays before.

    Attributes:
        drawn_from: The generator state of every draw so far, also where none was given.
        footprint: What it takes, if it was measured; copies of sources that are written included.

    Raises:
        ProgramError: An op is not allowed, or the lists do not fit the program.
        ReplayError: An op failed, or returned other sizes than recorded.
    """

    def __init__(
        self,
        program: Program,
        sources: Sequence[Tensor],
        generator_states: Sequence[bytes],
        *,
        keep_saved: bool = False,
        is_own: bool = False,
        wants_sketches: bool = False,
        is_measured: bool = False,
        histories: Mapping[int, Tensor] | None = None,
        context: AbstractContextManager[Any] | None = None,
        trace: list[str] | None = None,
        check: Callable[[], None] | None = None,
        watched: Collection[int] = (),
        known: KnownDigests | None = None,
    ) -> None:
        if len(sources) != len(program.sources) or len(generator_states) != program.draws:
            raise ProgramError(
                f"a program of {len(program.sources)} sources was given {len(sources)}, with "
                f"{len(generator_states)} generator states"
            )
        self._program = program
        self._is_own = is_own
        self._check = check
        self._states = iter(generator_states)
        self.drawn_from: list[bytes] = []
        self._sources = [
            copy_exact(tensor) if source.is_written else tensor.detach()
            for source, tensor in zip(program.sources, sources, strict=True)
        ]
        self._first_sequence = next_sequence_number()
        self._histories = histories or {}
        self._sources = [
            self._entered(index, tensor) if source.requires_grad else tensor
            for index, (source, tensor) in enumerate(zip(program.sources, self._sources, strict=True))
        ]
        self._lent = {
            storage_key(tensor)
            for source, tensor in zip(program.sources, self._sources, strict=True)
            if not source.is_written
        }
        meter = FootprintMeter(self._sources) if is_measured else None
        stored = [tensor for source, tensor in zip(program.sources, sources, strict=True) if not source.is_written]
        contents = ContentDigests(known, stored if known is not None else ())
        self._packing = SavedTensorPacker(keep_saved, contents, self._lent if wants_sketches else None, meter)
        # Taken before the run: where the program writes into a source, its history leads elsewhere afterwards.
        self._targets: dict[Target, int] = {
            get_gradient_edge(tensor)[:2]: index
            for index, (source, tensor) in enumerate(zip(program.sources, self._sources, strict=True))
            if source.requires_grad
        }
        self._trace = trace
        self._watched, self._written = watched, dict[int, tuple[int, int]]()
        self._cuts, self._cut = self._last_written(sources, generator_states), dict[int, Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(self._packing, unpacking(check)), context or nullcontext():
            results = self._run(meter, keeps_modes=context is not None)
        self._outputs = [self._value(ref, results) for ref in program.outputs]
        for position, made in self._cut.items():
            self._outputs[position] = made
        if program.casts:
            self._targets |= self._casts(has_history=histories is not None)
        self.footprint: Footprint | None = meter.footprint(self._outputs) if meter is not None else None

    @property
    def saved_digests(self) -> list[bytes]:
        """Of every tensor that autograd saved, in order; see `recording.SavedTensor`."""
        return list(map(read, self._packing.digests))

    @property
    def saved_sketches(self) -> list[tuple[float, ...]]:
        """The projections of all saved tensors in order, empty for parts of sources; see `random_projection`."""
        return self._packing.sketches

    def _run(self, meter: FootprintMeter | None, *, keeps_modes: bool) -> list[list[Tensor] | None]:
        program = self._program
        last_use = _last_uses(program)
        ledger = StorageLedger()
        for source in self._sources:
            ledger.add(source)
        results: list[list[Tensor] | None] = []
        present, states = ambient_state.capture(), program.ambient_states
        if keeps_modes:
            states = tuple(map(ambient_state.with_present_modes, states))
        for index, node in enumerate(program.nodes):
            state = states[node.ambient]
            if state != present:
                ambient_state.apply(state, present)
                present = state
            if node.fresh_casts:
                torch.clear_autocast_cache()
            if self._check is not None:
                self._check()
            made = self._call(node, results, ledger, meter)
            if self._check is not None and index % _CHECKED_NODES == 0:
                _check_in_backward(made, self._check)
            results.append(made)
            for position in self._watched:
                self._note_written(position, index, results)
            for position, written in self._cuts.items():
                if written == index:
                    self._cut_at(position, results)
            for freed in last_use.get(index, ()):
                results[freed] = None
        return results

    def _entered(self, number: int, value: Tensor) -> Tensor:
        """What ops use for a source: a tensor without history, or with that of another."""
        history = self._histories.get(number)
        if history is None:
            return with_own_history(value, is_leaf=self._program.sources[number].is_leaf)
        return with_history_of(value, history)

    def _last_written(self, sources: Sequence[Tensor], states: Sequence[bytes]) -> dict[int, int]:
        """By position of each output whose history is given, the last node that makes it or writes to it."""
        first = len(self._program.sources) + len(self._program.casts)
        refs = enumerate(self._program.outputs, first)
        positions = [number - first for number, ref in refs if number in self._histories and isinstance(ref, ResultRef)]
        if not positions:
            return {}
        scout = Replay(self._program, sources, states, is_own=self._is_own, watched=positions)
        return {position: index for position, (index, _) in scout._written.items()}

    def _note_written(self, position: int, index: int, results: list[list[Tensor] | None]) -> None:
        ref = self._program.outputs[position]
        assert isinstance(ref, ResultRef)
        if ref.node <= index:
            version = version_of(self._value(ref, results))
            if self._written.get(position, (0, -1))[1] != version:
                self._written[position] = index, version

    def _cut_at(self, position: int, results: list[list[Tensor] | None]) -> None:
        """Lets later ops see an output with the history of another tensor."""
        number = len(self._program.sources) + len(self._program.casts) + position
        made = self._value(self._program.outputs[position], results)
        cut = with_history_of(made, self._histories[number])
        for result in results:
            if result is not None:
                result[:] = [cut if tensor is made else tensor for tensor in result]
        self._targets[get_gradient_edge(cut)[:2]] = number
        self._cut[position] = made

    def _call(
        self, node: Node, results: list[list[Tensor] | None], ledger: StorageLedger, meter: FootprintMeter | None
    ) -> list[Tensor]:
        args = [self._value(value, results) for value in node.args]
        kwargs = {name: self._value(value, results) for name, value in node.kwargs}
        op = resolve(node.op)
        if rules(op).draws:
            generator = self._generator(args, kwargs) if node.draws else None  # else its draws are given
            args = [generator if isinstance(value, GeneratorRef) else value for value in args]
            kwargs = {name: generator if isinstance(v, GeneratorRef) else v for name, v in kwargs.items()}
        if not rules(op).reads_values:  # torch's own bindings call these below autograd, which knows not all of them
            args = [value.detach() if isinstance(value, Tensor) else value for value in args]
        self._packing.op = node.op
        read = tensors_in((args, list(kwargs.values()))) if node.op in UNDEFINED_SAVES else None
        with DisableTorchDispatch():
            self._packing.reads = None if read is None else read_digest(read)
            self._packing.reads_sketch = projections(read) if read and self._packing.wants_sketches else ()
        try:
            self._check_lent(op, args, kwargs)
            if not self._is_own:
                unsafe_arguments.check_values(node.op, op, args, kwargs)
            returned = self._results(op, node, args, kwargs)
            sizes = tuple([ledger.add(tensor) for tensor in returned])
        except ProgramError:
            raise
        except Exception as error:  # ops raise what they like
            raise ReplayError(f"{node.op} failed on replay: {error}", op=node.op) from error
        if sizes != node.result_bytes:
            raise ReplayError(f"{node.op} took {sizes} bytes on replay, {node.result_bytes} when recorded", op=node.op)
        if self._trace is not None:
            self._trace.append(describe_op(op, tuple(args), kwargs, returned))
        if meter is not None:
            meter.ran(tensors_in((args, list(kwargs.values()))), returned)
        if node.op in UNWRITTEN_RESULTS:
            for tensor in returned:
                with DisableTorchDispatch():
                    tensor.detach().zero_()
        return returned

    def _check_lent(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises ProgramError for an op that would write into lent memory, or reach past it. NOTE [Lent memory]."""
        op_rules = rules(op)
        for tensor in written_tensors(op_rules, args, kwargs):
            if storage_key(tensor) in self._lent:
                raise ProgramError(
                    f"{op_rules.name} would write into a source that the program does not declare as written",
                    op=op_rules.name,
                )
        if op_rules.name in ABSOLUTE and storage_key(args[0]) in self._lent:
            raise ProgramError(f"{op_rules.name} would reach past a source", op=op_rules.name)

    def _results(self, op: OpOverload, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if not node.given:
            return tensors_in(op(*args, **kwargs))
        given = [(self._sources[given.source], given.packed_elements) for given in node.given]
        values = ChoiceReplay(given, self._lent)
        with values:
            returned = op(*args, **kwargs)
        return values.decided(tensors_in(returned))

    def _generator(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
        """The generator that the next node draws from, in the state it was recorded with."""
        given = next(self._states)
        device = drawing_device(args, kwargs)
        is_own = any(isinstance(value, GeneratorRef) for value in (*args, *kwargs.values()))
        generator = torch.Generator(device) if is_own else default_generator(device)
        if given:
            try:
                generator.set_state(torch.frombuffer(bytearray(given), dtype=torch.uint8))
            except (RuntimeError, TypeError) as error:
                raise ProgramError(
                    f"a generator state of {len(given)} bytes is not one of {device}: {error}"
                ) from error
        self.drawn_from.append(given or generator.get_state().numpy().tobytes())
        return generator

    def _value(self, value: Any, results: list[list[Tensor] | None]) -> Any:
        match value:
            case SourceRef(index):
                return self._sources[index]
            case ResultRef(node, output):
                result = results[node]
                assert result is not None, "freed before its last use"
                return result[output]
            case tuple():
                return [self._value(item, results) for item in value]
        return value

    def saved(self, index: int) -> VersionedTensor:
        """The `index`-th tensor that autograd saved. Shares memory with the replay, and with sources.

        Raises:
            ProgramError: The replay saved fewer tensors.
        """
        if index >= len(self._packing.kept):
            raise ProgramError(f"saved tensor {index} is asked for of {len(self._packing.kept)}")
        return self._packing.kept[index]

    def output(self, position: int) -> Tensor:
        """The tensor at a position of `Program.outputs`, detached. Shares memory with the replay."""
        output: Tensor = self._outputs[position]
        return output.detach()

    def uses(self) -> list[list[Use]]:
        """The uses of each source, cast and output, last first. Raises ProgramError for a graph no recording has."""
        count = len(self._sources) + len(self._program.casts)
        try:
            return find_uses(self._outputs, self._targets, self._first_sequence, count)
        except Refusal as refusal:
            raise ProgramError(f"the replay's graph differs from a recorded one: {refusal.reason}") from refusal

    def _casts(self, *, has_history: bool) -> dict[Target, int]:
        """Where gradients of the program's casts arrive.

        Args:
            has_history: The sources are no leaves, so autocast has cast them for each use anew.
        """
        casts = self._program.casts
        if has_history:
            made = find_casts(self._outputs, self._targets, self._first_sequence)
        else:
            cached = zip(casts, cached_casts([self._sources[source] for source in casts]), strict=True)
            made = {s: [get_gradient_edge(c)[:2]] for s, c in cached if c is not None and c.requires_grad}
        if not made.keys() >= {*casts}:
            raise ProgramError(f"a program names casts of the sources {list(casts)[:8]}, and autocast made others")
        return {target: len(self._sources) + i for i, source in enumerate(casts) for target in made[source]}

    def backward(self, gradients: Mapping[int, Tensor], *, create_graph: bool = False) -> list[Contribution]:
        """Runs the backward once; the graph is freed unless `create_graph`.

        Args:
            gradients: Gradient of an output by its position in `Program.outputs`; outputs without one are left out.
            create_graph: Give contributions that can be differentiated themselves.

        Returns:
            One contribution per use of sources, casts and outputs, in this order, last use first. Gradients end at
            outputs that others follow from, and go on from there when these are given theirs.
        """
        uses = self.uses()
        collected: dict[tuple[int, int], Tensor | None] = {}
        by_node: dict[Any, list[tuple[int, tuple[int, int]]]] = {}
        for source, of_source in enumerate(uses):
            for number, use in enumerate(of_source):
                by_node.setdefault(use.node, []).append((use.input_index, (source, number)))
        handles = [node.register_hook(_collector(places, collected)) for node, places in by_node.items()]
        inputs = [GradientEdge(*target) for target, number in self._targets.items() if uses[number]]
        of_outputs = zip(self._outputs, uses[len(uses) - len(self._outputs) :], strict=True)
        inputs += [get_gradient_edge(output) for output, of_source in of_outputs if of_source]
        positions = [position for position in gradients if self._outputs[position].requires_grad]
        try:
            if inputs and positions:
                torch.autograd.grad(
                    [self._outputs[position] for position in positions],
                    inputs,
                    [gradients[position] for position in positions],
                    create_graph=create_graph,
                    allow_unused=True,
                )
        except BackhaulError:  # of `check`, or a SavedTensorModifiedError
            raise
        except Exception as error:  # backward formulas raise what they like
            raise ReplayError(f"the backward of a replay failed: {error}") from error
        finally:
            for handle in handles:
                handle.remove()
        return [
            Contribution(source, collected.get((source, number)))
            for source, of_source in enumerate(uses)
            for number in range(len(of_source))
        ]


def _check_in_backward(results: Sequence[Tensor], check: Callable[[], None]) -> None:
    """Has the backward of the op that returned these call `check` first."""
    made = next((tensor.grad_fn for tensor in results if tensor.grad_fn is not None), None)
    if made is not None:
        made.register_prehook(lambda _: check())


def _collector(
    places: list[tuple[int, tuple[int, int]]], collected: dict[tuple[int, int], Tensor | None]
) -> Callable[[Any, Any], Any]:
    """A hook that takes contributions off a node, so that autograd does not add them up."""

    def hook(grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> tuple[Tensor | None, ...]:
        remaining = list(grad_inputs)
        for input_index, position in places:
            gradient = grad_inputs[input_index]
            collected[position] = None if gradient is None else with_memory(gradient)
            remaining[input_index] = None
        return tuple(remaining)

    return hook


def _last_uses(program: Program) -> dict[int, list[int]]:
    """By node, the earlier nodes whose results no later node needs."""
    last: dict[int, int] = {index: index for index in range(len(program.nodes))}

    def visit(value: Any, at: int) -> None:
        if isinstance(value, ResultRef):
            last[value.node] = at
        elif isinstance(value, tuple):
            for item in value:
                visit(item, at)

    for index, node in enumerate(program.nodes):
        visit(node.args, index)
        visit(tuple(value for _, value in node.kwargs), index)
    for output in program.outputs:
        visit(output, len(program.nodes))
    freed: dict[int, list[int]] = {}
    for node_index, at in last.items():
        freed.setdefault(at, []).append(node_index)
    return freed


@contextmanager
def isolated(devices: Sequence[torch.device]) -> Iterator[None]:
    """Lets a replay run in a thread whose generators and settings belong to others: both are put back."""
    generators = [default_generator(device) for device in dict.fromkeys((torch.device("cpu"), *devices))]
    states = [generator.get_state() for generator in generators]
    try:
        with ambient_state.restored():
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
