"""Saved rows in a pool: the same bits, the memory of the rows that there are."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import reference as ref
import torch
from checks import saved_tensors
from number_formats import BLOCK_FP8, MX
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible.kernels import saved_rows
from fusible.kernels.saved_rows import header_size, restore, save
from fusible.testing import assume_target

SIZES = [5, 0, 7, 1]
ROWS, HIDDEN, INNER = 40, 32, 64
USED = sum(SIZES)


def mlp(**options):
    torch.manual_seed(0)
    return fz.Sequential(
        fz.GroupedLinear(len(SIZES), HIDDEN, 2 * INNER, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(len(SIZES), INNER, HIDDEN, **options),
    )


def block(**options):
    torch.manual_seed(0)
    return fz.Sequential(
        fz.TopKRouter(HIDDEN, 4, 2),
        fz.Dispatch(4, capacity_factor=2.0, **options),
        *mlp(bias=False),
        fz.Combine(),
    )


def inputs(sizes=SIZES, dtype=torch.float32):
    splits = torch.tensor(sizes)
    x = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    scales = torch.rand(ROWS, requires_grad=True)
    return x, splits, scales, splits


def grads(module, given, pool=None, dy=None):
    leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
    if pool is None:
        y = module(*given)
    else:
        with pool:
            y = module(*given)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y) if dy is None else dy)]


@pytest.mark.parametrize("machine", ["cpu", "sm90"])
@pytest.mark.parametrize("sizes", [SIZES, [0] * 4, [ROWS, 0, 0, 0], [10] * 4], ids=str)
def test_outputs_and_gradients_keep_their_bits(sizes, machine):
    module, given = mlp(), inputs(sizes)
    if machine == "sm90":
        module, given = module.bfloat16(), inputs(sizes, torch.bfloat16)
    pool = fz.SavedRowsPool(1 << 20, "cpu")
    with assume_target(machine):
        want = grads(module, given)
        ref.assert_equal(grads(module, given, pool), want)
    assert (module.plan.fired == ("grouped_mlp_sm90",)) == (machine == "sm90")
    assert not pool.overflowed()
    features = HIDDEN + INNER if machine == "cpu" else 0  # inputs of both linears
    bytes_ = 4 * features * sum(sizes)
    if machine == "sm90":  # FC1's input and the pre-activation
        bytes_ = 2 * (HIDDEN + 2 * INNER) * sum(sizes)
    assert bytes_ <= pool.peak_bytes() <= bytes_ + 2 * 128


@pytest.mark.parametrize("recipe", [BLOCK_FP8, MX], ids=["fp8", "mxfp8"])
def test_pre_activations_under_a_recipe(recipe):
    module, given = mlp().bfloat16(), inputs(dtype=torch.bfloat16)
    pool = fz.SavedRowsPool(1 << 20, "cpu")
    with assume_target("sm90"), fz.autocast(recipe=recipe):
        want = grads(module, given)
        ref.assert_equal(grads(module, given, pool), want)
    bytes_ = 2 * INNER * USED * (2 if recipe is BLOCK_FP8 else 4)  # FP32 of decoded, on a CPU
    assert bytes_ <= pool.peak_bytes() < bytes_ + 128


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_of_experts(recompute):
    module = block(recompute_rows=recompute).bfloat16()
    x = torch.randn(20, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    pool = fz.SavedRowsPool(1 << 20, "cpu")
    with assume_target("sm90"):
        want = grads(module, (x,))
        ref.assert_equal(grads(module, (x,), pool), want)
        assert "moe_experts_sm90" in module.plan.fired
    rows = 40 * 2 * 2 * INNER
    assert pool.peak_bytes() == pytest.approx(
        rows if recompute else rows + 40 * 2 * HIDDEN, abs=256
    )


def test_a_pre_activation_that_is_saved_in_fp8():
    module, given = mlp().bfloat16(), inputs(dtype=torch.bfloat16)
    module[1] = fz.ScaledSwiGLU(cache_quantized_input=True)
    pool = fz.SavedRowsPool(1 << 20, "cpu")
    with assume_target("sm90"):
        ref.assert_equal(grads(module, given, pool), grads(module, given))
    bytes_ = (2 * HIDDEN + 2 * INNER) * sum(SIZES)
    assert bytes_ <= pool.peak_bytes() <= bytes_ + 2 * 128


def test_what_is_saved_takes_the_rows_that_there_are():
    module, given = mlp().bfloat16(), inputs(dtype=torch.bfloat16)

    def shapes(pool):
        with assume_target("sm90"), pool:
            y = module(*given)
        return [t.shape for t in y.grad_fn.saved_tensors if t is not None]

    whole = {(ROWS, HIDDEN), (ROWS, 2 * INNER)}
    assert whole <= set(shapes(nullcontext()))
    assert whole.isdisjoint(shapes(fz.SavedRowsPool(1 << 20, "cpu")))


@pytest.mark.parametrize("reentrant", [True, False])
def test_hooks_and_checkpoints_take_what_is_saved(reentrant):
    module, given = mlp(), inputs()
    want, pool = grads(module, given), fz.SavedRowsPool(1 << 20, "cpu")

    def checkpointed(*tensors):
        return checkpoint(module, *tensors, use_reentrant=reentrant)

    leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
    with pool:
        y = checkpointed(*given)
    y.sum().backward()
    ref.assert_equal([y.detach(), *[t.grad for t in leaves]], want)
    with saved_tensors() as saved:
        ref.assert_equal(grads(module, given, pool), want)
    assert (ROWS, HIDDEN) in [t.shape for t in saved]
    assert pool.peak_bytes() == 0


def test_threads_do_not_share_a_step():
    pool = fz.SavedRowsPool(1 << 20, "cpu")
    with ThreadPoolExecutor(1) as other:
        with pool, pytest.raises(RuntimeError, match="must not be entered inside another"):
            other.submit(pool.__enter__).result()
        other.submit(pool.__enter__).result()
        other.submit(pool.__exit__, None, None, None).result()


def test_several_forwards_of_a_step_and_a_retained_graph():
    module, pool = mlp(), fz.SavedRowsPool(1 << 20, "cpu")
    first, second = inputs(), inputs([1, 2, 3, 4])
    wanted = [grads(module, given) for given in (first, second)]
    for _ in range(2):  # steps
        with pool:
            outputs = [module(*given) for given in (first, second)]
        for i in (1, 0, 1):
            given = (first, second)[i]
            leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
            got = torch.autograd.grad(
                outputs[i], leaves, torch.ones_like(outputs[i]), retain_graph=True
            )
            ref.assert_equal([outputs[i].detach(), *got], wanted[i])
    needed = pool.peak_bytes()
    with pool:
        module(*first)
    assert pool.peak_bytes() == needed  # the most of any step


def test_rows_without_room_are_nan_and_it_says_so():
    module, given = mlp(bias=False, single_grouped_weight=True), inputs()
    needed = fz.SavedRowsPool(1 << 20, "cpu")
    grads(module, given, needed)
    enough = fz.SavedRowsPool(needed.peak_bytes(), "cpu")
    ref.assert_equal(grads(module, given, enough), grads(module, given))
    assert not enough.overflowed()
    small = fz.SavedRowsPool(needed.peak_bytes() - 128, "cpu")
    y, _, _, dw1, dw2 = grads(module, given, small)
    assert small.overflowed()
    assert small.peak_bytes() == needed.peak_bytes()
    assert y.isfinite().all()
    assert dw1.isfinite().all()  # the first copy has room
    assert dw2[0].isnan().all()


def test_a_backward_of_an_earlier_step_is_refused():
    module, pool = mlp(), fz.SavedRowsPool(1 << 20, "cpu")
    with pool:
        y = module(*inputs())
    with pool:
        module(*inputs())
    with pytest.raises(RuntimeError, match="before its SavedRowsPool is entered again, got one of"):
        y.sum().backward()


def test_arguments():
    with pytest.raises(ValueError, match="num_bytes must be positive, got 0"):
        fz.SavedRowsPool(0)
    pool = fz.SavedRowsPool(1, "cpu")
    with pool, pytest.raises(RuntimeError, match="must not be entered inside another, or twice"):
        pool.__enter__()
    assert not pool.overflowed()


def test_tensors_of_other_devices_are_saved_as_without():
    module, given = mlp(), inputs()
    want, pool = grads(module, given), fz.SavedRowsPool(1 << 20, "meta")
    ref.assert_equal(grads(module, given, pool), want)


def test_compiled_code_saves_as_without():
    module, given = mlp(), inputs()
    want, pool = grads(module, given), fz.SavedRowsPool(1 << 20, "cpu")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
    with pool:
        y = compiled(*given)
    got = [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]
    ref.assert_equal(got, want)
    assert pool.peak_bytes() == 0


def test_more_copies_than_a_step_may_have(monkeypatch):
    monkeypatch.setattr("fusible.fuser.saved_rows._COPIES", 1)
    module, given = mlp(), inputs()
    want, pool = grads(module, given), fz.SavedRowsPool(1 << 20, "cpu")
    ref.assert_equal(grads(module, given, pool), want)
    assert pool.peak_bytes() == pytest.approx(4 * HIDDEN * USED, abs=128)


# --- the copies -----------------------------------------------------------------------------------


def buffer(lines, device="cpu"):
    memory = torch.full((header_size(3) + (lines + 1) * 128,), 7, dtype=torch.uint8, device=device)
    memory[: header_size(3)] = 0
    return memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_copies_lie_one_behind_another(dtype):
    memory, shape = buffer(8), (6, 32)
    ends = [torch.tensor([0, n], dtype=torch.int32) for n in (3, 0, 9)]
    rows = [torch.randn(shape).to(dtype) for _ in ends]
    for i, (given, end) in enumerate(zip(rows, ends, strict=True)):
        save(memory, given, end, i, 3)
    header = memory[: header_size(3)].view(torch.int32)
    lines = [-(-n * 32 * dtype.itemsize // 128) for n in (3, 0, 6)]  # rows of 6 at most
    assert header[1:5].tolist() == [0, lines[0], lines[0], sum(lines)]
    assert header[0] == sum(lines)
    fits = sum(lines) <= 8
    assert fits == (dtype != torch.float32)
    for i, (given, end) in enumerate(zip(rows, ends, strict=True)):
        got = restore(memory, end, i, 3, shape, dtype)
        n = min(int(end[-1]), 6)
        if i < 2 or fits:
            assert torch.equal(got[:n].view(torch.uint8), given[:n].view(torch.uint8))
        else:
            assert got[:n].float().isnan().all()
        assert not got[n:].float().any()


@pytest.mark.parametrize("name", ["save", "restore"])
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90a", "sm_100a"])
def test_it_compiles(name, gpu):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from fusible.kernels.runtime.launch import compile_kernel

    assert compile_kernel(f"saved_rows.copy.{name}", (), f"--gpu-arch {gpu}")


@pytest.mark.parametrize("columns", [3, 4])
def test_what_rows_are_supported(columns):
    rows = torch.zeros(5, columns)
    assert saved_rows.supports_copy(rows) == (columns == 4)
    assert not saved_rows.supports_copy(rows.T)
    assert not saved_rows.supports_copy(rows[:0])
