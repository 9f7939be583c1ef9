"""Caches: everything that outlives a call is bounded, or grows with what is compiled alone."""

import ast
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import fusible as fz
from fusible.caches import keep
from fusible.fuser import run as runs
from fusible.fuser.tracing import WeakGroups
from fusible.kernels.runtime import workspaces
from fusible.ops import op as ops

SOURCES = Path(fz.__file__).parent

# What has no bound of its own, and what bounds it.
UNBOUNDED = {
    "fuser/context.py _NO_KWARGS": "empty, as nothing writes to it",
    "fuser/run.py _traced_names": "256 names, grown below",
    "fuser/target.py _cuda_targets": "devices",
    "versions.py has_triton": "no arguments",
    "kernels/runtime/cache.py _compile_seconds": "compiled kernels",
    "kernels/runtime/cache.py directory": "no arguments",
    "flops.py _formulas": "library ops",
    "library.py _implementations": "library ops",
    "kernels/runtime/gpu.py architecture": "devices",
    "kernels/runtime/gpu.py capability": "devices",
    "kernels/runtime/gpu.py has_cutlass": "no arguments",
    "kernels/runtime/gpu.py multiprocessors": "devices",
    "kernels/runtime/gpu.py runs_kernels": "devices",
    "kernels/runtime/launch.py load_kernel": "compiled kernels",
    "kernels/sm100/warmup.py _last_streams": "devices",
    "kernels/sm100/warmup.py _warm": "compiled kernels",
    "kernels/runtime/workspaces.py _capture_counters": "devices",
    "kernels/runtime/workspaces.py _captured": "weights in captured graphs, grown below",
    "kernels/runtime/workspaces.py _pointer_tables": "1024 tables (test_sm90_prepared.py)",
    "kernels/runtime/workspaces.py _stream_counters": "256 streams, grown below",
    "ops/operand_cache.py _copies": "stored weights that exist (test_sm90_fp8_stored.py)",
    "ops/peer_memory.py _captured": "sizes that a group's exchanges grew to, in captured graphs",
    "versions.py installed": "two packages",
    "versions.py sources_digest": "one digest",
}


def unbounded(tree):
    """Module-level containers that start empty, and functions that remember all their results."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            if any(d.endswith(("cache", "maxsize=None)")) for d in decorators):
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = ast.unparse(node.value)
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if value in ("{}", "[]") or value.endswith(("dict()", "set()", "list()", "Dict()")):
                yield from (ast.unparse(t) for t in targets if ast.unparse(t) != "__all__")


def test_whatever_has_no_bound_is_listed_with_what_bounds_it():
    found = {
        f"{path.relative_to(SOURCES).as_posix()} {name}"
        for path in SOURCES.rglob("*.py")
        for name in unbounded(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(UNBOUNDED)


def test_the_oldest_entry_makes_place():
    cache = {}
    for i in range(5):
        keep(cache, i, i, 3)
    keep(cache, 2, "again", 3)
    assert cache == {2: "again", 3: 3, 4: 4}


@pytest.fixture
def fast_collections():
    """The collector leaves alone what is alive before the test, as tests/conftest.py lets it."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("fast_collections")
def test_groups_without_objects_are_dropped():
    groups = WeakGroups()
    kept = type("Kept", (), {})()
    groups.add([type(kept)], kept)
    for _ in range(50):
        member = type("Dynamic", (), {})()
        groups.add([type(member)], member)
        del member
        gc.collect()
        assert len(groups._members) <= 3
    other = type(kept)()
    groups.add([type(kept)], other)
    assert [*groups.others([type(kept)], other)] == [kept]


def test_an_object_that_a_thread_adds_while_others_are_read():
    Member = type("Member", (), {})
    groups, added, members = WeakGroups(), Member(), [Member() for _ in range(3)]
    for member in members:
        groups.add([Member], member)
    alive = groups._members[id(Member),]
    thread = threading.Thread(target=groups.add, args=([Member], added))

    class Read(type(alive)):
        def __iter__(self):
            for n, member in enumerate(super().__iter__()):
                if n == 1 and not thread.ident:
                    thread.start()
                    thread.join(0.2)  # it waits for the lock
                yield member

    alive.__class__ = Read
    assert {*groups.others([Member], members[0])} == {*members[1:]}
    thread.join()
    assert {*groups.others([Member], members[0])} == {*members[1:], added}


@pytest.mark.usefixtures("fast_collections")
def test_classes_that_parametrizations_make_are_forgotten():
    fz.BasicLinear(2, 2)(torch.ones(2))
    before = len(ops._operations._members), len(runs._runs._members)
    for _ in range(20):
        linear = fz.BasicLinear(2, 2)
        nn.utils.parametrize.register_parametrization(linear, "weight", nn.Identity())
        linear(torch.ones(2)).sum().backward()
        alive = weakref.ref(linear)
        del linear
        gc.collect()
        assert alive() is None  # though its class, which is its own, refers to it
    after = len(ops._operations._members), len(runs._runs._members)
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_schedules_of_compiled_code_are_bounded_and_made_anew(monkeypatch):
    monkeypatch.setattr(runs, "MOST_PLANS", 2)
    monkeypatch.setattr(runs, "_traced_names", {})
    seq = fz.Sequential(fz.ConstantScale(2.0), fz.ReLU())
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    kinds = [(torch.float32, True), (torch.float32, False), (torch.float64, True)]
    (run,) = seq.parts()
    for dtype, grad in [*kinds, *kinds]:
        x = torch.tensor([-1.0, 3.0], dtype=dtype, requires_grad=grad)
        y = compiled(x)
        assert y.tolist() == [0, 6]
        if grad:
            assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 2]
        assert len(vars(run._traced)) <= 2
        assert len(runs._traced_names) <= 2


def test_counters_of_streams_are_bounded(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    for cache in ("_stream_counters", "_capture_counters"):
        monkeypatch.setattr(workspaces, cache, {})
    tensor = torch.tensor
    monkeypatch.setattr(torch, "zeros", lambda *_, device, dtype: tensor([0, 0], dtype=dtype))
    for stream in range(workspaces._MAX_STREAMS + 9):
        workspaces.zeroed_counter(stream % 2, stream)
    assert len(workspaces._stream_counters) == workspaces._MAX_STREAMS
    assert len(workspaces._capture_counters) == 2
    last = workspaces._stream_counters[stream % 2, stream]
    assert workspaces.zeroed_counter(stream % 2, stream) == last.data_ptr()


def test_captured_launches_of_many_graphs_have_counters_of_their_own(monkeypatch):
    capturing, made = [False], []
    name = "_cuda_isCurrentStreamCapturing"
    monkeypatch.setattr(torch._C, name, lambda: capturing[0], raising=False)
    for cache in ("_stream_counters", "_capture_counters"):
        monkeypatch.setattr(workspaces, cache, {})
    zeros = torch.zeros

    def on_cpu(*shape, device, dtype):
        made.append(shape)
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_cpu)
    workspaces.zeroed_counter(0, 0)
    capturing[0], allocated = True, len(made)
    launches = 70 * 100 * 9
    assert len({workspaces.zeroed_counter(0, 0) for _ in range(launches)}) == launches
    assert len(made) == allocated
