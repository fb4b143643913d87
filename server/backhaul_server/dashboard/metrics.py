"""/metrics in the form Prometheus reads."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from backhaul_server.dashboard.metric_definitions import BUCKETS_S, METRICS, Histogram, MetricDefinition
from backhaul_server.dashboard.metric_sources import Source


class _Metrics(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        return (_family(definition, self._source) for definition in METRICS)


def _family(definition: MetricDefinition, source: Source) -> Metric:
    name, text, labels = definition.name, definition.help, definition.labels
    samples = definition.read(source)
    if definition.kind == "histogram":
        durations = HistogramMetricFamily(name, text, labels=labels)
        for values, found in samples:
            assert isinstance(found, Histogram)
            buckets = [(str(bound), count) for bound, count in zip(BUCKETS_S, found.counts, strict=True)]
            durations.add_metric(values, [*buckets, ("+Inf", found.calls)], found.sum_s)
        return durations
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    numbers: CounterMetricFamily | GaugeMetricFamily = kind(name, text, labels=labels)
    for values, found in samples:
        assert not isinstance(found, Histogram)
        numbers.add_metric(values, found)
    return numbers


def exposition(source: Source) -> bytes:
    """All metrics now, as text."""
    registry = CollectorRegistry()
    registry.register(_Metrics(source))
    return generate_latest(registry)
