"""`backhaul verify`: recorded steps are equal again, and whatever is changed in a directory is named."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from backhaul._evidence.files import EvidenceName, encoded
from backhaul_proto.v1 import evidence_pb2, program_pb2
from support.evidence import (
    SEGMENTS,
    Verified,
    Verify,
    add_object,
    copied,
    files_of,
    first_call,
    flip,
    read,
    record_demo,
    rewrite,
    verify,
)
from support.processes import WorkerProcess


@pytest.fixture(scope="module")
def recorded(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all steps of the demo. Tests change copies of it."""
    directory = tmp_path_factory.mktemp("recorded") / "evidence"
    record_demo(directory, worker.address)
    return directory


@pytest.fixture
def verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """Runs the command on a directory."""

    def run(directory: Path, *options: str) -> Verified:
        return verify(directory, tmp_path, lambda: "".join(capsys.readouterr()), *options)

    return run


@pytest.fixture
def directory(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded directory."""
    return copied(recorded, tmp_path)


def test_each_segment_of_the_demo_is_equal_again(recorded: Path, verified: Verify) -> None:
    result = verified(recorded)
    assert (result.code, result.problems, result.notes) == (0, [], [])
    assert (len(result.verdicts), result.outcomes) == (SEGMENTS, {"equal"})
    assert f"\n{SEGMENTS} segments: {SEGMENTS} equal, 0 differ, 0 can't be judged.\n" in result.shown
    with_gradients = [verdict for verdict in result.verdicts if verdict["gradients"]]
    assert len(with_gradients) == SEGMENTS * 2 // 3  # all variants but the one that returns activations
    assert all(verdict["tensors"] for verdict in result.verdicts)


def test_a_second_worker_computes_the_same(recorded: Path, own_worker: WorkerProcess, verified: Verify) -> None:
    result = verified(recorded, "--worker", own_worker.address)
    assert (result.code, len(result.verdicts), result.outcomes) == (0, SEGMENTS, {"equal"})


def test_steps_and_segments_can_be_chosen(recorded: Path, verified: Verify) -> None:
    assert {verdict["step"] for verdict in verified(recorded, "--step", "1").verdicts} == {1}
    assert len(verified(recorded, "--segment", "Block").verdicts) == SEGMENTS
    nothing, missing = verified(recorded, "--segment", "Other"), verified(recorded, "--step", "7")
    assert (nothing.code, nothing.verdicts) == (2, [])
    assert (missing.code, missing.problems) == (2, ["the directory has no step 7"])


def objects_of(directory: Path) -> dict[str, tuple[EvidenceName, bytes]]:
    """An object of each kind, with a call that needs it."""
    name, call = first_call(directory)
    backward = read(directory / "steps" / str(name._replace(backward=1)), evidence_pb2.EvidenceBackward)
    by_kind = {
        "origin": call.origin,
        "program": call.program,
        "source": call.sources[0].object,
        "state": next(state for state in call.generator_states if state),
        "gradient": backward.gradients[0].tensor.object,
    }
    return {kind: (name, digest) for kind, digest in by_kind.items()}


@pytest.mark.parametrize("kind", ["origin", "program", "source", "state", "gradient"])
def test_a_changed_byte_of_an_object_is_named(kind: str, directory: Path, verified: Verify) -> None:
    name, digest = objects_of(directory)[kind]
    flip(directory / "objects" / digest.hex(), 5)
    result = verified(directory)
    assert result.code == 2
    assert result.of(name)["outcome"] == "unknown"
    assert f"objects/{digest.hex()} was changed" in result.of(name)["why"]
    assert f"objects/{digest.hex()} was changed" in result.shown
    assert result.outcomes <= {"equal", "unknown"}


@pytest.mark.parametrize("kind", ["call", "backward"])
def test_a_changed_byte_of_a_file_of_a_call_concerns_that_call(kind: str, directory: Path, verified: Verify) -> None:
    name, _ = first_call(directory)
    file = directory / "steps" / str(name if kind == "call" else name._replace(backward=1))
    flip(file, 30)
    result = verified(directory)
    assert (result.code, result.of(name)["outcome"]) == (2, "unknown")
    assert f"steps/{file.name} was changed" in result.of(name)["why"]
    assert sum(verdict["outcome"] == "equal" for verdict in result.verdicts) == SEGMENTS - 1


def test_a_changed_byte_of_the_end_of_a_step_is_named(directory: Path, verified: Verify) -> None:
    end = next(path for name, path in files_of(directory) if not name.call)
    flip(end, 3)
    result = verified(directory)
    assert result.code == 2
    assert f"steps/{end.name} was changed" in result.problems[0]


def test_an_object_that_no_call_needs_is_checked_too(directory: Path, verified: Verify) -> None:
    digest = add_object(directory, b"of a process that was killed")
    assert verified(directory).code == 0
    flip(directory / "objects" / digest.hex(), 0)
    result = verified(directory)
    assert (result.code, len(result.problems), digest.hex() in result.problems[0]) == (2, 1, True)


def test_of_a_truncated_directory_the_rest_is_judged(directory: Path, verified: Verify) -> None:
    """Many files of the steps are missing, as after an interrupted copy, and the last one is cut off."""
    names = [name for name, _ in files_of(directory)]
    end = max(number for number, name in enumerate(names) if name.backward)
    for name in names[end + 1 :]:
        (directory / "steps" / str(name)).unlink()
    last = directory / "steps" / str(names[end])
    last.write_bytes(last.read_bytes()[:100])
    result = verified(directory)
    assert result.code == 2
    assert {"equal"} < result.outcomes <= {"equal", "unknown"}
    assert last.name in result.shown
    assert result.of(names[end])["outcome"] == "unknown"


def test_a_missing_backward_is_named_if_the_end_of_the_step_counts_it(directory: Path, verified: Verify) -> None:
    name, _ = first_call(directory)
    file = name._replace(backward=1)
    (directory / "steps" / str(file)).unlink()
    result = verified(directory)
    assert (result.code, result.of(name)["outcome"]) == (2, "unknown")
    assert result.of(name)["why"] == f"steps/{file} is missing"


def test_without_the_end_of_a_step_a_call_without_a_backward_is_not_equal(directory: Path, verified: Verify) -> None:
    name, _ = first_call(directory)
    for file in (name._replace(backward=1), name._replace(call=0)):
        (directory / "steps" / str(file)).unlink()
    result = verified(directory)
    assert (result.code, result.of(name)["outcome"]) == (2, "unknown")
    assert "has no end" in result.problems[0]


def test_a_gradient_that_differs_is_named_with_its_distance(
    directory: Path, own_worker: WorkerProcess, verified: Verify
) -> None:
    name, _ = first_call(directory)
    file = directory / "steps" / str(name._replace(backward=1))
    message = read(file, evidence_pb2.EvidenceBackward)
    wrong = next(one for one in message.contributions if one.projection)
    wrong.digest = bytes(16)
    for position in range(1, len(wrong.projection)):  # a gradient of twice the size
        wrong.projection[position] *= 2
    rewrite(file, message)
    for options in ((), ("--worker", own_worker.address)):
        result = verified(directory, *options)
        verdict = result.of(name)
        assert (result.code, verdict["outcome"], len(verdict["differences"])) == (1, "differs", 1)
        assert f"source {wrong.source}, {wrong.description}" in verdict["differences"][0]["tensor"]
        assert verdict["differences"][0]["distance"] == pytest.approx(0.5, abs=0.3)
        assert "DIFFERS" in result.shown
        assert sum(verdict["outcome"] == "equal" for verdict in result.verdicts) == SEGMENTS - 1


def test_a_tensor_of_forward_that_differs_is_named_with_the_fingerprint(directory: Path, verified: Verify) -> None:
    name, message = first_call(directory, with_backward=False)
    origin = evidence_pb2.EvidenceOrigin(session=name.session, fingerprint={"device": "cpu", "cpu": "another one"})
    message.origin = add_object(directory, encoded(origin))
    message.compared[2].digest = bytes(16)
    rewrite(directory / "steps" / str(name), message)
    result = verified(directory)
    verdict = result.of(name)
    assert (result.code, verdict["outcome"]) == (1, "differs")
    (difference,) = verdict["differences"]
    assert difference["tensor"].startswith(f"tensor 2, saved by {message.compared[2].op}, ")
    assert difference["distance"] is None
    assert verdict["fingerprint"]["cpu"][0] == "another one"
    assert "cpu was another one and is" in result.shown


@pytest.mark.parametrize("text", ["backhaul evidence 2\n", "", "\0"])
def test_a_directory_of_another_version_is_refused(text: str, directory: Path, verified: Verify) -> None:
    (directory / "format").write_text(text)
    result = verified(directory)
    assert (result.code, result.verdicts) == (2, [])
    assert f"format says {text!r}, and this version of backhaul reads" in result.shown


def test_what_is_no_directory_of_evidence_is_refused(tmp_path: Path, verified: Verify) -> None:
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path, "has no file named format"),
        (tmp_path / "none", "is no directory"),
        (tmp_path / "file", ""),
    ):
        result = verified(path)
        assert result.code == 2
        assert why in result.shown
        assert str(path) in result.shown


def test_a_worker_that_does_not_answer_is_an_error(recorded: Path, verified: Verify, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0" * 43)
    result = verified(recorded, "--worker", "nonsense")
    assert (result.code, result.verdicts) == (2, [])
    assert 'the address "nonsense" can\'t be read' in result.shown


def test_links_are_not_followed(directory: Path, tmp_path: Path, verified: Verify) -> None:
    name, digest = objects_of(directory)["source"]
    elsewhere = (directory / "objects" / digest.hex()).rename(tmp_path / "elsewhere")
    (directory / "objects" / digest.hex()).symlink_to(elsewhere)
    result = verified(directory)
    assert (result.code, result.of(name)["outcome"]) == (2, "unknown")
    assert "it is a link, which is not followed" in result.of(name)["why"]


@pytest.mark.parametrize("folder", ["objects", "steps"])
def test_folders_that_are_links_are_not_followed(
    folder: str, directory: Path, tmp_path: Path, verified: Verify
) -> None:
    elsewhere = (directory / folder).rename(tmp_path / "elsewhere")
    (directory / folder).symlink_to(elsewhere)
    result = verified(directory)
    assert (result.code, "equal" in result.outcomes) == (2, False)
    assert folder in result.shown


def test_pipes_and_names_that_lead_elsewhere_are_not_read(directory: Path, verified: Verify) -> None:
    name, digest = objects_of(directory)["source"]
    (directory / "objects" / digest.hex()).unlink()
    os.mkfifo(directory / "objects" / digest.hex())
    (directory / "steps" / "..\\..\\secret").write_text("x")
    (directory / "objects" / "-rf").write_text("x")
    result = verified(directory)
    assert "is no plain file" in result.of(name)["why"]
    assert "'..\\\\..\\\\secret' is no file of evidence" in result.shown
    assert "'objects/-rf' is no file of evidence" in result.shown


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda call: setattr(call, "program", b"../../etc/passwd"), "names an object by 16 bytes, not 32"),
        (lambda call: setattr(call.sources[0].spec, "dtype", "sys"), 'a layout is refused: "sys" is not a dtype'),
        (lambda call: call.sources[0].spec.shape.__setitem__(0, 1 << 40), "needs "),
        (
            lambda call: setattr(call.sources[0].spec, "device", "mps"),
            "it ran on mps, and this machine has no such device",
        ),
        (lambda call: call.sources.pop(), "sources, and"),
        (lambda call: call.compared.pop(), "tensors to compare, and"),
        (lambda call: call.uses.pop(), "how they are used"),
        (lambda call: setattr(call, "step", 7), "is the file of another place"),
        (lambda call: setattr(call.compared[1], "digest", b""), "forward has no digest of the tensors [1]"),
        (lambda call: call.generator_states.pop(), "generator states"),
    ],
)
def test_what_contradicts_itself_is_refused(
    change: Callable[[evidence_pb2.EvidenceCall], object], why: str, directory: Path, verified: Verify
) -> None:
    """As in a directory that somebody has written by hand, with digests that fit."""
    name, message = first_call(directory)
    change(message)
    rewrite(directory / "steps" / str(name), message)
    result = verified(directory)
    assert (result.code, result.of(name)["outcome"]) == (2, "unknown")
    assert why in result.of(name)["why"]


def test_a_program_of_the_directory_passes_the_checks_of_one_that_has_arrived(
    directory: Path, verified: Verify
) -> None:
    name, message = first_call(directory)
    program = program_pb2.Program.FromString((directory / "objects" / message.program.hex()).read_bytes())
    program.ops[0] = "aten.from_file.default"
    message.program = add_object(directory, program.SerializeToString(deterministic=True))
    rewrite(directory / "steps" / str(name), message)
    why = verified(directory).of(name)["why"]
    assert why.startswith("its program is refused: ")
    assert "from_file" in why


def test_the_file_of_another_call_does_not_pass_for_this_one(directory: Path, verified: Verify) -> None:
    name, _ = first_call(directory)
    other = name._replace(call=name.call + 1)
    (directory / "steps" / str(name)).write_bytes((directory / "steps" / str(other)).read_bytes())
    assert "is the file of another place" in verified(directory).of(name)["why"]


@pytest.mark.slow
def test_no_changed_byte_goes_unnoticed(recorded: Path, tmp_path: Path, verified: Verify) -> None:
    """Flips bits of random files. Each is named, and no segment whose data was changed is equal."""
    draws = random.Random(0)
    files = [path.relative_to(recorded) for path in sorted(recorded.rglob("*")) if path.is_file()]
    directory = copied(recorded, tmp_path)
    for _ in range(25):
        path = draws.choice([file for file in files if file.name != "lock"])  # `verify` does not read that one
        whole = (directory / path).read_bytes()
        flip(directory / path, draws.randrange(len(whole)), draws.randrange(8))
        result = verified(directory)
        assert result.code == 2, path
        assert path.name in result.shown
        assert "Traceback" not in result.shown
        (directory / path).write_bytes(whole)
    assert verified(directory).code == 0
