"""Replays a program: runs the forward of a recorded call on given sources, and its backward.

Workers use this module, and so does the trainer when it recomputes a segment itself. So both get the same bits.

NOTE [Lent memory]
1. The sources of a replay are lent, that is, others use the same memory. On a worker they lie in the store, which
   serves other segments and sessions. On the trainer they are parameters and kept copies. No program may change them.
2. If the program declares a source as written, the replay uses a copy in memory of its own.
3. Before an op runs, the replay looks up the storages of all tensors that the op will write to. If one of them is lent,
   it refuses the program. The tensors that an op writes to follow from its schema, and from HIDDEN_WRITES if the schema
   does not declare them: a test runs every op of the list and compares all arguments before and after. The storage is
   read from the tensor itself, so it does not matter which ops return an alias of an argument.
4. Ops that take an offset from the start of a storage could reach beyond a lent tensor, so they are refused for one.
5. Therefore a stored tensor has the same digest in every replay, and a worker keeps the digest (`KnownDigests`). It
   computes the digest again once in `KNOWN_USES` uses, to detect memory that a hardware fault has damaged.
6. The ops inside a custom function are watched too, but a kernel outside torch could still write anywhere. So could an
   op of a tensor subclass, which passes it on to the tensors inside. So an op that writes to a tensor subclass is
   refused, and the digests of the sources of a program with functions or objects are computed again after each replay
   and each backward.
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
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.program.op_list import resolve
from backhaul_runtime.program.op_rules import (
    ABSOLUTE,
    UNWRITTEN_RESULTS,
    rules,
    tensors_in,
    written_tensors,
)
from backhaul_runtime.program.op_trace import describe_op
from backhaul_runtime.program.program import (
    FLEX_ATTENTION,
    Composite,
    GeneratorRef,
    Node,
    Program,
    ResultRef,
    SourceRef,
    parts_in,
)
from backhaul_runtime.program.undefined_saves import PARTLY_UNDEFINED, UNDEFINED_SAVES, undefined_saves
from backhaul_runtime.replay.compiled_programs import CompiledFunction, device_of, function_of, undefined_saves_of
from backhaul_runtime.replay.custom.custom_execution import CustomExecution
from backhaul_runtime.replay.footprint import FootprintMeter
from backhaul_runtime.replay.nested_programs import run_attention
from backhaul_runtime.replay.recorded_choices import ChoiceReplay
from backhaul_runtime.replay.saved_tensors import SavedTensorPacker, VersionedTensor, unpacking
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, KnownDigests, digest_of, read
from backhaul_runtime.tensors.digest import read_digest, saved_digest
from backhaul_runtime.tensors.layout import copy_exact, layout_of, with_memory
from backhaul_runtime.tensors.random_projection import read_projections, unread_projections
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.autocast_cache import cached_casts
from backhaul_runtime.torch_internals.generators import default_generator, drawing_device, restoring
from backhaul_runtime.torch_internals.graph_entries import (
    with_history_of,
    with_own_history,
    without_gradient,
)
from backhaul_runtime.torch_internals.graph_uses import Target, Use, find_casts, find_uses
from backhaul_runtime.torch_internals.inductor import may_differentiate
from backhaul_runtime.torch_internals.private import (
    DisableTorchDispatch,
    OpOverload,
    is_thin,
    next_sequence_number,
    version_of,
)
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key

_CHECKED_NODES = 64
"""Backward calls `check` whenever it unpacks a saved tensor, and at one in this many nodes, as some save nothing."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The contribution of one use to the gradient of a source, of a cast or of an output.

    Attributes:
        source: Number of the source, cast or output: sources are numbered first, then casts, then outputs. See
            `Program.casts`.
        gradient: The tensor to add; None if the use got no gradient.
    """

    source: int
    gradient: Tensor | None


def sums_of(contributions: Sequence[Contribution], wanted: Collection[int]) -> dict[int, Tensor]:
    """Adds each wanted source's contributions, in the order in which autograd adds them on the trainer."""
    sums: dict[int, Tensor] = {}
    for contribution in contributions:
        source, gradient = contribution.source, contribution.gradient
        if source in wanted and gradient is not None:
            gradient = gradient.detach()
            sums[source] = sums[source] + gradient if source in sums else gradient
    return sums


