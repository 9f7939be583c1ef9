"""load_checkpoint: published layouts, written by NumPy, into stored and ordinary weights."""

import checkpoint_writers as write
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fusible as fz
from fusible import recipes
from fusible.integrations.checkpoint_layouts import LAYOUTS, MXFP4, layout_of, matrix_of
from fusible.integrations.checkpoints import load_checkpoint
from fusible.recipes.recipe import Recipe

E, HIDDEN, INNER = 3, 256, 128
NVFP4 = recipes.NVFP4BlockScaling(disable_2d_quantization=True)
NAMES = {"0": ("experts.*.gate_proj", "experts.*.up_proj"), "2": "experts.*.down_proj"}
LAYOUT_CASES = {  # writer, recipe of the same format, name of the layout
    "nvfp4_modelopt": (write.nvfp4_modelopt, NVFP4, "NVFP4 of ModelOpt"),
    "nvfp4_compressed": (write.nvfp4_compressed, NVFP4, "NVFP4 of compressed-tensors"),
    "deepseek": (
        write.deepseek,
        recipes.Float8BlockScaling(use_f32_scales=True),
        "FP8 blocks of DeepSeek",
    ),
    "mxfp8": (
        write.mxfp8,
        recipes.MXFP8BlockScaling(),
        "MXFP8 of compressed-tensors",
    ),
    "fp8_tensor": (
        write.fp8_tensor,
        recipes.Float8CurrentScaling(),
        "FP8 per tensor of ModelOpt and compressed-tensors",
    ),
}
LAYOUT = pytest.mark.parametrize(
    ("writer", "recipe", "name"), LAYOUT_CASES.values(), ids=LAYOUT_CASES
)


def mlp(recipe=None, *, usage="inference", dtype=torch.bfloat16, single=True, **options):
    def linear(*sizes):
        return fz.GroupedLinear(
            E, *sizes, bias=False, dtype=dtype, single_grouped_weight=single, **options
        )

    def build():
        return fz.Sequential(linear(HIDDEN, 2 * INNER), fz.ScaledSwiGLU(), linear(INNER, HIDDEN))

    if recipe is None:
        return build()
    with fz.quantized_model_init(recipe=recipe, usage=usage):
        return build()


def experts(writer, seed=0, **options):
    """A state dict of per-expert entries and the values of both weights, ``[E, out, in]``."""
    rng = np.random.default_rng(seed)
    sizes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    state, values = {}, {}
    for name, size in sizes.items():
        entries, values[name] = write.experts(writer, rng, E, *size, name, **options)
        state |= entries
    return state, np.concatenate([values["gate_proj"], values["up_proj"]], 1), values["down_proj"]


def weight(op):
    weights = [w.dequantize() if isinstance(w, fz.QuantizedTensor) else w for w in op.weights()]
    return weights[0] if len(weights) == 1 else torch.stack(weights)


