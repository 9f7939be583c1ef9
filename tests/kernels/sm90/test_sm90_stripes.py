"""Gate and linear columns that alternate in stripes below 8: which thread gets which of them."""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass import cute

from fusible.kernels.sm90.device import stripes

LANES = np.arange(32)


class Device:
    """The device functions for all lanes of a warp at once."""

    @staticmethod
    def select_(condition, a, b):
        return np.where(condition, a, b)

    class arch:  # noqa: N801 - as in cutlass.cute
        @staticmethod
        def shuffle_sync(value, lane):
            return value[lane]


@pytest.mark.parametrize("stripe", [1, 2, 4])
def test_every_thread_gets_gates_and_linears_of_its_columns(stripe, monkeypatch):
    monkeypatch.setattr(stripes, "select_", Device.select_)
    monkeypatch.setattr(stripes, "cute", Device)
    monkeypatch.setattr(stripes, "Boolean", np.asarray)
    pair = np.arange(16 * 16).reshape(16, 16)  # rows of a warp by columns
    held = [
        [pair[LANES // 4 + 8 * (i // 2), 8 * group8 + 2 * (LANES % 4) + i % 2] for i in range(4)]
        for group8 in range(2)
    ]
    sides = stripes.to_stripes_of_8(*held, stripe, LANES)
    for side in range(2):
        for i in range(4):
            row, column = LANES // 4 + 8 * (i // 2), 2 * (LANES % 4) + i % 2
            at = column // stripe * 2 * stripe + column % stripe + side * stripe
            assert (sides[side][i] == pair[row, at]).all()


@pytest.mark.parametrize("stripe", [1, 2, 4])
def test_every_thread_copies_gates_and_linears_of_its_columns(stripe):
    def check():
        layout, _ = stripes.fragment_layout(stripe)
        for thread in range(128):
            for i, place in enumerate(stripes.fragment_order(stripe)):
                warp, lane = divmod(thread, 32)
                row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
                column = 2 * (lane % 4) + i % 2
                at = column // stripe * 2 * stripe + column % stripe + i // 4 * stripe
                assert cute.crd2idx((thread, place), layout) == row + 64 * at

    @cute.jit
    def compiled():
        check()

    cute.compile(compiled)  # layouts exist while something is compiled
