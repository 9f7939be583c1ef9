"""Small models of transformers, saved with weights in the layouts of checkpoints."""

import json
from pathlib import Path

import checkpoint_writers as write
import numpy as np
import torch
import transformers
from hf_models import COMMON, FAMILIES
from safetensors.torch import load_file, save_file

SIZES = {
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 16},
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "deepseek_v3": {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "intermediate_size": 128,
        "n_routed_experts": 4,
        "n_group": 2,
    },
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 3},
}
IDS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))


def save(folder, family, writer, quantization, stored=lambda key: ".experts." in key, **options):
    """Save a small model twice: with weights of a layout, and with their values in BF16."""
    torch.manual_seed(0)
    name, sizes, _ = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **sizes, **SIZES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    quantized, ordinary = Path(folder, "quantized"), Path(folder, "ordinary")
    model.save_pretrained(quantized)
    model.save_pretrained(ordinary)
    rng = np.random.default_rng(0)
    state, values = {}, {}
    for key, value in load_file(quantized / "model.safetensors").items():
        if not stored(key) or value.dim() < 2 or key.endswith("bias"):
            state[key] = values[key] = value
        elif value.dim() == 3:  # of GPT-OSS, [E, in, out]
            entries, exact = write.stacked(
                writer, rng, len(value), *value.shape[:0:-1], "", **options
            )
            state |= {key + ending.removeprefix("experts."): t for ending, t in entries.items()}
            values[key] = torch.from_numpy(exact).mT.to(torch.bfloat16).contiguous()
        else:
            entries, exact = writer(rng, *value.shape, **options)
            state |= {key.removesuffix(".weight") + ending: t for ending, t in entries.items()}
            values[key] = torch.from_numpy(exact).to(torch.bfloat16)
    for where, tensors in ((quantized, state), (ordinary, values)):
        save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = quantization
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, ordinary


def load(folder, **options):
    given = {"experts_implementation": "fusible", "dtype": torch.bfloat16, **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given)


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def experts_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Experts")]


def assert_same_parameters(got, expected):
    assert got.state_dict().keys() == expected.state_dict().keys()
    for (name, a), b in zip(got.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


CASES = {  # family, writer, its options, format of the experts
    "modelopt": ("qwen3_moe", write.nvfp4_modelopt, {"scale_2": 1e-4}, "nvfp4"),
    "compressed": ("mixtral", write.nvfp4_compressed, {"global_scale": 9000.0}, "nvfp4"),
    "deepseek": ("deepseek_v3", write.deepseek, {}, "fp8_128x128_e4m3"),
    "mxfp4": ("qwen3_moe", write.mxfp4_compressed, {}, "mxfp4_e2m1"),
    "gpt_oss": ("gpt_oss", write.mxfp4, {}, "mxfp4_e2m1"),
}
