"""What a trainer tells of its steps: counted, bounded, and never in the way."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from backhaul._observe.call_log import CallLog
from backhaul._observe.journal import SegmentLog
from backhaul._observe.report import Decision
from backhaul._observe.telemetry import MAX_CALLS, MAX_STEPS, Telemetry
from backhaul_proto.v1 import telemetry_pb2
from backhaul_proto.v1.segment_pb2 import Timing
from backhaul_proto.v1.telemetry_pb2 import Lane
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.wire.telemetry import BOUNDS_S, bucket_of
from backhaul_server.worker.rpc.trainer_reports import ANSWER_BYTES, MAX_BYTES, TrainerReports
from conftest import wait_until


class Frame:
    """Dies when a test says so."""


class Reporter:
    """A telemetry whose reports are kept."""

    def __init__(
        self,
        deliver: Callable[[telemetry_pb2.TrainerReport], bool] | None = None,
        links: Sequence[telemetry_pb2.Link] = (),
    ) -> None:
        self.reports: list[telemetry_pb2.TrainerReport] = []
        self.telemetry = Telemetry(deliver or self._keep, telemetry_pb2.Run(id="run"), links=lambda: list(links))

    def _keep(self, report: telemetry_pb2.TrainerReport) -> bool:
        self.reports.append(telemetry_pb2.TrainerReport.FromString(report.SerializeToString()))
        return True

    def call(self, name: str = "block") -> CallLog:
        return CallLog(SegmentLog(name), self.telemetry)

    def close(self) -> list[telemetry_pb2.TrainerReport]:
        self.telemetry.start()
        self.telemetry.close()
        self.telemetry._thread.join()  # longer than a training would wait
        return self.reports

    @property
    def steps(self) -> list[telemetry_pb2.Step]:
        return [step for report in self.reports for step in report.steps]

    @property
    def calls(self) -> list[telemetry_pb2.SegmentCall]:
        return [call for report in self.reports for call in report.calls]


def test_a_step_adds_up_its_calls() -> None:
    reporter, frames = Reporter(), [Frame(), Frame()]
    for frame in frames:
        call = reporter.call()
        call.forward(frame, Recording(), 0.5, overhead_s=0.01, packed_bytes=100)
        call.traffic(up_bytes=7)
        call.add(Decision.GRADIENTS, 0.25)
        call.traffic(down_bytes=9)
    reporter.telemetry.step(torch.tensor(1.5))
    reporter.close()
    (step,) = reporter.steps
    assert (step.number, step.calls, step.gradients, step.fallbacks) == (0, 2, 2, 0)
    assert (step.wait_s, step.spared_s, step.loss) == (0.5, 1.0, 1.5)
    assert step.overhead_s == pytest.approx(0.02)  # a sum of two
    assert (step.up_bytes, step.down_bytes) == (14, 18)
    assert (step.saved_bytes, step.peak_saved_bytes) == (200, 200)
    assert [(call.step, call.number, call.position) for call in reporter.calls] == [(0, 0, 0), (0, 1, 1)]


@pytest.mark.parametrize(("backward_s", "spared_s"), [(0.2, 1.5), (0.0, 0.5), (60.0, 2.0)])
def test_a_backward_on_a_worker_spares_the_trainer_its_own(backward_s: float, spared_s: float) -> None:
    reporter, frame = Reporter(), Frame()
    call = reporter.call()
    call.forward(frame, Recording(), 0.5, overhead_s=0.0, packed_bytes=0)
    # A worker that is five times as fast: its forward takes 0.1 s. Its own pauses must not count without limit.
    call.answered(Timing(recompute_at_s=100, recompute_s=0.1, backward_at_s=101, backward_s=backward_s), 0.0)
    call.add(Decision.GRADIENTS, 0.25)
    call.add(Decision.ACTIVATIONS, 0.0)
    reporter.telemetry.step()
    reporter.close()
    assert reporter.steps[0].spared_s == pytest.approx(spared_s + 0.5)


def test_what_is_saved_goes_with_its_frame() -> None:
    reporter = Reporter()
    for _ in range(3):
        frame = Frame()
        reporter.call().forward(frame, Recording(), 0.1, 0.0, packed_bytes=100)
        del frame
    reporter.telemetry.step()
    reporter.close()
    assert reporter.steps[0].saved_bytes == 100


def test_what_the_trainer_did_spares_it_nothing() -> None:
    reporter, frame = Reporter(), Frame()
    call = reporter.call()
    call.forward(frame, Recording(), 0.5, 0.0, 0)
    call.fallback("the worker is gone", is_said=True)
    call.add(Decision.TRAINER, 0.5)
    reporter.telemetry.step()
    reporter.close()
    (step,), (reported,) = reporter.steps, reporter.calls
    assert (step.on_trainer, step.fallbacks, step.wait_s, step.spared_s) == (1, 1, 0.0, 0.0)
    assert (reported.decision, reported.reason, reported.is_fallback) == ("trainer", "the worker is gone", True)
    assert [span.lane for span in reported.spans] == [Lane.LANE_FORWARD, Lane.LANE_TRAINER]


def test_a_call_that_keeps_activations_is_kept_whoever_recomputes_what_comes_before() -> None:
    reporter, frame = Reporter(), Frame()
    call = reporter.call()
    call.kept("a custom autograd function")
    call.forward(frame, Recording(), 0.5, 0.0, 0)
    call.add(Decision.TRAINER, 0.25)
    reporter.telemetry.step()
    reporter.close()
    (step,), (reported,) = reporter.steps, reporter.calls
    assert (reported.decision, reported.reason, reported.is_fallback) == ("kept", "a custom autograd function", False)
    assert (step.on_trainer, step.fallbacks) == (1, 0)


def test_a_step_without_calls_is_none() -> None:
    reporter = Reporter()
    reporter.telemetry.step()
    reporter.close()
    assert reporter.steps == []


@pytest.mark.slow
def test_a_call_is_told_once_its_frame_is_gone_or_its_step_has_ended() -> None:
    reporter, frame, other = Reporter(), Frame(), Frame()
    gone, waits, done = reporter.call("gone"), reporter.call("waits"), reporter.call("done")
    gone.forward(frame, Recording(), 0.1, 0.0, 0)
    for call in (waits, done):
        call.forward(other, Recording(), 0.1, 0.0, 0)
    done.add(Decision.GRADIENTS, 0.1)
    del frame
    reporter.telemetry.start()
    wait_until(lambda: [call.name for call in reporter.calls] == ["gone"], "the first is told")
    reporter.telemetry.step()
    wait_until(lambda: [call.name for call in reporter.calls] == ["gone", "done"], "the one of the step is told")
    reporter.telemetry.close()
    assert [call.name for call in reporter.calls] == ["gone", "done", "waits"]
    assert [report.run.is_closed for report in reporter.reports][-1]


def test_lists_are_bounded_and_what_is_dropped_is_counted() -> None:
    reporter = Reporter()
    for _ in range(MAX_CALLS + 5):
        reporter.call()
    for _ in range(MAX_STEPS + 3):
        reporter.telemetry.step()
        reporter.call()
    reporter.close()
    assert len(reporter.steps) == MAX_STEPS
    assert len(reporter.calls) == MAX_CALLS
    assert reporter.reports[-1].dropped == 5 + MAX_STEPS + 3 + 3


class Outage:
    """Delivers nothing until `is_over`.

    Attributes:
        tried: Numbers of the steps that could not be delivered.
        arrived: The reports that could.
    """

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.tried: set[int] = set()
        self.arrived: list[telemetry_pb2.TrainerReport] = []

    def __call__(self, report: telemetry_pb2.TrainerReport) -> bool:
        if self.is_over.is_set():
            self.arrived.append(report)
        else:
            self.tried |= {step.number for step in report.steps}
        return self.is_over.is_set()

    @property
    def steps(self) -> list[telemetry_pb2.Step]:
        return [step for report in self.arrived for step in report.steps]


@pytest.mark.slow
def test_steps_that_can_not_be_sent_are_sent_once_a_worker_answers() -> None:
    outage, frame = Outage(), Frame()
    reporter = Reporter(outage)
    call = reporter.call()
    call.forward(frame, Recording(), 0.5, 0.0, 0)
    call.fallback("the worker is gone", is_said=True)
    call.add(Decision.TRAINER, 0.5)
    reporter.telemetry.step()
    reporter.telemetry.start()
    wait_until(lambda: 0 in outage.tried, "the step is tried")
    reporter.call()
    reporter.telemetry.step()
    outage.is_over.set()
    reporter.telemetry.close()
    assert [(step.number, step.fallbacks) for step in outage.steps] == [(0, 1), (1, 0)]
    assert [event.kind for report in outage.arrived for event in report.events] == ["fell_back"]
    assert outage.arrived[-1].dropped == 1  # the call


@pytest.mark.slow
def test_of_steps_that_can_not_be_sent_the_last_are_kept() -> None:
    outage = Outage()
    reporter = Reporter(outage)
    reporter.telemetry.start()
    for last in (MAX_STEPS, 2 * MAX_STEPS):
        for _ in range(MAX_STEPS):
            reporter.call()
            reporter.telemetry.step()
        wait_until(partial(outage.tried.__contains__, last - 1), "all of them are tried")
    outage.is_over.set()
    reporter.telemetry.close()
    assert [step.number for step in outage.steps] == list(range(MAX_STEPS, 2 * MAX_STEPS))
    assert outage.arrived[-1].dropped == MAX_STEPS


@pytest.mark.parametrize(
    ("decision", "drifts", "reported"),
    [
        (Decision.GRADIENTS, [], 0.0),
        (Decision.ACTIVATIONS, [0.0, 2e-6, 1e-7], 2e-6),
        (Decision.TRAINER, [], None),
    ],
)
def test_the_largest_drift_is_reported_once_a_worker_has_recomputed(
    decision: Decision, drifts: list[float], reported: float | None
) -> None:
    reporter = Reporter()
    call = reporter.call()
    call.add(decision, 0.1)
    for drift in drifts:
        call.drift(drift)
    reporter.telemetry.step()
    report = reporter.close()[-1]
    assert (report.drift if report.HasField("drift") else None) == reported


@pytest.mark.slow
def test_delivery_that_hangs_or_fails_holds_nobody_up() -> None:
    release, asked = threading.Event(), threading.Event()

    def deliver(report: telemetry_pb2.TrainerReport) -> bool:
        asked.set()
        release.wait(240)
        raise OSError("full")

    reporter = Reporter(deliver)
    reporter.telemetry.start()
    reporter.call()
    reporter.telemetry.step()
    assert asked.wait(240)
    reporter.call()
    reporter.telemetry.step()  # returns
    reporter.telemetry.close()  # likewise, though the thread still waits
    release.set()
    reporter.telemetry._thread.join(60)
    assert not reporter.telemetry._thread.is_alive()


@pytest.mark.parametrize("loss", [torch.zeros(2), "much", object()])
def test_a_loss_that_is_no_number_costs_only_itself(loss: object) -> None:
    reporter = Reporter()
    reporter.call()
    reporter.telemetry.step(loss)  # type: ignore[arg-type]
    reporter.close()
    assert [step.HasField("loss") for step in reporter.steps] == [False]


def test_a_workers_times_come_in_the_trainers_clock() -> None:
    reporter = Reporter()
    timing = Timing(
        queued_at_s=1000.0,
        recompute_at_s=1001.0,
        recompute_s=2.0,
        requested_at_s=1005.0,
        backward_at_s=1006.0,
        backward_s=4.0,
    )
    call = reporter.call()
    call.answered(timing, clock_offset_s=900.0)
    reporter.close()
    spans = [(span.lane, span.started_at_s, span.duration_s) for span in reporter.calls[0].spans]
    assert spans[:4] == [
        (Lane.LANE_QUEUE, 100.0, 1.0),
        (Lane.LANE_RECOMPUTE, 101.0, 2.0),
        (Lane.LANE_QUEUE, 105.0, 1.0),
        (Lane.LANE_BACKWARD, 106.0, 4.0),
    ]
    assert spans[4][:2] == (Lane.LANE_DOWNLOAD, 110.0)


def after(
    reports: TrainerReports, number: int, credential: str | None = None
) -> tuple[list[telemetry_pb2.Report], bool]:
    """Those that came after a report, decoded."""
    encoded, has_more = reports.after(number, credential)
    return [telemetry_pb2.Report.FromString(report) for report in encoded], has_more


def test_reports_are_found_by_what_came_before_them() -> None:
    reports = TrainerReports()
    for number in range(5):
        reports.put(telemetry_pb2.TrainerReport(dropped=number), "one")
    assert [report.number for report in after(reports, 0)[0]] == [1, 2, 3, 4, 5]
    assert [report.report.dropped for report in after(reports, 3)[0]] == [3, 4]
    assert reports.after(5, None) == reports.after(99, None) == ([], False)
    reports.put(telemetry_pb2.TrainerReport(dropped=9), "another")
    assert [report.number for report in after(reports, 3, "one")[0]] == [4, 5]
    assert [report.number for report in after(reports, 3, "another")[0]] == [6]


def test_reports_are_bounded_in_bytes_and_come_in_parts() -> None:
    reports = TrainerReports()
    count = 24
    for number in range(count):
        reports.put(telemetry_pb2.TrainerReport(run=telemetry_pb2.Run(id="x" * (MAX_BYTES // 16)), dropped=number), "")
    seen, last, more = 0, 0, True
    while more:
        part, more = after(reports, last)
        assert len(part) == 1 or sum(report.ByteSize() for report in part) <= ANSWER_BYTES
        seen, last = seen + len(part), part[-1].number
    assert 8 < seen < 16
    assert last == count


def test_a_report_larger_than_a_message_still_comes() -> None:
    reports = TrainerReports()
    reports.put(telemetry_pb2.TrainerReport(run=telemetry_pb2.Run(id="x" * (2 * ANSWER_BYTES))), "")
    reports.put(telemetry_pb2.TrainerReport(dropped=1), "")
    part, more = after(reports, 0)
    assert ([report.number for report in part], more) == ([1], True)
    assert [report.number for report in after(reports, 1)[0]] == [2]


@pytest.mark.parametrize(("duration_s", "bucket"), [(0.0, 0), (1e-4, 0), (1.01e-4, 1), (1e9, len(BOUNDS_S))])
def test_durations_have_a_bucket(duration_s: float, bucket: int) -> None:
    assert bucket_of(duration_s) == bucket
