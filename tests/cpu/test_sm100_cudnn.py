"""cuDNN's front end itself, for every configuration that the SM100 ops ask for, without a GPU.

The fused ops run on the emulator; every call that they make also goes to the real wrapper, which
checks its support, compiles the kernel for ``sm_100a``, and has the compiler's own argument checks
look at the very tensors of the call.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

import fusible as fz
from fusible import recipes
from fusible.kernels import emulator_sm100 as emulator
from fusible.testing import assume_target

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import blackwell

BF16 = torch.bfloat16
MXFP8, NVFP4 = recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()


class Both:
    """Every call goes to cuDNN's wrapper, whose results have no values, then to the emulator."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        import cudnn

        def call(**arguments):
            self.calls.append(name)
            # The real one writes nothing, but what it was given to write to is the caller's.
            real = getattr(cudnn, name)(**arguments)
            emulated = getattr(emulator, name)(**arguments)
            for key in set(real.keys()) & set(emulated.keys()):
                a, b = real[key], emulated[key]
                if a is not None and b is not None:
                    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), key
            return emulated

        return call


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


def module_of(recipe, options, act):
    pointers = not options["single_grouped_weight"]
    scale_bias = {"scale_bias": options["bias"]}
    store = fz.quantized_model_init(recipe=recipe) if pointers and recipe else nullcontext()
    with store:
        module = fz.Sequential(
            fz.GroupedLinear(3, 128, 256, **options),
            copy.deepcopy(act),
            fz.GroupedLinear(3, 128, 192, **options, **scale_bias),
        )
    for fc in (module[0], module[2]) if pointers and not recipe else ():
        for name, w in list(fc.named_parameters()):
            setattr(fc, name, torch.nn.Parameter(w.detach().clone()))
    return module


def calls_of(module, given, recipe, accumulate=None):
    """The names of the wrappers called, forward and backward, each of which has launched."""
    kernels = Both()
    context = fz.autocast(recipe=recipe) if recipe else nullcontext()
    with blackwell.simulated() as launches, assume_target("sm100", kernels), context:
        y = module(*given)
        y.sum().backward()
        assert y.isfinite().all()
    assert launches.count == len(kernels.calls)
    return kernels.calls, launches


MLP_CALLS = ["glu", "quant", "dglu", "quant", "wgrad", "wgrad"]


@pytest.mark.parametrize("case", CASES)
def test_the_grouped_mlp_is_what_the_front_end_takes(case):
    recipe, options, act = CASES[case]
    module = module_of(recipe, options, act)
    splits, rows = torch.tensor([20, 0, 300]), 400
    x = torch.randn(rows, 128, dtype=BF16, requires_grad=True)
    scales = torch.rand(rows, requires_grad=True)
    given = [x, splits, scales, splits, *([torch.rand(rows)] if options["bias"] else [])]
    torch.use_deterministic_algorithms(case == "nvfp4 pointers")
    try:
        calls, _ = calls_of(module, given, recipe)
    finally:
        torch.use_deterministic_algorithms(False)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    wanted = [f"grouped_gemm_{name}_wrapper_sm100" for name in MLP_CALLS]
    if recipe is None:
        wanted = [name.replace("_quant", "") for name in wanted]
    assert calls == wanted


@pytest.mark.parametrize(
    ("recipe", "single"),
    [(MXFP8, True), (MXFP8, False), (None, True)],
    ids=["mxfp8", "mxfp8 pointers", "bf16"],
)
def test_gradients_are_added_to_fp32_main_grads(recipe, single):
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": single}
    linear = fz.GroupedLinear(3, 128, 256, **options, accumulate_into_main_grad=True)
    for p in linear.parameters():
        p.main_grad = torch.zeros(p.shape)
    given = torch.randn(30, 128, dtype=BF16), torch.tensor([10, 8, 12])
    calls, _ = calls_of(linear, given, recipe)
    assert calls[-1] == "grouped_gemm_wgrad_wrapper_sm100"
    assert all(p.main_grad.any() for p in linear.parameters())


def test_one_group_no_rows_and_another_row_count():
    """Strides of dimensions of size 1; no launch for nothing; one compilation for every size."""
    linear = fz.GroupedLinear(1, 64, 64, **SINGLE)
    for rows, launched, compiled in ((70, 3, 3), (0, 0, 0), (2000, 3, 0)):
        x = torch.randn(rows, 64, dtype=BF16, requires_grad=True)
        calls, launches = calls_of(linear, (x, torch.tensor([rows])), MXFP8)
        assert (len(calls), len(launches.compiled)) == (launched, compiled)


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
