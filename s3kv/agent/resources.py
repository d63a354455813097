"""What all namespaces of an agent share."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from s3kv.agent.metrics import AgentMetrics
from s3kv.agent.weights import ByteSemaphore
from s3kv.settings import Settings
from s3kv.store.base import Store
from s3kv.tier.budget import NodeBudget


@dataclass(frozen=True)
class Resources:
    """`clock` counts seconds for waits and ages; `wall_clock` gives seconds since 1970 for the catalog."""

    settings: Settings
    store: Store
    budget: NodeBudget
    metrics: AgentMetrics
    threads: ThreadPoolExecutor
    upload_bytes: ByteSemaphore
    fetch_bytes: ByteSemaphore
    index_dir: Path
    agent_id: int
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    rng: random.Random
