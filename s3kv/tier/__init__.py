"""Host memory for blocks: arenas of slots, the directory of one namespace, the budget of the node."""

from s3kv.tier.arena import Arena
from s3kv.tier.block import Committed, Counters, Held, Holder, Match, ReaderId, Reserved, State
from s3kv.tier.budget import NodeBudget
from s3kv.tier.directory import Directory

__all__ = [
    "Arena",
    "Committed",
    "Counters",
    "Directory",
    "Held",
    "Holder",
    "Match",
    "NodeBudget",
    "ReaderId",
    "Reserved",
    "State",
]
