"""LoRA of peft, ``target_parameters``, over frozen stored experts."""

import copy

import checkpoint_writers as write
import other_cpu
import pytest
import reference as ref
import torch
from torch import nn

import fusible as fz
from fusible import recipes
from fusible.recipes.matrix import Uses
from fusible.recipes.product import quantizer

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")
import peft
from hf_checkpoints import CASES, IDS, experts_of, load, logits, save
from hf_models import make_model

pytestmark = pytest.mark.filterwarnings("ignore")

FORMATS = {
    "nvfp4": recipes.NVFP4BlockScaling(disable_2d_quantization=True),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "fp8": recipes.Float8BlockScaling(),
}
SIZES = torch.tensor([10, 0, 19])  # of 30 rows


class Block(nn.Module):
    """Experts of plain ops, stored for inference."""

    def __init__(self, recipe, single=True):
        super().__init__()
        torch.manual_seed(0)
        self.experts = fz.Sequential(
            fz.GroupedLinear(3, 128, 128, single_grouped_weight=single),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(3, 64, 128, single_grouped_weight=single, bias=False),
        )
        fz.quantize_(self.requires_grad_(False), recipe, usage="inference")

    def forward(self, x, **options):
        return self.experts(x, SIZES, torch.linspace(0.5, 1.5, len(x)), SIZES, **options)

    def stored(self):
        return {n: p for n, p in self.named_parameters() if isinstance(p, fz.QuantizedTensor)}


def decoded(block):
    plain = copy.deepcopy(block)
    for name, weight in block.stored().items():
        path, _, own = name.rpartition(".")
        setattr(plain.get_submodule(path), own, nn.Parameter(weight.dequantize(), False))
    return plain


def adapted(model, targets):
    torch.manual_seed(1)
    options = {"target_modules": [], "target_parameters": targets, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **options))


def deltas(model):
    """What adapters add, by the name of the weight in the model without them."""
    found = {}
    for path, module in model.base_model.model.named_modules():
        if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
            name = f"{path.replace('.base_layer', '')}.{module.parameter_name}"
            found[name] = module.get_delta_weight("default").detach()
    return found


def step(model, *args, **options):
    y = model(*args, **options)
    loss = y.loss if hasattr(y, "loss") else y.square().sum()
    loss.backward()
    y = y.logits if hasattr(y, "logits") else y
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got, expected):
    """The output in all bits; the gradients but for less than one BF16 rounding of every element.

    Some CPUs round a BF16 product by where its operands lie. The mean square of one rounding is
    a third of that of the largest, 2^-9.
    """
    ref.assert_equal_elsewhere([got[0]], [expected[0]])
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        ref.assert_near(got[1][name], grad, 2**-10 if other_cpu.is_nearest() else 2**-4)


@pytest.mark.parametrize("single", [True, False], ids=["one weight", "one per group"])
@pytest.mark.parametrize("name", FORMATS)
def test_adapters_of_a_sequential_train(name, single):
    block, x = Block(FORMATS[name], single), torch.randn(30, 128)
    plain, targets, base = decoded(block), list(block.stored()), block(x)
    stored = {n: w.detach().clone() for n, w in block.stored().items()}
    model = adapted(block, targets)
    got = step(model, x)
    assert_same(got, step(adapted(copy.deepcopy(plain), targets), x))
    assert len(got[1]) == 2 * len(targets)
    # As weights that are sums, whose gradients are those of the sums.
    sums = {n: w.dequantize() + deltas(model)[n] for n, w in stored.items()}
    with torch.no_grad():
        y = torch.func.functional_call(plain, sums, (x,))
    torch.testing.assert_close(got[0], y)
    for old, new in zip(stored.values(), block.stored().values(), strict=True):
        assert not new.requires_grad
        assert new.pieces().keys() == old.pieces().keys()
        assert torch.equal(new, old)
    with model.disable_adapter():
        assert torch.equal(model(x), base)
    assert torch.equal(model(x), got[0])


