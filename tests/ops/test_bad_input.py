"""Bad input: every message says what must hold, what it got, and what to do or which it is."""

import re

import pytest
import reference as ref
import torch

import fusible as fz


def mlp_call(**changed):
    mlp = ref.grouped_mlp()
    x, splits, scales = ref.grouped_mlp_inputs()
    given = {"x": x, "first": splits, "scales": scales, "second": splits, **changed}
    return mlp(*given.values())


def grouped(splits, rows=10, **options):
    return fz.GroupedLinear(4, 8, 6, **options)(torch.randn(rows, 8), splits)


def replaced(op, name, value):
    setattr(op, name, None if value is None else torch.nn.Parameter(value))
    return op


SPLITS = torch.tensor([3, 0, 4, 1])

# what: (call, (what must hold, what it got, what to do or where))
VALUE_ERRORS = {
    "features of BasicLinear": (
        lambda: fz.BasicLinear(8, 4)(torch.randn(3, 7)),
        ("must have 8 features in its last dimension", "got shape (3, 7)", "input of BasicLinear"),
    ),
    "features of Linear": (
        lambda: fz.Linear(8, 4)(torch.randn(3, 9)),
        ("must have 8 features", "got shape (3, 9)", "input of Linear"),
    ),
    "a channel that nothing reads": (
        lambda: fz.Sequential(
            fz.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
            torch.nn.Tanh(),
            fz.AddExtraInput(),
        )(torch.randn(3, 8)),
        ("extra inputs must number 1", "got 0", "(addend of op 1 (AddExtraInput))"),
    ),
    "features of Linear, in the middle of a run": (
        lambda: fz.Sequential(fz.Linear(8, 4), fz.SiLU(), fz.Linear(5, 2))(torch.randn(3, 8)),
        ("must have 5 features", "got shape (3, 4)", "input of Linear"),
    ),
    "features of Bias": (
        lambda: fz.Bias(8)(torch.randn(3, 1)),
        ("must have 8 features", "got shape (3, 1)", "input of Bias"),
    ),
    "no features at all": (
        lambda: fz.Bias(1)(torch.tensor(1.0)),
        ("must have 1 features", "got shape ()", "input of Bias"),
    ),
    "features of GroupedLinear": (
        lambda: mlp_call(x=torch.randn(10, 15)),
        ("must have 16 features", "got shape (10, 15)", "input of GroupedLinear"),
    ),
    "odd features of SwiGLU": (
        lambda: fz.SwiGLU()(torch.randn(3, 7)),
        ("must be a multiple of 2", "got shape (3, 7)", "two halves"),
    ),
    "features of an interleaved ScaledSwiGLU": (
        lambda: fz.ScaledSwiGLU(glu_interleave_size=4)(torch.randn(3, 12), torch.rand(3)),
        ("must be a multiple of 8", "got shape (3, 12)", "blocks of 4"),
    ),
    "too few extra inputs": (
        lambda: ref.grouped_mlp()(torch.randn(10, 16), SPLITS, torch.rand(10)),
        (
            "must number 3",
            "got 2",
            "split_sizes of op 0 (GroupedLinear), scales of op 1 (ScaledSwiGLU), "
            "split_sizes of op 2 (GroupedLinear)",
        ),
    ),
    "too many extra inputs": (
        lambda: fz.Sequential(fz.AddExtraInput())(*torch.randn(3, 2, 2)),
        ("must number 1", "got 2", "addend of op 0 (AddExtraInput)"),
    ),
    "extra input for an op without any": (
        lambda: fz.SiLU()(*torch.randn(2, 2, 2)),
        ("must number 0", "got 1", "none"),
    ),
    "too many extra inputs over several runs": (
        lambda: fz.Sequential(fz.AddExtraInput(), torch.nn.Tanh(), fz.SiLU())(
            *torch.randn(4, 2, 2)
        ),
        ("must number 1", "got 3", "extra inputs"),
    ),
    "splits of the wrong length": (
        lambda: grouped(torch.tensor([3, 4])),
        ("of shape (4,)", "got torch.int64 of shape (2,)", "the rows of each group"),
    ),
    "splits in two dimensions": (
        lambda: grouped(SPLITS[None]),
        ("of shape (4,)", "got torch.int64 of shape (1, 4)", "split_sizes of GroupedLinear"),
    ),
    "splits that are floats": (
        lambda: grouped(SPLITS.float()),
        ("must be an int64 or int32 tensor", "got torch.float32", "split_sizes of GroupedLinear"),
    ),
    "splits in a list of floats": (
        lambda: grouped([3.0, 0.0, 4.0, 1.0]),
        ("must be an int64 or int32 tensor", "got torch.float32", "split_sizes of GroupedLinear"),
    ),
    "splits that are int16": (
        lambda: grouped(SPLITS.short()),
        ("must be an int64 or int32 tensor", "got torch.int16", "split_sizes of GroupedLinear"),
    ),
    "a negative split": (
        lambda: grouped(torch.tensor([3, 0, -4, 1])),
        ("must not be negative", "got -4 for group 2", "0 for none"),
    ),
    "splits of more rows than there are": (
        lambda: grouped(SPLITS, rows=7),
        ("at most the 7 rows of the input", "got 8", "give as many rows as the groups hold"),
    ),
    "splits on another device": (
        lambda: grouped(SPLITS.to("meta")),
        ("must be on cpu with the input, or on the CPU", "got meta", "move them"),
    ),
    "weight on another device": (
        lambda: fz.BasicLinear(8, 4, device="meta")(torch.randn(3, 8)),
        ("must be on one device", "got cpu and meta", "move one of them"),
    ),
    "grouped weight on another device": (
        lambda: grouped(SPLITS, device="meta"),
        ("must be on one device", "got cpu and meta", "move one of them"),
    ),
    "bias on another device": (
        lambda: fz.Bias(8, device="meta")(torch.randn(3, 8)),
        ("must be on one device", "got cpu and meta", "move one of them"),
    ),
    "addend on another device": (
        lambda: fz.AddExtraInput()(torch.randn(3), torch.randn(3, device="meta")),
        ("must have shape (3,)", "be on cpu", "got (3,) on meta", "extra input of AddExtraInput"),
    ),
    "scales on another device": (
        lambda: fz.ScaledSwiGLU()(torch.randn(3, 4), torch.rand(3, device="meta")),
        ("of shape (3,) on cpu", "on meta", "one value for each row"),
    ),
    "addend of another shape": (
        lambda: fz.AddExtraInput()(torch.randn(3, 4), torch.randn(3)),
        ("must have shape (3, 4)", "broadcasts to it", "got (3,)", "as what it is added to"),
    ),
    "scales for other rows": (
        lambda: fz.ScaledSwiGLU()(torch.randn(3, 4), torch.rand(4)),
        ("of shape (3,)", "(4,)", "one value for each row of the input"),
    ),
    "scales with a dimension too much": (
        lambda: fz.ScaledClampedQGeGLU()(torch.randn(3, 4), torch.rand(3, 1)),
        ("of shape (3,)", "(3, 1)", "scales of ScaledClampedQGeGLU"),
    ),
    "scales that are integers": (
        lambda: mlp_call(scales=torch.ones(10, dtype=torch.int64)),
        ("must be a floating tensor", "got torch.int64", "scales of ScaledSwiGLU"),
    ),
    "scales of the bias for other rows": (
        lambda: fz.GroupedLinear(4, 8, 6, scale_bias=True)(
            torch.randn(10, 8), SPLITS, torch.rand(9)
        ),
        ("of shape (10,)", "(9,)", "scales of GroupedLinear"),
    ),
    "integer input of a linear": (
        lambda: fz.BasicLinear(8, 4)(torch.ones(3, 8, dtype=torch.int64)),
        ("must be one of bfloat16, float16, float32, float64", "got torch.int64", "cast it"),
    ),
    "FP8 input of a grouped linear": (
        lambda: mlp_call(x=torch.ones(10, 16).to(torch.float8_e4m3fn)),
        ("must be one of bfloat16,", "got torch.float8_e4m3fn", "cast it"),
    ),
    "FP8 weight": (
        lambda: fz.BasicLinear(8, 4).to(torch.float8_e5m2)(torch.randn(3, 8)),
        ("must be one of bfloat16,", "got torch.float8_e5m2", "weight of BasicLinear"),
    ),
    "integer input of an activation": (
        lambda: fz.SwiGLU()(torch.arange(4)),
        ("must be one of bfloat16,", "got torch.int64", "input of SwiGLU"),
    ),
    "FP8 input of an activation": (
        lambda: fz.SiLU()(torch.ones(4).to(torch.float8_e4m3fn)),
        ("must be one of bfloat16,", "got torch.float8_e4m3fn", "cast it"),
    ),
    "integer input of a scaled activation": (
        lambda: fz.ScaledSwiGLU()(torch.ones(2, 4, dtype=torch.int32), torch.rand(2)),
        ("must be one of bfloat16,", "got torch.int32", "input of ScaledSwiGLU"),
    ),
    "op_kwargs for an op of another module": (
        lambda: fz.Sequential(fz.SiLU())(torch.randn(2), op_kwargs={fz.SiLU(): {}}),
        ("must be keyed by a basic op of this Sequential", "got SiLU", "or its index"),
    ),
    "op_kwargs for an ordinary module": (
        lambda: fz.Sequential(torch.nn.Tanh(), fz.SiLU())(torch.randn(2), op_kwargs={0: {}}),
        ("must be keyed by a basic op", "got index 0, Tanh", "or its index"),
    ),
    "op_kwargs that an op does not know": (
        lambda: fz.Sequential(fz.GroupedLinear(4, 8, 6))(
            torch.randn(10, 8), SPLITS, op_kwargs={0: {"out": None}}
        ),
        ("must be among ['output', 'grad_input']", "got ['out']", "arguments of GroupedLinear"),
    ),
    "op_kwargs that a fusion would not ask for": (
        lambda: fz.Sequential(fz.Linear(8, 8), fz.SiLU())(
            torch.randn(2, 8), op_kwargs={1: {"output": torch.empty(2, 8)}}
        ),
        ("arguments of SiLU must be among none", "got ['output']"),
    ),
    "op_kwargs of an op without any": (
        lambda: fz.Dispatch(2)(
            torch.randn(2, 8), torch.rand(2, 1), torch.zeros(2, 1).int(), capacity=1
        ),
        ("arguments of Dispatch must be among ['probs', 'expert_ids']", "got ['capacity']"),
    ),
    "op_kwargs for a Linear with a bias": (
        lambda: fz.Sequential(fz.Linear(8, 8))(
            torch.randn(2, 8), op_kwargs={0: {"output": torch.empty(2, 8)}}
        ),
        ("must be keyed by a basic op", "got index 0, Linear, which is BasicLinear + Bias"),
    ),
    "keyword arguments of a Linear with a bias": (
        lambda: fz.Linear(8, 8)(torch.randn(2, 8), output=torch.empty(2, 8)),
        ("must be for one basic op", "got ['output']", "which is BasicLinear + Bias"),
    ),
    "op_kwargs that are nearly right": (
        lambda: fz.Sequential(fz.BasicLinear(8, 8))(
            torch.randn(2, 8), op_kwargs={0: {"ouput": torch.empty(2, 8)}}
        ),
        ("must be among ['output', 'grad_input']", "got ['ouput']", "did you mean 'output'?"),
    ),
    "a required rule that is nearly right": (
        lambda: fz.Sequential(fz.SiLU(), require=["linear_ad"]),
        ("must be one of ", "got 'linear_ad'", "did you mean 'linear_add'?"),
    ),
    "a router of more experts than are dispatched to": (
        lambda: fz.Sequential(fz.TopKRouter(8, 8, 2), fz.Dispatch(4))(torch.randn(3, 8)),
        ("must be at least the 8 experts of the TopKRouter", "got 4", "would be lost"),
    ),
    "groups of another number than experts": (
        lambda: fz.Sequential(fz.TopKRouter(8, 8, 2), fz.Dispatch(8), fz.GroupedLinear(4, 8, 8))(
            torch.randn(3, 8)
        ),
        ("must be the 8 experts of the Dispatch", "got 4", "num_groups of GroupedLinear"),
    ),
    "negative features": (
        lambda: fz.GroupedLinear(2, -8, 4),
        ("must be at least 1", "got -8", "in_features of GroupedLinear"),
    ),
    "a dtype of parameters": (
        lambda: fz.Bias(8, dtype=torch.int32),
        ("must be one of bfloat16, float16, float32, float64", "got torch.int32", "dtype of Bias"),
    ),
    "no features of a norm": (
        lambda: fz.LayerNorm((4, 0)),
        ("must be at least 1", "got 0", "normalized_shape of LayerNorm"),
    ),
    "eps": (
        lambda: fz.RMSNorm(8, eps=-1e-5),
        ("must not be negative", "got -1e-05", "eps of RMSNorm"),
    ),
    "no groups": (
        lambda: fz.GroupedLinear(0, 8, 8),
        ("must be at least 1", "got 0", "num_groups of GroupedLinear"),
    ),
    "glu_interleave_size": (
        lambda: fz.ScaledSwiGLU(glu_interleave_size=0),
        ("must be at least 1", "got 0", "glu_interleave_size of ScaledSwiGLU"),
    ),
    "limit": (
        lambda: fz.ScaledClampedQGeGLU(limit=0.0),
        ("must be positive", "got 0.0", "limit of ScaledClampedQGeGLU"),
    ),
    "recomputed activation": (
        lambda: fz.ScaledSwiGLU(activation_recompute_in_mlp=True),
        ("must be False in ScaledSwiGLU", "got True", "only ScaledSReLU takes it"),
    ),
    "beta1": (
        lambda: fz.SiTUGLU(beta1=0.0),
        ("must be finite and positive", "got 0.0", "beta1 of SiTUGLU"),
    ),
    "beta2": (
        lambda: fz.ScaledSiTUGLU(beta2=float("inf")),
        ("must be finite and positive", "got inf", "beta2 of ScaledSiTUGLU"),
    ),
    "limit of ClampedSwiGLU": (
        lambda: fz.ClampedSwiGLU(limit=-1.0),
        ("must be positive", "got -1.0", "limit of ClampedSwiGLU"),
    ),
    "features of RMSNorm": (
        lambda: fz.RMSNorm((4, 8))(torch.randn(3, 2, 8)),
        ("must end in the dimensions (4, 8)", "got shape (3, 2, 8)", "input of RMSNorm"),
    ),
    "too few dimensions for LayerNorm": (
        lambda: fz.LayerNorm((2, 8))(torch.randn(8)),
        ("must end in the dimensions (2, 8)", "got shape (8,)", "input of LayerNorm"),
    ),
    "a weight of a norm of another shape": (
        lambda: replaced(fz.RMSNorm(8), "weight", torch.ones(1))(torch.randn(3, 8)),
        ("weight of RMSNorm must have shape (8,)", "got (1,)"),
    ),
    "weight of a norm on another device": (
        lambda: fz.LayerNorm(8, device="meta")(torch.randn(3, 8)),
        ("must be on one device", "got cpu and meta", "move one of them"),
    ),
    "integer input of a norm": (
        lambda: fz.RMSNorm(4)(torch.ones(3, 4, dtype=torch.int64)),
        ("must be one of bfloat16, float16, float32, float64", "got torch.int64", "cast it"),
    ),
    "probability of Dropout": (
        lambda: fz.Dropout(1.5),
        ("must be at least 0 and at most 1", "got 1.5", "p of Dropout"),
    ),
    "a tensor-parallel mode": (
        lambda: fz.Linear(8, 8, tensor_parallel_mode="columns"),
        ("must be None", "got 'columns'", '"column" or "row"'),
    ),
    "main gradients without buffers": (
        lambda: fz.Linear(8, 8, accumulate_into_main_grad=True)(torch.randn(2, 8)).sum().backward(),
        ("main_grad of every weight", "got none", "set weight.main_grad"),
    ),
    "a fused op without its parts' parameters": (
        lambda: fz.Sequential(fz.FusedOperation([fz.BasicLinear(2, 2)]))(torch.randn(2, 2)),
        ("must hold the basic ops", "got the fused op", "made by the fuser"),
    ),
}
# what: (call, exception, the same)
OTHER_ERRORS = {
    "the block size of a gated unit for its first option": (
        lambda: fz.SwiGLU(32),
        TypeError,
        ("must be a bool", "got 32", "cache_quantized_input of SwiGLU"),
    ),
    "extra input that is None": (
        lambda: fz.ScaledSwiGLU()(torch.randn(3, 4), None),
        TypeError,
        ("must be tensors or lists of numbers", "got NoneType", "extra input 0"),
    ),
    "input that is no tensor": (
        lambda: fz.SiLU()([1.0, 2.0]),
        TypeError,
        ("must be a tensor", "got list", "input"),
    ),
    "op_kwargs beyond the last op": (
        lambda: fz.Sequential(fz.SiLU())(torch.randn(2), op_kwargs={4: {}}),
        IndexError,
        ("4", "out of range", "index"),
    ),
    "op_kwargs that are no mapping": (
        lambda: fz.Sequential(fz.SiLU())(torch.randn(2), op_kwargs=[{}]),
        TypeError,
        ("must map basic ops, or their indices", "got a list"),
    ),
    "op_kwargs of one op that are no mapping": (
        lambda: fz.Sequential(fz.SiLU())(torch.randn(2), op_kwargs={0: torch.empty(2)}),
        TypeError,
        ("must map basic ops, or their indices", "got a dict of ['Tensor']"),
    ),
    "what is no module": (
        lambda: fz.Sequential(fz.SiLU(), torch.relu),
        TypeError,
        ("must be given modules, one list of modules, or one dict", "got <built-in method relu"),
    ),
    "the class of an op": (
        lambda: fz.Sequential([fz.Linear(8, 8), fz.SiLU]),
        TypeError,
        ("must be given modules, one list of modules, or one dict", "got the class SiLU"),
    ),
    "a required rule as a string": (
        lambda: fz.Sequential(fz.SiLU(), require="linear_add"),
        TypeError,
        ("must be a list of rules' names", "got the string 'linear_add'"),
    ),
    "a ragged list": (
        lambda: grouped([[1], [2, 3]]),
        TypeError,
        ("must be tensors or lists of numbers", "got [[1], [2, 3]]"),
    ),
    "features that are no integer": (
        lambda: fz.Linear(8, 4.0),
        TypeError,
        ("must be an integer", "got 4.0", "out_features of BasicLinear"),
    ),
    "a recipe that is none": (
        lambda: fz.autocast(recipe="mxfp8"),
        TypeError,
        ("must be a recipe of fusible.recipes", "got 'mxfp8'", "pass recipe=MXFP8BlockScaling()"),
    ),
    "a function to keep a recipe for": (
        lambda: fz.keep_recipe(3),
        TypeError,
        ("takes a function or a module", "got 3"),
    ),
    "a rule that is none": (
        lambda: fz.register_rule(3),
        TypeError,
        ("must be made by fusible.extend.rule", "got 3"),
    ),
    "a fusion that is no function": (
        lambda: fz.register_forward_fusion(3),
        TypeError,
        ("must be a function func(ops, *, recipe) -> ops", "got 3"),
    ),
    "a norm whose bias was removed": (
        lambda: replaced(fz.LayerNorm(8), "bias", None)(torch.randn(3, 8)),
        AttributeError,
        ("bias of LayerNorm must be a tensor", "got None", "make an op without it"),
    ),
    "a bias of a linear without one": (
        lambda: replaced(fz.Linear(8, 8, bias=False), "bias", torch.ones(8)),
        TypeError,
        ("made with bias=False must be None", "got Parameter", "make it with bias=True"),
    ),
    "a collective without processes": (
        fz.AllReduce,
        RuntimeError,
        ("needs torch.distributed", "is not initialized", "init_process_group"),
    ),
    "an op that defines nothing": (
        lambda: fz.BasicOperation()(torch.randn(2)),
        TypeError,
        ("must define formula", "op_forward and op_backward", "BasicOperation"),
    ),
}
CASES = {what: (call, ValueError, parts) for what, (call, parts) in VALUE_ERRORS.items()}
CASES |= OTHER_ERRORS


