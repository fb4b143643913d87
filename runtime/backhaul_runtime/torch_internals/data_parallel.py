"""What torch does not say in public about a model of DistributedDataParallel (DDP)."""

from typing import Any

from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPSink

from backhaul_runtime.torch_internals.private import is_node_of

PRE_FORWARD = "_pre_forward"
"""The method that runs before each forward of a model, also of one that torch's `replicate` has made."""


def is_still_ordering(model: DistributedDataParallel) -> bool:
    """Whether the next reduction determines in which order DDP puts gradients into buckets."""
    never_orders = model.find_unused_parameters and not model.static_graph
    return not (model._has_rebuilt_buckets or never_orders)


def is_still_counting(model: DistributedDataParallel) -> bool:
    """Whether DDP counts in the next backward how often each parameter is used, because the graph is static."""
    return bool(model.static_graph and not model._static_graph_delay_allreduce_enqueued)


def is_sink(node: Node) -> bool:
    """Whether a node was made by the function through which DDP passes a model's outputs. It does not communicate."""
    sink: Any = _DDPSink
    return is_node_of(node, sink)
