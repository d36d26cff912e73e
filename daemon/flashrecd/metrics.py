"""`/metrics` in Prometheus form. Read at scrape time from the daemon's state; nothing is counted twice."""

from collections.abc import Callable, Iterable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from flashrec.errors import EnvironmentFault
from flashrecd.jobrun import JobRun


class JobCollector(Collector):
    """`job()` gives the running job, if there is one; `refused()` the number of messages refused so far. Both
    belong to the daemon's loop, so `in_loop` runs what reads them there, though a scrape comes on a thread."""

    def __init__(
        self,
        job: Callable[[], JobRun | None],
        refused: Callable[[], int],
        in_loop: Callable[[Callable[[], list[Metric]]], list[Metric]],
    ) -> None:
        self._job, self._refused, self._in_loop = job, refused, in_loop

    def collect(self) -> Iterable[Metric]:
        return self._in_loop(lambda: list(self._metrics()))

    def _metrics(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "flashrec_refused_messages",
            "Messages refused: malformed, unknown, or of a stranger",
            self._refused(),
        )
        job = self._job()
        if job is None:
            return
        state, label = job.core.state, [job.name]
        yield _gauge("flashrec_generation", "Newest generation", label, state.generation)
        yield _gauge("flashrec_world_size_ranks", "Ranks of the job", label, job.core.config.world_size)
        yield _gauge(
            "flashrec_standbys_processes",
            "Standbys that are ready",
            label,
            sum(1 for s in state.standbys if s[1]),
        )
        restarts = CounterMetricFamily("flashrec_restarts", "Recoveries begun", labels=["job"])
        restarts.add_metric(label, state.restarts)
        yield restarts
        step = GaugeMetricFamily(
            "flashrec_committed_steps", "Newest committed version of a rank", labels=["job", "rank"]
        )
        age = GaugeMetricFamily(
            "flashrec_last_commit_seconds", "Monotonic time of a rank's last commit", labels=["job", "rank"]
        )
        for rank in range(len(state.members)):
            tag = job.tag(rank)
            if tag is not None:
                step.add_metric([job.name, str(rank)], tag.committed)
                age.add_metric([job.name, str(rank)], tag.committed_ns / 1e9)
        yield step
        yield age
        taken = job.recoveries.taken
        recovery = HistogramMetricFamily(
            "flashrec_recovery_seconds", "First sign of a failure to the next commit", labels=["job"]
        )
        recovery.add_metric(label, buckets=taken.cumulative(), sum_value=taken.sum_s)
        yield recovery


def _gauge(name: str, text: str, label: list[str], value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=["job"])
    gauge.add_metric(label, value)
    return gauge


def serve(collector: JobCollector, address: str, port: int) -> Callable[[], None]:
    """Serve it; returns what ends it. EnvironmentFault when the port is in use."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise EnvironmentFault(f"cannot serve metrics on {address}:{port}: {error.strerror}") from None
    assert isinstance(server, WSGIServer)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
