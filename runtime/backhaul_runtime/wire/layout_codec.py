"""Encodes layouts of tensors for messages."""

from functools import lru_cache

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors.layout import (
    Layout,
    check_layout,
    dtype_named,
)

MOST_LAYOUTS = 1 << 10
"""Number of layouts whose encoding is cached: a training has few, and sends each in every step."""


@lru_cache(maxsize=MOST_LAYOUTS)
def encode_layout(layout: Layout) -> tensor_pb2.TensorSpec:
    """Encodes a layout for a message. The result is cached and shared: callers must not change it."""
    return tensor_pb2.TensorSpec(
        dtype=layout.dtype_name,
        shape=layout.shape,
        strides=layout.strides,
        alignment_bytes=layout.alignment_bytes,
        conjugate=layout.conjugate,
        negative=layout.negative,
        device=layout.device,
    )


def decode_layout(spec: tensor_pb2.TensorSpec) -> Layout:
    """Decodes a layout. Raises TransferError for one that no tensor can have."""
    spec.DiscardUnknownFields()  # otherwise the cache's key would keep them
    return _decoded(spec.SerializeToString())


@lru_cache(maxsize=MOST_LAYOUTS)
def _decoded(encoded: bytes) -> Layout:
    spec = tensor_pb2.TensorSpec.FromString(encoded)
    layout = Layout(
        dtype=dtype_named(spec.dtype),
        shape=tuple(spec.shape),
        strides=tuple(spec.strides),
        alignment_bytes=spec.alignment_bytes,
        conjugate=spec.conjugate,
        negative=spec.negative,
        device=spec.device,
    )
    check_layout(layout)
    return layout