@pytest.mark.parametrize(("call", "exception", "parts"), CASES.values(), ids=CASES)
def test_refused_with_a_message(call, exception, parts):
    with pytest.raises(exception) as error:
        call()
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("make", "call", "name", "value"),
    [
        (lambda: fz.ConstantScale(2.0), (torch.ones(2),), "scale", 3.0),
        (lambda: fz.Reshape((2, 1)), (torch.ones(2),), "shape", (1, 2)),
        (fz.SwiGLU, (torch.ones(4),), "glu_interleave_size", 1),
        (fz.ScaledClampedQGeGLU, (torch.ones(1, 4), torch.ones(1)), "limit", 3.0),
        (lambda: fz.BasicLinear(2, 2), (torch.ones(1, 2),), "in_features", 4),
    ],
)
def test_facts_changed_after_the_first_call(make, call, name, value):
    op = make()
    setattr(op, name, getattr(op, name))  # free before
    before = op(*call)
    with pytest.raises(RuntimeError, match=f"{name} of .* must be set before .* make a new op"):
        setattr(op, name, value)
    assert torch.equal(op(*call), before)


def test_checking_is_a_scope():
    # On the CPU sizes are checked in any case, so a device is imitated: its implementation called
    # as it runs there.
    from fusible.kernels.grouped import groups

    class OnDevice(torch.Tensor):
        """Says that it is not on the CPU."""

        @property
        def device(self):
            return torch.device("cuda", 0)

    def ends(sizes, rows):
        return groups.group_ends(torch.tensor(sizes).as_subclass(OnDevice), rows).tolist()

    assert ends([2, -1, 3], 4) == [2, 2, 4]  # clamped: no negative sizes, no more rows than given
    assert ends([5, 5], 4) == [4, 4]
    with fz.checking():
        with pytest.raises(ValueError, match="must not be negative, got -1 for group 1"):
            ends([2, -1, 3], 4)
        with pytest.raises(ValueError, match=re.escape("at most the 4 rows of the input, got 10")):
            ends([5, 5], 4)
        with fz.checking(False):
            assert ends([5, 5], 4) == [4, 4]
        with pytest.raises(ValueError, match="at most"):
            ends([5, 5], 4)
    assert ends([5, 5], 4) == [4, 4]


