"""A simulated TensorRT-LLM: a small paged-KV transformer and an executor that drives any connector by the contract.

    from s3kv.sim import ConnectorConfig, Engine, SimConfig, SimRequest, install

    with install():                                     # the interface, under TensorRT-LLM's module names
        connector = ConnectorConfig("my.module", "MyScheduler", "MyWorker")
        with Engine(SimConfig(manager="v2", chunk_tokens=64), connector) as engine:
            results = engine.generate([SimRequest(1, tuple(range(200)), max_new_tokens=8)])

For tests and the demo; never a stand-in for TensorRT-LLM in production. `install` must be entered before the
connector's module is imported. An `Engine` without a connector gives the tokens to compare with.

`SimConfig` presents what the runtime can present: V1 and V2 caches, windows, several regions, chunked prefill, the
overlap scheduler, reuse on the device, offers honoured in part, replays, tensor parallelism and attention data
parallelism. A connector that breaks the contract is stopped by an error (ContractError, or KeyError for a request id
that `get_finished` was not given); one that saves or loads wrong bytes gives wrong tokens and scores, because the
attention reads keys and values from the pages alone and freed pages are filled with NaN. With `SimConfig(guard=True)`
pages written outside an offer, and promised pages that were not written, are found as well.

What drives the connector imports nothing of s3kv besides this folder, so that it judges the connector independently;
only the demonstration (`demo`) knows the rest.
"""

from s3kv.sim.config import ConnectorConfig, SimConfig, SimRequest, SimResult
from s3kv.sim.engine import Engine
from s3kv.sim.errors import BringUpError, ContractError
from s3kv.sim.install import install
from s3kv.sim.model import Media
from s3kv.sim.policy import OfferPolicy, ReplayPolicy
from s3kv.sim.shape import ModelShape

__all__ = [
    "BringUpError",
    "ConnectorConfig",
    "ContractError",
    "Engine",
    "Media",
    "ModelShape",
    "OfferPolicy",
    "ReplayPolicy",
    "SimConfig",
    "SimRequest",
    "SimResult",
    "install",
]
