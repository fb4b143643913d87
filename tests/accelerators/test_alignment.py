"""The alignment of tensors on a GPU, up to the 256 bytes that cuBLASLt distinguishes."""

import pytest
import torch

from backhaul_runtime.tensors.layout import check_layout, copy_exact, layout_of
from backhaul_runtime.wire.bundle import bundle, unbundle


@pytest.mark.parametrize("offset_bytes", [0, 64, 128, 192, 256, 320])
def test_copies_have_the_alignment(offset_bytes: int) -> None:
    begin = offset_bytes // 4
    x = torch.arange(300.0, device="cuda")[begin : begin + 100]
    layout = layout_of(x)
    check_layout(layout)
    copied = copy_exact(x)
    assert layout.alignment_bytes == copied.data_ptr() % 256 == offset_bytes % 256
    assert torch.equal(copied, x)


def test_views_that_travel_together_have_their_alignments() -> None:
    x = torch.arange(300.0, device="cuda")
    views = {position: x[begin : begin + 50] for position, begin in enumerate((16, 32, 48, 64, 80, 200))}
    sent = bundle(list(views.items()))
    arrived = unbundle([copy_exact(outgoing.tensor) for outgoing in sent.tensors], sent.views)
    assert len(sent.tensors) == 1
    for position, view in views.items():
        assert arrived[position].data_ptr() % 256 == view.data_ptr() % 256
        assert torch.equal(arrived[position], view)
