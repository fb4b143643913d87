"""`support.count_functions` finds both ends of each way."""

import pytest

from support.count_functions import count


@pytest.mark.nightly
def test_both_ways_are_followed_from_end_to_end() -> None:
    up, back = count()
    assert {"backhaul/_session.py Session._run", "backhaul_server/worker/engine/store.py Store.arrived"} <= up
    assert "backhaul/_forward/graft.py _Graft.backward" in back
    assert any(function.startswith("backhaul_server/worker/rpc/") for function in back)
