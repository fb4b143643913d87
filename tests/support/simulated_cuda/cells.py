"""CUDA's fused cells of recurrent networks, made of ops that the host has too."""

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the new hidden and cell states [batch, n], and the gates [batch, 4 n] that backward needs."""
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the gates, of the old cell state and of each bias."""
    i, f, g, o = workspace.chunk(4, 1)
    activated = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - activated * activated)
    grad_c = grad_c if grad_cy is None else grad_c + grad_cy
    gates = [
        grad_c * g * i * (1 - i),
        grad_c * cx * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_hy * activated * o * (1 - o),
    ]
    grad_gates = torch.cat(gates, 1)
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else grad_gates.new_empty(0)


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the new hidden state [batch, n], and what backward needs [batch, 5 n]."""
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, ii, ix), (hr, hi, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, i = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    n = (ix + r * hn).tanh()
    return n + i * (hx - n), torch.cat([r, i, n, hx, hn], 1)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Gradients:
    """Returns the gradients of the input and hidden gates, of the old hidden state, and of both biases."""
    r, i, n, hx, hn = workspace.chunk(5, 1)
    grad_i = grad_hy * (hx - n) * i * (1 - i)
    grad_n = grad_hy * (1 - i) * (1 - n * n)
    grad_r = grad_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat([grad_r, grad_i, grad_n], 1), torch.cat([grad_r, grad_i, grad_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (of_input.new_empty(0), of_input.new_empty(0))
    return of_input, of_hidden, grad_hy * i, *biases


def register() -> torch.library.Library:
    """Registers the cells for CUDA, as long as the returned object lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_thnn_fused_lstm_cell": lstm_cell,
        "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
        "_thnn_fused_gru_cell": gru_cell,
        "_thnn_fused_gru_cell_backward": gru_cell_backward,
    }.items():
        library.impl(name, function, "CUDA")
    return library
