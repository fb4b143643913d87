"""Computes recorded calls again in this process, as a worker does."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from backhaul._evidence.files import UnusableError
from backhaul.verify.stored_calls import StoredBackward, StoredCall
from backhaul_runtime.process.fingerprint import differences, fingerprint_with_host
from backhaul_runtime.replay.replay import Contribution, Replay, isolated, sums_of, with_sums
from backhaul_runtime.torch_internals import ambient_state


class Recomputation(NamedTuple):
    """A call that was computed again.

    Attributes:
        digests: The digests of what is compared of forward.
        contributions: What its backward has returned; empty without a backward.
    """

    digests: Sequence[bytes]
    contributions: Sequence[Contribution] = ()


Fingerprints = dict[str, tuple[str, str]]
"""What differs between two fingerprints: then and now, by key."""


class Recomputer(Protocol):
    """Computes calls again somewhere."""

    def recompute(self, call: StoredCall, backward: StoredBackward | None) -> Recomputation:
        """Computes a call again, with a backward if one is given.

        Raises:
            UnusableError: It can't be computed there. Any other exception means that as well.
        """

    def differences(self, call: StoredCall) -> Fingerprints:
        """Returns how the fingerprint there differs from that of the trainer then."""


class Here:
    """Computes calls again in this process."""

    def recompute(self, call: StoredCall, backward: StoredBackward | None) -> Recomputation:
        """See `Recomputer`."""
        if call.program.compilation is not None or call.program.holds_attention:
            raise UnusableError("its program is one that torch compiles: name a worker that compiles with --worker")
        devices = [call.device] if call.device.type == "cuda" else []
        with isolated(devices), torch.enable_grad():
            replay = Replay(
                call.program,
                [tensor for tensor, _ in call.sources],
                call.generator_states,
                compares_outputs=call.compares_outputs,
            )
            digests = replay.digests
            if backward is None:
                return Recomputation(digests)
            ambient_state.apply(backward.state, ambient_state.capture())
            contributions = replay.backward(backward.gradients)
        return Recomputation(digests, with_sums(contributions, sums_of(contributions, backward.summed)))

    def differences(self, call: StoredCall) -> Fingerprints:
        """See `Recomputer`."""
        return differences(call.fingerprint, fingerprint_with_host(call.device), computes_on_host=call.computes_on_host)
