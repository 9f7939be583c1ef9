"""State dicts in every layout and file format, and what survives conversions of a module."""

import copy

import pytest
import reference as ref
import torch
from number_formats import KINDS
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import fusible as fz
from fusible.recipes import QuantizedTensor

safetensors = pytest.importorskip("safetensors.torch")

recipe_names = pytest.mark.parametrize("recipe", KINDS)
LAYOUTS = [True, False]
layouts = pytest.mark.parametrize("single", LAYOUTS, ids=["single", "separate"])


def build(single, recipe="none", keep=False, groups=3, **options):
    options = {"single_grouped_weight": single, "single_grouped_bias": single} | options
    with fz.quantized_model_init(
        KINDS[recipe] is not None, KINDS[recipe], preserve_high_precision_init_val=keep
    ):
        module = fz.Sequential(
            fz.GroupedLinear(groups, 128, 256, **options),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(groups, 128, 128, **options),
            fz.Linear(128, 128),
        )
    for name, p in module.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(p)
    return module


@pytest.mark.usefixtures("cpu_or_cuda")
@recipe_names
@layouts
def test_layouts_load_into_each_other(recipe, single):
    """There and back with the same bits; what is saved is what the module holds."""
    here, there = build(single, recipe), build(not single, recipe)
    there.load_state_dict(here.state_dict())
    mine = {name for name in there.state_dict() if name.startswith(("0.", "2."))}
    suffixes = {name.split(".")[1] for name in mine}
    assert ("weight" in suffixes) == (not single)
    x, splits, scales = torch.randn(40, 128), [20, 0, 20], torch.rand(40)
    with fz.autocast(enabled=recipe != "none", recipe=KINDS[recipe]):
        assert torch.equal(*(m(x, splits, scales, splits) for m in (here, there)))
    back = build(single, recipe)
    back.load_state_dict(there.state_dict(), assign=True)
    ref.assert_same_bits(back.state_dict(), here.state_dict())


@pytest.mark.usefixtures("cpu_or_cuda")
@pytest.mark.parametrize("stored", ["mxfp8", "fp8_current"])
@layouts
def test_layouts_and_precisions_load_into_each_other(stored, single):
    quantized, plain = build(single, stored), build(not single)
    plain.load_state_dict(quantized.state_dict())
    ref.assert_equal(stacked(quantized), stacked(plain))
    requantized = build(single, stored)
    requantized.load_state_dict(build(not single).state_dict())
    for p in requantized[0].weights():
        assert isinstance(p, QuantizedTensor)


def stacked(module):
    """The values of the grouped weights, as 3-D tensors."""
    for op in (module[0], module[2]):
        weights = [w.dequantize() if isinstance(w, QuantizedTensor) else w for w in op.weights()]
        yield weights[0] if weights[0].dim() == 3 else torch.stack(weights)


def test_one_group():
    here, there = build(True, groups=1), build(False, groups=1)
    there.load_state_dict(here.state_dict())
    assert torch.equal(there[0].weight0, here[0].weight[0])
    here.load_state_dict(there.state_dict())


def test_incomplete_layouts_raise():
    state = build(False).state_dict()
    del state["0.weight1"]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"0\.weight must be .* got no 0\.weight1"):
            build(True).load_state_dict(state, strict=strict)
    unlike = {**build(False).state_dict(), "0.weight1": torch.zeros(3, 4)}
    with pytest.raises(RuntimeError, match=r"0\.weight must be .*0\.weight1 of shape \(3, 4\)"):
        build(True).load_state_dict(unlike)
    with pytest.raises(RuntimeError, match=r"Missing .*0\.weight1"):
        build(False).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        build(False, groups=2).load_state_dict(build(True).state_dict())


def test_both_layouts_at_once_raise():
    single, separate = build(True), build(False)
    state = {**single.state_dict(), **separate.state_dict()}
    with pytest.raises(RuntimeError, match=r"Unexpected .*0\.weight0"):
        single.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected .*0\.weight\b"):
        separate.load_state_dict(state)


@layouts
def test_weights_and_biases_may_differ_in_layout(single):
    here = build(single, single_grouped_bias=not single)
    for target in (True, False):
        there = build(target)
        there.load_state_dict(here.state_dict())
        back = build(single, single_grouped_bias=not single)
        back.load_state_dict(there.state_dict())
        ref.assert_same_bits(back.state_dict(), here.state_dict())


@pytest.mark.usefixtures("cpu_or_cuda")
@layouts
def test_transformer_engines_names(single):
    """As its ops save them: every op has the state of its quantizers, a Linear is two ops."""
    source = build(False)
    theirs = {}
    for name, t in source.state_dict().items():
        op, _, rest = name.partition(".")
        if op == "3":
            rest = f"basic_ops.{int(rest == 'bias')}.{rest}"
        theirs[f"{op}.{rest}"] = t
    for op in ("0", "1", "2", "3.basic_ops.0", "3.basic_ops.1"):
        theirs[f"{op}._extra_state"] = torch.empty(0, dtype=torch.uint8)
    mine = build(single)
    mine.load_state_dict(theirs)
    again = build(False)
    again.load_state_dict(mine.state_dict())
    ref.assert_same_bits(again.state_dict(), source.state_dict())


def test_an_ops_own_extra_state_is_loaded():
    class Counting(fz.Identity):
        count = 0

        def get_extra_state(self):
            return torch.tensor(self.count)

        def set_extra_state(self, state):
            self.count = int(state)

    here, there = fz.Sequential(Counting()), fz.Sequential(Counting())
    here[0].count = 3
    there.load_state_dict(here.state_dict())
    assert there[0].count == 3


