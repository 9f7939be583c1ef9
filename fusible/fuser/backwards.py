"""The backwards that autograd's engine runs: which one this is, and whether it ended."""

from __future__ import annotations

import threading
import weakref

import torch


class Backward:
    """One backward: it has ended, an error ended it, or it is running."""

    def __init__(self) -> None:
        self._ended = False
        self._callback: weakref.ref[_End]
        self.overwritten: set[int] = set()
        """The ids of the weights whose ``main_grad`` it has overwritten."""

    @staticmethod
    def running() -> Backward | None:
        """The one in which this thread is, None outside of any."""
        task = torch._C._current_graph_task_id()
        if task < 0:
            return None
        with _lock:
            callback = _callbacks.get(task)
            if callback is None:
                callback = _callbacks[task] = _End()
                callback.backward._callback = weakref.ref(callback)
                torch.autograd.Variable._execution_engine.queue_callback(callback)
            return callback.backward

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended and self._callback() is not None

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        return not self._ended and self._callback() is None


class _End:
    """What the engine holds until a backward is over, and calls at its end without an error."""

    def __init__(self) -> None:
        self.backward = Backward()

    def __call__(self) -> None:
        self.backward._ended = True


_lock = threading.Lock()
_callbacks: weakref.WeakValueDictionary[int, _End] = weakref.WeakValueDictionary()
