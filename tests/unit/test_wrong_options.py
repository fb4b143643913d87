"""Options of `backhaul plan`, `doctor` and `worker` that can't be used: one line says why, with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from backhaul._cli.main import main

PLAN = ["plan", "--model", "support.example_models:plain"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([*PLAN], "required: --budget"),
        ([*PLAN, "--budget", "2XB"], '"2XB" is not a size'),
        ([*PLAN, "--budget=-1GiB"], '"-1GiB" is not a size'),
        ([*PLAN, "--budget", "0GiB"], '"0GiB" leaves no room'),
        ([*PLAN, "--budget", "24"], '"24" has no unit'),
        ([*PLAN, "--budget", f"{'9' * 400}GiB"], "more memory than any machine has"),
        ([*PLAN, "--budget", "1GiB", "--micro-batches", "0"], '"0" is not a number of at least 1'),
        ([*PLAN, "--budget", "1GiB", "--micro-batches", "two"], '"two" is not a number of at least 1'),
        ([*PLAN, "--budget", "1GiB", "--rounds", "1.5"], '"1.5" is not a number of at least 1'),
        ([*PLAN, "--budget", "1GiB", "--optimizer-bytes", "nan"], '"nan" is not a number of at least 0'),
        ([*PLAN, "--budget", "1GiB", "--optimizer-bytes=-8"], '"-8" is not a number of at least 0'),
        ([*PLAN, "--budget", "1GiB", "--output", "."], "--output .: it is a directory"),
        ([*PLAN, "--budget", "1GiB", "--json", "/missing/plan.json"], "its directory is missing or not writable"),
        (["plan", "--budget", "1GiB", "--model", "two words:plain"], 'must be "module:function"'),
        (
            ["plan", "--budget", "1GiB", "--model", "support.leaving:plain"],
            "importing support.leaving failed: SystemExit",
        ),
        (["doctor", "--rounds", "none"], '"none" is not a number of at least 1'),
        (["doctor", "--json", "."], "--json .: it is a directory"),
        (["doctor", "--model", ":"], 'must be "module:function"'),
        (["doctor", "--worker", "two words:1"], "can't be read"),
        (["worker", "--allow"], "--allow: expected at least one argument"),
        (["worker", "--memory", "2XB"], '"2XB" is not a size'),
        (["worker", "--memory", "8gb"], '"8gb" may mean powers of 1000 or of 1024: write 8GiB'),
        (["worker", "--mem", "1GiB"], "backhaul worker: error: unrecognized arguments: --mem 1GiB"),
        (["worker", "--memroy=1GiB"], "unrecognized arguments: --memroy=1GiB; did you mean --memory?"),
        (["wroker"], "there is no command 'wroker'; did you mean worker?"),
        (["fleet", "upp"], "invalid choice: 'upp'"),
        (["worker", "--device", "nonsense"], '"nonsense" is no device of a worker: write auto, cpu, cuda or cuda:N'),
        (["worker", "--listen", "0.0.0.0:50077"], "everyone who reaches it could use this worker"),
    ],
)
def test_what_is_wrong_with_an_option_is_said_in_a_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:  # argparse's own errors
        code = ended.code
    *usage, last = capsys.readouterr().err.strip().splitlines()
    assert (code, why in last) == (2, True), last
    assert not usage or usage[0].startswith("usage: ")


def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "worker"])
    assert capsys.readouterr().out.startswith("usage: backhaul worker ")


def test_options_of_a_worker_are_checked_before_torch_is_imported() -> None:
    program = (
        "import sys; from backhaul._cli.main import main; "
        "assert main(['worker', '--listen', '0.0.0.0:50077']) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_an_existing_file_that_is_not_writable_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.toml"
    path.touch()
    monkeypatch.setattr("os.access", lambda checked, _: checked != path)
    assert main([*PLAN, "--budget", "1GiB", "--output", str(path)]) == 2
    assert f"--output {path}: it is not writable" in capsys.readouterr().err
