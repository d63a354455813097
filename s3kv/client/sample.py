"""What an agent did between two looks at its metrics: rates for `s3kv top`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """`at` in seconds of some monotonic clock; `values` by metric sample name and sorted labels."""

    at: float
    values: Mapping[tuple[str, Labels], float]
    status: Mapping[str, Any]

    @classmethod
    def parse(cls, at: float, metrics: str, status: Mapping[str, Any]) -> Sample:
        values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        }
        return cls(at, values, status)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values of the metric summed by one label."""
        found: dict[str, float] = {}
        for (metric, labels), value in self.values.items():
            if metric == name:
                key = dict(labels).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def total(self, name: str) -> float:
        return sum(value for (metric, _), value in self.values.items() if metric == name)


@dataclass(frozen=True, slots=True)
class Call:
    """Calls to the store of one kind in the interval. `slowest_s`: upper bound of the slowest bucket that was hit."""

    name: str
    count: float
    failed: float
    mean_s: float
    slowest_s: float


@dataclass(frozen=True, slots=True)
class View:
    """Of the time between two samples; `found` is blocks asked for by where they were found."""

    seconds: float
    found: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()

    def share(self, where: str) -> float | None:
        """Of the blocks asked for; None when none were."""
        total = sum(self.found.values())
        return self.found.get(where, 0.0) / total if total else None


RATES = (
    "uploaded_bytes",
    "fetched_bytes",
    "saved_blocks",
    "fetched_blocks",
    "dropped_blocks",
    "failed_puts",
    "failed_fetches",
)


def between(before: Sample, after: Sample) -> View:
    seconds = max(after.at - before.at, 1e-9)
    found = _risen(before.by("s3kv_matched_blocks_total", "found"), after.by("s3kv_matched_blocks_total", "found"))
    rates = {
        name: max(0.0, after.total(f"s3kv_{name}_total") - before.total(f"s3kv_{name}_total")) / seconds
        for name in RATES
    }
    return View(seconds, found, rates, tuple(sorted(_calls(before, after), key=lambda call: -call.slowest_s)))


def _risen(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """A counter that fell belongs to an agent that was started anew."""
    return {
        name: value - before.get(name, 0.0) if value >= before.get(name, 0.0) else value
        for name, value in after.items()
    }


def _calls(before: Sample, after: Sample) -> list[Call]:
    base = "s3kv_store_call_seconds"
    counts = _risen(before.by(f"{base}_count", "call"), after.by(f"{base}_count", "call"))
    sums = _risen(before.by(f"{base}_sum", "call"), after.by(f"{base}_sum", "call"))
    calls = []
    for name, count in counts.items():
        if count > 0:
            failed = _failed(before, after, name)
            calls.append(Call(name, count, failed, sums.get(name, 0.0) / count, _slowest(before, after, name)))
    return calls


def _failed(before: Sample, after: Sample, call: str) -> float:
    def bad(sample: Sample) -> float:
        return sum(
            value
            for (metric, labels), value in sample.values.items()
            if metric == "s3kv_store_call_seconds_count"
            and dict(labels).get("call") == call
            and dict(labels).get("result") != "ok"
        )

    return max(0.0, bad(after) - bad(before))


def _slowest(before: Sample, after: Sample, call: str) -> float:
    def buckets(sample: Sample) -> dict[float, float]:
        found: dict[float, float] = {}
        for (metric, labels), value in sample.values.items():
            each = dict(labels)
            if metric == "s3kv_store_call_seconds_bucket" and each.get("call") == call:
                edge = float(each["le"])
                found[edge] = found.get(edge, 0.0) + value
        return found

    first, last = buckets(before), buckets(after)
    total = max((last[edge] - first.get(edge, 0.0) for edge in last), default=0.0)
    return min((edge for edge in last if last[edge] - first.get(edge, 0.0) >= total), default=0.0)
