"""Experts over a group on GPUs: values, no synchronisation, graphs, and what a device refuses.

NCCL refuses two processes on one GPU; there gloo carries CUDA tensors.
"""

import datetime
import os
import signal
import time
from pathlib import Path

import expert_parallel as ep
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checks import graph_of, never_waiting
from expert_parallel import Case

import fusible as fz

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MODES = ("rows", "tokens", "all")
TIMEOUT = datetime.timedelta(seconds=240)
OPTIONS = [
    {},
    {"tokens": "many", "top_k": 4},
    {"tokens": "many", "top_k": 8, "recompute": True},
    {"scale_input": True},
    {"weighted": True, "top_k": 1},
    {"capacity_factor": 1.0},
    {"checkpointed": True},
    {"routing": "last"},
    {"routing": "outside", "twice": True},
    {"recipe": "MXFP8BlockScaling"},
    {"recipe": "MXFP8BlockScaling", "quantized_send": True, "tokens": "many"},
    {"tokens": "uneven"},
    {"tokens": "none"},
]
CASES = [
    Case(send, BF16, **options)
    for send in MODES
    for options in OPTIONS
    # Sizes that no host reads must be equal.
    if send != "all" or options.get("tokens", "many") == "many"
] + [
    *[Case(send) for send in MODES],
    Case("all", BF16, tokens="uneven", max_tokens=20),
    Case("all", BF16, tokens="none", max_tokens=16, recompute=True),
]
NAMES = ("output", "gradient of x", "of probs", "of FC1's weight", "of FC2's weight")


def compared(case, group, rank, processes):
    return [[t.cpu() for t in pair] for pair in ep.compared(case, group, rank, processes, "cuda")]


def stepping(case, group, rank, processes):
    """A block over the group, its inputs, and its forward and backward of them."""
    module = ep.block(case, group, rank, processes).cuda()
    given = ep.on("cuda", ep.tensors(case, rank, processes))
    return module, given, lambda: ep.run(module, case, *given)


def not_waiting(case, group, rank, processes):
    """A step that never waits for the device; the rules that fire, and its results."""
    module, _, step = stepping(case, group, rank, processes)
    first = step()
    torch.cuda.synchronize()
    with never_waiting():
        second = step()
    return module.plan.fired, [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


def replayed(case, group, rank, processes):
    """Whether each replay of a graph, with other routing, has the bits of a call."""
    _, given, step = stepping(case, group, rank, processes)
    graph, captured = graph_of(step)
    same, outputs = [], []
    for seed in range(1, 4):
        with torch.no_grad():
            for t, new in zip(given, ep.tensors(case, rank + 10 * seed, processes), strict=True):
                t.copy_(new)
        graph.replay()
        outputs.append([t.clone() for t in captured])
        same += [torch.equal(a, b) for a, b in zip(outputs[-1], step(), strict=True)]
    torch.cuda.synchronize()
    graph.reset()  # before the group that it communicates by
    same += [not torch.equal(a, b) for a, b in zip(outputs[0], outputs[1], strict=True)]
    return same


WHAT = {"compared": compared, "not_waiting": not_waiting, "replayed": replayed}
DEFAULT = Case(None, BF16, tokens="many", top_k=4)
# With more than one process the modes that read sizes are left out.
GRAPHS = [DEFAULT, Case("all", BF16, top_k=8, recompute=True), Case("all", BF16, weighted=True)]


class Task(tuple):
    """What to do, and the case."""

    def __str__(self):
        return f"{self[0]}: {self[1]}"


def task(given, group, rank, processes):
    what, case = given
    return WHAT[what](case, group, rank, processes)


def seen_by(folder, backend, processes, *whats):
    tasks = [Task(("compared", case)) for case in CASES]
    tasks += [Task((what, case)) for what in whats for case in GRAPHS]
    return ep.results(processes, folder, tasks, task, TIMEOUT, backend)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return seen_by(tmp_path_factory.mktemp("one"), "nccl", 1, "not_waiting", "replayed")


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory):
    return seen_by(tmp_path_factory.mktemp("two"), "gloo", 2)


@pytest.fixture(scope="module")
def on_two_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return seen_by(tmp_path_factory.mktemp("nccl"), "nccl", 2, "not_waiting", "replayed")


def found(seen, what, case):
    for rank, results in enumerate(seen):
        result = results[str(Task((what, case)))]
        assert not isinstance(result, str), f"process {rank}:\n{result}"
        yield result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_group_of_one(alone, case):
    """Every bit of the ops without a group."""
    for pairs in found(alone, "compared", case):
        for name, (got, want) in zip(NAMES, pairs, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want), name