def test_errors_leave_the_module_usable():
    mlp = ref.grouped_mlp()
    x, splits, scales = ref.grouped_mlp_inputs()
    expected = mlp(x, splits, scales, splits)
    for bad in (
        (x, splits, scales),
        (x, -splits, scales, splits),
        (x[:2], splits, scales[:2], splits),
    ):
        with pytest.raises(ValueError, match="must"):
            mlp(*bad)
    assert torch.equal(mlp(x, splits, scales, splits), expected)


class Model(torch.nn.Module):
    """Ops in a model, two containers down."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [fz.Sequential(fz.Linear(8, 8), fz.SiLU(), fz.SwiGLU(), out) for out in self.last()]
        )

    @staticmethod
    def last():
        return fz.Linear(4, 8), fz.Linear(5, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("hooked", [False, True])
def test_errors_say_where_the_op_is(hooked):
    model = Model()
    if hooked:
        model.layers[1][3].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="must have 5 features") as caught:
        model(torch.randn(3, 8))
    (note,) = caught.value.__notes__
    assert note == "raised in Model.layers.1.3 (LinearBiasActivation), forward"
    assert "features" in str(caught.value)


class Fails(fz.BasicOperation):
    """Has no backward."""

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ + 1

    def op_backward(self, ctx, grad_output):
        raise RuntimeError("no backward")


def test_errors_of_a_backward_say_where_the_op_is():
    class Failing(Model):
        @staticmethod
        def last():
            return fz.Linear(4, 8), Fails()

    def note_of(module):
        y = module(torch.randn(3, 8, requires_grad=True))
        with pytest.raises(RuntimeError, match="no backward") as caught:
            y.sum().backward()
        (note,) = caught.value.__notes__
        return note

    saved = "backward, for whose basic ops the forward saved [0] tensors"
    model = Failing()
    assert note_of(model) == f"raised in Failing.layers.1.3 (Fails), {saved}"
    # A part of a model that was called by itself is named by itself.
    assert note_of(Failing().layers[1]) == f"raised in Sequential.3 (Fails), {saved}"
    assert note_of(Fails()) == f"raised in Fails (Fails), {saved}"


@pytest.mark.parametrize(
    "make",
    [
        fz.ConstantScale,
        fz.Dropout,
        lambda t: fz.ClampedSwiGLU(alpha=t),
        lambda t: fz.ScaledClampedQGeGLU(limit=t),
        lambda t: fz.SiTUGLU(beta1=t),
        lambda t: fz.ScaledSiTUGLU(beta2=t),
        lambda t: fz.LayerNorm(8, eps=t),
        lambda t: fz.L2Normalization(eps=t),
        lambda t: fz.TopKRouter(8, 4, 2, scaling_factor=t),
        lambda t: fz.Dispatch(4, capacity_factor=t),
    ],
)
@pytest.mark.parametrize("given", [torch.tensor(0.5, requires_grad=True), "0.5"])
def test_constants_are_numbers(make, given):
    with pytest.raises(TypeError, match=r"must be a number, a constant that is not trained, got"):
        make(given)
    assert make(0.5) is not None


def test_delayed_gradients_are_chosen_before_the_first_call():
    linear = fz.BasicLinear(8, 8)
    linear(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="delay_wgrad_compute of BasicLinear must be set before"):
        linear.delay_wgrad_compute = True


def test_a_buffer_for_an_op_that_takes_none():
    seq, y = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput()), torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"among none, got \['output'\]; copy the result: buffer"):
        seq(torch.randn(4, 8), y, op_kwargs={1: {"output": y}})


@pytest.mark.parametrize(
    "op", [fz.Linear(8, 4), fz.RMSNorm(8), fz.LayerNorm(8), fz.TopKRouter(8, 4, 2)], ids=type
)
def test_nested_tensors(op):
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"must be a tensor of rows, got a nested tensor; pass x"):
        op(x)
    op(x.values())


def test_a_bias_of_integers():
    with pytest.raises(ValueError, match=r"input of Bias must be one of .* got torch.int64; cast"):
        fz.Bias(4)(torch.ones(1, 4, dtype=torch.int64))
