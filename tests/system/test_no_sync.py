"""BF16 on CUDA never waits for the device: shown without a GPU.

The implementations for CUDA run on meta tensors, which stand for those of a device: they have no
values that the host could read. (Fake CUDA tensors need a build of torch with CUDA.)
"""

import itertools

import pytest
import reference as ref
import torch
from number_formats import each_recipe
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import fusible as fz
from fusible import library, versions
from fusible.kernels import grouped, moe
from fusible.kernels.grouped import definitions, pytorch
from fusible.kernels.runtime import gpu
from fusible.testing import assume_target

aten = torch.ops.aten
# What reads values on the host, whatever device they are on.
READS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}


class Synchronises(AssertionError):
    """An op that waits for the device was called."""


# torch itself refuses to copy what has no values.
REFUSED = (Synchronises, NotImplementedError)


class NoSync(TorchDispatchMode):
    """Refuses to read values of device tensors on the host, and copies of them to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        on_device = any(t.is_meta for t in given)
        if on_device and func in READS:
            raise Synchronises(f"{func} reads values of a device tensor on the host")
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        if on_device and any(t.device.type == "cpu" for t in made):
            raise Synchronises(f"{func} copies a device tensor to the host")
        return out


@pytest.fixture
def no_sync(monkeypatch):
    """Meta tensors, on which the library ops run their CUDA implementations."""
    monkeypatch.setattr(library, "is_direct", lambda _: True)
    for module in (gpu, moe.cuda):  # no kernel of ours
        monkeypatch.setattr(module, "capability", lambda _: (0, 0))
    with torch.device("meta"), NoSync():
        yield


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu", non_blocking=True),
        lambda t: bool(t.any()),
        lambda t: torch.empty(3, device="cpu").copy_(t),
        lambda t: torch.repeat_interleave(t, t.int()),
    ],
    ids=["item", "tolist", "cpu", "to", "bool", "copy_", "repeat_interleave"],
)
def test_the_mode_catches(read, no_sync):
    with pytest.raises(REFUSED):
        read(torch.ones(3))


def on_device(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def assert_gradients(*tensors):
    """Each has one, on the device."""
    for t in tensors:
        assert (t.grad.shape, t.grad.dtype, t.grad.device) == (t.shape, t.dtype, t.device)


def mlp_on_device(dtype=torch.bfloat16, scale_bias=False, **options):
    fc2 = {"scale_bias": scale_bias, "dtype": dtype, **options}
    return fz.Sequential(
        fz.GroupedLinear(4, 16, 48, dtype=dtype, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 24, 16, **fc2),
    )


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delay", [True, False])
def test_main_grads(single, delay, no_sync):
    with assume_target("sm100"):
        options = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delay}
        mlp = mlp_on_device(bias=True, single_grouped_weight=single, **options)
        for i, p in enumerate(mlp.parameters()):
            p.main_grad = torch.empty(p.shape, dtype=torch.float32)
            p.overwrite_main_grad = i % 2 == 0
        x, scales = on_device(10, 16), on_device(10, dtype=torch.float32)
        splits = torch.ones(4, dtype=torch.int64)
        mlp(x, splits, scales, splits).sum().backward()
        mlp[0].backward_dw()
        mlp[2].backward_dw()
    assert_gradients(x, scales, *mlp[0].biases(), *mlp[2].biases())


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_mlp(single, bias, no_sync):
    with assume_target("sm100"):
        mlp = mlp_on_device(
            bias=bias,
            scale_bias=bias,
            single_grouped_weight=single,
            single_grouped_bias=single,
        )
        x, scales = on_device(10, 16), on_device(10, dtype=torch.float32)
        splits = torch.ones(4, dtype=torch.int64)
        extra = [splits, scales, splits, *([scales] if bias else [])]
        mlp(x, *extra).sum().backward()
    assert_gradients(x, scales, *mlp.parameters())


@pytest.mark.parametrize("features", [(16, 48), (12, 20), (3, 5)])
def test_features_of_any_alignment(features, no_sync):
    """Padding to what the grouped product asks for needs no values."""
    with assume_target("sm100"):
        op = fz.GroupedLinear(4, *features, dtype=torch.bfloat16)
        x = on_device(10, features[0])
        splits = torch.ones(4, dtype=torch.int64)
        op(x, splits).sum().backward()
    assert_gradients(x, *op.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_without_triton_other_dtypes_synchronise_and_explain_says_so(dtype, no_sync, monkeypatch):
    monkeypatch.setattr(versions, "has_triton", lambda: False)
    with assume_target("sm100"):
        op = fz.GroupedLinear(4, 16, 16, dtype=dtype)
        x = on_device(10, 16, dtype=dtype)
        splits = torch.ones(4, dtype=torch.int64)
        with pytest.raises(REFUSED):
            op(x, splits)
        notes = op.notes(str(dtype).removeprefix("torch."), fz.Target("cuda", 100, triton=False))
    assert "a synchronisation" in notes[0]
    assert op.notes("bfloat16", fz.Target("cuda", 100)) == ()


def test_dense_ops(no_sync):
    with assume_target("sm100"):
        seq = fz.Sequential(
            fz.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
            fz.Linear(8, 16, dtype=torch.bfloat16),
            fz.SwiGLU(),
            fz.Reshape((-1, 8)),
            fz.BasicLinear(8, 8, dtype=torch.bfloat16),
            fz.AddExtraInput().set_extra_input_channel(0, "r"),
            fz.ConstantScale(2.0),
            fz.GELU(),
        )
        x = on_device(6, 8)
        seq(x).sum().backward()
    assert_gradients(x, *seq.parameters())


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_moe_block(capacity, no_sync):
    """By the definitions, which also serve what the kernels do not support on CUDA."""
    options = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
    with assume_target("sm100"):
        block = fz.Sequential(
            fz.TopKRouter(16, 4, 2, num_groups=2, top_groups=1, expert_bias=True),
            fz.Dispatch(4, capacity_factor=capacity),
            fz.GroupedLinear(4, 16, 48, **options),
            fz.SwiGLU(),
            fz.GroupedLinear(4, 24, 16, **options),
            fz.Combine(weighted=True),
        )
        x = on_device(10, 16)
        block(x).sum().backward()
        block[0].update_expert_bias(torch.ones(4))
    assert_gradients(x, *block.parameters())


@pytest.fixture
def fake_group():
    """Four processes of which there is one; what they send each other has no values."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"receive_factor": 1.5}, {"capacity_factor": 1.0}])
