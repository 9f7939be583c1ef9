"""Experts over a group of processes that disagree, die, fall silent or get too many rows."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from expert_parallel import EXPERTS, Case, experts, results, tensors

import fusible as fz

SECONDS, SHORT, SILENT = 120, 4, 10
"""Seconds: the timeout of a group, of one whose process stops responding, and of that stop."""


def attempt(case, group, rank, processes):
    """The output, or the error and the seconds until it; ``case.recipe`` says of what."""
    what = case.recipe
    x, probs, ids, _ = tensors(case, rank, processes)
    options = {"process_group": group, "send": case.send}
    if what == "k, send left out":
        options["send"] = None
    if what == "receive_factor":
        options["receive_factor"] = 1.75
    elif what == "enough":
        options["receive_factor"] = 2.0
    elif rank == 1 and what == "send":
        options["send"] = "rows" if case.send == "all" else "all"
    elif rank == 1 and what == "capacity_factor":
        options["capacity_factor"] = 1.5
    elif rank == 1 and what == "dtype":
        x = x.bfloat16()
    elif rank == 1 and what.startswith("k"):
        probs, ids = probs[:, :1], ids[:, :1]
    elif rank == 1 and what == "grad":
        x = x.detach()
    if rank == 1 and what in ("dead", "silent"):
        time.sleep(0.5 if what == "dead" else SILENT)
        return None
    if what == "large ids":
        ids = ids.clone()
        ids[:, 0] += 2**32
    local = EXPERTS // processes
    linears = [op.to(x.dtype) for op in experts(case, rank * local, local)]
    module = fz.Sequential(
        fz.Dispatch(EXPERTS, **options), *linears, fz.Combine(process_group=group)
    )
    start = time.monotonic()
    try:
        y, _ = module(x, probs, ids)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    if what == "large ids":
        ids[:, 0] = -1
        return y.detach(), module(x, probs, ids)[0].detach()
    return y.detach()


def described(case, group, rank, processes):
    """``explain`` on one process alone, which must wait for none."""
    x, probs, ids, _ = tensors(case, rank, processes)
    local = EXPERTS // processes
    module = fz.Sequential(
        fz.Dispatch(EXPERTS, process_group=group, send=case.send),
        *experts(case, rank * local, local),
        fz.Combine(process_group=group),
    )
    module.to(torch.bfloat16)
    texts = ["", ""]
    if rank == 0:
        targets = (None, "sm90")
        texts = [str(fz.explain(module, x.bfloat16(), probs, ids, target=t)) for t in targets]
    dist.barrier()
    return texts


def seen(folder, run, *cases, seconds=SECONDS):
    return results(2, folder, cases, run, datetime.timedelta(seconds=seconds))


MODES = ("rows", "tokens", "all")


def test_processes_that_disagree(tmp_path):
    wanted = {
        "send": ("send of Dispatch must be the same", "'all'"),
        "capacity_factor": ("capacity_factor of Dispatch must be the same", "[None, 1.5]"),
        "dtype": ("dtype of the input of Dispatch", "[torch.float32, torch.bfloat16]"),
        "k": ("k (choices of a token) of Dispatch", "[2, 1]"),
        "k, send left out": ("k (choices of a token) of Dispatch", "[2, 1]"),
        "grad": ("requires_grad of (input, probs) of Dispatch", "[(True, True), (False, True)]"),
    }
    cases = [Case(mode, recipe=what) for mode in MODES for what in wanted]
    for of_rank in seen(tmp_path, attempt, *cases):
        for case in cases:
            kind, text, seconds = of_rank[str(case)]
            assert kind == "ValueError", case
            assert seconds < SECONDS / 2
            for part in (*wanted[case.recipe], "all 2 processes", "in order of rank"):
                assert part in text


def test_more_rows_than_the_bound(tmp_path):
    """All processes raise, also where they have different numbers of tokens, or none."""
    cases = [
        Case(mode, recipe=what, tokens=tokens, routing="last")
        for mode in MODES
        for what in ("receive_factor", "enough")
        for tokens in ("even", "uneven", "none")
    ]
    for of_rank in seen(tmp_path, attempt, *cases):
        for case in cases:
            # All choices are of the last process's experts: twice the most of a process or fewer.
            choices = {"even": (64, 56), "uneven": (34, 42), "none": (32, 56)}[case.tokens]
            if case.recipe == "enough" or choices[0] <= choices[1]:
                assert isinstance(of_rank[str(case)], torch.Tensor), of_rank[str(case)]
                continue
            kind, text, seconds = of_rank[str(case)]
            assert (kind, seconds < SECONDS / 2) == ("ValueError", True)
            assert "at most 56 rows (receive_factor of Dispatch, 1.75" in text
            assert "got 64" in text


@pytest.mark.parametrize("what", ["dead", "silent"])
def test_a_process_that_does_not_take_part(tmp_path, what):
    """One that ended is noticed at once, one that does not answer after the group's timeout."""
    case = Case("tokens", recipe=what)
    timeout = SECONDS if what == "dead" else SHORT
    kind, text, seconds = seen(tmp_path, attempt, case, seconds=timeout)[0][str(case)]
    assert kind == "RuntimeError"
    assert "Dispatch over 2 processes: another process failed, left or did not answer" in text
    assert seconds < (SECONDS / 2 if what == "dead" else SILENT)


def test_large_ids_are_no_experts(tmp_path):
    """Ids past 32 bits, which end in those of experts."""
    cases = [Case(mode, recipe="large ids") for mode in MODES]
    for of_rank in seen(tmp_path, attempt, *cases):
        for case in cases:
            torch.testing.assert_close(*of_rank[str(case)], rtol=0, atol=0)


def test_explain_needs_no_other_process(tmp_path):
    """It names the mode that is chosen, and what hides an exchange."""
    hidden = "gradients of the tokens are sent while the weight gradient of the first linear"
    chosen = {Case(mode): mode for mode in MODES} | {
        Case(None): "all, chosen for top_k 2",
        Case(None, top_k=1): "tokens, chosen for top_k 1",
    }
    of_rank = seen(tmp_path, described, *chosen)[0]
    for case, mode in chosen.items():
        plain, hopper = of_rank[str(case)]
        for text in (plain, hopper):
            assert f"experts are shared among 2 processes; sends {mode}" in text
            assert ("reads sizes on the host" in text) == ("all" not in mode)
        assert "moe_experts_sm90" in hopper
        assert (hidden in hopper, hidden in plain) == (True, False)
