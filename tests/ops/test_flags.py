"""Flags and recipes: what is none is refused, since anything else would count as True or False."""

import inspect

import pytest
import torch

import fusible as fz
from fusible import recipes
from fusible.recipes.formats import nvfp4

REQUIRED = {
    "device": "cuda",
    "in_features": 4,
    "out_features": 4,
    "num_groups": 2,
    "hidden_size": 4,
    "num_experts": 2,
    "top_k": 1,
    "normalized_shape": 4,
    "format": nvfp4(),
    "op_fusion_func": lambda ops, *, recipe: ops,
    "function": lambda: None,
    "size": 4,
    "module": torch.nn.Identity(),
    "modules": torch.nn.Identity(),
    "x": recipes.Operand(),
    "sample_args": (),
    "scale": torch.zeros(128, 4, dtype=torch.uint8),
    "swizzled": torch.zeros(1, 1, 32, 4, 4, dtype=torch.uint8),
    "shape": (128, 4),
}


def flags():
    """Every flag of every public function and constructor."""
    for module in (fz, recipes):
        for name in module.__all__:
            what = getattr(module, name)
            if not callable(what):
                continue
            if isinstance(what, type):
                what = what.__init__
            for parameter in inspect.signature(what).parameters.values():
                # Strings where a module postpones the evaluation of its annotations.
                if parameter.annotation in ("bool", bool):
                    yield module, name, parameter.name


FLAGS = sorted({(name, flag): (module, name, flag) for module, name, flag in flags()}.items())


def enter(made):
    """Contexts that are generators begin when they are entered."""
    with made:
        pass


def test_the_flags_are_found():
    found = {key for key, _ in FLAGS}
    assert len(found) > 50
    assert {("autocast", "enabled"), ("Linear", "bias"), ("checking", "enabled")} <= found


@pytest.mark.parametrize(("module", "name", "flag"), [v for _, v in FLAGS])
@pytest.mark.parametrize(
    "wrong", ["false", 1, None, torch.tensor(True), recipes.NVFP4BlockScaling()]
)
def test_a_flag_that_is_no_bool_is_refused(module, name, flag, wrong):
    what = getattr(module, name)
    signature = inspect.signature(what.__init__ if isinstance(what, type) else what)
    needed = {k: v for k, v in REQUIRED.items() if k in signature.parameters}
    with pytest.raises(TypeError, match=f"{flag} of .* must be a bool, got "):
        enter(what(**{**needed, flag: wrong}))


@pytest.mark.parametrize("scope", [fz.autocast, fz.quantized_model_init], ids=lambda f: f.__name__)
def test_a_recipe_must_be_one_and_given_by_name(scope):
    name = scope.__name__
    meant = rf"{name}\(recipe=NVFP4BlockScaling\("
    for given in (recipes.NVFP4BlockScaling(), "nvfp4", "NVFP4", recipes.NVFP4BlockScaling):
        with pytest.raises(TypeError, match=f"enabled of {name} must be a bool, got .*{meant}"):
            scope(given)
    for given in ("nvfp4", "mvfp4", "NVFP4BlockScaling", recipes.NVFP4BlockScaling):
        for enabled in (True, False):
            with pytest.raises(TypeError, match=r"fusible.recipes, .*; pass recipe=NVFP4BlockSc"):
                scope(enabled, recipe=given)
    with pytest.raises(TypeError, match=r"calibrating of autocast must be .* autocast\(recipe="):
        fz.autocast(True, recipes.NVFP4BlockScaling())
    elsewhere = type("Float8CurrentScaling", (), {})()  # of another package
    with pytest.raises(TypeError, match=r"pass recipe=Float8CurrentScaling\(\)"):
        scope(recipe=elsewhere)
    with pytest.raises(TypeError, match=r"MXFP8BlockScaling\(\) or NVFP4BlockScaling\(\) or "):
        scope(recipe=0)


def test_a_recipe_by_name_and_by_second_place_is_in_force():
    for scope in (fz.autocast(recipe=recipes.NVFP4BlockScaling()), fz.autocast(True, recipe=HALF)):
        with scope:
            assert recipes.current_recipe() != recipes.MXFP8BlockScaling()
    with fz.quantized_model_init(True, HALF):
        assert fz.BasicLinear(128, 128).weight.format == HALF.format("weight")


HALF = recipes.Float8CurrentScaling(use_power_2_scales=True)


def test_compiled_code_takes_recipes_and_flags():
    op = fz.BasicLinear(32, 32).requires_grad_(False)

    @torch.compile(fullgraph=True, backend="eager")
    def step(x):
        with fz.autocast(), fz.autocast(enabled=True, recipe=recipes.NVFP4BlockScaling()):
            return op(x)

    x = torch.randn(32, 32)
    with fz.autocast(recipe=recipes.NVFP4BlockScaling()):
        torch.testing.assert_close(step(x), op(x), rtol=0, atol=0)


def test_the_size_of_interleaved_blocks_is_an_integer():
    for kind in (fz.SwiGLU, fz.ScaledSwiGLU, fz.ScaledSiTUGLU):
        with pytest.raises(TypeError, match=f"glu_interleave_size of {kind.__name__} must be an"):
            kind(glu_interleave_size=True)
