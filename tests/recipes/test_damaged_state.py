"""Pieces of quantized weights are checked before anything is written, and before they are read."""

import json

import pytest
import reference as ref
import torch
from number_formats import each_format, each_recipe

import fusible as fz
from fusible import recipes
from fusible.recipes import QuantizedTensor
from fusible.recipes.quantize_ops import dequantize_matrix

safetensors = pytest.importorskip("safetensors.torch")


def linear(recipe):
    with fz.quantized_model_init(recipe=recipe):
        return fz.BasicLinear(256, 128)


def bits(module):
    return {k: v.view(-1).view(torch.uint8).clone() for k, v in module.state_dict().items()}


def halved(t):
    for dim, size in enumerate(t.shape):
        if size > 1:
            return t.narrow(dim, 0, size // 2)
    return t.repeat(2)


def other_dtype(t):
    return t.to(torch.float64) if t.dtype == torch.float32 else t.view(torch.int8)


DAMAGE = {
    "shape": halved,
    "rank": lambda t: t[None],
    "flat": lambda t: t.reshape(-1) if t.dim() > 1 else t[0],
    "dtype": other_dtype,
    "device": lambda t: t.to("meta"),
    "no tensor": lambda t: [1, 2],
}


@each_recipe
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
def test_a_malformed_piece_is_named_and_nothing_changes(recipe, damage, assign, strict):
    module, other = linear(recipe), linear(recipe)
    before, weight = bits(module), module.weight
    for key, piece in other.state_dict().items():
        if key == "weight.format":
            continue
        state = dict(other.state_dict())
        state[key] = DAMAGE[damage](piece)
        if damage == "device" and key == "weight.values":
            key = "weight.scale"  # noqa: PLW2901 - it is not where the first one is
        with pytest.raises(RuntimeError, match=rf"(?s){key} must be .*, got ") as raised:
            module.load_state_dict(state, assign=assign, strict=strict)
        assert "Missing" not in str(raised.value)
        assert module.weight is weight
        ref.assert_equal(bits(module), before)
    module.load_state_dict(other.state_dict(), assign=assign)
    ref.assert_equal(bits(module), bits(other))


@each_recipe
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_missing_and_unexpected_pieces(recipe, assign):
    module, other = linear(recipe), linear(recipe)
    before = bits(module)
    for key in other.state_dict():
        state = dict(other.state_dict())
        del state[key]
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{key}"\.'):
            module.load_state_dict(state, assign=assign)
        loose = module.load_state_dict(state, assign=assign, strict=False)
        assert (loose.missing_keys, loose.unexpected_keys) == ([key], [])
        ref.assert_equal(bits(module), before)


def test_a_piece_of_no_use_is_unexpected():
    module, other = linear(recipes.MXFP8BlockScaling()), linear(recipes.MXFP8BlockScaling())
    before = bits(module)
    state = {**other.state_dict(), "weight.tensor_scale": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"weight.tensor_scale"'):
        module.load_state_dict(state)
    ref.assert_equal(bits(module), before)


def respelled(state, **facts):
    spelled = json.loads(bytes(state["weight.format"].tolist()).decode()) | facts
    return torch.tensor(list(json.dumps(spelled).encode()), dtype=torch.uint8)


FORMAT_DAMAGE = {
    "no JSON": lambda state: torch.tensor([1, 2, 3], dtype=torch.uint8),
    "no bytes": lambda state: torch.tensor([0.5]),
    "on the meta device": lambda state: state["weight.format"].to("meta"),
    "a list": lambda state: torch.tensor(list(b"[1]"), dtype=torch.uint8),
    "an element of another version": lambda state: respelled(state, element="e9m9"),
    "blocks of another version": lambda state: respelled(state, block=[1, 48]),
    "no block": lambda state: respelled(state, block=[1]),
    "an amax that is none": lambda state: respelled(state, amax_epsilon=float("nan")),
    "a dtype of another version": lambda state: respelled(state, dtype="torch.float64"),
    "a negative size": lambda state: respelled(state, shape=[-128, 256]),
    "one size": lambda state: respelled(state, shape=[256]),
    "another size": lambda state: respelled(state, shape=[128, 512]),
}


@each_recipe
@pytest.mark.parametrize("damage", FORMAT_DAMAGE)
def test_a_damaged_format_is_named(recipe, damage):
    module, other = linear(recipe), linear(recipe)
    before, state = bits(module), dict(other.state_dict())
    state["weight.format"] = FORMAT_DAMAGE[damage](state)
    with pytest.raises(RuntimeError, match=r"weight\.\w+ must be .*, got "):
        module.load_state_dict(state)
    ref.assert_equal(bits(module), before)


def test_one_of_separate_weights_is_damaged():
    def build(single, recipe=None):
        with fz.quantized_model_init(recipe=recipe):
            return fz.GroupedLinear(2, 128, 128, bias=False, single_grouped_weight=single)

    for single in (True, False):
        module, other = build(single), build(False)
        before, state = bits(module), dict(other.state_dict())
        state["weight1.scale"] = state["weight1.scale"][:1]
        with pytest.raises(RuntimeError, match=r"weight1.scale must be .* got .*\(1, 4\)"):
            module.load_state_dict(state)
        kept = {k: v for k, v in before.items() if not k.startswith("weight0")}  # a whole parameter
        ref.assert_equal({k: bits(module)[k] for k in kept}, kept)


def test_separate_weights_of_two_formats_are_not_stacked():
    recipe = recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()
    state = {}
    for group in range(2):
        with fz.quantized_model_init(recipe=recipe[group]):
            module = fz.GroupedLinear(2, 128, 128, bias=False)
        saved = module.state_dict()
        state |= {key: saved[key] for key in saved if key.startswith(f"weight{group}.")}
    single = fz.GroupedLinear(2, 128, 128, bias=False, single_grouped_weight=True)
    with pytest.raises(RuntimeError, match=r'(?s)Missing .*"weight".*Unexpected .*"weight0"'):
        single.load_state_dict(state)


def test_of_a_file(tmp_path):
    module, other = linear(recipes.MXFP8BlockScaling()), linear(recipes.MXFP8BlockScaling())
    state = {**other.state_dict(), "weight.scale": other.state_dict()["weight.scale"][:1].clone()}
    safetensors.save_file(state, tmp_path / "state")
    with pytest.raises(RuntimeError, match=r"weight.scale must be .*\(128, 8\).*got .*\(1, 8\)"):
        module.load_state_dict(safetensors.load_file(tmp_path / "state"))


# --- tensors put together by hand ----------------------------------------------------------------


@each_format
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "column"])
def test_dequantize_checks_sizes(fmt, columnwise):
    """A scale that broadcasts would be read past its end on CUDA."""
    q = QuantizedTensor.quantize(torch.randn(128, 256), fmt, columnwise=columnwise)
    matrix = q.matrix(columnwise=columnwise)
    scale, tensor_scale = matrix.scale, matrix.tensor_scale
    damaged = [{"scale": halved(scale)}, {"scale": scale[0]}]
    damaged.append({"tensor_scale": None if fmt.has_tensor_scale else torch.ones(1)})
    if fmt.has_tensor_scale:
        damaged += [{"tensor_scale": tensor_scale.double()}, {"tensor_scale": tensor_scale[0]}]
    for fields in damaged:
        with pytest.raises(ValueError, match="scales"):
            dequantize_matrix(matrix._replace(**fields))


@each_recipe
def test_products_check_sizes_of_weights(recipe):
    module = linear(recipe)
    weight = module.weight
    for name in ("scale_inv", "columnwise_scale_inv"):
        whole = getattr(weight, name)
        if whole is None:
            continue
        setattr(weight, name, halved(whole))
        x = torch.randn(32, 256, requires_grad=True)
        with fz.autocast(recipe=recipe), pytest.raises(ValueError, match="must be of shape"):
            module(x)
        with pytest.raises(ValueError, match="must be of shape"):
            weight.dequantize(columnwise=name != "scale_inv")
        setattr(weight, name, whole)


def test_copying_a_malformed_tensor_writes_nothing():
    weight = linear(recipes.MXFP8BlockScaling()).weight.detach()
    before = {name: piece.clone() for name, piece in weight.pieces().items()}
    other = weight.clone()
    other.scale_inv = other.scale_inv[:1]
    with pytest.raises(ValueError, match="must be of shape"):
        weight.copy_(other)
    ref.assert_same_bits(weight.pieces(), before)
