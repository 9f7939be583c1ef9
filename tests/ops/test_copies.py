"""Copies of modules that share attributes: replicas of DataParallel, copies of ``__dict__``."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference as ref
import torch
from torch import nn

import fusible as fz


class Scale(fz.BasicOperation):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(8))
        self.b = nn.Parameter(torch.randn(8))

    def formula(self, x, a, b):
        return x * a + b


MAKERS = {
    "Linear": lambda: fz.Linear(8, 8),
    "BasicLinear": lambda: fz.BasicLinear(8, 8),
    "GroupedLinear": lambda: fz.GroupedLinear(2, 8, 8),
    "LayerNorm": lambda: fz.LayerNorm(8),
    "TopKRouter": lambda: fz.TopKRouter(8, 4, 2, bias=True),
    "an own op": Scale,
    "Sequential": lambda: fz.Sequential(fz.Linear(8, 8), fz.SiLU(), Scale()),
    "nested": lambda: fz.Sequential(
        fz.RMSNorm(8), fz.Sequential(fz.Linear(8, 8), fz.GELU()), nn.Identity(), fz.Bias(8)
    ),
    "a model": lambda: nn.Sequential(nn.Linear(8, 8), fz.Sequential(fz.Linear(8, 8), fz.SiLU())),
}


def randomized(module):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape))
    return module


def extra_of(module):
    return ([2, 3],) if isinstance(module, fz.GroupedLinear) else ()


def output(module, x):
    y = module(x, *extra_of(module))
    return y[1] if isinstance(y, tuple) else y


def replicate(module, values):
    """What torch.nn.parallel.replicate makes, of these values of the parameters."""
    modules = list(module.modules())
    places = {m: i for i, m in enumerate(modules)}
    copies = [m._replicate_for_data_parallel() for m in modules]
    for made in copies:
        made._former_parameters = {}
    names = {id(p): name for name, p in module.named_parameters()}
    for m, made in zip(modules, copies, strict=True):
        for key, child in m._modules.items():
            made._modules[key] = None
            if child is not None:
                setattr(made, key, copies[places[child]])
        for key, p in m._parameters.items():
            if p is None:
                made._parameters[key] = None
            else:
                value = values[names[id(p)]]
                setattr(made, key, value)
                made._former_parameters[key] = value
    return copies[0]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("what", MAKERS)
def test_a_replica_computes_with_its_own_values(what, called):
    module, other = randomized(MAKERS[what]()), randomized(MAKERS[what]())
    x = torch.randn(5, 8)
    if called:
        output(module, x)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    # Not leaves, as what a broadcast gives.
    replica = replicate(module, {name: 1 * p for name, p in leaves.items()})
    y, expected = output(replica, x), output(other, x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn(y.shape)
    found = torch.autograd.grad((y * weights).sum(), list(leaves.values()))
    wanted = torch.autograd.grad((expected * weights).sum(), list(other.parameters()))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(output(replica, x), expected)
    assert not torch.equal(output(module, x), expected)


@pytest.mark.parametrize("what", MAKERS)
def test_replicas_in_threads(what):
    module = randomized(MAKERS[what]())
    x = torch.randn(5, 8)
    others = [randomized(MAKERS[what]()) for _ in range(4)]
    replicas = [replicate(module, dict(other.named_parameters())) for other in others]

    def call(replica):
        return [output(replica, x) for _ in range(3)][-1]

    with ThreadPoolExecutor(len(replicas)) as threads:
        found = list(threads.map(call, replicas))
    torch.testing.assert_close(found, [output(other, x) for other in others])


def of_attributes(module):
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    return made


@pytest.mark.parametrize("make", [copy.copy, of_attributes])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("what", ["Linear", "LayerNorm", "an own op"])
def test_a_shallow_copy_reads_its_own_parameters(what, called, make):
    module, other = randomized(MAKERS[what]()), randomized(MAKERS[what]())
    x = torch.randn(5, 8)
    if called:
        output(module, x)
    made = make(module)
    made._parameters = dict(other._parameters)
    torch.testing.assert_close(output(made, x), output(other, x))
    assert not torch.equal(output(module, x), output(other, x))


@pytest.mark.parametrize("make", [lambda module: module, copy.copy, of_attributes])
@pytest.mark.parametrize("wrap", [lambda module: module, fz.Sequential])
@pytest.mark.parametrize("what", ["Linear", "BasicLinear", "LayerNorm", "an own op"])
def test_parameters_are_replaced_after_a_call(what, wrap, make):
    module, other = randomized(MAKERS[what]()), randomized(MAKERS[what]())
    x = torch.randn(5, 8)
    output(module, x)
    made = make(module)
    call = wrap(made)
    output(call, x)
    made._parameters = dict(other._parameters)
    torch.testing.assert_close(output(call, x), output(other, x))
    for part, of in zip(made.basic_ops, other.basic_ops, strict=True):
        assert part._parameters.keys() == of._parameters.keys()
        assert all(part._parameters[name] is p for name, p in of._parameters.items())


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("what", ["Linear", "BasicLinear", "GroupedLinear"])
def test_a_copy_loads_and_is_copied_when_the_original_is_gone(what, stored):
    size = 32  # a block of the format
    makers = {
        "Linear": lambda: fz.Linear(size, size),
        "BasicLinear": lambda: fz.BasicLinear(size, size),
        "GroupedLinear": lambda: fz.GroupedLinear(2, size, size),
    }
    with fz.quantized_model_init(stored, recipe=fz.recipes.MXFP8BlockScaling()):
        module, other = makers[what](), makers[what]()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    made = copy.copy(module)
    made._parameters = {
        name: None if p is None else nn.Parameter(p.detach().clone())
        for name, p in module._parameters.items()
    }
    made.load_state_dict(other.state_dict())
    ref.assert_same_bits(module.state_dict(), before)
    del module
    gc.collect()
    made.load_state_dict(other.state_dict())
    found = copy.deepcopy(nn.Sequential(made))[0].state_dict()
    ref.assert_same_bits(found, other.state_dict())


def test_channels_of_a_shallow_copy_are_its_own():
    module = fz.MakeExtraOutput()
    made = copy.copy(module)
    made.set_extra_output_channel(0, "other", output_to_caller=False)
    x = torch.randn(2)
    torch.testing.assert_close(fz.Sequential(module)(x), (x, x))


@pytest.mark.parametrize("make", [copy.copy, of_attributes])
def test_a_shallow_copy_of_a_sequential_runs_its_own_ops(make):
    module = fz.Sequential(fz.Linear(8, 8), fz.SiLU())
    x = torch.randn(5, 8)
    module(x)
    made = make(module)
    made._modules = {"0": fz.Linear(8, 8), "1": fz.SiLU()}
    torch.testing.assert_close(made(x), nn.functional.silu(made[0](x)))


def test_compiled_code_of_a_module_runs_a_replica(fresh_compiler):
    module, other = randomized(fz.Linear(8, 8)), randomized(fz.Linear(8, 8))
    x = torch.randn(5, 8)
    call = torch.compile(lambda m: m(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(module), module(x))
    replica = replicate(module, dict(other.named_parameters()))
    torch.testing.assert_close(call(replica), other(x))


def test_parts_taken_out_of_a_linear_keep_its_parameters():
    made = fz.Sequential(*fz.Linear(8, 8).basic_ops)
    x = torch.randn(5, 8)
    expected = nn.functional.linear(x, made[0].weight, made[1].bias)
    torch.testing.assert_close(made(x), expected)
    assert len(list(made.parameters())) == 2


def test_a_linear_is_freed_when_it_is_dropped():
    linear = fz.Linear(8, 8)
    weight = weakref.ref(linear.weight)
    linear(torch.randn(2, 8))
    del linear
    assert weight() is None
