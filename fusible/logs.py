"""Log lines that are written once in a process."""

import logging
from functools import lru_cache


def log_once(logger: logging.Logger, level: int, message: str, *arguments: str) -> None:
    """Log a line unless a logger that had the level enabled was given the same before."""
    if logger.isEnabledFor(level):
        _log(logger, level, message, *arguments)


@lru_cache(maxsize=1024)
def _log(logger: logging.Logger, level: int, message: str, *arguments: str) -> None:
    logger.log(level, message, *arguments)
