"""cuDNN's front end itself, for every configuration that the SM100 ops ask for, without a GPU.

The fused ops run on the emulator; every call that they make also goes to the real wrapper, which
checks its support, compiles the kernel for ``sm_100a``, and has the compiler's own argument checks
look at the very tensors of the call.
"""

import copy
from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import torch

import fusible as fz
from fusible import recipes
from fusible.kernels import emulator_sm100 as emulator
from fusible.testing import assume_target

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import blackwell

from fusible.kernels.sm100 import frontend

BF16 = torch.bfloat16
MXFP8, NVFP4 = recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()


class Both:
    """Every call goes to cuDNN's wrapper, whose results have no values, then to the emulator."""

    def __init__(self):
        self.calls = []
        self.configurations = set()

    def __getattr__(self, name):
        def call(**arguments):
            self.calls.append(name)
            self.configurations.add(configuration(name, arguments))
            # The real one writes nothing, but what it was given to write to is the caller's.
            real = getattr(frontend, name)(**arguments)
            emulated = getattr(emulator, name)(**arguments)
            for key in set(real.keys()) & set(emulated.keys()):
                a, b = real[key], emulated[key]
                if a is not None and b is not None:
                    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), key
            return emulated

        return call


FREE = {"n", "m_aligned", "descriptor_workspace", "linear_offset", "geglu_alpha", "glu_clamp_max",
        "glu_clamp_min"}  # fmt: skip


def configuration(name, arguments):
    """What a kernel is compiled for: the wrapper, its options, and which tensors it is given."""
    described = {
        key: str(value.dtype) if isinstance(value, torch.Tensor) else value
        for key, value in arguments.items()
        if key not in FREE and value is not None
    }
    return name, tuple(sorted(described.items(), key=str))


SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True, "dtype": BF16}
SWIGLU = fz.ScaledSwiGLU(glu_interleave_size=32)
GEGLU = fz.ScaledClampedQGeGLU(glu_interleave_size=32)
# (recipe, options of the linears, activation): each kernel with all that is baked into it.
CASES = {
    "mxfp8": (MXFP8, {**SINGLE, "bias": True}, SWIGLU),
    "mxfp8 pointers": (MXFP8, {**SINGLE, "bias": False, "single_grouped_weight": False}, GEGLU),
    "nvfp4": (NVFP4, {**SINGLE, "bias": True}, GEGLU),
    "nvfp4 pointers": (NVFP4, {**SINGLE, "bias": False, "single_grouped_weight": False}, SWIGLU),
    "bf16": (None, {**SINGLE, "bias": True}, SWIGLU),
    "bf16 pointers": (None, {**SINGLE, "bias": False, "single_grouped_weight": False}, GEGLU),
}


def module_of(recipe, options, act, groups=3, scale_bias=None):
    pointers = not options["single_grouped_weight"]
    scale_bias = options["bias"] if scale_bias is None else scale_bias
    store = fz.quantized_model_init(recipe=recipe) if pointers and recipe else nullcontext()
    with store:
        module = fz.Sequential(
            fz.GroupedLinear(groups, 128, 256, **options),
            copy.deepcopy(act),
            fz.GroupedLinear(groups, 128, 192, **options, scale_bias=scale_bias),
        )
    for fc in (module[0], module[2]) if pointers and not recipe else ():
        apart(fc)
    return module


def apart(linear):
    """Each weight in a memory of its own."""
    for name, w in list(linear.named_parameters()):
        if name.startswith("weight"):
            setattr(linear, name, torch.nn.Parameter(w.detach().clone()))


def inputs_of(module, sizes=(20, 0, 300), rows=400):
    splits = torch.tensor(sizes)
    x = torch.randn(rows, 128, dtype=BF16, requires_grad=True)
    scales = torch.rand(rows, requires_grad=True)
    scale_bias = module[2].scale_bias
    return [x, splits, scales, splits, *([torch.rand(rows)] if scale_bias else [])]


def calls_of(module, given, recipe, compiling=True):
    """The kernels called, forward and backward, each of which has launched."""
    kernels = Both()
    context = fz.autocast(recipe=recipe) if recipe else nullcontext()
    with (
        blackwell.simulated(compiling) as launches,
        assume_target("sm100", kernels),
        context,
    ):
        y = module(*given)
        y.sum().backward()
        assert y.isfinite().all()
    assert launches.count == len(kernels.calls)
    return kernels, launches


def sums_in_order(wanted):
    """Where a kernel can; torch's own switch would import its compiler, which takes seconds."""
    return mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=wanted)


MLP_CALLS = ["glu", "quant", "dglu", "quant", "wgrad", "wgrad"]


@pytest.mark.parametrize("case", CASES)
def test_the_grouped_mlp_is_what_the_front_end_takes(case):
    recipe, options, act = CASES[case]
    module = module_of(recipe, options, act)
    with sums_in_order("pointers" in case):
        kernels, _ = calls_of(module, inputs_of(module), recipe)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    wanted = [f"grouped_gemm_{name}_wrapper_sm100" for name in MLP_CALLS]
    if recipe is None:
        wanted = [name.replace("_quant", "") for name in wanted]
    assert kernels.calls == wanted


