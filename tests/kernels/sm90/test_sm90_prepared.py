"""Launches over plain operands are those of the checked entries; nothing runs."""

import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from sm90_in_tile import in_tile
from sm90_launches import forget_launches, load_kernels, take_cpu_tensors

import fusible as fz
from fusible.fuser import run as fuser_run
from fusible.kernels.glu import Glu
from fusible.kernels.runtime import workspaces
from fusible.kernels.sm90 import checked_products, grouped_products, tiles
from fusible.testing import assume_target

SWIGLU = Glu()
QGEGLU = Glu("clamped_qgeglu", 32, 7.0, 1.702, 1.0)
OUTPUTS = {"out", "preact_out", "row_sums"}
ADDRESSES = (
    "a", "b", "preact", "out", "preact_out", "ends", "table", "bias", "scales", "preact_scales",
    "out_scales", "row_sums",
)  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """What kernels are started with, instead of starting them; tensors may be on the CPU."""
    made = []

    def load_kernel(path, what, _):
        if path == "grouped.vectors.TileSums":
            return lambda *_: None
        return lambda *arguments: made.append((*what, arguments))

    load_kernels(monkeypatch, load_kernel)
    take_cpu_tensors(monkeypatch)
    yield made
    forget_launches()


def equal(one, other):
    """Whether two launches agree in all but where new tensors lie."""
    (spec, arguments), (other_spec, other_arguments) = one, other
    changed = {
        ADDRESSES[i] if i < len(ADDRESSES) else i
        for i, (a, b) in enumerate(zip(arguments, other_arguments, strict=True))
        if a != b
    }
    return spec == other_spec and changed <= OUTPUTS