def assert_near(seen, case):
    """Within the rounding of two partial sums and of what they sum to."""
    for pairs in found(seen, "compared", case):
        for name, (got, want) in zip(NAMES, pairs, strict=True):
            assert got.dtype == want.dtype
            scale = want.double().abs().amax() if want.numel() else torch.tensor(0.0)
            bound = 5 * torch.finfo(case.dtype).eps * scale
            assert ((got.double() - want.double()).abs() <= bound).all(), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_on_one_gpu(on_one_gpu, case):
    assert_near(on_one_gpu, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_gpus(on_two_gpus, case):
    assert_near(on_two_gpus, case)


@pytest.mark.parametrize("case", GRAPHS, ids=str)
@pytest.mark.parametrize("group", ["alone", "on_two_gpus"])
def test_no_synchronisation(request, group, case):
    for fired, same in found(request.getfixturevalue(group), "not_waiting", case):
        assert all(same)
        if torch.cuda.get_device_capability()[0] == 9 and not case.weighted:
            assert fired == ("moe_experts_sm90",)


@pytest.mark.parametrize("case", GRAPHS, ids=str)
@pytest.mark.parametrize("group", ["alone", "on_two_gpus"])
def test_graph_replayed_with_other_routing(request, group, case):
    for same in found(request.getfixturevalue(group), "replayed", case):
        assert all(same)


# --- what the device refuses: each in processes of its own, whose contexts are lost ----


def refused(rank, processes, folder, what):
    """Write what a call that the device refuses says, on stderr and as an error, and end at once.

    The message is printed by the device. Which error the host then sees, or whether torch aborts
    the process before, depends on its version and on which of its threads meets it first.
    """
    stderr = os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stderr, 2)
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo" if processes > 1 else "nccl",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=processes,
        timeout=TIMEOUT,
    )
    case = Case("all", BF16, tokens="uneven" if what == "tokens" else "even")
    given = ep.on("cuda", ep.tensors(case, rank, processes))
    if what == "options" and rank == 1:
        given[0] = given[0].detach()
    dispatch = fz.Dispatch(
        ep.EXPERTS,
        process_group=dist.group.WORLD,
        send="all",
        receive_factor=0.5 if what == "rows" else None,
    )
    Path(folder, f"called{rank}").touch()
    try:
        dispatch(*given[:3])
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(REFUSED)
    Path(folder, f"returned{rank}").touch()
    os._exit(0)


REFUSED = 3
MESSAGES = {
    "rows": "more rows than receive_factor of Dispatch allows",
    "tokens": "processes disagree about Dispatch's options or token counts",
    "options": "processes disagree about Dispatch's options or token counts",
}


@pytest.mark.parametrize(
    ("what", "processes"), [("rows", 1), ("rows", 2), ("tokens", 2), ("options", 2)]
)
def test_device_assertions(tmp_path, what, processes):
    """More rows than the bound, other numbers of tokens or other options: never a wrong number.

    Each process ends by the error or by an abort (SIGABRT), after the device has said why.
    """
    context = mp.spawn(refused, (processes, str(tmp_path), what), processes, join=False)
    for process in context.processes:
        process.join(TIMEOUT.total_seconds())
        process.kill()  # if it hangs
    for rank, process in enumerate(context.processes):
        said = (tmp_path / f"stderr{rank}").read_text()
        assert (tmp_path / f"called{rank}").exists(), said
        assert not (tmp_path / f"returned{rank}").exists(), "the call was not refused"
        assert process.exitcode in (REFUSED, -signal.SIGABRT), said
        assert MESSAGES[what] in said


# --- symmetric memory ---------------------------------------------------------------------


def by_memory(rank, processes, folder, leave):
    """A call through each other's memory; then, with ``leave``, one that the last does not make."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(seconds=20),
        device_id=torch.device("cuda", rank),
    )
    given = ep.on("cuda", ep.tensors(Case("all", BF16), rank, processes))
    dispatch = fz.Dispatch(ep.EXPERTS, process_group=dist.group.WORLD, send="all")
    dispatch(*given[:3])
    torch.cuda.synchronize()
    said = str(fz.explain(dispatch, *given[:3]))
    Path(folder, f"said{rank}").write_text(said)
    if leave and rank == processes - 1:
        time.sleep(60)
        os._exit(0)
    began = time.monotonic()
    try:
        dispatch(*given[:3])
        torch.cuda.synchronize()
    except RuntimeError:
        Path(folder, f"refused{rank}").write_text(str(time.monotonic() - began))
    os._exit(0)


@pytest.mark.parametrize("leave", [False, True])
def test_symmetric_memory(tmp_path, leave):
    """It is used on two GPUs; a process that stops responding is an error within the timeout."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    context = mp.spawn(by_memory, (2, str(tmp_path), leave), 2, join=False)
    for process in context.processes:
        process.join(100)
        process.kill()  # if it hangs
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text()
        assert "tokens are read from, and sums written to, each other's memory" in said
    refused = [path.name for path in tmp_path.glob("refused*")]
    ended_by_signal = context.processes[0].exitcode == -signal.SIGABRT
    assert leave == (refused == ["refused0"] or ended_by_signal), refused
