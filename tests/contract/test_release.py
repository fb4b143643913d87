"""The workflow of a release does what the project has."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_it_runs_scripts_and_targets_that_exist() -> None:
    commands = "\n".join(step.get("run", "") for step in STEPS)
    assert all((ROOT / script).exists() for script in re.findall(r"[\w/]+\.sh", commands))
    targets = re.findall(r"^make (\S+)$", commands, re.MULTILINE)
    assert targets
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)


def test_only_what_publishes_may_identify_itself_and_it_needs_what_was_tested() -> None:
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if job.get("permissions")} == {"publish", "site"}
    assert (jobs["publish"]["needs"], jobs["site"]["needs"]) == ("build", "publish")


def test_every_action_has_a_version() -> None:
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@\S+", step["uses"]) for step in STEPS if "uses" in step)
