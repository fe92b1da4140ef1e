"""`LocalSGD` has not landed; the module says so."""

from __future__ import annotations

from typing import Any

from shardwise.errors import NotYetSupported


class LocalSGD:
    """Has not landed.

    Raises:
        NotYetSupported: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotYetSupported("LocalSGD has not landed; gradient_accumulation_steps makes processes talk less often.")
