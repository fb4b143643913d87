"""A worker of a session."""

import weakref
from collections.abc import Mapping

from backhaul._chains import Chains
from backhaul._link import Link
from backhaul._remote import SavedSegment
from backhaul._upload import Uploader


class Side:
    """A worker of the session: its link, what sends to it, and the segments it has."""

    def __init__(self, link: Link, inflight_bytes: int, inflight_boundaries: int) -> None:
        self.link = link
        self.uploader = Uploader(link, inflight_bytes, inflight_boundaries)
        self.chains = Chains()
        self.segments: dict[int, weakref.ref[SavedSegment]] = {}
        self.differences: dict[tuple[int, str], Mapping[str, tuple[str, str]]] = {}  # by generation and kind of device

    def upcoming(self, segment: int) -> list[int]:
        """The segment that backward reaches after this one: the last saved before it that is still there."""
        earlier = [number for number in list(self.segments) if number < segment]
        return [max(earlier)] if earlier else []
