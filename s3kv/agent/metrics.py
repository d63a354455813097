"""What the agent counts, in Prometheus's words and the glossary's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from s3kv.store.breaker import State

_WAITS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_CALLS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class AgentMetrics:
    """One registry an agent, so that several agents of one process (tests) do not mix."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"s3kv_{name}", text, labels, registry=registry)

        self.matched_blocks = counter("matched_blocks", "Blocks asked for, by where they were found", "found")
        self.match_wait = Histogram("s3kv_match_wait_seconds", "Wait of a match", registry=registry, buckets=_WAITS_S)
        self.not_offered = counter("matches_not_offered", "Matches answered empty for a reason of their own", "reason")
        self.saved_blocks = counter("saved_blocks", "Blocks that became resident by a save")
        self.uploaded_chunks = counter("uploaded_chunks", "Chunks made durable and published")
        self.uploaded_blocks = counter("uploaded_blocks", "Blocks in those chunks")
        self.uploaded_bytes = counter("uploaded_bytes", "Bytes sent to the store, headers included")
        self.raw_bytes = counter("uploaded_raw_bytes", "The same before compression")
        self.known_blocks = counter("known_blocks", "Saved blocks that the bucket held already")
        self.dropped_blocks = counter("dropped_blocks", "Blocks that were not stored, by reason", "reason")
        self.fetched_blocks = counter("fetched_blocks", "Blocks read from the store, verified")
        self.fetched_bytes = counter("fetched_bytes", "Bytes read from the store")
        self.failed_fetches = counter("failed_fetches", "Chunk reads that gave no block, by kind of error", "error")
        self.failed_puts = counter("failed_puts", "Tries to store a chunk that failed, by kind of error", "error")
        self.repairs = counter("repairs", "Chunks forgotten because their objects were missing or corrupt", "reason")
        self.troubles = counter("troubles", "Passing troubles of background work", "work")
        self.refused_clients = counter("refused_clients", "Connections ended for cause", "reason")
        self.clients = Gauge("s3kv_clients", "Connections", registry=registry)
        self.tier = Gauge("s3kv_tier_slots", "Slots by state", ("namespace", "state"), registry=registry)
        self.store_call = Histogram(
            "s3kv_store_call_seconds", "Calls to the store", ("call", "result"), registry=registry, buckets=_CALLS_S
        )
        self.store_bytes = counter("store_bytes", "Bytes asked of or sent to the store", "call")
        self.store_retries = counter("store_retries", "Tries repeated after a passing fault", "call", "error")
        self.breaker_open = Gauge("s3kv_store_breaker_open", "1 while nothing is sent to the store", registry=registry)

    # ---- hooks of the store (`s3kv.store.guard.StoreEvents`)

    def call(self, operation: str, outcome: str, seconds: float, size: int) -> None:
        self.store_call.labels(operation, outcome).observe(seconds)
        if outcome == "ok":
            self.store_bytes.labels(operation).inc(size)

    def retry(self, operation: str, outcome: str) -> None:
        self.store_retries.labels(operation, outcome).inc()

    def breaker(self, state: State) -> None:
        self.breaker_open.set(state == "open")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def total(self, counter: Counter) -> int:
        """Sum over all labels."""
        return int(sum(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total")))
