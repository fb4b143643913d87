"""Digests and descriptions of gradients, by which a backward is compared with one of another process."""

import xxhash

from backhaul_proto.v1 import evidence_pb2
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.digest import content_digest
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.random_projection import project


def measured_contribution(contribution: Contribution) -> evidence_pb2.EvidenceContribution:
    """Returns what the evidence has of a gradient. Waits for an accelerator. The tensor may be changed afterwards.

    The digest covers the elements in the order of their indices. So it does not depend on strides, which no later sum
    of the gradient takes over.

    Raises:
        UnsupportedTensorError: The gradient is sparse, for example.
    """
    if contribution.gradient is None:
        return evidence_pb2.EvidenceContribution(source=contribution.source)
    gradient = contribution.gradient.detach().resolve_conj().resolve_neg().contiguous()
    what = f"{str(gradient.dtype).removeprefix('torch.')} {list(gradient.shape)}"
    return evidence_pb2.EvidenceContribution(
        source=contribution.source,
        digest=xxhash.xxh3_128_digest(what.encode() + content_digest(gradient, layout_of(gradient))),
        description=what,
        projection=project(gradient) if gradient.is_floating_point() or gradient.is_complex() else (),
    )
