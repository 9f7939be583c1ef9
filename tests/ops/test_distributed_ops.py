"""Collectives and tensor-parallel Linear on two processes (gloo): started once for all cases."""

import copy
import traceback

import process_groups
import pytest
import reference as ref
import torch
import torch.distributed as dist
from torch import nn

import fusible as fz

PROCESSES = 2


def of_all(rank, *shape):
    """Every process's tensor, and this one's as a leaf."""
    everyone = torch.randn(PROCESSES, *shape, generator=torch.Generator().manual_seed(3))
    return everyone, everyone[rank].clone().requires_grad_()


def part(t, rank, dim):
    return t.chunk(PROCESSES, dim)[rank]


def equal(got, want):
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


# --- cases: each is run by both processes ---------------------------------------------------------


def collective(make, rows, forward, backward):
    """Its output from all processes' inputs, and its gradient from those of their outputs."""

    def case(rank):
        everyone, x = of_all(rank, rows, 4)
        y = make()(x)
        dys, dy = of_all(rank, *y.shape)
        y.backward(dy.detach())
        equal(y, forward(everyone, rank))
        equal(x.grad, backward(dys, rank))
        assert torch.equal(x.detach(), everyone[rank])  # nothing is written where it lies

    return case


def own(t, rank):
    return t[rank]


def summed(t, rank):
    return t.sum(0)


def joined(t, rank):
    return t.flatten(0, 1)


def own_part_summed(t, rank):
    return part(t.sum(0), rank, 0)


def transposed_gradients_and_inputs(rank):
    """Collectives want contiguous memory, callers need not give it."""
    everyone, x = of_all(rank, 4, 6)
    y = fz.Sequential(fz.AllGather(), fz.ReduceScatter(), fz.AllReduce())(x.t())
    y.sum().backward()
    gathered = everyone.mT.flatten(0, 1)
    equal(y, part(PROCESSES * gathered, 0, 0) + part(PROCESSES * gathered, 1, 0))
    equal(x.grad, torch.full((4, 6), float(PROCESSES)))


