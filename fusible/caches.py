"""Caches that may grow with what a program does, and are bounded."""

import threading
from typing import Any

_filling = threading.Lock()  # caches are read without


def keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Add an entry to a cache, in the place of its oldest ones if it has ``most``."""
    with _filling:
        while len(cache) >= most and key not in cache:
            del cache[next(iter(cache))]
        cache[key] = value
