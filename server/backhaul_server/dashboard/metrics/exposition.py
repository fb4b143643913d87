"""Formats /metrics for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.metrics.definitions import BUCKETS_S, METRICS, Histogram, MetricDefinition


class MetricsSnapshot(Collector):
    """All samples at the time of construction, so that another thread can format them while the watch changes."""

    def __init__(self, watch: Watch) -> None:
        self._families = [_family(definition, watch) for definition in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; called by prometheus_client."""
        return iter(self._families)


def _family(definition: MetricDefinition, watch: Watch) -> Metric:
    name, text, labels = definition.name, definition.help, definition.labels
    samples = definition.read(watch)
    if definition.kind == "histogram":
        durations = HistogramMetricFamily(name, text, labels=labels)
        for values, value in samples:
            assert isinstance(value, Histogram)
            buckets = [(str(bound), count) for bound, count in zip(BUCKETS_S, value.counts, strict=True)]
            durations.add_metric(values, [*buckets, ("+Inf", value.calls)], value.sum_s)
        return durations
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    numbers: CounterMetricFamily | GaugeMetricFamily = kind(name, text, labels=labels)
    for values, value in samples:
        assert not isinstance(value, Histogram)
        numbers.add_metric(values, value)
    return numbers


def exposition(collected: MetricsSnapshot) -> bytes:
    """Returns the text of /metrics. It is a megabyte for 50 workers, and formatting it takes most of the time."""
    registry = CollectorRegistry()
    registry.register(collected)
    return generate_latest(registry)
