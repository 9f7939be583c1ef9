"""How tests start process groups."""

import os
import signal
from pathlib import Path

import process_groups
import pytest
import torch
from torch import distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")


def fails(rank, folder, how, attempts):
    """The rank and a sum over the group; process 1 fails in the attempts named."""
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    if rank == 1 and Path(folder).name in attempts:
        if how == "abort":
            os.kill(os.getpid(), signal.SIGABRT)
        raise ValueError(how)
    return rank, total


def test_a_group_of_which_a_signal_ends_a_process_is_started_again(tmp_path):
    with pytest.warns(UserWarning, match="started again: process 1 terminated with signal SIGABRT"):
        seen = process_groups.results(fails, ("abort", ["first"]), 2, tmp_path)
    assert seen == [(0, torch.tensor(3)), (1, torch.tensor(3))]


def test_but_once(tmp_path):
    with (
        pytest.warns(UserWarning, match="started again"),
        pytest.raises(ProcessExitedException, match="SIGABRT"),
    ):
        process_groups.results(fails, ("abort", ["first", "second"]), 2, tmp_path)


def test_an_error_is_raised_at_once(tmp_path):
    with pytest.raises(ProcessRaisedException, match="ValueError: some error"):
        process_groups.results(fails, ("some error", ["first"]), 2, tmp_path)
    assert not (tmp_path / "second").exists()
