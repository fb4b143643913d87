"""What is written for the wire, as a peer with generated stubs sees it."""

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.splicing import Batch, encode


def plain(batch: Batch) -> tensor_pb2.TensorBatch:
    """The batch, read by protobuf."""
    return tensor_pb2.PutTensorsRequest.FromString(encode(batch, 2)).tensors
