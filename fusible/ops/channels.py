"""Channels: names by which extra outputs of one op reach the extra inputs of later ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from torch import nn

from fusible.arguments import check_bools


class Channels(nn.Module):
    """The channels of an op's extra inputs and outputs; fixed once a run captures the op."""

    num_extra_inputs: int
    num_extra_outputs: int
    extra_input_channels: list[str | None]
    extra_output_channels: list[tuple[str | None, bool]]
    _frozen: bool

    def set_extra_input_channel(self, index: int, channel: str | None) -> Self:
        """Feed an extra input from the channel that an earlier op of the same run produces.

        None undoes it. Returns the op.

        Raises:
            IndexError: there is no such extra input.
            ValueError: the name is not a non-empty string; unknown, late and duplicate producers
                are found when the run is captured.
            RuntimeError: a run has captured this op already.
        """
        self._check_channel("extra input", index, self.num_extra_inputs, channel)
        self.extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> Self:
        """Send an extra output down a channel, to any number of later ops of the same run.

        Their gradients are summed. ``output_to_caller=False`` hides the output from the caller;
        None removes the channel and shows it again. Returns the op.

        Raises:
            TypeError: ``output_to_caller`` is not a bool; and as :meth:`set_extra_input_channel`.
        """
        check_bools("set_extra_output_channel", output_to_caller=output_to_caller)
        self._check_channel("extra output", index, self.num_extra_outputs, channel)
        self.extra_output_channels[index] = (channel, channel is None or output_to_caller)
        return self

    def _check_channel(self, what: str, index: int, count: int, channel: str | None) -> None:
        name = type(self).__name__
        if not 0 <= index < count:
            raise IndexError(
                f"index of the {what} must be at least 0 and under {count} for {name}, got {index}"
            )
        if channel is not None and not (isinstance(channel, str) and channel):
            raise ValueError(f"channel must be a non-empty string or None, got {channel!r}")
        if self._frozen:
            raise RuntimeError(
                f"channels of {name} must be bound before it first runs: a run of ops has captured "
                "them; bind the channels of a new op and build a new Sequential"
            )


def channels(ops: Iterable[Any]) -> list[Any]:
    """The channels of all ops."""
    return [(op.extra_input_channels, op.extra_output_channels) for op in ops]
