"""Which ops run during the communication of another one; how: fused/test_moe_experts_group.py."""

import pytest

import fusible as fz
from fusible.fuser.overlap import overlaps
from fusible.fuser.wiring import wire

COMBINE, SWAP, UP, DOWN, ADD = 2, 3, 4, 6, 7


@pytest.fixture
def ops(monkeypatch):
    monkeypatch.setattr(fz.Combine, "communicates", True)
    return [
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        fz.Dispatch(4),
        fz.Combine(),
        fz.Swap()
        .set_extra_input_channel(0, "tokens")
        .set_extra_output_channel(0, "routed", output_to_caller=False),
        *fz.Linear(8, 16, bias=False).basic_ops,
        fz.SwiGLU(),
        *fz.Linear(8, 8, bias=False).basic_ops,
        fz.AddExtraInput().set_extra_input_channel(0, "routed"),
    ]


class Fused(fz.extend.FusedOperation):
    pass


def hidden(ops, *fused):
    """What runs meanwhile, where the slices ``fused`` of the ops run as one op each."""
    steps, at = [], 0
    while at < len(ops):
        stop = next((stop for start, stop in fused if start == at), at + 1)
        steps.append((ops[at] if stop == at + 1 else Fused(ops[at:stop]), at, stop))
        at = stop
    return [overlap.overlapped for overlap in overlaps(ops, wire(ops), steps)]


def test_the_branch_between_the_swap_and_the_sum(ops):
    assert hidden(ops) == [slice(UP, ADD)]


def test_an_op_that_is_fused_with_the_reader_waits(ops):
    assert hidden(ops, (DOWN, ADD + 1)) == [slice(UP, DOWN)]
    assert hidden(ops, (UP, ADD + 1)) == []


def test_an_op_that_covers_the_swap_may_read_what_it_passes_on(ops):
    assert hidden(ops, (SWAP, UP + 1)) == []


def test_what_the_caller_gets_too_is_complete(ops):
    ops[SWAP].set_extra_output_channel(0, "routed", output_to_caller=True)
    assert hidden(ops) == []


def test_an_op_without_a_second_branch(ops):
    assert hidden(ops[: COMBINE + 1]) == []