def test_explain_names_the_wrappers_and_the_decoded_weights():
    model = adapted(Block(FORMATS["mxfp8"]), ["experts.0.weight", "experts.2.weight"])
    said = str(fz.explain(model, torch.randn(30, 128)))
    assert said.count("weights are computed from stored ones") == 2
    assert "experts.0 is a wrapper of ops, which ends a run of ops" in said


def test_a_wrapped_linear_takes_its_op_kwargs():
    model = adapted(Block(FORMATS["mxfp8"]), ["experts.0.weight", "experts.2.weight"])
    x, output = torch.randn(30, 128), torch.empty(30, 128)
    with torch.no_grad():
        expected = model(x)
        assert model(x, op_kwargs={2: {"output": output}}).data_ptr() == output.data_ptr()
    assert torch.equal(output, expected)


def test_an_adapter_is_saved_and_loaded(tmp_path):
    block, x = Block(FORMATS["nvfp4"]), torch.randn(30, 128)
    targets = list(block.stored())
    model = adapted(block, targets)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(Block(FORMATS["nvfp4"]), tmp_path)
    assert torch.equal(loaded(x), model(x))
    other = adapted(Block(FORMATS["nvfp4"]), targets)
    with torch.no_grad():
        for p in [p for p in other.parameters() if p.requires_grad]:
            p.mul_(2)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("single", [True, False], ids=["one weight", "one per group"])
@pytest.mark.parametrize("name", FORMATS)
def test_merging_rounds_the_sum_once(name, single, safe):
    block = Block(FORMATS[name], single)
    model = adapted(block, list(block.stored()))
    sums = {n: w.dequantize() for n, w in Block(FORMATS[name], single).stored().items()}
    sums = {n: w + deltas(model)[n] for n, w in sums.items()}
    rowwise = {n: w.pieces().keys() for n, w in Block(FORMATS[name], single).stored().items()}
    merged = model.merge_and_unload(safe_merge=safe).stored()
    quantize = quantizer(FORMATS[name], "weight", Uses(row=True))
    for n, weight in merged.items():
        assert weight.pieces().keys() == rowwise[n]
        assert torch.equal(weight.dequantize(), quantize(sums[n]).dequantize())
    assert merged.keys() == sums.keys()


TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("layout", ["modelopt", "deepseek", "gpt_oss"])
def test_adapters_of_a_checkpoints_experts_train(layout, tmp_path):
    family, writer, options, _ = CASES[layout]
    method = "modelopt" if writer is write.nvfp4_modelopt else "fusible"
    quantized, ordinary = save(tmp_path, family, writer, {"quant_method": method}, **options)
    stored, plain = (adapted(load(folder), TARGETS) for folder in (quantized, ordinary))
    got = step(stored, IDS, labels=IDS, use_cache=False)
    assert_same(got, step(plain, IDS, labels=IDS, use_cache=False))
    assert len(got[1]) == 4 * len(experts_of(stored))
    for module in experts_of(stored):
        for weight in (module.gate_up_proj, module.down_proj):
            assert isinstance(weight, fz.QuantizedTensor)
            assert weight.columnwise_data is None
            assert weight.grad is None
    stored.save_pretrained(tmp_path / "adapter")  # the decoded model takes it too
    loaded = peft.PeftModel.from_pretrained(load(ordinary), tmp_path / "adapter")
    ref.assert_equal_elsewhere([logits(loaded)], [got[0]])


def test_adapters_of_llama4_train():
    """Its layer calls the wrapper of its experts, and gives what eager does."""
    model = make_model("llama4")
    eager = copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    got, expected = (
        step(adapted(m, TARGETS), IDS, labels=IDS, use_cache=False) for m in (model, eager)
    )
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert len(got[1]) == 8  # two matrices for each of two weights, in two layers
    for name, grad in expected[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=1e-5, msg=name)
