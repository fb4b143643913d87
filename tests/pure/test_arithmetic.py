"""The formulas that decide where a worker pays: figures known from elsewhere, and properties."""

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from backhaul import _arithmetic as a

POSITIVE = st.floats(1e-3, 1e3)
BACKWARD = st.floats(0.5, 3.0)

# Llama-3-8B: 32 layers of 218 million parameters, width 4,096, bf16.
PARAMETERS, WIDTH, LAYERS, TOKENS = 218.1e6, 4096, 32, 8192
BOUNDARY = TOKENS * WIDTH * 2
GBIT = 1e9 / 8
RTX_4090, H100 = 107e12, 400e12


def layer_s(flop_per_s: float, length: int = TOKENS) -> float:
    return a.layer_forward_s(PARAMETERS, TOKENS, length, WIDTH, flop_per_s)


def test_thresholds_of_a_blocking_backward() -> None:
    assert a.blocking_threshold(a.LORA_BACKWARD) == approx(0.67, abs=0.005)
    assert a.blocking_threshold(a.FULL_BACKWARD) == 0.75


def test_layers_that_hide_a_link() -> None:
    assert a.layers_that_hide_link(BOUNDARY, 10 * GBIT, layer_s(RTX_4090, 0)) == 2
    assert a.layers_that_hide_link(BOUNDARY, GBIT, layer_s(RTX_4090, 0)) == approx(16, abs=1)
    assert a.layers_that_hide_link(BOUNDARY, GBIT, layer_s(H100, 0)) == approx(60, abs=2)


def test_traffic_with_derived_boundaries() -> None:
    assert a.traffic_bytes(BOUNDARY, LAYERS, 1, 0) == approx(6.4e9, rel=0.01)
    assert a.traffic_bytes(BOUNDARY, LAYERS, 1, 1) == approx(0.2e9, rel=0.01)


def test_memory_of_one_and_of_two_workers() -> None:
    boundary, weights = 4 * BOUNDARY, PARAMETERS * 2
    run = (a.SAVED_PER_BOUNDARY + 1) * boundary
    assert a.worker_memory_bytes(LAYERS, weights, LAYERS, boundary, run) == approx(27.4e9, rel=0.01)
    assert a.worker_memory_bytes(16, weights, 16, boundary, run) == approx(16.1e9, rel=0.01)


def test_tokens_that_hide_the_traffic_of_all_weights() -> None:
    for device, gbit, known in ((RTX_4090, 10, 46e3), (RTX_4090, 100, 5e3), (H100, 10, 171e3), (H100, 100, 17e3)):
        tokens = a.tokens_that_hide_weights(
            LAYERS * PARAMETERS * 2, gbit * GBIT, LAYERS * layer_s(device) / TOKENS, a.FULL_BACKWARD
        )
        assert tokens == approx(known, rel=0.1)


def test_sessions_that_a_worker_and_a_link_serve() -> None:
    assert a.sessions_per_worker(1.0, a.FULL_BACKWARD) == approx(4 / 3)
    trained = LAYERS * PARAMETERS * 2
    step_s = 8 * LAYERS * layer_s(RTX_4090) * (2 + a.FULL_BACKWARD)
    lora, full = (a.link_bytes(BOUNDARY, 16, 1, 8, part * trained) for part in (0.005, 1))
    assert lora == approx(
        0.005 * trained + 8 * 17 * BOUNDARY
    )  # what goes up: one boundary more than there are segments
    assert full == approx(8 * (trained + 16 * BOUNDARY))  # what comes down: gradients of all weights, each time
    assert a.sessions_per_link(full, step_s, 10 * GBIT) == approx(0.41, abs=0.005)


def test_the_line_of_a_dashboard_goes_through_what_was_measured() -> None:
    sizes = ((50, 50, 0.053), (50, 100, 0.051), (50, 200, 0.058), (50, 400, 0.090), (100, 50, 0.068), (200, 50, 0.115))
    assert all(a.dashboard_cores(workers, sessions) == approx(cores, abs=0.014) for workers, sessions, cores in sizes)
    assert a.dashboard_cores(1_736, 1_736) < 1 < a.dashboard_cores(1_737, 1_737)


def test_limits_of_deferral() -> None:
    assert a.deferred_limit(10, a.LORA_BACKWARD) == approx(3.05)
    assert a.deferred_limit(10, a.FULL_BACKWARD) == 4
    assert a.deferred_limit(0.5, a.FULL_BACKWARD) == 1.5


@given(BACKWARD)
def test_at_the_threshold_a_step_takes_as_long_as_torchs(backward: float) -> None:
    assert a.blocking_ratio(a.blocking_threshold(backward), backward, 0) == approx(1)


@given(POSITIVE, st.floats(1, 10), BACKWARD, st.floats(0, 2))
def test_a_faster_worker_never_makes_a_step_longer(speed: float, times: float, backward: float, record: float) -> None:
    assert a.blocking_ratio(speed * times, backward, record) <= a.blocking_ratio(speed, backward, record)
    assert a.deferred_ratio(speed * times, backward, record) <= a.deferred_ratio(speed, backward, record)


@given(POSITIVE, BACKWARD)
def test_without_recording_a_deferred_step_reaches_the_limit(speed: float, backward: float) -> None:
    assert a.deferred_ratio(speed, backward, 0) == approx(1 / a.deferred_limit(speed, backward))


@given(POSITIVE, BACKWARD, st.floats(0, 2))
def test_deferring_is_never_slower_than_waiting(speed: float, backward: float, recording: float) -> None:
    waiting = a.blocking_ratio(speed, backward, recording)
    assert a.deferred_ratio(speed, backward, recording) <= waiting + recording + 1e-9


@given(POSITIVE, POSITIVE, POSITIVE)
def test_a_boundary_is_sent_within_the_forward_of_that_many_layers(size: float, rate: float, layer: float) -> None:
    layers = a.layers_that_hide_link(size, rate, layer)
    assert size / rate <= layers * layer * (1 + 1e-9)
    assert layers == 1 or size / rate > (layers - 1) * layer * (1 - 1e-9)


@given(POSITIVE, POSITIVE, POSITIVE, BACKWARD)
def test_that_many_tokens_take_as_long_as_the_weights(size: float, rate: float, token: float, backward: float) -> None:
    tokens = a.tokens_that_hide_weights(size, rate, token, backward)
    assert tokens * (1 + backward) * token == approx(2 * size / rate)


@given(POSITIVE, st.integers(1, 64), POSITIVE)
def test_longer_segments_need_less_bandwidth(size: float, layers: int, layer: float) -> None:
    one, doubled = (a.break_even_bytes_per_s(size, count, layer) for count in (layers, 2 * layers))
    assert one == approx(2 * doubled)


@given(BACKWARD)
def test_a_free_link_to_the_host_spares_the_recomputation(backward: float) -> None:
    assert a.offload_ratio(1, 1e12, 1, backward) == approx((1 + backward) / (2 + backward))
    assert a.offload_ratio(1e9, 1, 1, backward) > 1


@given(POSITIVE)
def test_data_parallelism_divides_the_batch(speed: float) -> None:
    assert a.data_parallel_ratio(speed, 0, 1, 1, 0) == approx(1 / (1 + speed))
    assert a.data_parallel_ratio(speed, 10, 1, 1, 0) == 20
