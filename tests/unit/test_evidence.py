"""Names, shares and files of a directory of evidence."""

from pathlib import Path

import pytest
import torch

from backhaul._evidence.evidence import is_chosen
from backhaul._evidence.files import EvidenceName, EvidenceReader, EvidenceWriter, UnusableError, object_of
from backhaul._evidence.gradients import measured_contribution
from backhaul_proto.v1 import evidence_pb2
from backhaul_runtime.replay.replay import Contribution

NAME = EvidenceName(3, "0123456789abcdef", 2, 1)
MESSAGE = evidence_pb2.EvidenceBackward(step=3, call=2, number=1, why_missing="it is a test")


@pytest.mark.parametrize(("share", "steps"), [(0.0, []), (0.01, [0, 100]), (0.3, [0, 4, 7]), (1.0, list(range(8)))])
def test_a_share_of_the_steps_is_chosen_evenly(share: float, steps: list[int]) -> None:
    assert [step for step in range(101) if is_chosen(step, share)][: len(steps)] == steps


def test_as_many_steps_are_chosen_as_the_share_says() -> None:
    for share in (0.001, 0.01, 0.37, 0.9):
        chosen = sum(is_chosen(step, share) for step in range(10_000))
        assert abs(chosen - 10_000 * share) <= 1


@pytest.mark.parametrize(
    "name", [NAME, NAME._replace(backward=0), NAME._replace(call=0, backward=0), NAME._replace(step=10**10 - 1)]
)
def test_a_name_is_read_as_it_was_written(name: EvidenceName) -> None:
    assert EvidenceName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "../0000000003-0123456789abcdef",
        "0000000003-0123456789abcdef.tmp",
        "٠٠٠٠٠٠٠٠٠٣-0123456789abcdef",
        "0000000003-0123456789abcdef-00000000",
        "0000000003-0123456789ABCDEF",
        "",
    ],
)
def test_other_texts_are_no_names(text: str) -> None:
    assert EvidenceName.parse(text) is None


def test_what_was_written_is_read(tmp_path: Path) -> None:
    writer, digest = EvidenceWriter(tmp_path / "new" / "evidence", 1 << 20), object_of(b"content")
    assert writer.write({digest: b"content"}, {NAME: MESSAGE})
    reader = EvidenceReader(tmp_path / "new" / "evidence")
    assert reader.names() == ([NAME], [])
    assert reader.message(NAME, evidence_pb2.EvidenceBackward) == MESSAGE
    assert reader.object(digest, 7) == b"content"
    assert list(reader.unread_objects()) == []
    with pytest.raises(UnusableError, match="more than 6 bytes"):
        reader.object(digest, 6)
    with pytest.raises(UnusableError, match="has 7 bytes, and what names it needs 8"):
        reader.object(digest, 8, 8)


def test_two_sessions_share_the_bound_of_a_directory(tmp_path: Path) -> None:
    first, second = EvidenceWriter(tmp_path, 200 << 10), EvidenceWriter(tmp_path, 200 << 10)
    contents = [bytes([number]) * (32 << 10) for number in range(8)]
    fits = [writer.write({object_of(one): one}, {}) for one, writer in zip(contents, [first, second] * 4, strict=True)]
    assert fits == [True] * 4 + [False] * 4  # the last 64 KiB are for the ends of steps
    assert second.write({}, {NAME: MESSAGE}, is_end=True)


@pytest.mark.parametrize("number", ["", "0", "many", "9" * 32])
def test_the_number_of_bytes_is_counted_anew_when_a_session_begins(number: str, tmp_path: Path) -> None:
    digest = object_of(bytes(100 << 10))
    EvidenceWriter(tmp_path, 1 << 20).write({digest: bytes(100 << 10)}, {})
    (tmp_path / "lock").write_text(number)
    writer = EvidenceWriter(tmp_path, 200 << 10)
    assert not writer.write({object_of(b"x" * (100 << 10)): b"x" * (100 << 10)}, {})
    assert writer.write({object_of(b"x"): b"x"}, {})


def test_a_writer_that_is_interrupted_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EvidenceWriter(tmp_path, 1 << 20)
    writer.write({}, {NAME: MESSAGE})

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        writer.write({}, {NAME: evidence_pb2.EvidenceBackward()})
    assert EvidenceReader(tmp_path).message(NAME, evidence_pb2.EvidenceBackward) == MESSAGE
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_digest_of_a_gradient_is_of_its_numbers_and_not_of_its_strides() -> None:
    gradient = torch.randn(3, 4)
    one, other = (measured_contribution(Contribution(0, tensor)) for tensor in (gradient, gradient.T.clone().T))
    assert one == other
    changed = measured_contribution(Contribution(0, gradient.T.contiguous()))
    assert changed.digest != one.digest
    assert measured_contribution(Contribution(0, None)).digest == b""
    assert not measured_contribution(Contribution(0, torch.ones(3, dtype=torch.int64))).projection


def test_zeros_of_another_sign_have_another_digest() -> None:
    zeros = torch.zeros(3)
    digests = {measured_contribution(Contribution(0, gradient)).digest for gradient in (zeros, -zeros)}
    assert len(digests) == 2