@pytest.mark.parametrize("sizes", [(8, 64, 64, 64), (3, 128, 640, 90), (4, 256, 384, 4000)])
@pytest.mark.parametrize("act", [SWIGLU, QGEGLU], ids=["swiglu", "qgeglu"])
@pytest.mark.parametrize("how", ["single", "separate", "transposed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_prepared_launches_are_the_checked_ones(launches, sizes, act, how, bias):
    groups, inner, outer, rows = sizes
    x, dy, preact = random(rows, inner), random(rows, outer), random(rows, 2 * inner)
    w, ends, scales = weights(groups, outer, inner, how), torch.zeros(groups).int(), random(rows)
    b = random(groups, outer) if bias else None
    row_scale = random(rows) if bias else None
    strides = (1, outer) if how == "transposed" else (inner, 1)
    it = products(groups, outer, inner, rows, strides)
    at = w[0].data_ptr()
    checked, dglu = checked_products, (dy, w, ends, preact, scales, act)
    pairs = (
        (it.forward(x, at, ends, b, row_scale),
         checked.grouped_mm(x, w, ends, b, row_scale, False)),
        (it.glu(x, at, ends, scales, act, b, True)[:2],
         checked.grouped_glu(x, w, ends, scales, act, b, True)),
        (it.glu(x, at, ends, scales, act, b, False)[:2],
         checked.grouped_glu(x, w, ends, scales, act, b, False)),
        (it.glu(x, at, ends, None, act, b, True)[:2],
         checked.grouped_glu(x, w, ends, None, act, b, True)),
        (it.forward(dy, at, ends, transpose_w=True),
         checked.grouped_mm(dy, w, ends, None, None, True)),
        (it.dglu(dy, at, ends, preact, scales, act), checked.grouped_dglu(*dglu)),
        (it.dglu(dy, at, ends, preact, scales, act, True),
         checked.grouped_dglu(*dglu, overwrite=True)),
        (it.wgrad(dy, x, ends), checked.grouped_wgrad(dy, x, ends)),
        (it.wgrad(x, dy, ends), checked.grouped_wgrad(x, dy, ends)),
    )  # fmt: skip
    assert len(launches) == 2 * len(pairs)
    for i, results in enumerate(pairs):
        assert equal(launches[2 * i], launches[2 * i + 1]), i
        for one, other in zip(*map(_as_tuple, results), strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype


@pytest.mark.parametrize(
    ("kind", "tile"),
    [(kind, tile) for kind, choices in tiles.TILES.items() for tile in choices],
    ids=str,
)
def test_a_given_tile_is_that_of_every_product(launches, kind, tile):
    """What the tests on a GPU and the benchmark of tiles rely on."""
    x, dy, ends, scales = random(8, 64), random(8, 128), torch.zeros(2).int(), random(8)
    w, preact = [random(2, 128, 64)], random(8, 128)
    ops = checked_products

    def call():
        launches.clear()
        if kind == "store":
            ops.grouped_mm(x, w, ends)
        elif kind == "glu":
            ops.grouped_glu(x, w, ends, scales, SWIGLU)
        elif kind == "dglu":
            ops.grouped_dglu(dy, w, ends, preact, scales, SWIGLU)
        else:
            ops.grouped_wgrad_([torch.zeros(2, 128, 64)], dy, x, ends)
        return launches[0][0].tile

    chosen = call()
    for given in (tile, tile._replace(dynamic=not tile.dynamic)):
        with in_tile(given):
            assert call() == given
    with in_tile(None):
        assert call() == chosen
    assert call() == chosen


def random(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


def products(groups, columns, depth, rows, strides=None):
    """The products with a weight in one piece of memory."""
    strides = (columns * depth, *(strides or (depth, 1)))
    for_rows = tiles.rows_bucket(rows, groups)
    return grouped_products.cached_products(
        torch.device("cpu"), torch.bfloat16, (groups, columns, depth), strides, False, for_rows
    )


def weights(groups, rows, columns, how):
    if how == "single":
        return [random(groups, rows, columns)]
    if how == "separate":
        return [torch.nn.Parameter(one) for one in random(groups, rows, columns).unbind(0)]
    return [random(groups, columns, rows).mT]


def _as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("whole", [True, False], ids=["mlp", "linear"])
def test_one_node_launches_what_the_op_does(launches, monkeypatch, single, whole):
    options = {"bias": False, "single_grouped_weight": single, "dtype": torch.bfloat16}
    linear, act = fz.GroupedLinear(2, 32, 64, **options), fz.ScaledSwiGLU()
    rest = (act, fz.GroupedLinear(2, 32, 32, **options)) if whole else ()
    model = fz.Sequential(linear, *rest)
    x, splits = random(16, 32).requires_grad_(), torch.tensor([9, 7])
    given = (x, splits, torch.rand(16, requires_grad=True), splits) if whole else (x, splits)

    def step():
        with assume_target("sm90"):
            y = model(*given)
            y.backward(torch.ones_like(y))
        made = [(spec, *arguments[len(ADDRESSES) + 1 :]) for spec, arguments in launches]
        launches.clear()
        return type(y.grad_fn).__name__, made

    node, direct = step()
    monkeypatch.setattr(fuser_run.Run, "_fast_path", lambda *_: None)
    model[0]._run, model._captured, model._known = None, None, ()
    other, general = step()
    assert (node, other) == ("_FastPathFunctionBackward", "RunFunctionBackward")
    # FC1's two gradients, which need nothing of each other, come in either order.
    assert sorted(map(repr, direct)) == sorted(map(repr, general))
    assert len(direct) == (7 if whole else 4)


def test_scales_of_no_known_dtype_are_refused(launches):
    it, w = products(2, 64, 32, rows=16), weights(2, 64, 32, "single")
    scales = torch.ones(16, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"scales must be a float tensor, got torch\.float8_e5m2"):
        it.glu(random(16, 32), w[0].data_ptr(), torch.zeros(2).int(), scales, SWIGLU)


# --- tables of separate weights' addresses --------------------------------------------------------


@pytest.fixture
def on_stream(monkeypatch):
    """Makes streams current, which note what they wait for, instead of CUDA's."""
    state = SimpleNamespace(current=None, capturing=False)

    def stream(name, capturing=False):
        state.current, state.capturing = SimpleNamespace(name=name, waits=[], reads=[]), capturing
        state.current.wait_event = state.current.waits.append
        return state.current

    event = lambda: SimpleNamespace(record=lambda stream: None)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: state.current.name,
                        raising=False)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: state.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: stream.reads.append(t))
    for kept in ("_pointer_tables", "_captured"):
        monkeypatch.setattr(workspaces, kept, type(getattr(workspaces, kept))())
    return stream


def test_a_stream_waits_for_a_table_that_another_copies(on_stream):
    cpu, pointers = torch.device("cpu"), (16, 32, 96)
    first = on_stream(1)
    table = workspaces.pointer_table(pointers, cpu)
    assert table.tolist() == [16, 32, 96]
    assert workspaces.pointer_table(pointers, cpu) is table
    assert first.waits == []
    second = on_stream(2)
    assert workspaces.pointer_table(pointers, cpu) is table
    assert len(second.waits) == 1
    assert second.reads == [table]
    captured = on_stream(3, capturing=True)  # an event from outside would break the capture
    assert workspaces.pointer_table(pointers, cpu) is table
    assert captured.waits == []


def test_tables_of_a_graph_live_as_long_as_it_may(on_stream):
    """However many others there have been since its capture."""
    cpu = torch.device("cpu")
    on_stream(1)
    table = weakref.ref(workspaces.pointer_table((16, 32), cpu))
    forgotten = weakref.ref(workspaces.pointer_table((16, 48), cpu))
    on_stream(2, capturing=True)
    workspaces.pointer_table((16, 32), cpu)
    on_stream(1)
    for i in range(workspaces._MAX_POINTER_TABLES + 1):
        workspaces.pointer_table((i,), cpu)
    assert table() is not None
    assert forgotten() is None
    assert len(workspaces._pointer_tables) == workspaces._MAX_POINTER_TABLES
    on_stream(2, capturing=True)
    assert workspaces.pointer_table((16, 32), cpu) is table()


def test_captures_of_the_same_weights_keep_one_table(on_stream):
    cpu = torch.device("cpu")
    for _ in range(5):  # unknown before the capture, and known
        on_stream(2, capturing=True)
        assert workspaces.pointer_table((16, 64), cpu).tolist() == [16, 64]
        on_stream(1)
        workspaces.pointer_table((16, 64), cpu)
    assert len(workspaces._captured) == 1


def test_threads_that_need_tables_at_once(on_stream, monkeypatch):
    """Each gets its own pointers' table, while others drop it from the full cache."""
    monkeypatch.setattr(workspaces, "_MAX_POINTER_TABLES", 1)
    on_stream(1)
    failed = []

    def run(i):
        try:
            for k in range(2000):
                pointers = ((i + k) % 3, 7)
                assert workspaces.pointer_table(pointers, torch.device("cpu")).tolist() == [
                    *pointers
                ]
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert len(workspaces._pointer_tables) == 1
