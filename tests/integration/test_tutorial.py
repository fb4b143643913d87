"""docs/tutorial.md: its programs are run, and print what the page says."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import wait_until

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
OUTPUTS = [text for language, text in BLOCKS if language == "text"]
ADDRESS = "127.0.0.1:50051"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("BACKHAUL_")},
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def without_measurements(text: str) -> str:
    """A text without times and sizes, and what follows from them, which differ from run to run."""
    return re.sub(r"(^|[ (]+)[\d.,]+ (ms|[KM]iB)( longer| shorter)?", r" \2", text, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_three_ways_print_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "compare.py").write_text(PROGRAMS[0])
    command = [sys.executable, "compare.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=True
    )
    assert without_measurements(done.stdout) == without_measurements(OUTPUTS[0])


@pytest.mark.soak
def test_a_training_goes_on_without_its_worker(tmp_path: Path) -> None:
    (serve,) = [text for _, text in BLOCKS if text.startswith("backhaul worker")]
    with (tmp_path / "log").open("w") as opened:
        command = [sys.executable, "-m", *serve.replace(ADDRESS, "127.0.0.1:0").split()]
        worker = subprocess.Popen(command, env=ENVIRONMENT, stdout=opened, stderr=opened, start_new_session=True)
    log = tmp_path / "log"
    try:
        wait_until(lambda: "listening on" in log.read_text(), "the worker is ready")
        address = re.search(r"listening on (\S+)", log.read_text())[1]  # type: ignore[index]
        (tmp_path / "lose.py").write_text(PROGRAMS[1].replace(ADDRESS, address))
        with subprocess.Popen(
            [sys.executable, "lose.py"],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as trainer:
            assert trainer.stdout is not None
            printed = ""
            while not printed.endswith("press Enter. ") and (character := trainer.stdout.read(1)):
                printed += character
            os.killpg(worker.pid, signal.SIGINT)
            worker.wait()
            rest, _ = trainer.communicate("\n", timeout=240)
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    output, reasons = (printed + rest).split("\n  ", 1)
    assert without_measurements(output) == without_measurements(OUTPUTS[1]).split("\n  ", 1)[0]
    assert sum(int(count) for count in re.findall(r"(\d+) on the trainer: ", reasons)) == 12