def as_bytes(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


@LAYOUT
def test_values_are_those_of_an_independent_decoder(writer, recipe, name):
    state, up, down = experts(writer)
    module = mlp(dtype=torch.float32)
    assert load_checkpoint(module, state, NAMES) == {
        "0": f"{name}, decoded to torch.float32",
        "2": f"{name}, decoded to torch.float32",
    }
    for op, values in ((module[0], up), (module[2], down)):
        expected = torch.from_numpy(values)
        # Each scale may be rounded twice (1 / global scale, and its product), the value once.
        assert ((weight(op).double() - expected).abs() <= 3 * 2.0**-24 * expected.abs()).all()


@LAYOUT
@pytest.mark.parametrize("single", [True, False])
def test_stored_weights_keep_the_bits(writer, recipe, name, single, tmp_path):
    state, up, _ = experts(writer)
    save_file(state, tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    module = mlp(recipe, single=single)
    before = [w.rowwise_data.data_ptr() for w in module[0].weights()]
    done = load_checkpoint(module, state, NAMES)
    assert done == {"0": f"{name}, bits kept", "2": f"{name}, bits kept"}
    assert [w.rowwise_data.data_ptr() for w in module[0].weights()] == before
    row = next(layout for layout in LAYOUTS if layout.name == name)
    stored = list(module[2].weights())
    for expert in range(E):
        data = stored[0].rowwise_data[expert] if single else stored[expert].rowwise_data
        scale = stored[0].scale_inv[expert] if single else stored[expert].scale_inv
        base = f"experts.{expert}.down_proj"
        assert torch.equal(as_bytes(data), as_bytes(state[base + row.values]))
        assert torch.equal(as_bytes(scale), as_bytes(state[base + row.scale]))
    ordinary = mlp()
    load_checkpoint(ordinary, state, NAMES)
    assert torch.equal(weight(module[0]), weight(ordinary[0]))
    # Rounded once: the double rounding through FP32 does not show on these values.
    assert torch.equal(weight(ordinary[0]), torch.from_numpy(up).to(torch.bfloat16))


@LAYOUT
def test_the_same_outputs_with_and_without_a_recipe(writer, recipe, name):
    state, up, down = experts(writer)
    stored, ordinary = mlp(recipe, dtype=torch.float32), mlp(dtype=torch.float32)
    load_checkpoint(stored, state, NAMES)
    load_checkpoint(ordinary, state, NAMES)
    x, splits = torch.randn(20, HIDDEN), torch.tensor([7, 0, 13])
    call = (x, splits, torch.rand(20), splits)
    with torch.no_grad():
        assert torch.equal(stored(*call), ordinary(*call))
        with fz.autocast(recipe=recipe):
            y = stored(*call)
        # By hand: inputs through the quantizer, the values that NumPy decoded, FP64 sums.
        quantizer = recipes.Quantizer(recipe.format("input"), columnwise=False)
        rows = [quantizer(part).dequantize().double() for part in (x[:7], x[7:])]
        upper = torch.from_numpy(up)
        parts = [r @ upper[e].T for r, e in zip(rows, (0, 2), strict=True)]
        gate, linear = torch.cat(parts).float().chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * linear * call[2][:, None]
        rows = [quantizer(part).dequantize().double() for part in (hidden[:7], hidden[7:])]
        lower = torch.from_numpy(down)
        expected = torch.cat([r @ lower[e].T for r, e in zip(rows, (0, 2), strict=True)])
    # An activation next to a rounding boundary of the recipe may fall on its other side.
    assert (y.double() - expected).norm() <= 2e-3 * expected.norm()


def test_gpt_oss_in_every_format():
    rng = np.random.default_rng(1)
    state, values = write.stacked(write.mxfp4, rng, E, 2 * INNER, HIDDEN, "gate_up_proj")
    state["experts.gate_up_proj_bias"] = torch.randn(E, 2 * INNER).bfloat16()

    class MXFP4Weights(Recipe):
        name = "mxfp4_weights"

        def format(self, role):
            return MXFP4 if role == "weight" else None

    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(expected.double(), torch.from_numpy(values))  # BF16 has the values
    said = {
        None: "decoded to torch.bfloat16",
        MXFP4Weights(): "bits kept",
        recipes.MXFP8BlockScaling(): "encoded as mxfp8_e4m3 with the same values",
        recipes.MXFP8BlockScaling(fp8_format=recipes.Format.E5M2): (
            "encoded as mxfp8_e5m2 with the same values"
        ),
    }
    for recipe, how in said.items():
        with fz.quantized_model_init(recipe is not None, recipe=recipe, usage="inference"):
            op = fz.GroupedLinear(
                E, HIDDEN, 2 * INNER, dtype=torch.bfloat16, single_grouped_weight=True
            )
        assert load_checkpoint(op, state, {"": "experts.gate_up_proj"}) == {
            "": f"MXFP4 of GPT-OSS, {how}"
        }
        assert torch.equal(weight(op).detach(), expected)
        assert torch.equal(torch.stack(op.biases()), state["experts.gate_up_proj_bias"])
        if recipe is not None:
            scales = as_bytes(op.weight.scale_inv)
            assert torch.equal(scales, as_bytes(state["experts.gate_up_proj_scales"]))
    compressed, values = experts(write.mxfp4_compressed)[:2]
    module = mlp(recipes.MXFP8BlockScaling())
    done = load_checkpoint(module, compressed, NAMES)
    assert done["0"] == "MXFP4 of compressed-tensors, encoded as mxfp8_e4m3 with the same values"
    assert torch.equal(weight(module[0]).double(), torch.from_numpy(values))


def test_power_of_two_scales_go_into_either_format():
    state, up, _ = experts(write.deepseek, power_of_two=True)
    for f32 in (False, True):
        module = mlp(recipes.Float8BlockScaling(use_f32_scales=f32))
        assert load_checkpoint(module, state, NAMES)["0"] == "FP8 blocks of DeepSeek, bits kept"
        assert torch.equal(weight(module[0]), torch.from_numpy(up).to(torch.bfloat16))
    as_e8m0 = {
        key: t.to(torch.float8_e8m0fnu) if key.endswith("_inv") else t for key, t in state.items()
    }
    module = mlp(recipes.Float8BlockScaling())
    assert load_checkpoint(module, as_e8m0, NAMES)["0"] == "FP8 blocks of DeepSeek, bits kept"
    assert torch.equal(weight(module[0]), torch.from_numpy(up).to(torch.bfloat16))


def test_a_dense_linear_with_short_blocks_and_a_bias():
    rng = np.random.default_rng(2)
    entries, values = write.deepseek(rng, 200, 96)
    state = {f"model.q_proj{ending}": t for ending, t in entries.items()}
    state["model.q_proj.bias"] = torch.randn(200)
    for recipe in (None, recipes.Float8BlockScaling(use_f32_scales=True)):
        with fz.quantized_model_init(recipe is not None, recipe=recipe):
            block = fz.Sequential(fz.Linear(96, 200), fz.GELU())
        load_checkpoint(block, state, {"0": "q_proj"}, prefix="model.")
        got = block[0].weight.detach()
        assert isinstance(got, fz.QuantizedTensor) == (recipe is not None)
        assert torch.equal(torch.as_tensor(got), torch.from_numpy(values.astype(np.float32)))
        assert torch.equal(block[0].bias, state["model.q_proj.bias"])


def test_names_of_mixtral_and_the_order_of_the_parts():
    rng = np.random.default_rng(3)
    state, values = {}, {}
    for name, size in {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}.items():
        entries, values[name] = write.experts(write.plain, rng, E, *size, name)
        state |= entries
    names = {"0": ("experts.*.w1", "experts.*.w3"), "2": "experts.*.w2"}
    for single in (True, False):
        module = mlp(single=single)
        done = load_checkpoint(module, state, names)
        assert done["0"] == "high precision, bits kept"
        wide = {name: t.float() for name, t in state.items()}
        done = load_checkpoint(module, wide, names)
        assert done["0"] == "high precision, converted to torch.bfloat16"
        expected = torch.from_numpy(np.concatenate([values["w1"], values["w3"]], 1))
        assert torch.equal(weight(module[0]).double(), expected)
        assert torch.equal(weight(module[2]).double(), torch.from_numpy(values["w2"]))
    stored = mlp(recipes.MXFP8BlockScaling(), usage="training")
    assert load_checkpoint(stored, state, names)["0"] == "high precision, quantized to mxfp8_e4m3"
    fz.quantize_(module, recipes.MXFP8BlockScaling(), usage="training")
    assert torch.equal(weight(stored[0]), weight(module[0]))


@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("quantized", [False, True])
def test_parts_alternate_as_the_activation_reads_them(size, quantized):
    state, up, _ = experts(write.nvfp4_modelopt)
    module = mlp(NVFP4 if quantized else None)
    done = load_checkpoint(module, state, NAMES, glu_interleave_size=size)
    assert done["0"].endswith("bits kept" if quantized else "decoded to torch.bfloat16")
    gate, linear = np.split(up, 2, axis=1)
    expected = np.empty_like(up)
    for row in range(INNER):
        block, within = divmod(row, size)
        expected[:, 2 * block * size + within] = gate[:, row]
        expected[:, (2 * block + 1) * size + within] = linear[:, row]
    assert torch.equal(weight(module[0]), torch.from_numpy(expected).to(torch.bfloat16))


def test_stacked_and_transposed_entries():
    rng = np.random.default_rng(4)
    state, values = write.stacked(write.plain, rng, E, 96, 64, "gate_up_proj")
    state = {"experts.gate_up_proj": state["experts.gate_up_proj.weight"]}
    names = {"": "experts.gate_up_proj"}
    options = {"bias": False, "dtype": torch.bfloat16, "single_grouped_weight": True}
    op = fz.GroupedLinear(E, 64, 96, **options)
    load_checkpoint(op, state, names)
    assert torch.equal(weight(op).double(), torch.from_numpy(values))
    state = {"experts.gate_up_proj": state["experts.gate_up_proj"].mT.contiguous()}
    other = fz.GroupedLinear(E, 64, 96, **options)
    with pytest.raises(ValueError, match=r"must be of \(3, 'out', 64\).*transposed=True"):
        load_checkpoint(other, state, names)
    load_checkpoint(other, state, names, transposed=True)
    assert torch.equal(weight(other), weight(op))


def test_on_the_meta_device():
    state, up, _ = experts(write.nvfp4_modelopt)
    for recipe in (None, NVFP4):
        module = mlp(recipe, device="meta")
        load_checkpoint(module, state, NAMES)
        assert torch.equal(weight(module[0]), torch.from_numpy(up).to(torch.bfloat16))
        assert isinstance(module[0].weight, fz.QuantizedTensor) == (recipe is not None)


SECOND = {  # what would be rounded a second time: state, module, its path, what the error says
    "other_format": (
        write.nvfp4_modelopt,
        {},
        recipes.MXFP8BlockScaling(),
        "inference",
        r"fp4 with one float8_e4m3fn scale per 1x16.*the module stores fp8",
    ),
    "square_blocks": (
        write.nvfp4_modelopt,
        {},
        recipes.NVFP4BlockScaling(disable_2d_quantization=False),
        "inference",
        r"stores fp4 with one float8_e4m3fn scale per 16x16",
    ),
    "f32_scales": (
        write.deepseek,
        {},
        recipes.Float8BlockScaling(),
        "inference",
        "build it with the recipe of the checkpoint's format",
    ),
    "both_uses": (
        write.nvfp4_modelopt,
        {},
        NVFP4,
        "training",
        'store weights with usage="inference"',
    ),
}


@pytest.mark.parametrize(
    ("writer", "options", "recipe", "usage", "says"), SECOND.values(), ids=SECOND
)
def test_a_second_rounding_is_asked_for(writer, options, recipe, usage, says):
    state, up, _ = experts(writer, **options)
    module = mlp(recipe, usage=usage)
    before = weight(module[0]).clone()
    with pytest.raises(ValueError, match=says) as error:
        load_checkpoint(module, state, NAMES)
    assert "rounded a second time" in str(error.value)
    assert "nothing was loaded" in str(error.value)
    assert torch.equal(weight(module[0]), before)
    done = load_checkpoint(module, state, NAMES, requantize=True)
    assert "quantized again" in done["0"]
    decoded = mlp(dtype=torch.float32)
    load_checkpoint(decoded, state, NAMES)
    columnwise = usage == "training"  # of which the row-wise form has the checkpoint's bits
    quantizer = recipes.Quantizer(recipe.format("weight"), columnwise=columnwise)
    expected = quantizer(decoded[0].weight.detach()).dequantize(columnwise=columnwise)
    got = module[0].weight.detach().dequantize(torch.float32, columnwise=columnwise)
    assert torch.equal(got, expected)
    if columnwise:
        assert torch.equal(weight(module[0]), torch.from_numpy(up).to(torch.bfloat16))


@pytest.mark.parametrize("writer", [write.nvfp4_modelopt, write.fp8_tensor])
def test_parts_with_scales_of_their_own(writer):
    rng = np.random.default_rng(5)
    option = "scale_2" if writer is write.nvfp4_modelopt else "scale"
    state, values = {}, []
    for name, scale in (("gate_proj", 0.01), ("up_proj", 0.03)):
        entries, value = write.experts(writer, rng, E, INNER, HIDDEN, name, **{option: scale})
        state |= entries
        values.append(value)
    names = {"0": NAMES["0"]}
    recipe = NVFP4 if writer is write.nvfp4_modelopt else recipes.Float8CurrentScaling()
    with pytest.raises(ValueError, match="parts have scales of their own for the whole matrix"):
        load_checkpoint(mlp(recipe), state, names)
    expected = torch.from_numpy(np.concatenate(values, 1))
    ordinary = mlp()
    load_checkpoint(ordinary, state, names)
    assert torch.equal(weight(ordinary[0]), expected.to(torch.bfloat16))
    again = mlp(recipe)
    load_checkpoint(again, state, names, requantize=True)
    assert (weight(again[0]) - expected).norm() <= 0.2 * expected.norm()


def test_blocks_that_would_be_cut():
    rng = np.random.default_rng(6)
    state, values = {}, []
    for name in ("gate_proj", "up_proj"):
        entries, value = write.experts(write.deepseek, rng, E, 96, HIDDEN, name)
        state |= entries
        values.append(value)
    recipe = recipes.Float8BlockScaling(use_f32_scales=True)
    with fz.quantized_model_init(recipe=recipe):
        op = fz.GroupedLinear(E, HIDDEN, 192, bias=False, single_grouped_weight=True)
    with pytest.raises(ValueError, match="blocks that would be cut"):
        load_checkpoint(op, state, {"": NAMES["0"]})
    plain = fz.GroupedLinear(E, HIDDEN, 192, bias=False, single_grouped_weight=True)
    load_checkpoint(plain, state, {"": NAMES["0"]})
    expected = torch.from_numpy(np.concatenate(values, 1).astype(np.float32))
    assert torch.equal(plain.weight, expected)
    state, _, _ = experts(write.deepseek)
    with pytest.raises(ValueError, match="blocks that would be cut"):
        load_checkpoint(mlp(recipe), state, NAMES, glu_interleave_size=32)


def broken(change):
    state, _, _ = experts(write.nvfp4_modelopt)
    change(state)
    return state


BASE = "experts.1.down_proj"
WRONG = {
    "a scale is missing": (
        lambda s: s.pop(f"{BASE}.weight_scale_2"),
        r"experts\.1\.down_proj\.weight_scale_2 is missing",
    ),
    "a weight is missing": (
        lambda s: [s.pop(key) for key in [*s] if key.startswith(f"{BASE}.")],
        r"experts\.\*\.down_proj must be of 3 experts.*got the numbers \[0, 2\]",
    ),
    "the elements are missing": (
        lambda s: s.pop(f"{BASE}.weight"),
        r"experts\.1\.down_proj must be stored in one of LAYOUTS",
    ),
    "an expert too many": (
        lambda s: s.update({k.replace(".1.", ".3."): t for k, t in s.items() if ".1." in k}),
        r"must be of 3 experts.*got the numbers \[0, 1, 2, 3\]",
    ),
    "an entry too many": (
        lambda s: s.update({f"{BASE}.weight_zero_point": torch.zeros(1)}),
        r"experts\.1\.down_proj\.weight_zero_point must not be there",
    ),
    "a bias too many": (
        lambda s: s.update({f"{BASE}.bias": torch.zeros(HIDDEN)}),
        r"experts\.1\.down_proj\.bias must not be there",
    ),
    "a shape": (
        lambda s: s.update({f"{BASE}.weight_scale": s[f"{BASE}.weight_scale"][:-1]}),
        "experts.1.down_proj is not as NVFP4 of ModelOpt has it: scales and tensor scales",
    ),
    "a weight's shape": (
        lambda s: s.update(
            {
                f"experts.{e}.down_proj{end}": s[f"experts.{e}.down_proj{end}"][:, :cut]
                for e in range(E)
                for end, cut in ((".weight", 32), (".weight_scale", 4))
            }
        ),
        r"experts\.\*\.down_proj must be of \(3, 'out', 128\), got \(3, 256, 64\)",
    ),
    "an expert in another layout": (
        lambda s: [
            [s.pop(f"{BASE}{end}") for end in (".weight_scale", ".weight_scale_2", ".input_scale")],
            s.update({f"{BASE}.weight": torch.zeros(HIDDEN, INNER)}),
        ],
        r"experts of experts\.\*\.down_proj must be alike",
    ),
}


@pytest.mark.parametrize(("change", "says"), WRONG.values(), ids=WRONG)
def test_nothing_is_written_if_anything_is_wrong(change, says):
    module = mlp(recipes.Float8BlockScaling() if change is WRONG["a shape"][0] else None)
    before = [weight(op).clone() for op in (module[0], module[2])]
    with pytest.raises(ValueError, match=says):
        load_checkpoint(module, broken(change), NAMES)
    assert torch.equal(weight(module[0]), before[0])
    assert torch.equal(weight(module[2]), before[1])


def test_wrong_names_and_flags():
    state, _, _ = experts(write.nvfp4_modelopt)
    with pytest.raises(ValueError, match=r"paths of linears of fusible, got '1'.*'0', '2'"):
        load_checkpoint(mlp(), state, {"1": "experts.*.gate_proj"})
    with pytest.raises(ValueError, match=r"must have 256 output features, got 128"):
        load_checkpoint(mlp(), state, {"0": "experts.*.gate_proj"})
    with pytest.raises(ValueError, match=r"model\.experts\.\*\.down_proj must be of 3 experts"):
        load_checkpoint(mlp(), state, {"2": "experts.*.down_proj"}, prefix="model.")
    with pytest.raises(ValueError, match="multiple of glu_interleave_size"):
        load_checkpoint(mlp(), state, NAMES, glu_interleave_size=96)
    with pytest.raises(ValueError, match="of no experts"):
        load_checkpoint(fz.Linear(HIDDEN, INNER), state, {"": "experts.*.gate_proj"})
    for flag in ("transposed", "requantize"):
        with pytest.raises(TypeError, match=f"{flag} of load_checkpoint must be a bool, got 1"):
            load_checkpoint(mlp(), state, NAMES, **{flag: 1})
    with_bias = fz.GroupedLinear(E, INNER, HIDDEN)
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.bias is missing"):
        load_checkpoint(with_bias, state, {"": "experts.*.down_proj"})


@pytest.mark.parametrize("size", [None, 8])
def test_biases_fit_their_parts(size):
    """Not their sum alone."""
    linear = fz.GroupedLinear(2, 8, 64, single_grouped_weight=True, single_grouped_bias=True)
    state = {
        f"{part}.{e}.{what}": torch.zeros(sizes)
        for e in range(2)
        for part, bias in (("g", 24), ("u", 40))
        for what, sizes in (("weight", (32, 8)), ("bias", (bias,)))
    }
    says = r"the bias of g.\* must be of \(2, 32\), got \(2, 24\); the bias of u"
    names = {"": ["g.*", "u.*"]}
    with pytest.raises(ValueError, match=says):
        load_checkpoint(linear, state, names, glu_interleave_size=size)
    state["g.1.bias"] = torch.zeros(31)
    with pytest.raises(ValueError, match=r"experts of g.\* must be alike, got \(24,\), \(31,\)"):
        load_checkpoint(linear, state, names, glu_interleave_size=size)


def test_a_scale_of_another_dtype_is_not_called_missing():
    state, *_ = experts(write.deepseek)
    name = next(name for name in state if name.endswith("down_proj.weight_scale_inv"))
    state[name] = state[name].double()
    with pytest.raises(ValueError, match=r"weight_scale_inv must be of .*, got torch\.float64"):
        load_checkpoint(mlp(), state, NAMES)


def largest_allocation(call):
    """The largest sum of bytes that a call holds at a time besides what there was."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as p:
        call()
    held = largest = 0
    events = p.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            largest = max(largest, held)
    return largest


@pytest.mark.parametrize("recipe", [None, NVFP4], ids=["decoded", "stored"])
def test_memory_for_one_weight_at_a_time(recipe):
    state, _, _ = experts(write.nvfp4_modelopt)
    layers = 8
    module = fz.Sequential(*[op for _ in range(layers) for op in mlp(recipe)])
    one = {"0": NAMES["0"]}
    every = {str(3 * i): NAMES["0"] for i in range(layers)}
    load_checkpoint(module, state, one)
    alone = largest_allocation(lambda: load_checkpoint(module, state, one))
    assert alone >= 2 * INNER * HIDDEN * E / 2
    together = largest_allocation(lambda: load_checkpoint(module, state, every))
    assert together <= 1.5 * alone
    for i in range(layers):
        assert torch.equal(weight(module[3 * i]), weight(module[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_of_a_matrix_may_have_any_float_dtype(dtype):
    data = torch.randn(4, 256).to(torch.float8_e4m3fn)
    entries = {"a.weight": data, "a.weight_scale": torch.tensor(0.5, dtype=dtype)}
    layout, missing = layout_of(entries, "a")
    assert layout.name == "FP8 per tensor of ModelOpt and compressed-tensors"
    assert not missing
    made = matrix_of(*entries.values())
    assert made.scale.tolist() == [0.5]
    assert made.scale.dtype == torch.float32


def test_an_entry_of_gate_and_up_is_not_interleaved():
    state = {"experts.gate_up_proj": torch.randn(E, 2 * INNER, HIDDEN)}
    linear = fz.GroupedLinear(E, HIDDEN, 2 * INNER, bias=False, single_grouped_weight=True)
    with pytest.raises(ValueError, match="must have a tuple of parts with glu_interleave_size"):
        load_checkpoint(linear, state, {"": "experts.gate_up_proj"}, glu_interleave_size=8)
    for size in (True, 8.0):
        with pytest.raises(TypeError, match="must be an int"):
            load_checkpoint(linear, state, {"": "experts.gate_up_proj"}, glu_interleave_size=size)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_from_the_meta_device_do_not_share_the_checkpoints_memory(transposed, dtype):
    with torch.device("meta"):
        linears = [fz.Linear(8, 16, dtype=torch.bfloat16) for _ in range(2)]
    weight = torch.randn(8, 16, dtype=dtype) if transposed else torch.randn(16, 8, dtype=dtype)
    state = {"w.weight": weight, "w.bias": torch.randn(16, dtype=dtype)}
    want = {name: entry.clone() for name, entry in state.items()}
    for linear in linears:
        load_checkpoint(linear, state, {"": "w"}, transposed=transposed)
    with torch.no_grad():
        linears[0].weight.zero_(), linears[0].bias.zero_()
    loaded = want["w.weight"].mT if transposed else want["w.weight"]
    assert torch.equal(linears[1].weight, loaded.bfloat16())
    assert torch.equal(linears[1].bias, want["w.bias"].bfloat16())
    assert linears[1].weight.is_contiguous()
    for name, entry in state.items():
        assert torch.equal(entry, want[name])


@pytest.mark.parametrize("names", ["experts.down_proj", {"": 3}, {"": ()}, {"": ("a", 3)}])
@pytest.mark.parametrize("size", [None, 8])
def test_names_that_are_none(names, size):
    with pytest.raises(TypeError, match="names of load_checkpoint must map paths of linears"):
        load_checkpoint(fz.Linear(8, 8), {}, names, glu_interleave_size=size)