def test_whatever_the_default_device_is(default_device):
    module, other = build(True, "mxfp8"), build(False, "mxfp8")
    default_device("meta")
    other.load_state_dict(module.state_dict())
    ref.assert_equal(stacked(module), stacked(other))


# --- files ---------------------------------------------------------------------------------------


def by_torch(state, path):
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True)


def by_safetensors(state, path):
    safetensors.save_file(state, path / "state.safetensors")
    return safetensors.load_file(path / "state.safetensors")


@recipe_names
@layouts
@pytest.mark.filterwarnings("ignore")
def test_dcp_into_the_other_layout(single, recipe, tmp_path):
    """By the two lines of docs/training.md."""
    saved, other = build(single, recipe), build(not single, recipe)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "whole.pt")
    other.load_state_dict(torch.load(tmp_path / "whole.pt"))
    expected = build(not single, recipe)
    expected.load_state_dict(saved.state_dict())
    ref.assert_same_bits(other.state_dict(), expected.state_dict())
    back = build(single, recipe)
    back.load_state_dict(other.state_dict())
    ref.assert_same_bits(back.state_dict(), saved.state_dict())


def by_dcp(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)
    loaded = {name: torch.zeros_like(t) for name, t in state.items()}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    return loaded


@pytest.mark.usefixtures("cpu_or_cuda")
@pytest.mark.parametrize("through", [by_torch, by_safetensors, by_dcp])
@recipe_names
@layouts
@pytest.mark.filterwarnings("ignore")
def test_files_keep_the_bits(through, recipe, single, tmp_path):
    module, other = build(single, recipe), build(single, recipe)
    state = module.state_dict()
    assert all(type(t) is torch.Tensor for t in state.values())
    loaded = through(state, tmp_path)
    ref.assert_same_bits(loaded, state)
    other.load_state_dict(loaded)
    ref.assert_same_bits(other.state_dict(), state)


@pytest.mark.usefixtures("cpu_or_cuda")
@recipe_names
@layouts
@pytest.mark.filterwarnings("ignore")
def test_through_torchs_state_dict(recipe, single):
    """What trainers call rather than ``state_dict``, which looks up what every name stands for."""
    module, other = build(single, recipe), build(single, recipe)
    state = get_model_state_dict(module)
    ref.assert_same_bits(state, module.state_dict())
    set_model_state_dict(other, state, options=StateDictOptions(strict=True))
    ref.assert_same_bits(other.state_dict(), state)


# --- what survives -------------------------------------------------------------------------------

CONVERSIONS = {
    "to dtype": lambda m: m.bfloat16(),
    "to device": lambda m: m.to("meta"),
    "to empty": lambda m: m.to_empty(device="cpu"),
    "double": lambda m: m.double(),
    "the other layout": lambda m: (
        m.load_state_dict(build(not m[0].single_grouped_weight).state_dict()) and m
    ),
    "load_state_dict": lambda m: m.load_state_dict(copy.copy(m.state_dict())) and m,
    "assign": lambda m: (
        m.load_state_dict({name: t.clone() for name, t in m.state_dict().items()}, assign=True)
        and m
    ),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.usefixtures("cpu_or_cuda")
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
@layouts
def test_attributes_survive(convert, recipe, single):
    module = build(single, recipe, keep=True, accumulate_into_main_grad=True)
    tags = {}
    for i, (name, p) in enumerate(module.named_parameters()):
        p.main_grad = torch.full(p.shape, float(i))
        p.tag = tags[name] = {"name": name}
    module[0].requires_grad_(False)
    init = {
        name: p.get_high_precision_init_val()
        for name, p in module.named_parameters()
        if isinstance(p, QuantizedTensor)
    }
    assert bool(init) == (recipe == "mxfp8")
    assert all(t is not None for t in init.values())
    converted = convert(module)
    for i, (name, p) in enumerate(converted.named_parameters()):
        assert p.requires_grad == (not name.startswith("0."))
        assert torch.equal(p.main_grad, torch.full(p.shape, float(i)))
        assert p.tag == tags[name]
        assert (p.tag is tags[name]) == (convert is not copy.deepcopy)
        quantized = name in init and p.dtype != torch.float64  # whose values are left
        assert isinstance(p, QuantizedTensor) == quantized
        if quantized:
            assert torch.equal(p.get_high_precision_init_val(), init[name])


@pytest.mark.usefixtures("cpu_or_cuda")
def test_views_of_one_buffer_stay_views_in_a_copy():
    module = build(False)
    flat = torch.zeros(3, 256, 128)
    for weight, view in zip(module[0].weights(), flat, strict=True):
        weight.main_grad = view
    first, second, _ = copy.deepcopy(module)[0].weights()
    assert first.main_grad.data_ptr() != flat.data_ptr()
    assert second.main_grad.data_ptr() == first.main_grad.data_ptr() + first.nbytes


def test_assigned_values_are_stored_in_the_format_of_the_module():
    module, plain = build(True, "mxfp8"), build(True)
    module.load_state_dict(plain.state_dict(), assign=True)
    copied = build(True, "mxfp8")
    copied.load_state_dict(plain.state_dict())
    for name, p in copied.named_parameters():
        assigned = dict(module.named_parameters())[name]
        assert type(assigned) is type(p)
        assert torch.equal(assigned, p)