@pytest.mark.parametrize("weighted", [True, False])
def test_moe_block_over_a_group(options, weighted, fake_group, no_sync):
    """In the default mode, which reads neither sizes nor what processes agree on."""
    linear = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
    with assume_target("sm100"):
        block = fz.Sequential(
            fz.TopKRouter(16, 8, 4, expert_bias=True),
            fz.Dispatch(8, process_group=fake_group, **options),
            fz.GroupedLinear(2, 16, 48, **linear),
            fz.SwiGLU() if weighted else fz.ScaledSwiGLU(),
            fz.GroupedLinear(2, 24, 16, **linear),
            fz.Combine(weighted=weighted, process_group=fake_group),
        )
        x = on_device(10, 16)
        y, load = block(x)
        y.sum().backward()
        block[0].update_expert_bias(load, process_group=fake_group)
    assert_gradients(x, *block.parameters())
    with assume_target("sm100"), pytest.raises(REFUSED):
        fz.Dispatch(8, process_group=fake_group, send="tokens")(
            x, torch.rand(10, 4), torch.zeros(10, 4, dtype=torch.int64)
        )


def test_the_implementations_for_cuda_equal_the_loop(monkeypatch):
    """Values of what the fake tensors ran, with torch's grouped product as a loop on the CPU."""

    def loop(a, b, *, offs):
        ends = [0, *offs.tolist()]
        spans = list(itertools.pairwise(ends))
        if b.dim() == 3:
            y = torch.full((a.shape[0], b.shape[2]), float("nan"), dtype=a.dtype)
            for e, (start, end) in enumerate(spans):
                y[start:end] = a[start:end] @ b[e]
            return y
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])

    monkeypatch.setattr(pytorch.F, "grouped_mm", loop)
    for features, rows in (((16, 24), 10), ((5, 3), 10), ((8, 8), 0)):
        sizes = [3, 0, 4, 1] if rows else [0, 0, 0, 0]
        ends = grouped.group_ends(torch.tensor(sizes), rows)
        x = torch.randn(rows, features[0]).bfloat16()
        dy = torch.randn(rows, features[1]).bfloat16()
        w = torch.randn(4, *features[::-1]).bfloat16()
        bias, scales = torch.randn(4, features[1]).bfloat16(), torch.rand(rows)
        for weights in ([w], list(w.unbind(0)), [m.clone() for m in w]):
            for b, s in ((None, None), (bias, None), (bias, scales)):
                mine = pytorch.grouped_mm(x, weights, ends, b, s, False)
                exact = ref.grouped_linear(
                    x.double(),
                    w.double(),
                    sizes,
                    *(None if t is None else t.double() for t in (b, s)),
                )
                ref.assert_accurate(mine, exact)
            mine = pytorch.grouped_mm(dy, weights, ends, None, None, True)
            ref.assert_accurate(mine, ref.grouped_linear(dy.double(), w.double().mT, sizes))
        expected = grouped.grouped_wgrad(dy, x, ends)
        torch.testing.assert_close(pytorch.grouped_wgrad(dy, x, ends), expected)
        for accumulate in (False, True):
            out = [torch.ones_like(expected), torch.ones_like(expected)]
            definitions.grouped_wgrad_(
                out[:1], dy, x, ends, accumulate, product=pytorch.grouped_wgrad, rounds=True
            )
            grouped.grouped_wgrad_(out[1:], dy, x, ends, accumulate)
            torch.testing.assert_close(*out)


@pytest.mark.parametrize("machine", ["sm80", "sm90"])
@pytest.mark.parametrize("stored", [False, True])
@each_recipe
def test_recipes_read_nothing_on_the_host(recipe, stored, machine, no_sync):
    with fz.quantized_model_init(enabled=stored, recipe=recipe):
        mlp = ref.grouped_mlp(groups=4, hidden=128, inner=128, dtype=torch.bfloat16)
    x, splits = on_device(48, 128), torch.empty(4, dtype=torch.int64)
    with fz.autocast(recipe=recipe), assume_target(machine):
        y = mlp(x, splits, torch.empty(48), splits)
    assert (len(mlp.plan.fired) == 1) == (machine == "sm90")
    y.backward(torch.empty(48, 128, dtype=torch.bfloat16))
    assert x.grad.shape == (48, 128)
