"""Lengths, offsets and indices for which an op on sequences reads or writes out of bounds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _lstm(given: Mapping[str, Any]) -> None:
    """The kernel reads and writes weights and states past their ends if their sizes do not fit the input."""
    data, states = given["input"], given["hx"]
    if data.dim() != 3 or len(states) != 2:  # noqa: PLR2004  batch, time, width; hidden and cell state
        raise ValueError(
            f"an LSTM has an input of {data.dim()} dimensions (3 are needed) and {len(states)} states (2 are needed)"
        )
    _check_weights("an LSTM", 4, given, states, data.shape[0 if given["batch_first"] else 1])


def _packed(name: str, gates: int) -> Callable[[Mapping[str, Any]], None]:
    """Returns the check of a recurrent op on packed sequences, of which each time step has its own number of rows."""

    def check(given: Mapping[str, Any]) -> None:
        data, states = given["data"], given["hx"]
        states = [states] if isinstance(states, Tensor) else states
        has_cell = gates == 4  # noqa: PLR2004  an LSTM
        if data.dim() != 2 or len(states) != 1 + has_cell:  # noqa: PLR2004  all rows, width
            raise ValueError(f"{name} has packed rows of {data.dim()} dimensions and {len(states)} states")
        _check_batch_sizes(given["batch_sizes"], data.shape[0])
        _check_weights(name, gates, given, states, int(given["batch_sizes"][0]))

    return check


def _check_weights(name: str, gates: int, given: Mapping[str, Any], states: Sequence[Tensor], batch: int) -> None:
    data, parameters, layers = given.get("input", given.get("data")), given["params"], given["num_layers"]
    assert data is not None
    directions = 2 if given["bidirectional"] else 1
    if not 1 <= layers <= len(parameters):
        raise ValueError(f"{name} has {layers} layers with {len(parameters)} parameters")
    if any(state.dim() == 0 for state in states):
        raise ValueError(f"{name} has a state without dimensions")
    cell, output = states[-1].shape[-1], states[0].shape[-1]
    expected: list[tuple[int, ...]] = []
    for layer in range(layers):
        width = data.shape[-1] if layer == 0 else output * directions
        one = [(gates * cell, width), (gates * cell, output), *([(gates * cell,)] * 2 if given["has_biases"] else [])]
        expected += (one + ([(output, cell)] if output != cell else [])) * directions
    state_sizes = [(layers * directions, batch, state.shape[-1]) for state in states]
    shapes = [tuple(tensor.shape) for tensor in (*states, *parameters)]
    if shapes != [*state_sizes, *expected]:
        raise ValueError(f"{name} has states and weights of sizes {shapes}, it needs {[*state_sizes, *expected]}")


def _check_batch_sizes(sizes: Tensor, rows: int) -> None:
    _check_integers("the batch sizes", sizes, 1, torch.device("cpu"))
    is_falling = bool((sizes[1:] <= sizes[:-1]).all())
    if not sizes.numel() or not is_falling or int(sizes[-1]) < 1 or int(sizes.sum()) != rows:
        raise ValueError(f"the batch sizes of {rows} packed rows must fall to at least 1, with that sum")


def _pad(given: Mapping[str, Any]) -> None:
    """The kernel reads the first batch size of none, and writes lengths past their end if batch sizes rise."""
    if given["data"].dim() == 0:
        raise ValueError("packed rows have no dimensions")
    _check_batch_sizes(given["batch_sizes"], given["data"].shape[0])


def _pack(given: Mapping[str, Any]) -> None:
    """The kernel makes as many batch sizes as the first length says, though the input has no such rows."""
    data, lengths = given["input"], given["lengths"]
    _check_integers("the lengths", lengths, 1, torch.device("cpu"))
    if data.dim() < 2:  # noqa: PLR2004  time and batch
        raise ValueError(f"an input of {data.dim()} dimensions is packed, at least 2 are needed")
    time, batch = (data.shape[1], data.shape[0]) if given["batch_first"] else data.shape[:2]
    if lengths.numel() != batch or not batch or int(lengths.max()) > time:
        raise ValueError(f"{batch} sequences of up to {time} steps are packed by {lengths.numel()} lengths")


def _ctc(given: Mapping[str, Any]) -> None:
    """The kernel reads targets past their end for lengths that do not fit, and scores of targets that do not exist."""
    scores, targets = given["log_probs"], given["targets"]
    if scores.dim() not in {2, 3} or not scores.numel():  # time, (batch,) classes
        raise ValueError(f"a CTC loss of scores of shape {list(scores.shape)}, it needs time, batch and classes")
    time, classes = scores.shape[0], scores.shape[-1]
    batch = scores.shape[1] if scores.dim() == 3 else 1  # noqa: PLR2004  batched
    _check_integers("the targets", targets, targets.dim(), targets.device)
    steps, sizes = (_whole_numbers(given[name]) for name in ("input_lengths", "target_lengths"))
    if not len(steps) == len(sizes) == batch or min(*steps, *sizes) < 0 or max(steps) > time:
        raise ValueError(f"a CTC loss of {batch} sequences of {time} steps has lengths {steps[:8]} and {sizes[:8]}")
    if targets.dim() == 1:
        used = targets[: sum(sizes)]
        fits = sum(sizes) <= targets.numel()
    else:
        fits = targets.dim() == 2 and targets.shape[0] == batch and max(sizes) <= targets.shape[1]  # noqa: PLR2004
        places = torch.arange(targets.shape[-1] if targets.dim() else 0, device=targets.device)
        used = targets[places < torch.tensor(sizes, device=targets.device).unsqueeze(1)] if fits else targets
    if not fits or not 0 <= given["blank"] < classes or bool(((used < 0) | (used >= classes)).any()):
        raise ValueError(
            f"a CTC loss over {classes} classes has targets that it lacks or that do not fit their lengths"
        )


def _embedding_bag(given: Mapping[str, Any]) -> None:
    """The kernel reads out of bounds for offsets that decrease."""
    offsets = given["offsets"]
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError("the offsets of an embedding bag decrease, they must not")


def _rows(given: Mapping[str, Any]) -> None:
    """On a GPU, the kernel writes out of bounds for indices of rows that do not exist."""
    table, indices = given["self"], given["indices"]
    _check_integers("the indices of an embedding", indices, indices.dim(), table.device)
    if table.dim() != 2 or bool(((indices < 0) | (indices >= table.shape[0])).any()):  # noqa: PLR2004  rows, width
        raise ValueError(f"an embedding of shape {list(table.shape)} lacks a row that is to be normalized")


def _check_integers(what: str, tensor: Tensor, dims: int, device: torch.device) -> None:
    if tensor.dtype not in {torch.int32, torch.int64} or tensor.dim() != dims or tensor.device != device:
        raise ValueError(
            f"{what} are {tensor.dtype} of {tensor.dim()} dimensions on {tensor.device}, {dims} on {device} are needed"
        )


def _whole_numbers(lengths: Any) -> list[int]:
    if not isinstance(lengths, Tensor):
        return [lengths] if isinstance(lengths, int) else list(lengths)
    _check_integers("the lengths", lengths, lengths.dim(), lengths.device)
    numbers: list[int] = lengths.flatten().tolist()
    return numbers


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "aten.lstm.input": _lstm,
    "aten.lstm.data": _packed("a packed LSTM", 4),
    "aten.gru.data": _packed("a packed GRU", 3),
    "aten.rnn_tanh.data": _packed("a packed RNN", 1),
    "aten.rnn_relu.data": _packed("a packed RNN", 1),
    "aten._pack_padded_sequence.default": _pack,
    "aten._pad_packed_sequence.default": _pad,
    "aten.ctc_loss.IntList": _ctc,
    "aten.ctc_loss.Tensor": _ctc,
    "aten.embedding_bag.padding_idx": _embedding_bag,
    "aten.embedding_renorm_.default": _rows,
}
"""The check of each op, from its arguments by name. A check raises ValueError."""
