import torch

from backhaul_runtime.tensors.digest import address_of, content_digest, saved_digest, weighted_sums
from backhaul_runtime.tensors.layout import layout_of


def digest(tensor: torch.Tensor) -> bytes:
    layout = layout_of(tensor)
    return saved_digest(layout, content_digest(tensor, layout))


def test_values_dtype_shape_and_strides_all_count() -> None:
    base = torch.arange(12, dtype=torch.int32).view(3, 4)
    different = [base, base.view(4, 3), base.t(), base.to(torch.int64), base + 1, base.float(), base.flip(0)]
    assert len({digest(tensor) for tensor in different}) == len(different)


def test_zeros_of_either_sign_and_nans_of_any_kind_differ() -> None:
    digests = {digest(torch.tensor([value])) for value in (0.0, -0.0, float("nan"), -float("nan"))}
    assert len(digests) == 4


def test_where_a_tensor_lies_counts_for_its_address_alone() -> None:
    base = torch.arange(40, dtype=torch.float32)
    first, second = base[:8], torch.cat([torch.zeros(1), base[:8]])[1:]
    assert digest(first) == digest(second)
    assert address_of(first) != address_of(second)


def test_gaps_between_elements_do_not_count() -> None:
    first, second = torch.arange(8.0), torch.arange(8.0)
    second[1::2] = 9
    assert digest(first[::2]) == digest(second[::2])


def test_weighted_sums_see_every_byte_and_its_place() -> None:
    data = torch.randint(0, 256, (1001,), dtype=torch.uint8)
    expected = weighted_sums(data)
    assert len(expected) == 16
    for index in (0, 500, 1000):
        changed = data.clone()
        changed[index] += 1
        sums = weighted_sums(changed)
        assert sums[:8] != expected[:8]
        assert sums[8:] != expected[8:]
    assert weighted_sums(data.flip(0)) != expected
    assert weighted_sums(torch.zeros(8, dtype=torch.uint8)) != weighted_sums(torch.zeros(12, dtype=torch.uint8))
    assert weighted_sums(torch.zeros(0, dtype=torch.uint8)) == bytes(16)