def a_group_of_one_process(rank):
    groups = [dist.new_group([r]) for r in range(PROCESSES)]
    _, x = of_all(rank, 3, 4)
    for make in (fz.AllReduce, fz.AllReduceGrad, fz.AllGather, fz.ReduceScatter):
        y = make(groups[rank])(x)
        equal(y, x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        equal(dx, torch.ones_like(x))
    linear = fz.Linear(4, 6, tensor_parallel_mode="row", tensor_parallel_group=groups[rank])
    equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


def rows_that_cannot_be_divided(rank):
    with pytest.raises(
        ValueError, match=r"multiple of the group's 2 processes, got shape \(3, 4\)"
    ):
        fz.ReduceScatter()(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"AllGather must have a first dimension.*unsqueeze\(0\)"):
        fz.AllGather()(torch.tensor(1.0))
    with pytest.raises(ValueError, match="in_features of a tensor-parallel Linear must be a multi"):
        fz.Linear(5, 4, tensor_parallel_mode="row")
    with pytest.raises(ValueError, match="out_features of a tensor-parallel Linear must be a mul"):
        fz.Linear(4, 5, tensor_parallel_mode="column")


def parallel(mode, sequence, bias, dtype):
    """A parallel Linear against the whole one in FP64, values and every gradient."""

    def case(rank):
        whole = nn.Linear(8, 6, bias=bias, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in whole.parameters():
                p.copy_(torch.randn(p.shape, generator=generator).to(dtype))
        x, dy = (torch.randn(4, 3, n, generator=generator).to(dtype) for n in (8, 6))
        exact_x = x.double().requires_grad_()
        whole(exact_x).backward(dy.double())

        mine = fz.Linear(
            8, 6, bias=bias, dtype=dtype, tensor_parallel_mode=mode, sequence_parallel=sequence
        )
        shares = {"weight": 0 if mode == "column" else 1}
        if mode == "column":
            shares["bias"] = 0
        state = {
            name: part(p, rank, shares[name]) if name in shares else p
            for name, p in whole.state_dict().items()
        }
        assert {n: p.shape for n, p in mine.named_parameters()} == {
            n: p.shape for n, p in state.items()
        }
        mine.load_state_dict(state)

        def of_mine(t, cut):
            """What it has of a tensor whose features are divided in the mode ``cut``."""
            if mode == cut:
                return part(t, rank, -1)
            return part(t, rank, 0) if sequence else t

        x = of_mine(x, "row").clone().requires_grad_()
        y = mine(x)
        y.backward(of_mine(dy, "column"))
        ref.assert_accurate(y.detach(), of_mine(whole(exact_x), "column").detach(), 6)
        ref.assert_accurate(x.grad, of_mine(exact_x.grad, "row"), 6)
        for name, p in mine.named_parameters():
            grad = getattr(whole, name).grad
            exact = part(grad, rank, shares[name]) if name in shares else grad
            ref.assert_accurate(p.grad, exact, 8)

    return case


def a_parallel_mlp_trains_as_the_whole_one(rank):
    """With sequence parallelism: the bias of the second layer must stay one and the same."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.GELU("tanh"), nn.Linear(16, 8))
    options = {"sequence_parallel": True}
    mine = fz.Sequential(
        fz.Linear(8, 16, tensor_parallel_mode="column", **options),
        fz.GELU(),
        fz.Linear(16, 8, tensor_parallel_mode="row", **options),
    )
    up, _, down = (m.state_dict() for m in whole)
    mine[0].load_state_dict({name: part(p, rank, 0) for name, p in up.items()})
    mine[2].load_state_dict({"weight": part(down["weight"], rank, 1), "bias": down["bias"]})
    # A step that does not amplify what rounding does to the parameters.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (whole, mine)]
    for _ in range(4):
        x, target = torch.randn(6, 8), torch.randn(6, 8)
        losses = []
        for module, optimizer in zip((whole, mine), optimizers, strict=True):
            share = (lambda t: t) if module is whole else (lambda t: part(t, rank, 0))
            loss = (module(share(x)) - share(target)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        # Sums of 48 squares of what two products of 8 and 16 terms give.
        ref.assert_equal_but_for_rounding(losses[1], losses[0], roundings=16)
    ref.assert_equal_but_for_rounding(mine[2].bias, whole[2].bias, roundings=16)


def parallel_under_a_recipe(rank):
    """The local products are quantized, the collectives carry the values."""
    torch.manual_seed(0)
    recipe = fz.recipes.MXFP8BlockScaling()
    mine = fz.Linear(64, 64, tensor_parallel_mode="column", sequence_parallel=True)
    alone = fz.Linear(64, 32)
    alone.load_state_dict(mine.state_dict())
    everyone, x = of_all(rank, 32, 64)
    with fz.autocast(recipe=recipe):
        y, want = mine(x), alone(everyone.flatten(0, 1))
    assert torch.equal(y, want)
    y.sum().backward()
    assert x.grad.shape == (32, 64)


def explained_without_communicating(rank):
    """On one process only: were it to wait for the other, it would not return."""
    if rank == 0:
        mlp = fz.Sequential(
            fz.Linear(8, 16, tensor_parallel_mode="column", sequence_parallel=True),
            fz.Linear(16, 8, tensor_parallel_mode="row", sequence_parallel=True),
        )
        text = str(fz.explain(mlp, torch.randn(4, 8)))
        assert "AllGather(processes=2)" in text
        assert "ReduceScatter(processes=2)" in text


def compiled(rank):
    mlp = fz.Sequential(
        fz.Linear(8, 16, tensor_parallel_mode="column"),
        fz.GELU(),
        fz.Linear(16, 8, tensor_parallel_mode="row", sequence_parallel=True),
    )
    results = []
    for call in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager")):
        _, x = of_all(rank, 4, 8)
        y = call(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())))
        mlp.zero_grad()
    for a, b in zip(*results, strict=True):
        equal(a, b)


CASES = (
    {
        "all_reduce": collective(fz.AllReduce, 3, summed, own),
        "all_reduce_grad": collective(fz.AllReduceGrad, 3, own, summed),
        "all_gather": collective(fz.AllGather, 3, joined, own_part_summed),
        "reduce_scatter": collective(fz.ReduceScatter, 6, own_part_summed, joined),
    }
    | {
        f.__name__: f
        for f in (
            transposed_gradients_and_inputs,
            a_group_of_one_process,
            rows_that_cannot_be_divided,
            a_parallel_mlp_trains_as_the_whole_one,
            parallel_under_a_recipe,
            explained_without_communicating,
            compiled,
        )
    }
    | {
        f"{mode}, sequence={sequence}, bias={bias}, {dtype}": parallel(mode, sequence, bias, dtype)
        for mode in ("column", "row")
        for sequence in (False, True)
        for bias in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
    }
)


def run_cases(rank, folder):
    """What one process does: every case, noting what went wrong."""
    failures = {}
    for name, case in CASES.items():
        try:
            case(rank)
        except Exception:
            failures[name] = traceback.format_exc()
        dist.barrier()
    return failures


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return process_groups.results(run_cases, (), PROCESSES, tmp_path_factory.mktemp("meet"))


@pytest.mark.parametrize("name", CASES)
def test_on_two_processes(name, failures):
    for rank, of_rank in enumerate(failures):
        assert name not in of_rank, f"process {rank}:\n{of_rank[name]}"


def test_copies_share_the_process_group(mesh):
    group = mesh.get_group()
    op = nn.Sequential(fz.AllReduce(group), fz.Dispatch(4, process_group=group))
    for one, other in zip(op, copy.deepcopy(op), strict=True):
        assert one is not other
        assert one.process_group is other.process_group is group


@pytest.mark.parametrize("norm_type", [-float("inf"), 0.5, 1, 2, float("inf")])
def test_gradients_of_one_process_are_clipped_as_by_torch(norm_type):
    ours, theirs = ([nn.Parameter(torch.zeros(3)) for _ in range(2)] for _ in range(2))
    for p, q in zip(ours, theirs, strict=True):
        p.grad, q.grad = (
            torch.randn(3, generator=torch.Generator().manual_seed(1)) for _ in range(2)
        )
    got = fz.distributed.clip_grad_norm_(ours, 0.1, norm_type)
    want = nn.utils.clip_grad_norm_(theirs, 0.1, norm_type)
    ref.assert_equal([got, *[p.grad for p in ours]], [want, *[p.grad for p in theirs]])


def test_a_norm_of_zero_is_refused():
    with pytest.raises(ValueError, match="norm_type of clip_grad_norm_ must not be 0"):
        fz.distributed.clip_grad_norm_(nn.Parameter(torch.zeros(3)), 1.0, 0)
