"""What a block is: chains of hashes, namespaces, fingerprints. Pure.

Invariant kept here: two different identities never encode alike. Every variable-length field is framed by a tag and a
length, so LoRA "5" is not salt "5" and model `a/b_c` is not `a_b/c`.
"""

from s3kv.identity.chain import ROOT, BlockHash, Chain, MediaSpan, Scope, chain_hashes
from s3kv.identity.fingerprint import fingerprint_model
from s3kv.identity.namespace import (
    REPLICATED,
    Buffer,
    GroupSpec,
    NamespaceSpec,
    Part,
    RegionSpec,
)

__all__ = [
    "REPLICATED",
    "ROOT",
    "BlockHash",
    "Buffer",
    "Chain",
    "GroupSpec",
    "MediaSpan",
    "NamespaceSpec",
    "Part",
    "RegionSpec",
    "Scope",
    "chain_hashes",
    "fingerprint_model",
]
