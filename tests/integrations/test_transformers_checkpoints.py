"""from_pretrained of quantized checkpoints: experts keep bits, logits are of decoded models."""

import checkpoint_writers as write
import numpy as np
import pytest
import reference as ref
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

import fusible as fz
from fusible import recipes
from fusible.integrations.checkpoints import load_checkpoint
from fusible.kernels import grouped

pytest.importorskip("transformers", minversion="5.23")
import transformers
from hf_checkpoints import CASES, IDS, assert_same_parameters, experts_of, load, logits, save
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer


def assert_same_logits(model, expected):
    ref.assert_equal_elsewhere([logits(model)], [logits(expected)])


@pytest.mark.parametrize(("family", "writer", "options", "name"), CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_the_decoded_model(
    family, writer, options, name, tmp_path, monkeypatch
):
    method = "modelopt" if writer is write.nvfp4_modelopt else "fusible"
    quantized, ordinary = save(tmp_path, family, writer, {"quant_method": method}, **options)
    stored, expected = load(quantized), load(ordinary)
    for module in experts_of(stored):
        for weight in (module.gate_up_proj, module.down_proj):
            assert isinstance(weight, fz.QuantizedTensor)
            assert weight.format.name == name
            assert weight.columnwise_data is None
            assert not weight.requires_grad
    product, multiplied = grouped.grouped_mm_stored, []
    monkeypatch.setattr(
        grouped, "grouped_mm_stored", lambda x, *a: multiplied.append(x) or product(x, *a)
    )
    assert_same_logits(stored, expected)
    assert len(multiplied) == 2 * len(experts_of(stored))  # by the weights as they are stored
    decoded = load(quantized, experts_implementation="eager")
    assert_same_parameters(decoded, expected)
    # The rest trains, and gradients pass through the stored experts.
    stored(IDS, labels=IDS, use_cache=False).loss.backward()
    expected(IDS, labels=IDS, use_cache=False).loss.backward()
    grads = {n: p.grad for n, p in expected.named_parameters()}
    for parameter, p in stored.named_parameters():
        if p.requires_grad:
            ref.assert_equal_elsewhere([p.grad], [grads[parameter]])


@pytest.mark.filterwarnings("ignore")
def test_linears_are_decoded_and_other_methods_left_to_transformers(tmp_path):
    quantized, ordinary = save(
        tmp_path,
        "qwen3_moe",
        write.nvfp4_modelopt,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        stored=lambda key: "_proj" in key,
        scale_2=1e-4,
    )
    stored, expected = load(quantized), load(ordinary)
    assert torch.equal(stored.model.layers[0].self_attn.q_proj.weight,
                       expected.model.layers[0].self_attn.q_proj.weight)  # fmt: skip
    assert_same_logits(stored, expected)
    recipe = recipes.NVFP4BlockScaling(disable_2d_quantization=True)
    with fz.autocast(recipe=recipe):  # multiplies by the stored values, not those of a second one
        experts = experts_of(stored)[0]
        x, ids, weights = torch.randn(9, 64).bfloat16(), torch.randint(6, (9, 2)), torch.rand(9, 2)
        y = experts(x, ids, weights)
    options = {"bias": False, "dtype": torch.bfloat16, "single_grouped_weight": True}
    by_hand = fz.Sequential(
        fz.Dispatch(6),
        fz.GroupedLinear(6, 64, 192, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(6, 96, 64, **options),
        fz.Combine(),
    )
    fz.quantize_(by_hand, recipe, usage="inference")
    names = {"1": ("experts.*.gate_proj", "experts.*.up_proj"), "3": "experts.*.down_proj"}
    state = load_file(quantized / "model.safetensors")
    done = load_checkpoint(by_hand, state, names, prefix="model.layers.0.mlp.")
    assert done == {"1": "NVFP4 of ModelOpt, bits kept", "3": "NVFP4 of ModelOpt, bits kept"}
    with fz.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(by_hand(x, weights, ids).to(x.dtype), y)


@pytest.mark.filterwarnings("ignore")
def test_gpt_oss_as_transformers_decodes_it(tmp_path):
    quantized, ordinary = save(tmp_path, "gpt_oss", write.mxfp4, {"quant_method": "mxfp4"})
    config = transformers.Mxfp4Config(dequantize=True)
    decoded, expected = load(quantized, quantization_config=config), load(ordinary)
    assert_same_parameters(decoded, expected)
    assert_same_logits(decoded, expected)
    block = fz.GroupedLinear(3, 64, 128, dtype=torch.bfloat16, single_grouped_weight=True)
    state = load_file(quantized / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    load_checkpoint(block, state, {"": name})
    assert torch.equal(block.weight.mT, dict(decoded.named_parameters())[name])


@pytest.fixture
def on_any_machine(monkeypatch):
    """Without a GPU and accelerate transformers decodes FP8, or refuses it."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_experts_of_transformers_run_here(tmp_path, on_any_machine, scale_fmt):
    linears = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "lm_head",
               "gate", "shared_experts.*", "layers.0.mlp"]  # fmt: skip
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": scale_fmt,
        "modules_to_not_convert": [*linears, *[f"{name}_proj" for name in ("gate", "up", "down")]],
    }
    power_of_two = scale_fmt == "ue8m0"
    quantized, ordinary = save(
        tmp_path,
        "deepseek_v3",
        write.deepseek,
        quantization,
        stored=lambda key: ".experts." in key,
        power_of_two=power_of_two,
    )
    if power_of_two:
        state = load_file(quantized / "model.safetensors")
        state = {
            key: t.to(torch.float8_e8m0fnu) if key.endswith("_inv") else t
            for key, t in state.items()
        }
        save_file(state, quantized / "model.safetensors", metadata={"format": "pt"})
    stored, expected = load(quantized), load(ordinary)
    (experts,) = experts_of(stored)
    assert type(experts).__name__ == "FP8Experts"
    assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
    assert_same_logits(stored, expected)
    (weight,) = experts._fusible_block.mlp[1].weights()
    assert weight.rowwise_data.data_ptr() == experts.gate_up_proj.data_ptr()
    config = transformers.FineGrainedFP8Config(dequantize=True)
    decoded = load(quantized, quantization_config=config)  # as transformers decodes it
    assert_same_parameters(decoded, expected)
    recipe = recipes.Float8BlockScaling(use_f32_scales=not power_of_two)
    x, ids, weights = torch.randn(9, 128).bfloat16(), torch.randint(4, (9, 2)), torch.rand(9, 2)
    with fz.autocast(recipe=recipe), torch.no_grad(), recipes.no_implicit_dequantize():
        y = experts(x, ids, weights)
    if power_of_two:
        return
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    with fz.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(compiled(x, ids, weights), y)
    # An adapter would be added to elements before the scales multiply them.
    parametrize.register_parametrization(experts, "gate_up_proj", Negated())
    with pytest.raises(ValueError, match=r"gate_up_proj of .*FP8Experts must be a parameter"):
        experts(x, ids, weights)


class Negated(nn.Module):
    def forward(self, elements):
        return (-elements.float()).to(elements.dtype)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_kept_is_decoded_and_said(tmp_path, caplog):
    scales = iter(np.linspace(1e-4, 9e-4, 1000))

    def each_with_its_own(rng, rows, columns):
        return write.nvfp4_modelopt(rng, rows, columns, scale_2=next(scales))

    quantized, ordinary = save(
        tmp_path, "qwen3_moe", each_with_its_own, {"quant_method": "modelopt"}
    )
    stored, expected = load(quantized), load(ordinary)
    experts = experts_of(stored)[0]
    assert not isinstance(experts.gate_up_proj, fz.QuantizedTensor)
    assert isinstance(experts.down_proj, fz.QuantizedTensor)
    assert_same_logits(stored, expected)
    assert "gate_up_proj is decoded: no tensor of its format has all of its scales" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_entries_that_are_no_weight_are_an_error(tmp_path):
    quantized, _ = save(tmp_path, "qwen3_moe", write.nvfp4_modelopt, {"quant_method": "modelopt"})
    path = quantized / "model.safetensors"
    state = load_file(path)
    state = {key: t for key, t in state.items() if not key.endswith("3.up_proj.weight_scale_2")}
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(Exception, match="conversion"):
        load(quantized)


@pytest.mark.filterwarnings("ignore")
def test_the_method_of_a_config_that_is_given(tmp_path):
    quantized, ordinary = save(
        tmp_path, "mixtral", write.mxfp4_compressed, {"quant_method": "compressed-tensors"}
    )
    config = transformers.AutoConfig.from_pretrained(quantized)
    config.quantization_config = {"quant_method": "fusible"}
    stored = load(quantized, config=config)
    assert isinstance(experts_of(stored)[0].down_proj, fz.QuantizedTensor)
    assert_same_logits(stored, load(ordinary))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expert", [0, 2])
def test_experts_in_several_layouts_are_an_error(tmp_path, expert):
    """The first one must not decide alone: scales of the others would be left out."""
    quantized, _ = save(tmp_path, "qwen3_moe", write.deepseek, {"quant_method": "fusible"})
    path = quantized / "model.safetensors"
    state = load_file(path)
    for name in [n for n in state if f"experts.{expert}.up_proj.weight" in n]:
        if name.endswith("_scale_inv"):
            del state[name]
        else:
            state[name] = state[name].to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(Exception, match="conversion"):
        load(quantized)


@pytest.mark.filterwarnings("ignore")
def test_scales_of_all_experts_in_one_entry_are_refused(tmp_path):
    quantized, _ = save(tmp_path, "qwen3_moe", write.deepseek, {"quant_method": "fusible"})
    path = quantized / "model.safetensors"
    state = load_file(path)
    base = "model.layers.0.mlp.experts"
    state[f"{base}.gate_up_proj_scale_inv"] = torch.ones(4, 1, 1)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"got model.*gate_up_proj_scale_inv in"):
        load(quantized)