def with_sums(contributions: Sequence[Contribution], sums: Mapping[int, Tensor]) -> list[Contribution]:
    """Replaces the first contribution of each source by its sum, and the gradients of the others by None."""
    left = dict(sums)
    return [Contribution(c.source, left.pop(c.source, None)) if c.source in sums else c for c in contributions]


class Replay:
    """One run of a program. Constructing it runs the forward. It owns its graph and saved tensors.

    It changes the default generators and the ambient settings of the calling thread. Construct it inside `isolated` if
    other code uses them.

    Args:
        program: The program; each of its ops must be on the list.
        sources: One tensor for each source of the program, with the recorded layout, on the device to run on. They are
            not written to, and must not change until the backward has run.
        generator_states: One state for each node that draws. If empty, the node draws from the generator as the
            previous draw left it.
        keep_saved: Whether to keep all saved tensors for `saved`. Otherwise `backward` frees them as it goes.
        is_own: Whether this process recorded the program. The values of its arguments are then not checked, as forward
            has run with them.
        wants_projections: Whether to compute random projections of saved tensors.
        is_measured: Whether to measure `footprint`.
        histories: For contributions that are to be differentiated: tensors whose history replaces that of a source that
            takes gradients, or of an output that other outputs depend on. Keys are numbers as in `Contribution.source`.
        context: A context manager that the ops run in; None for none.
        trace: A list to which each op appends a readable line; None for no trace.
        check: Called between ops, in forward and backward, in the thread that runs them. An exception that it raises
            ends the execution and propagates.
        watched: Positions of outputs of which the last node that writes to them is noted.
        known: Digests of sources from previous replays; None to compute all digests.
        compares_outputs: Whether `digests` are those of the outputs, and none of saved tensors are computed.

    Attributes:
        drawn_from: The generator states before all draws so far, whether they were given or not.
        footprint: The measured footprint, copies of written sources included; None if not measured.
        written: The functions whose backward may have written to a source or output, by its number as in
            `Contribution.source`. Only for programs of this process: on a worker such a backward raises ReplayError.

    Raises:
        ProgramError: An op is not allowed, or the lists do not fit the program.
        ReplayError: An op failed, or its results have other sizes than recorded.
    """

    def __init__(
        self,
        program: Program,
        sources: Sequence[Tensor],
        generator_states: Sequence[bytes],
        *,
        keep_saved: bool = False,
        is_own: bool = False,
        wants_projections: bool = False,
        is_measured: bool = False,
        histories: Mapping[int, Tensor] | None = None,
        context: AbstractContextManager[Any] | None = None,
        trace: list[str] | None = None,
        check: Callable[[], None] | None = None,
        watched: Collection[int] = (),
        known: KnownDigests | None = None,
        compares_outputs: bool = False,
    ) -> None:
        # A client sends all three, and what follows pairs them.
        if len(sources) != len(program.sources) or len(generator_states) != program.draws:
            raise ProgramError(
                f"a program of {len(program.sources)} sources and {program.draws} draws was replayed with "
                f"{len(sources)} sources and {len(generator_states)} generator states"
            )
        function = None if program.compilation is None else function_of(program)
        self._program = program
        self._is_own = is_own
        self._check = check
        self._states = iter(generator_states)
        self.drawn_from: list[bytes] = []
        self.written: dict[int, list[str]] = {}
        # Sources are lent: another replay may read the same memory, so a program writes only to copies.
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
        # The digest of one that is written to belongs to its copy, which is another one in each replay.
        stored = [tensor for source, tensor in zip(program.sources, sources, strict=True) if not source.is_written]
        contents = ContentDigests(known, stored if known is not None else ())
        self._packing = SavedTensorPacker(
            keep_saved,
            contents,
            self._lent if wants_projections else None,
            meter,
            compares_saved=not compares_outputs,
        )
        self._custom = CustomExecution(program, self._packing, self._lent, is_own=is_own)
        # Read before the execution: if the program writes into a source, the source has another history afterwards.
        self._targets: dict[Target, int] = {
            get_gradient_edge(tensor)[:2]: index
            for index, (source, tensor) in enumerate(zip(program.sources, self._sources, strict=True))
            if source.requires_grad
        }
        self._trace = trace
        self._watched, self._written = watched, dict[int, tuple[int, int]]()
        self._cuts, self._cut = self._last_written(sources, generator_states), dict[int, Tensor]()
        with (
            self._packing.running(),
            torch.autograd.graph.saved_tensors_hooks(self._packing, unpacking(check)),
            context or nullcontext(),
        ):
            if function is not None:
                self._outputs = self._run_compiled(function)
            else:
                results = self._run(meter, keeps_modes=context is not None)
                self._outputs = [self._value(ref, results) for ref in program.outputs]
        if program.functions or program.types:  # Rule 6
            contents.forget()
        self._custom.check_identities()
        for position, made in self._cut.items():
            self._outputs[position] = made
        self._digests: Sequence[Digest] = self._packing.digests
        if compares_outputs:
            layouts = map(layout_of, self._outputs)
            self._digests = [
                digest_of(saved_digest, layout, contents.take(output, layout))
                for output, layout in zip(self._outputs, layouts, strict=True)
            ]
        if program.casts:
            self._targets |= self._casts(has_history=histories is not None)
        self.footprint: Footprint | None = meter.footprint(self._outputs) if meter is not None else None

    @property
    def digests(self) -> list[bytes]:
        """The digests of all saved tensors, in order, or of all outputs; see `recording.SavedTensor`.

        Waits for an accelerator.
        """
        return list(map(read, self._digests))

    @property
    def saved_projections(self) -> list[tuple[float, ...]]:
        """The random projections of all saved tensors, in order; empty for parts of sources that are not written to.

        Waits for an accelerator.
        """
        return read_projections(self._packing.projections)

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
            if node.fresh_casts:  # forward left an autocast region here, so the next op must cast its weights anew
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

    def _run_compiled(self, function: CompiledFunction) -> list[Tensor]:
        """Runs the program as a whole and returns its outputs. See NOTE [Compiled programs]."""
        program, given = self._program, next(self._states, b"")
        self._packing.is_undefined = undefined_saves_of(program)
        if program.ambient_states:
            ambient_state.apply(program.ambient_states[0], ambient_state.capture())
        if program.draws:
            generator = default_generator(device_of(self._sources))
            if given:
                _set_state(generator, given)
            self.drawn_from += [generator.get_state().numpy().tobytes(), *[b""] * (program.draws - 1)]
        if self._check is not None:
            self._check()
        try:
            outputs = list(function(self._sources))
        except BackhaulError:  # raised by `check`
            raise
        except Exception as error:  # a kernel may raise any type of error
            raise ReplayError(f"the compiled program failed on replay: {error}") from error
        made_by = {output.grad_fn for output in outputs}
        if len(made_by) != 1 or None in made_by:
            raise ProgramError("a compiled program returns an output without gradient, or a view of another tensor")
        self._custom.node_classes.update(map(type, made_by))
        return outputs

    def _entered(self, number: int, value: Tensor) -> Tensor:
        """Returns the tensor that ops use for a source: with a new history, or with the one given in `histories`."""
        history = self._histories.get(number)
        if history is None:
            return with_own_history(value, is_leaf=self._program.sources[number].is_leaf)
        return with_history_of(value, history)

    def _last_written(self, sources: Sequence[Tensor], states: Sequence[bytes]) -> dict[int, int]:
        """Returns the last node that makes or writes each output whose history is given, by the output's position.

        Only a run shows which nodes write to it, so this runs the program once more if `histories` names an output.
        """
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
        """Makes later ops see an output with the history given in `histories`. The output keeps its own history."""
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
        self._packing.begin_op(node.op)
        check = None
        if node.is_function or node.op in names.ops:
            given = [self._value(part, results) for part in node.parts if isinstance(part, (SourceRef, ResultRef))]
            check = self._custom.begin_check(node.op, given)
        if node.is_function:
            if node.draws:
                self._generator(args, {})
            op: OpOverload | str = node.op
            returned = self._custom.run(node.op, args)
        elif node.op == FLEX_ATTENTION:
            op = node.op
            returned = self._run_attention(args)
        else:
            op = resolve(node.op)
            returned = self._run_op(op, node, args, kwargs)
        try:
            sizes = tuple([ledger.add(tensor) for tensor in returned])
        except Exception as error:  # a result without memory
            raise ReplayError(f"{node.op} failed on replay: {error}", op=node.op) from error
        # The worker has reserved memory for the recorded sizes, so a larger result would exceed its budget.
        if sizes != node.result_bytes:
            raise ReplayError(f"{node.op} took {sizes} bytes on replay, {node.result_bytes} when recorded", op=node.op)
        if self._trace is not None:
            self._trace.append(describe_op(op, tuple(args), kwargs, returned))
        if meter is not None:
            meter.ran(tensors_in((args, list(kwargs.values()))), returned)
        if check is not None:
            self._custom.end_check(node.op, check, returned)
        if node.op in UNWRITTEN_RESULTS:  # or a program could read what another session left in this memory
            for tensor in returned:
                with DisableTorchDispatch():
                    tensor.detach().zero_()
        return returned

    def _run_attention(self, args: list[Any]) -> list[Tensor]:
        """Runs flex_attention, which writes to none of its arguments. Its node in the graph is a custom function's."""
        try:
            returned = run_attention(args)
        except ProgramError:
            raise
        except Exception as error:  # an op may raise any type of error
            raise ReplayError(f"{FLEX_ATTENTION} failed on replay: {error}", op=FLEX_ATTENTION) from error
        self._custom.node_classes.update(type(one.grad_fn) for one in returned if one.grad_fn is not None)
        return returned

    def _run_op(self, op: OpOverload, node: Node, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Runs an op, after changing its arguments to those that it takes here."""
        if rules(op).draws or node.draws:
            generator = self._generator(args, kwargs) if node.draws else None  # otherwise its draws were recorded
            args[:] = [generator if isinstance(value, GeneratorRef) else value for value in args]
            kwargs |= {name: generator for name, value in kwargs.items() if isinstance(value, GeneratorRef)}
        # torch calls these ops below autograd, and for some of them autograd has no formula.
        if not rules(op).reads_values:
            args[:] = [value.detach() if isinstance(value, Tensor) else value for value in args]
        self._packing.is_undefined = undefined_saves(op, args, kwargs) if node.op in PARTLY_UNDEFINED else None
        read = tensors_in((args, list(kwargs.values()))) if node.op in UNDEFINED_SAVES else None
        with DisableTorchDispatch():
            self._packing.reads = None if read is None else read_digest(read)
            self._packing.reads_projection = (
                unread_projections(read) if read and self._packing.wants_projections else []
            )
        try:
            # Stored memory is lent to several replays: a write would change the numbers of another one.
            self._check_lent(op, args, kwargs)
            if not self._is_own:  # the arguments of a client's program may crash the process
                unsafe_arguments.check_values(node.op, op, args, kwargs)
            return self._results(op, node, args, kwargs)
        except ProgramError:  # says that the program is wrong, not that its replay failed
            raise
        except Exception as error:  # an op may raise any type of error
            raise ReplayError(f"{node.op} failed on replay: {error}", op=node.op) from error

    def _check_lent(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises ProgramError for an op that would write to lent memory or reach beyond it (Rules 3 and 4)."""
        op_rules = rules(op)
        for tensor in written_tensors(op_rules, args, kwargs):
            if not is_thin(type(tensor)):
                raise ProgramError(f"{op_rules.name} writes to a {type(tensor).__name__}", op=op_rules.name)
            if storage_key(tensor) in self._lent:
                raise ProgramError(
                    f"{op_rules.name} would write into a source that the program does not declare as written",
                    op=op_rules.name,
                )
        if op_rules.name in ABSOLUTE and storage_key(args[0]) in self._lent:
            raise ProgramError(
                f"{op_rules.name} takes an offset from the start of a storage, and would reach beyond a source",
                op=op_rules.name,
            )

    def _results(self, op: OpOverload, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if not node.given:
            return tensors_in(op(*args, **kwargs))
        given = [(self._sources[given.source], given.packed_elements) for given in node.given]
        values = ChoiceReplay(given, self._lent)
        with values:
            returned = op(*args, **kwargs)
        return values.decided(tensors_in(returned))

    def _generator(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
        """Returns the generator that the next node draws from, set to the recorded state unless that is empty."""
        given = next(self._states)
        device = drawing_device(args, kwargs)
        is_own = any(isinstance(value, GeneratorRef) for value in (*args, *kwargs.values()))
        generator = torch.Generator(device) if is_own else default_generator(device)
        if given:
            _set_state(generator, given)
        self.drawn_from.append(given or generator.get_state().numpy().tobytes())
        return generator

    def _value(self, value: Any, results: list[list[Tensor] | None]) -> Any:
        match value:
            case SourceRef(index):
                return self._sources[index]
            case ResultRef(node, output):
                result = results[node]
                assert result is not None, "a result was freed before its last use"
                return result[output]
            case tuple():
                return [self._value(item, results) for item in value]
            case Composite(name, parts):
                return names.build(name, [self._value(part, results) for part in parts])
        return value

    def saved(self, index: int) -> VersionedTensor:
        """Returns the `index`-th saved tensor. It shares memory with the replay or a source: do not write to it.

        Raises:
            ProgramError: The replay saved fewer tensors, or was made without `keep_saved`.
        """
        if index >= len(self._packing.tensors):
            raise ProgramError(f"there is no saved tensor {index}: the replay kept {len(self._packing.tensors)}")
        return self._packing.tensors[index]

    def output(self, position: int) -> Tensor:
        """Returns the output at a position of `Program.outputs`, detached. It shares memory with the replay."""
        output: Tensor = self._outputs[position]
        return output.detach()

    def uses(self) -> list[list[Use]]:
        """Returns the uses of each source, cast and output, by number as in `Contribution.source`, last use first.

        Raises:
            ProgramError: The graph is one that a recording would have been refused for.
        """
        count = len(self._sources) + len(self._program.casts)
        try:
            return find_uses(self._outputs, self._targets, self._first_sequence, count, self._custom.node_classes)
        except Refusal as refusal:
            raise ProgramError(f"the replay's graph differs from a recorded one: {refusal.reason}") from refusal

    def _casts(self, *, has_history: bool) -> dict[Target, int]:
        """Returns the targets at which gradients of the program's casts arrive, with their numbers.

        Args:
            has_history: Whether `histories` was given. The sources are then no leaves, so autocast has cast them for
                each use anew, and the casts are found in the graph instead of the cache.

        Raises:
            ProgramError: Autocast did not cast one of the sources in `Program.casts`.
        """
        casts = self._program.casts
        if has_history:
            made = find_casts(self._outputs, self._targets, self._first_sequence)
        else:
            cached = zip(casts, cached_casts([self._sources[source] for source in casts]), strict=True)
            made = {s: [get_gradient_edge(c)[:2]] for s, c in cached if c is not None and c.requires_grad}
        if not made.keys() >= {*casts}:
            raise ProgramError(
                f"the program names casts of the sources {list(casts)[:8]}, autocast cast {sorted(made)[:8]}"
            )
        return {target: len(self._sources) + i for i, source in enumerate(casts) for target in made[source]}

    def backward(self, gradients: Mapping[int, Tensor], *, create_graph: bool = False) -> list[Contribution]:
        """Runs the backward once. It frees the graph unless `create_graph` is set.

        Args:
            gradients: The gradients of outputs by position in `Program.outputs`. Outputs without a gradient are
                left out. If the only one is, its custom functions get an undefined gradient, of which they may make
                zeros.
            create_graph: Whether the contributions can be differentiated themselves.

        Returns:
            One contribution for each use of sources, casts and outputs, in this order, last use first. Backward stops
            at an output that other outputs depend on. It continues there only if `gradients` has that output's
            complete gradient.

        Raises:
            ReplayError: A backward formula raised an error.
        """
        uses = self.uses()
        collected: dict[tuple[int, int], Tensor | None] = {}
        by_node: dict[Any, list[tuple[int, tuple[int, int]]]] = {}
        for source, of_source in enumerate(uses):
            for number, use in enumerate(of_source):
                by_node.setdefault(use.node, []).append((use.input_index, (source, number)))
        handles = [node.register_hook(_collector(places, collected)) for node, places in by_node.items()]
        # Only the hooks collect. The inputs tell autograd how far to go, which is nowhere without a use.
        inputs = [GradientEdge(*target) for target, number in self._targets.items() if uses[number]]
        followed = zip(self._outputs, uses[len(uses) - len(self._outputs) :], strict=True)
        inputs += [get_gradient_edge(output) for output, of_source in followed if of_source]
        is_guarded = bool(self._program.functions) and not self._is_own
        # A function may write to the gradients that it gets, which belong to the request.
        given = [
            (self._outputs[position], copy_exact(gradient) if is_guarded else gradient)
            for position, gradient in gradients.items()
            if self._outputs[position].requires_grad
        ]
        if not gradients and self._program.functions and len(self._outputs) == 1:
            given = [(without_gradient(self._outputs[0]), torch.ones(()))]
        functions = self._custom.backward(self._sources, dict(enumerate(self._outputs, len(uses) - len(self._outputs))))
        try:
            if inputs and given:  # torch raises an error without either
                outputs, of_outputs = zip(*given, strict=True)
                with may_differentiate() if create_graph and self._program.compilation else nullcontext():
                    torch.autograd.grad(outputs, inputs, of_outputs, create_graph=create_graph, allow_unused=True)
            self.written = functions.end()
            self._custom.check_identities()
        except BackhaulError as error:  # raised by `check`, or a SavedTensorModifiedError
            functions.failed(error)
            raise
        except Exception as error:  # a backward formula may raise any type of error
            if self._program.functions and self._is_own:
                raise  # an exception of the user's code, which the caller's own handlers expect as it is
            raise ReplayError(f"the backward of a replay failed: {error}") from error
        finally:
            for handle in handles:  # a graph that is kept would run them in its next backward
                handle.remove()
            if self._program.functions or self._program.types:  # these may have written to what was saved
                self._packing.forget()
        return [
            Contribution(source, collected.get((source, number)))
            for source, of_source in enumerate(uses)
            for number in range(len(of_source))
        ]


def _set_state(generator: torch.Generator, state: bytes) -> None:
    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, TypeError) as error:
        raise ProgramError(
            f"{len(state)} bytes are not a state of the generator of {generator.device}: {error}"
        ) from error


def _check_in_backward(results: Sequence[Tensor], check: Callable[[], None]) -> None:
    """Makes the backward of the op that returned `results` call `check` first."""
    made = next((tensor.grad_fn for tensor in results if tensor.grad_fn is not None), None)
    if made is not None:
        made.register_prehook(lambda _: check())


def _collector(
    places: list[tuple[int, tuple[int, int]]], collected: dict[tuple[int, int], Tensor | None]
) -> Callable[[Any, Any], Any]:
    """Returns a hook that moves contributions from a node to `collected`, so that autograd does not add them up."""

    def hook(grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> tuple[Tensor | None, ...]:
        remaining = list(grad_inputs)
        for input_index, position in places:
            gradient = grad_inputs[input_index]
            collected[position] = None if gradient is None else with_memory(gradient)
            remaining[input_index] = None
        return tuple(remaining)

    return hook


def _last_uses(program: Program) -> dict[int, list[int]]:
    """Returns, by node, the nodes whose results can be freed after it because no later node or output needs them."""
    last: dict[int, int] = {index: index for index in range(len(program.nodes))}

    used = [(node.args, tuple(value for _, value in node.kwargs)) for node in program.nodes]
    for index, values in enumerate([*used, program.outputs]):
        last |= {part.node: index for part in parts_in(values) if isinstance(part, ResultRef)}
    freed: dict[int, list[int]] = {}
    for node_index, at in last.items():
        freed.setdefault(at, []).append(node_index)
    return freed


@contextmanager
def isolated(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restores on exit the default generators of the CPU and of `devices`, and the thread's ambient settings."""
    restore = restoring([default_generator(device) for device in dict.fromkeys((torch.device("cpu"), *devices))])
    try:
        with ambient_state.restored():
            yield
    finally:
        restore()
