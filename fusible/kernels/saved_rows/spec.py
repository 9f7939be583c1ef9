"""How rows are laid out in a buffer, and how threads copy them."""

LINE, UNIT = 128, 16
"""Bytes at which a copy begins, and that a thread copies at once."""

THREADS = 256
TOGETHER = 4  # units that a thread has in flight
