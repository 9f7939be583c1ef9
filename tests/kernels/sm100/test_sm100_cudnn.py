"""cuDNN's front end itself, for every configuration that the SM100 ops ask for, without a GPU.

The fused ops run on the emulator; every call that they make also goes to the real wrapper, which
checks its support, compiles the kernel for ``sm_100a``, and has the compiler's own argument checks
look at the very tensors of the call.
"""

from contextlib import nullcontext

import pytest
import torch

import fusible as fz
from fusible.testing import assume_target
from fusible.testing import emulator_sm100 as emulator

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import blackwell
import cudnn
import test_sm100_kernels
from sm100_calls import (
    BF16,
    GEGLU,
    MLP_CALLS,
    MXFP8,
    NVFP4,
    RECIPES,
    SINGLE,
    SITUGLU,
    SRELU,
    SWIGLU,
    configuration,
    count_of,
    every_configuration,
    every_layout,
    inputs_of,
    linear_with_main_grad,
    module_of,
    sums_in_order,
)


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
            real = getattr(cudnn, name)(**arguments)
            emulated = getattr(emulator, name)(**arguments)
            for key in set(real.keys()) & set(emulated.keys()):
                a, b = real[key], emulated[key]
                if a is not None and b is not None:
                    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), key
            return emulated

        return call


# (recipe, options of the linears, activation): each kernel with all that is baked into it.
CASES = {
    "mxfp8": (MXFP8, {**SINGLE, "bias": True}, SWIGLU),
    "mxfp8 pointers": (MXFP8, {**SINGLE, "bias": False, "single_grouped_weight": False}, GEGLU),
    "mxfp8 situ": (MXFP8, {**SINGLE, "bias": True}, SITUGLU),
    "mxfp8 srelu": (MXFP8, {**SINGLE, "bias": True}, SRELU),
    "mxfp8 pointers, srelu": (
        MXFP8,
        {**SINGLE, "bias": False, "single_grouped_weight": False},
        SRELU,
    ),
    "nvfp4": (NVFP4, {**SINGLE, "bias": True}, GEGLU),
    "nvfp4 srelu": (NVFP4, {**SINGLE, "bias": True}, SRELU),
    "nvfp4 pointers": (NVFP4, {**SINGLE, "bias": False, "single_grouped_weight": False}, SWIGLU),
    "bf16": (None, {**SINGLE, "bias": True}, SWIGLU),
    "bf16 pointers": (None, {**SINGLE, "bias": False, "single_grouped_weight": False}, GEGLU),
}


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


@pytest.mark.parametrize("case", CASES)
def test_the_grouped_mlp_is_what_the_front_end_takes(case):
    """By its support check; `test_every_option_compiles` compiles these kernels."""
    recipe, options, act = CASES[case]
    module = module_of(recipe, options, act)
    with sums_in_order("pointers" in case):
        kernels, _ = calls_of(module, inputs_of(module), recipe, compiling=False)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    calls = MLP_CALLS if act.gated else [name.replace("glu", "srelu") for name in MLP_CALLS]
    wanted = [f"grouped_gemm_{name}_wrapper_sm100" for name in calls]
    if recipe is None:
        wanted = [name.replace("_quant", "") for name in wanted]
    assert kernels.calls == wanted


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
    """By kernels that `test_every_option_compiles` compiles."""
    linear = linear_with_main_grad(recipe, single, dtype, False)
    given = torch.randn(30, 128, dtype=BF16), torch.tensor([10, 8, 12])
    kernels, _ = calls_of(linear, given, recipe, compiling=False)
    assert kernels.calls[-1] == "grouped_gemm_wgrad_wrapper_sm100"
    assert all(p.main_grad.any() for p in linear.parameters())


def run_all(cases, recipe, compiling):
    """The kernels that the cases call, by configuration, and how many compilations there were."""
    found, compiled = set(), 0
    for _, module, given, ordered in cases:
        with sums_in_order(ordered):
            kernels, launches = calls_of(module, given, recipe, compiling)
        found.update(kernels.configurations)
        compiled += len(launches.compiled)
    return found, compiled


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("single", [True, False], ids=["dense", "pointers"])
def test_every_option_compiles(recipe, single):
    """The front end's support check of the very tensors of every kernel that can be asked for.

    And cross-compiled, with the compiler's own checks of the arguments.

    Every option of each kernel; every pair of them in one of the recipes and kinds of weights.

    Then, by the same kernels where these fit, of tensors that lie anywhere: odd addresses,
    transposed weights, one group, no rows are copied where a kernel wants it. Those of separate
    weights, which differ from whole ones by a table of addresses, are checked for support alone.
    """
    cases = every_configuration(recipe, single, groups=6, pairs=False)  # as no other test's
    found, compiled = run_all(cases, recipe, compiling=True)
    everything, _ = run_all(every_configuration(recipe, single, groups=2), recipe, compiling=False)
    assert len(everything) == count_of(recipe, single)
    assert everything > found
    assert options_of(everything) == options_of(found)
    assert compiled >= len(found)
    run_all(every_layout(recipe, single, groups=6), recipe, compiling=single)


def options_of(configurations):
    """Each value of each argument of each kernel."""
    return {(name, *option) for name, options in configurations for option in options}


def test_one_group_no_rows_and_another_row_count():
    """Strides of dimensions of size 1; no launch for nothing; one compilation for every size."""
    linear = fz.GroupedLinear(1, 64, 64, **SINGLE)
    for rows, launched, compiled in ((70, 3, 3), (0, 0, 0), (2000, 3, 0)):
        x = torch.randn(rows, 64, dtype=BF16, requires_grad=True)
        kernels, launches = calls_of(linear, (x, torch.tensor([rows])), MXFP8)
        assert (len(kernels.calls), len(launches.compiled)) == (launched, compiled)


@pytest.mark.parametrize(("kernel", "change", "sentence"), test_sm100_kernels.REFUSED)
def test_what_is_not_checked_before_is_refused(kernel, change, sentence):
    _, right = test_sm100_kernels.KERNELS[kernel]
    with blackwell.simulated(), assume_target("sm100", cudnn):
        test_sm100_kernels.run(kernel, right)
        with pytest.raises(ValueError, match=sentence):
            test_sm100_kernels.run(kernel, {**right, **change})


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
