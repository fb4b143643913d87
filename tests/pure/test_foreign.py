"""Whether other programs used the cores of a measurement."""

import os
import subprocess
import sys

import pytest

from backhaul.profile.foreign import MOST_TRIES, CoreUse, family, steps_wanted


@pytest.mark.parametrize(("busy_s", "own_s", "is_quiet"), [(2.0, 2.0, True), (2.09, 2.0, True), (2.2, 2.0, False)])
def test_a_step_is_quiet_if_others_used_little(busy_s: float, own_s: float, is_quiet: bool) -> None:
    before = CoreUse(100.0, 50.0, 40.0, cores=2)
    assert CoreUse(101.0, 50.0 + busy_s, 40.0 + own_s, cores=2).was_quiet(before) == is_quiet


def test_without_figures_of_cores_every_step_counts() -> None:
    assert CoreUse(101.0, 0.0, 3.0, cores=0).was_quiet(CoreUse(100.0, 0.0, 1.0, cores=0))


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc")  # noqa: PTH110
def test_a_family_has_the_children_of_its_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert {os.getpid(), child.pid} <= family({os.getpid()})
        use = CoreUse.now([0], family({os.getpid()}))
        assert (use.cores, use.busy_s > 0, use.own_s > 0) == (1, True, True)
    finally:
        child.communicate(b"\n")
    assert child.pid not in family({os.getpid()})


def test_more_steps_may_run_if_some_can_be_disturbed() -> None:
    assert steps_wanted(5, None) == 5
    assert steps_wanted(5, lambda: CoreUse(0.0, 0.0, 0.0, 0)) == 5 * MOST_TRIES
