"""The backwards that autograd's engine runs: which one this is, and whether it ended."""

from __future__ import annotations

import threading
import weakref

import torch


class Backward:
    """One backward of autograd's engine, which calls ``callback`` where it ends without an error.

    The engine alone holds the callback: if it was freed without being called, an error ended the
    backward.
    """

    def __init__(self, callback: _EndCallback) -> None:
        self._ended = False
        self._callback = weakref.ref(callback)
        self.overwritten: set[int] = set()  # ids of the weights whose `main_grad` it overwrote

    @staticmethod
    def running() -> Backward | None:
        """The one in which this thread is, None outside of any."""
        task = torch._C._current_graph_task_id()
        if task < 0:
            return None
        with _lock:
            callback = _callbacks.get(task)
            if callback is None:
                callback = _callbacks[task] = _EndCallback()
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


class _EndCallback:
    """What the engine calls at the end of a backward, and holds until then."""

    def __init__(self) -> None:
        self.backward = Backward(self)

    def __call__(self) -> None:
        self.backward._ended = True


_lock = threading.Lock()
_callbacks: weakref.WeakValueDictionary[int, _EndCallback] = weakref.WeakValueDictionary()
