"""Measures the link to a worker, with tensors that a segment takes and returns."""

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from backhaul.doctor.profile.observed import ObservedSession
from backhaul.doctor.profile.plain import synchronise
from backhaul_proto.v1 import telemetry_pb2

_LINK_BYTES, _FIRST_LINK_BYTES, _LINK_ROUNDS, _ENOUGH_S = 32 << 20, 1 << 20, 3, 0.2
"""Sizes of the tensors and of the first one, how many are measured, and how fast the first must be for large ones."""

Lane = telemetry_pb2.Lane


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The link to a worker.

    Attributes:
        up_bytes_per_s: Rate at which a large tensor is sent.
        down_bytes_per_s: Rate at which a large tensor is received.
        round_trip_s: Duration of a small request, in seconds.
        crosses_network: Whether the worker is reached over TCP.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    crosses_network: bool

    @property
    def bytes_per_s(self) -> float:
        """The lower of the two rates."""
        return min(self.up_bytes_per_s, self.down_bytes_per_s)


class LinkMeasurement:
    """Sends and receives large tensors. `profile` returns the rates once the session is closed.

    Args:
        session: The open session, which must have one worker.
        device: The device of the trainer's tensors.
    """

    def __init__(self, session: ObservedSession, device: torch.device) -> None:
        self._session, self._device = session, device
        self._steps: set[int] = set()
        self._round_trip_s = 0.0
        self._crosses_network = False

    def run(self) -> None:
        """Runs a segment whose input, output and gradients are large, and whose computation takes almost no time."""
        session, size, worker = self._session, _FIRST_LINK_BYTES, self._session._workers[0]
        for number in range(1 + _LINK_ROUNDS):
            # New contents each time: a worker is sent nothing that it has.
            x = torch.randn(size // 4, device=self._device, requires_grad=True)
            began_s = perf_counter()
            y: Tensor = session.checkpoint(_link_test, x)
            y.backward(torch.randn_like(y))  # type: ignore[no-untyped-call]
            synchronise(self._device)
            took_s = perf_counter() - began_s
            if number:
                self._steps.add(session.end_step())
            else:  # the first call connects further, so it does not count
                session.end_step()
                size = _LINK_BYTES if took_s < _ENOUGH_S else size
        link, worker_session = worker.connection.link(), worker.connection.up
        self._round_trip_s = link.round_trip_s
        self._crosses_network = worker_session is not None and worker_session.crosses_network

    def profile(self) -> LinkProfile | None:
        """Returns the rates; None if the worker did not run the segment. The session must be closed."""
        calls = [call for call in self._session.calls if call.step in self._steps and call.decision == "gradients"]
        ups, downs = (
            [
                size / span.duration_s
                for call in calls
                for span in call.spans
                if span.lane == lane and (size := getattr(call, moved)) and span.duration_s > 0
            ]
            for lane, moved in ((Lane.LANE_UPLOAD, "up_bytes"), (Lane.LANE_DOWNLOAD, "down_bytes"))
        )
        if not ups or not downs:
            return None
        return LinkProfile(max(ups), max(downs), self._round_trip_s, self._crosses_network)


def _link_test(x: Tensor) -> Tensor:
    """Takes almost no time, but must be recomputed in backward, because autograd saves the result of `exp`."""
    return x.clamp(-1, 1).exp()