def linear_with_main_grad(recipe, single, dtype, overwrite, groups=3):
    store = fz.quantized_model_init(recipe=recipe) if recipe and not single else nullcontext()
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": single}
    with store:
        linear = fz.GroupedLinear(groups, 128, 256, **options, accumulate_into_main_grad=True)
    if not single and recipe is None:
        apart(linear)
    for p in linear.parameters():
        p.main_grad, p.overwrite_main_grad = torch.zeros(p.shape, dtype=dtype), overwrite
    return linear


@pytest.mark.parametrize(
    ("recipe", "single", "dtype"),
    [
        (MXFP8, True, torch.float32),
        (MXFP8, False, torch.float32),
        (NVFP4, True, torch.float32),
        (None, True, torch.float32),
        (None, False, BF16),
    ],
    ids=["mxfp8", "mxfp8 pointers", "nvfp4", "bf16", "bf16 pointers"],
)
def test_gradients_are_added_to_main_grads(recipe, single, dtype):
    linear = linear_with_main_grad(recipe, single, dtype, False)
    given = torch.randn(30, 128, dtype=BF16), torch.tensor([10, 8, 12])
    kernels, _ = calls_of(linear, given, recipe)
    assert kernels.calls[-1] == "grouped_gemm_wgrad_wrapper_sm100"
    assert all(p.main_grad.any() for p in linear.parameters())


def every_configuration(recipe, single, groups, compiling):
    """All kernels that the ops can ask for under a recipe, over all options; what compiled.

    With ``single``, those of dense weights, else of pointers to them.
    """
    found, compiled = set(), 0

    def run(module, given):
        nonlocal compiled
        kernels, launches = calls_of(module, given, recipe, compiling)
        found.update(kernels.configurations)
        compiled += len(launches.compiled)

    sizes = [20, *[0] * (groups - 2), 30]
    # Bias, whether sums shall have an order, activation: what is told apart by some kernel.
    biases = [("none", False), ("none", True), ("plain", False)]
    mlps = [(*bias, act) for bias in biases for act in (SWIGLU, GEGLU)]
    for bias, ordered, act in [*mlps, ("scaled", False, SWIGLU)]:
        options = {**SINGLE, "single_grouped_weight": single, "bias": bias != "none"}
        module = module_of(recipe, options, act, groups, bias == "scaled")
        with sums_in_order(ordered):
            run(module, inputs_of(module, sizes, 60))
    for dtype, overwrite in product((torch.float32, BF16), (True, False)):
        linear = linear_with_main_grad(recipe, single, dtype, overwrite, groups)
        run(linear, (torch.randn(60, 128, dtype=BF16), torch.tensor(sizes)))
    return found, compiled


def configurations(test):
    """Give a test each recipe and each kind of weights."""
    recipes = pytest.mark.parametrize(
        "recipe", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"]
    )
    return recipes(
        pytest.mark.parametrize("single", [True, False], ids=["dense", "pointers"])(test)
    )


def count_of(recipe, single):
    """How many there are."""
    glu = 2 * 2  # bias, activation
    dglu = 2 * (2 if recipe is None else 3)  # activation; with its sum, without, that in an order
    # Bias, scaled or not (BF16's kernel takes a scale always), and the data gradient, whose weights
    # are k-major in NVFP4 as the forward's are.
    gemm = 4 if recipe == MXFP8 else 3
    wgrad = 2 * 2 + (not single)  # dtype, written or added to; and autograd's are dense
    return glu + dglu + gemm + wgrad


@configurations
def test_every_configuration_is_supported(recipe, single):
    """The front end's support check of the very tensors of every kernel that can be asked for."""
    found, _ = every_configuration(recipe, single, groups=2, compiling=False)
    assert len(found) == count_of(recipe, single)


@configurations
def test_every_configuration_compiles(recipe, single):
    """And all of them cross-compiled, with the compiler's own checks of the arguments."""
    found, compiled = every_configuration(recipe, single, groups=4, compiling=True)
    assert len(found) == count_of(recipe, single)
    assert compiled >= len(found)


def test_one_group_no_rows_and_another_row_count():
    """Strides of dimensions of size 1; no launch for nothing; one compilation for every size."""
    linear = fz.GroupedLinear(1, 64, 64, **SINGLE)
    for rows, launched, compiled in ((70, 3, 3), (0, 0, 0), (2000, 3, 0)):
        x = torch.randn(rows, 64, dtype=BF16, requires_grad=True)
        kernels, launches = calls_of(linear, (x, torch.tensor([rows])), MXFP8)
        assert (len(kernels.calls), len(launches.compiled)) == (launched, compiled)


def test_the_simulation_sees_wrong_arguments():
    """What check_support does not know, the generated entry refuses."""
    import cudnn

    def call(rows):
        return cudnn.grouped_gemm_quant_wrapper_sm100(
            a_tensor=torch.zeros(rows, 64, dtype=torch.float8_e4m3fn),
            sfa_tensor=torch.zeros(512 * rows // 128, dtype=torch.float8_e8m0fnu),
            padded_offsets=torch.tensor([rows], dtype=torch.int32),
            alpha_tensor=torch.ones(1),
            b_tensor=torch.zeros(1, 64, 64, dtype=torch.float8_e4m3fn),
            sfb_tensor=torch.zeros(512, dtype=torch.float8_e8m0fnu),
            sf_vec_size=32,
            generate_amax=False,
        )

    with blackwell.simulated() as launches:
        call(256)
        with pytest.raises(ValueError, match="expected to be divisible by 256"):
            call(128)
        assert launches.count == 1
