"""`/metrics` in Prometheus form. Read at scrape time from the daemon's state, and from its shard server's counters;
nothing is counted twice."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from wsgiref.simple_server import WSGIServer

import msgpack
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from flashrec.errors import EnvironmentFault
from flashrec.state.remote import ShardConnection, SourceFailed
from flashrecd.jobrun import JobRun

SHARDS_ANSWER_S = 2.0
# name: (of flashrecd.shards.counters.Counters, of which so many are one unit, what it says)
SHARD_COUNTERS = {
    "sent_bytes": ("sent_bytes", 1, "Bytes of sealed versions that this node gave to others"),
    "received_bytes": ("received_bytes", 1, "Bytes of replicas that this node took from others"),
    "received_saved_bytes": ("unpacked_bytes", 1, "Of those, bytes that compression kept off the wire"),
    "unchanged_bytes": ("unchanged_bytes", 1, "Bytes of replicas that were in place already"),
    "copied_bytes": ("copied_bytes", 1, "Bytes of replicas that were copied from the version before"),
    "replicated_versions": ("replicated_versions", 1, "Replicas that were completed here"),
    "failed_versions": ("failed_replications", 1, "Replicas that could not be completed, to be tried again"),
    "distrusted_versions": ("refused_sources", 1, "Replicas whose source said or sent what cannot be"),
    "refused_messages": ("refused_requests", 1, "Requests refused: malformed, or of a stranger"),
    "dropped_messages": ("dropped_replies", 1, "Replies to peers that asked for more than they read"),
    "held_back_seconds": ("paced_ms", 1000, "For how long the bandwidth cap held replicas back"),
}
SHARD_GAUGES = {
    "pulling_versions": ("replicas_under_way", 1, "Replicas that are being pulled"),
    "waiting_versions": (
        "replicas_waiting",
        1,
        "Replicas that wait for their turn: back-pressure, if it stays",
    ),
}


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
            sum(1 for s in state.standbys if s.depth),
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


class ShardCollector(Collector):
    """`address()`: where this node's shard server answers; None while there is none. It is asked on the scrape's own
    thread: a server that does not answer delays no loop."""

    def __init__(self, address: Callable[[], str | None], timeout_s: float = SHARDS_ANSWER_S) -> None:
        self._address, self._timeout_s = address, timeout_s

    def collect(self) -> Iterable[Metric]:
        address = self._address()
        if address is None:
            return
        counters = self._counters(address)
        yield GaugeMetricFamily(
            "flashrec_shards_up", "Whether this node's shard server answers", int(counters is not None)
        )
        for kind, metrics in ((CounterMetricFamily, SHARD_COUNTERS), (GaugeMetricFamily, SHARD_GAUGES)):
            for name, (counter, per_unit, text) in metrics.items():
                if counters is not None:
                    yield kind(f"flashrec_shards_{name}", text, counters[counter] / per_unit)

    def _counters(self, address: str) -> Mapping[str, int] | None:
        try:
            with ShardConnection(address, b"", lambda: False) as connection:
                found: dict[str, int] = msgpack.unpackb(connection.stats(self._timeout_s))
                return found
        except (SourceFailed, ValueError):
            return None


def _gauge(name: str, text: str, label: list[str], value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=["job"])
    gauge.add_metric(label, value)
    return gauge


def serve(collectors: Iterable[Collector], address: str, port: int) -> Callable[[], None]:
    """Serve it; returns what ends it. EnvironmentFault when the port is in use."""
    registry = CollectorRegistry()
    for collector in collectors:
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
