"""Digests that stay on an accelerator until they are needed. It is a fake one; its tensors are the host's."""

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from backhaul_runtime.tensors import deferred_digest
from backhaul_runtime.tensors.deferred_digest import (
    KNOWN_BYTES,
    KNOWN_USES,
    ContentDigests,
    DeferredDigest,
    KnownDigests,
    read,
)
from backhaul_runtime.tensors.digest import content_digest, read_sums, weighted_sums
from backhaul_runtime.tensors.layout import layout_of, payload
from support.streams import FakeCuda
from unit.test_framing import SHAPES


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.installed(monkeypatch)


def test_digests_are_read_together_and_as_if_they_had_been_read_at_once(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[int] = []

    def counted(sums: Sequence[Tensor]) -> list[bytes]:
        readings.append(len(sums))
        return read_sums(sums)

    monkeypatch.setattr(deferred_digest, "read_sums", counted)
    digests, tensors = ContentDigests(), [make() for make in SHAPES.values()]
    taken = [digests.take(tensor, layout_of(tensor)) for tensor in tensors]
    assert set(cuda.log) == {"trainer is marked"}
    assert all(isinstance(digest, DeferredDigest) for digest in taken)
    cuda.log.clear()
    assert list(map(read, taken)) == [weighted_sums(payload(t.detach(), layout_of(t))) for t in tensors]
    assert readings == [len(tensors)]


def test_a_digest_is_of_what_was_there_when_it_was_taken(cuda: FakeCuda) -> None:
    digests, tensor = ContentDigests(), torch.zeros(8)
    before = digests.take(tensor, layout_of(tensor))
    assert read(before) == weighted_sums(torch.zeros(32, dtype=torch.uint8))  # and more may be taken afterwards
    after = digests.take(tensor.fill_(1), layout_of(tensor))
    assert read(after) == weighted_sums(torch.ones(8).view(torch.uint8))
    assert read(before) != read(after)


def test_a_device_that_fails_while_digests_are_read_fails_each_of_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = ContentDigests()
    taken = [digests.take(torch.ones(count), layout_of(torch.ones(count))) for count in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", lambda *_: 1 / 0)
        for digest in taken:
            with pytest.raises(ZeroDivisionError):
                read(digest)
    assert read(taken[0]) == weighted_sums(torch.ones(1).view(torch.uint8))


def taken_of(tensor: torch.Tensor, known: KnownDigests, stored: list[torch.Tensor]) -> bytes:
    return read(ContentDigests(known, stored).take(tensor, layout_of(tensor)))


def test_the_digest_of_what_is_stored_is_taken_once_and_later_anew() -> None:
    known, stored = KnownDigests(), torch.zeros(KNOWN_BYTES // 64, 16)
    before = content_digest(stored, layout_of(stored))
    assert taken_of(stored.t(), known, [stored]) == before
    stored.numpy()[-1, -1] = 1  # damaged behind torch's back
    after = content_digest(stored, layout_of(stored))
    assert [taken_of(stored.detach(), known, [stored]) for _ in range(KNOWN_USES)] == [before] * (KNOWN_USES - 1) + [
        after
    ]


def test_no_digest_is_known_of_parts_and_of_what_lies_elsewhere() -> None:
    known, stored = KnownDigests(), torch.arange(KNOWN_BYTES).view(-1, 16).float()
    taken_of(stored, known, [stored])
    views = [stored[1:], stored[:-1], stored[:, 1:], stored[::2], stored.clone(), stored + 1, stored.view(-1)[:1]]
    for view in views:
        assert taken_of(view, known, [stored]) == content_digest(view, layout_of(view))


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_known_digests_are_those_of_each_layout(make: Callable[[], torch.Tensor]) -> None:
    known, stored = KnownDigests(), make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_digest, "KNOWN_BYTES", 0)
        for _ in range(2):
            assert taken_of(stored, known, [stored]) == content_digest(stored, layout_of(stored))


@pytest.mark.slow
def test_a_digest_that_nobody_reads_holds_nothing_that_is_stored(cuda: FakeCuda) -> None:
    known, stored = KnownDigests(), [torch.zeros(KNOWN_BYTES), torch.zeros(KNOWN_BYTES)]
    freed = [weakref.ref(tensor) for tensor in stored]
    assert isinstance(ContentDigests(known, stored).take(stored[0], layout_of(stored[0])), DeferredDigest)
    stored.clear()
    gc.collect()
    assert [ref() for ref in freed] == [None, None]
    assert len(known._digests) == 0


def test_what_is_freed_is_known_no_more() -> None:
    known, stored = KnownDigests(), torch.zeros(KNOWN_BYTES)
    taken_of(stored, known, [stored])
    assert len(known._digests) == 1
    del stored
    assert len(known._digests) == 0
