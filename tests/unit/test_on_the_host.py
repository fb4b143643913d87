"""On the host nothing is put off: copies, durations and digests are there at once."""

import torch

from backhaul_runtime.tensors.deferred_digest import ContentDigests
from backhaul_runtime.tensors.durations import known_s, wait_s
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.staging import device_moments, host_pieces
from backhaul_runtime.tensors.stopwatch import Stopwatch


def test_a_tensor_is_read_where_it_is() -> None:
    tensor = torch.ones(3)
    assert device_moments([tensor]) == []
    ((piece, complete),) = host_pieces(tensor, layout_of(tensor), [])
    assert complete == []
    assert piece.data_ptr() == tensor.data_ptr()


def test_a_duration_is_known() -> None:
    took = Stopwatch(torch.device("cpu")).stop()
    assert isinstance(took, float)
    assert known_s(took) == wait_s(took) == took


def test_a_digest_is_bytes() -> None:
    assert isinstance(ContentDigests().take(torch.ones(3), layout_of(torch.ones(3))), bytes)
