"""Cases of what was once wrong, each of which failed when it was: they pass, or are refused."""

import pytest

from .cases import Action, Case, Op
from .execute import run

STEP = Action("step")
LINEAR = Op("BasicLinear", {"out": 32})
EACH = {"num_groups": 2, "single_grouped_weight": False, "single_grouped_bias": True}
ONE = {"num_groups": 2, "single_grouped_weight": True, "single_grouped_bias": True}
MX = {"dtype": "float32", "recipe": "mxfp8"}


def grouped(**options):
    return Op("GroupedLinear", {"out": 32, "bias": True, "scale_bias": False, **ONE, **options})


def step(**options):
    return Action("step", options)


def fork(channel):
    return Op("MakeExtraOutput", {"in_place": True}, (), ((channel, False),))


def add(channel):
    return Op("AddExtraInput", {"in_place": False}, (channel,))


NESTED = fork("a"), fork("b"), Op("Identity"), add("b"), add("a")
NORM = Op("LayerNorm", {"eps": 1e-5, "zero_centered_gamma": False})
BACKWARD = Op("Quantize", {"forward": False, "backward": True, "num_groups": 2})
DENSE_BACKWARD = Op("Quantize", {"forward": False, "backward": True})
TINY = Action("quantize", {"role": "input", "values": "tiny"})
HAND = Op("HandWritten")

FOUND = {
    "experts registered again": ((grouped(**EACH),), (Action("reregister"), STEP), {}),
    "a norm's parameter registered again": ((NORM,), (Action("reregister"), STEP), {}),
    "an own op's, by hand": ((HAND,), (STEP, Action("reregister"), STEP), {}),
    "pruned experts": ((grouped(**EACH),), (Action("prune by mask"), STEP), {}),
    "a pruned linear": (
        (Op("Linear", {"out": 8, "bias": True}),),
        (Action("prune identity"), STEP),
        {},
    ),
    "nested residuals": (NESTED, (STEP,), {}),
    "DropConnect": ((LINEAR,), (Action("counted"), STEP), {}),
    "spectral norm": ((LINEAR,), (Action("spectral norm"), step(call="checkpoint")), {}),
    "data of a stored weight": ((LINEAR,), (Action("set data"), STEP), {**MX, "stored": True}),
    "a stored weight from a vector": (
        (LINEAR,),
        (Action("from vector"), STEP),
        {**MX, "stored": True},
    ),
    "broken state dicts": ((LINEAR,), (Action("broken state"), STEP), {**MX, "stored": True}),
    "a stored weight replaced": (
        (grouped(**EACH),),
        (Action("reregister"), STEP),
        {**MX, "stored": True},
    ),
    "a bias that scales, written to": (
        (grouped(scale_bias=True),),
        (step(between="parameters"),),
        {},
    ),
    "a buffer over what is read": ((grouped(),), (step(call="overlapping buffer"),), {}),
    "delayed gradients in buckets": (
        (grouped(delay_wgrad_compute=True),),
        (step(grads="flat"),),
        {},
    ),
    "an attribute of a formula": ((Op("Affine"),), (step(between="other attribute"), STEP), {}),
    "a parameter of a formula": ((Op("Affine"),), (step(between="replaced"), STEP), {}),
    "inputs of delayed gradients": (
        (grouped(delay_wgrad_compute=True),),
        (step(between="inputs", late=True),),
        {},
    ),
    "a module in a formula": ((Op("Inner"),), (step(call="replica"),), {}),
    "a formula that draws": ((Op("Noisy"),), (STEP,), {}),
    "biases before Quantize": ((grouped(scale_bias=True), BACKWARD), (STEP,), MX),
    "hooks on parts": (
        (Op("Linear", {"out": 8, "bias": True}),),
        (
            STEP,
            Action("forward hook that changes"),
            STEP,
            Action("forward pre-hook that changes"),
            STEP,
        ),
        {},
    ),
    "copies of copies": (
        (grouped(**EACH), Op("Linear", {"out": 8, "bias": True})),
        (STEP, Action("shallow copy"), Action("deepcopy"), STEP),
        {},
    ),
    "replicas": ((grouped(),), (step(call="replica"),), {}),
    "a bias before Quantize": (
        (Op("Linear", {"out": 64, "bias": True}), DENSE_BACKWARD, Op("GELU")),
        (STEP,),
        {"dtype": "float32", "recipe": "nvfp4"},
    ),
    "a norm whose weight is computed": ((NORM,), (Action("counted"), STEP), {}),
    "a replica of a parametrized weight": (
        (LINEAR, DENSE_BACKWARD),
        (Action("weight norm"), step(call="replica")),
        MX,
    ),
    "NVFP4 of tiny numbers": ((Op("Identity"),), (TINY,), {"dtype": "float32", "recipe": "nvfp4"}),
    "a hook where nothing flows back": (
        (LINEAR, Op("Swap", {}, (), (("unused", False),))),
        (Action("accumulated hook"), step(grads="flat")),
        {"dtype": "float32"},
    ),
    "draws after Dropout(1)": (
        (Op("Dropout", {"p": 1.0}), Op("Swap"), Op("Dropout", {"p": 0.5})),
        (STEP,),
        {},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    ops, program, options = FOUND[name]
    for seed in range(8):
        outcome = run(Case(ops, (6, 32), program, seed=seed, **options))
        assert outcome.kind in ("passed", "refused"), f"seed {seed}: {outcome.text}"


def test_a_sum_that_cancels_is_compared_with_its_terms():
    """In FP16 the gradient of the norm's only weight is 0.04, the sum of terms up to 1."""
    ops = [Op("GELU"), add(None), add(None), Op("SReLU"), Op("Affine"), Op("HandWritten")]
    norm = Op("RMSNorm", {"zero_centered_gamma": False, "eps": 0.01})
    outcome = run(Case((*ops, norm), (5, 1), (STEP,), dtype="float16", seed=155202333))
    assert outcome.kind == "passed", outcome.text
