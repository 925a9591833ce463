"""A config of a kernel: the values of a `helion.Config`, without importing Helion."""

from __future__ import annotations

import json
from typing import Any


class Config:
    """`Config(block_sizes=[...], num_warps=4, ...)`, hashable. The attribute `config` holds the values."""

    def __init__(self, /, **config: Any):
        self.config = config
        self._key = json.dumps(config, sort_keys=True)  # computed once, because each call of some operators hashes it

    def unrolled(self, *factors: int) -> Config:
        """This config with loops unrolled by Triton: a factor per loop, the grid's first. 0 leaves a loop as it is."""
        return Config(**self.config, range_unroll_factors=list(factors))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Config({self._key})"
