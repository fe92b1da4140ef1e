"""Run a test's functions on a pool of rank processes: ``ranks(2).run(fn, *args)``."""

from tests.ranks.errors import RankDied, RankError, RankLeak, RankTimeout, RemoteError
from tests.ranks.pool import RankPool, RankPools

__all__ = ["RankDied", "RankError", "RankLeak", "RankPool", "RankPools", "RankTimeout", "RemoteError"]
