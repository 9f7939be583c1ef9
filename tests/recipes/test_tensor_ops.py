"""Operations on quantized tensors give what they give on ordinary tensors of the same values."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from number_formats import KINDS
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import fusible as fz
from fusible import recipes
from fusible.recipes.tensor import QuantizedTensor

INDEX = torch.tensor([3, 0, 2])


def other(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


SQUARE, ROWS, VECTOR = other(64, 64), other(8, 64), other(64)
MASK = SQUARE > 0
NAMES = """
    abs acos acosh angle asin asinh atan atanh ceil conj_physical cos cosh deg2rad det diag
    diagonal digamma erf erfc exp exp2 expm1 fliplr flipud floor frac isfinite isinf isnan
    isneginf isposinf lgamma log10 log1p log2 logdet logit matrix_exp nan_to_num neg negative
    positive rad2deg ravel reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh
    sqrt square t tan tanh trace tril triu trunc sum mean std var prod amax amin max min
    argmax argmin median nanmean nansum norm all any count_nonzero flatten numel double int
    bool contiguous sort argsort aminmax
"""
BEFORE_2_13 = torch.__version__ < "2.13"
if BEFORE_2_13:
    NAMES = NAMES.replace(" aminmax", "")  # whose derivative PyTorch does not have
METHODS = {name: (lambda t, name=name: getattr(t, name)()) for name in NAMES.split()}
OPS = METHODS | {
    "@": lambda t: t @ SQUARE,
    "r@": lambda t: ROWS @ t,
    "mm": lambda t: torch.mm(ROWS, t),
    "mv": lambda t: t.mv(VECTOR),
    "vecmat": lambda t: VECTOR @ t,
    "addmm": lambda t: torch.addmm(VECTOR, ROWS, t, alpha=2),
    "bmm": lambda t: torch.bmm(t[None], SQUARE[None]),
    "baddbmm": lambda t: torch.baddbmm(SQUARE[None], t[None], SQUARE[None]),
    "einsum": lambda t: torch.einsum("ij,bj->bi", t, ROWS),
    "tensordot": lambda t: torch.tensordot(ROWS, t, 1),
    "outer": lambda t: torch.outer(t[0], VECTOR),
    "kron": lambda t: torch.kron(t[:2, :2], t[2:4, 2:4]),
    "linear": lambda t: F.linear(ROWS, t, VECTOR),
    "bilinear": lambda t: F.bilinear(ROWS, ROWS, t[None], VECTOR[:1]),
    "embedding": lambda t: F.embedding(INDEX, t),
    "conv1d": lambda t: F.conv1d(SQUARE[None], t[:, :, None]),
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(0),
    "cross_entropy": lambda t: F.cross_entropy(t[:3], INDEX),
    "mse": lambda t: F.mse_loss(t, SQUARE),
    "layer_norm": lambda t: F.layer_norm(t, (64,), VECTOR),
    "rms_norm": lambda t: F.rms_norm(t, (64,)),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "normalize": F.normalize,
    "pad": lambda t: F.pad(t, (1, 2)),
    "attention": lambda t: F.scaled_dot_product_attention(ROWS[None], t[None], SQUARE[None]),
    "pairwise": lambda t: F.pairwise_distance(t, SQUARE),
    "cosine": lambda t: F.cosine_similarity(t, SQUARE),
    "cdist": lambda t: torch.cdist(ROWS, t),
    "+": lambda t: t + 1,
    "r-": lambda t: 1 - t,
    "*": lambda t: t * SQUARE,
    "/": lambda t: t / 3,
    "//": lambda t: t.detach() // 3,
    "%": lambda t: t % 2,
    "**": lambda t: t**2,
    ">": lambda t: t > SQUARE,
    "==": lambda t: t == t.clone(),
    "where": lambda t: torch.where(MASK, t, SQUARE),
    "lerp": lambda t: t.lerp(SQUARE, 0.3),
    "addcmul": lambda t: t.addcmul(SQUARE, t),
    "clamp": lambda t: t.clamp(-1, 1),
    "maximum": lambda t: torch.maximum(t, SQUARE),
    "atan2": lambda t: t.atan2(SQUARE),
    "fmod": lambda t: t.fmod(0.5),
    "copysign": lambda t: t.copysign(SQUARE),
    "isclose": lambda t: t.isclose(t),
    "sum of rows": lambda t: t.sum(0),
    "mean of columns": lambda t: t.mean(1, keepdim=True),
    "max of rows": lambda t: t.max(0),
    "topk": lambda t: t.topk(3),
    "kthvalue": lambda t: t.kthvalue(3),
    "quantile": lambda t: t.quantile(0.5, 1),
    "histc": lambda t: t.histc(4),
    "cumsum": lambda t: t.cumsum(1),
    "cumprod": lambda t: t[:, :4].cumprod(1),
    "cummax": lambda t: t.cummax(0),
    "logcumsumexp": lambda t: t.logcumsumexp(1),
    "logsumexp": lambda t: t.logsumexp(1),
    "diff": torch.diff,
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "qr": lambda t: torch.linalg.qr(t)[1].abs(),
    "svdvals": torch.linalg.svdvals,
    "inv": torch.linalg.inv,
    "solve": lambda t: torch.linalg.solve(t, SQUARE),
    "pinv": torch.linalg.pinv,
    "cov": torch.cov,
    "t[3]": lambda t: t[3],
    "t[-1, 2]": lambda t: t[-1, 2],
    "t[2:5]": lambda t: t[2:5],
    "t[:, ::2]": lambda t: t[:, ::2],
    "t[..., None]": lambda t: t[..., None],
    "t[index]": lambda t: t[INDEX],
    "index_select": lambda t: t.index_select(1, INDEX),
    "gather": lambda t: t.gather(0, INDEX[None]),
    "take": lambda t: t.take(INDEX),
    "take_along_dim": lambda t: t.take_along_dim(SQUARE.argsort(0), 0),
    "narrow": lambda t: t.narrow(1, 3, 5),
    "unbind": lambda t: t.unbind(0),
    "iteration": lambda t: list(t)[:3],
    "chunk": lambda t: t.chunk(3),
    "split": lambda t: t.split([10, 54], 1),
    "tensor_split": lambda t: t.tensor_split(3),
    "cat": lambda t: torch.cat((t, SQUARE)),
    "stack": lambda t: torch.stack((t, t)),
    "hstack": lambda t: torch.hstack((SQUARE, t)),
    "block_diag": lambda t: torch.block_diag(t, t),
    "view": lambda t: t.view(32, 128),
    "view of a dtype": lambda t: t.view(torch.int32),
    "reshape": lambda t: t.reshape(16, 4, 64),
    "unflatten": lambda t: t.unflatten(1, (2, 32)),
    "permute": lambda t: t.permute(1, 0),
    "mT": lambda t: t.mT,
    "movedim": lambda t: t[None].movedim(0, 2),
    "squeeze": lambda t: t[:1].squeeze(0),
    "expand": lambda t: t.expand(2, 64, 64),
    "repeat": lambda t: t.repeat(2, 1),
    "repeat_interleave": lambda t: t.repeat_interleave(2, 0),
    "tile": lambda t: t.tile(2),
    "roll": lambda t: t.roll(3),
    "flip": lambda t: t.flip(0),
    "rot90": lambda t: t.rot90(),
    "unfold": lambda t: t.unfold(0, 4, 4),
    "as_strided": lambda t: t.as_strided((5, 5), (64, 2), 3),
    "masked_fill": lambda t: t.masked_fill(MASK, 0.5),
    "index_add": lambda t: t.index_add(0, INDEX, SQUARE[:3]),
    "scatter": lambda t: t.scatter(0, INDEX[None], SQUARE[:1]),
    "select_scatter": lambda t: t.select_scatter(VECTOR, 0, 1),
    "slice_scatter": lambda t: t.slice_scatter(ROWS, 0, 0, 8),
    "diagonal_scatter": lambda t: t.diagonal_scatter(VECTOR),
    "bucketize": lambda t: torch.bucketize(t, torch.tensor([-1.0, 0.0, 1.0])),
    "to float64": lambda t: t.to(torch.float64),
    "to int": lambda t: t.int(),
    "complex": lambda t: torch.complex(t, SQUARE),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda t: torch.full_like(t, 3, dtype=torch.int32),
    "new_zeros": lambda t: t.new_zeros(3),
    "new_ones": lambda t: t.new_ones(2, 2),
    "new_full": lambda t: t.new_full((2,), 3.0),
    "new_tensor": lambda t: t.new_tensor([1.0]),
    "new_empty": lambda t: t.new_empty((2, 3)).zero_(),
    "new_empty_strided": lambda t: t.new_empty_strided((2, 3), (1, 2)).zero_(),
    "empty_like": lambda t: torch.empty_like(t).zero_(),
    "into an ordinary one": lambda t: torch.zeros(64, 64).add_(t),
    "copied into": lambda t: torch.zeros(64, 64).copy_(t),
    "out=": lambda t: torch.mul(t.detach(), 2, out=torch.empty(64, 64)),
    "_foreach_add": lambda t: torch._foreach_add([t, SQUARE], 1),
    "_foreach_norm": lambda t: torch._foreach_norm([t, t]),
    "checkpoint": lambda t: torch.utils.checkpoint.checkpoint(torch.tanh, t, use_reentrant=False),
}
DYNAMIC = {
    "nonzero": torch.nonzero,
    "masked_select": lambda t: t.masked_select(MASK),
    "t[mask]": lambda t: t[MASK],
    "unique": lambda t: t.detach().unique(),
    "equal": lambda t: torch.tensor(torch.equal(t, t)),
    "allclose": lambda t: torch.tensor(t.allclose(t)),
    "item": lambda t: torch.tensor(t[1, 2].item()),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "numpy": lambda t: torch.tensor(t.detach().numpy()),
    "bincount": lambda t: t.abs().int().flatten().bincount(),
}
"""What is of a size, or on the host, that a graph does not know."""
WRITES = {
    "add_": lambda t: t.add_(1),
    "mul_ by itself": lambda t: t.mul_(t),
    "addmm_": lambda t: t.addmm_(SQUARE, SQUARE, alpha=0.1),
    "copy_": lambda t: t.copy_(SQUARE),
    "copy_ that broadcasts": lambda t: t.copy_(VECTOR),
    "copy_ of a number": lambda t: t.copy_(0.7),
    "through squeeze": lambda t: (t.squeeze().mul_(2), t)[1],
    "through expand": lambda t: (t.expand_as(SQUARE).mul_(2), t)[1],
    "fill_": lambda t: t.fill_(0.3),
    "fill_diagonal_": lambda t: t.fill_diagonal_(9.0),
    "zero_": lambda t: t.zero_(),
    "t_": lambda t: t.t_(),
    "tril_": lambda t: t.tril_(),
    "clamp_": lambda t: t.clamp_(-0.5, 0.5),
    "index_copy_": lambda t: t.index_copy_(0, INDEX, SQUARE[:3]),
    "index_add_": lambda t: t.index_add_(0, INDEX, SQUARE[:3]),
    "scatter_": lambda t: t.scatter_(0, INDEX[None], 2.0),
    "masked_fill_": lambda t: t.masked_fill_(MASK, 0.5),
    "masked_scatter_": lambda t: t.masked_scatter_(MASK, SQUARE),
    "index_put_": lambda t: t.index_put_((INDEX,), VECTOR),
    "out=": lambda t: torch.mm(SQUARE, SQUARE, out=t),
    "lerp_": lambda t: t.lerp_(SQUARE, 0.3),
    "addcdiv_": lambda t: t.addcdiv_(SQUARE, SQUARE.abs() + 1),
    "sort, out=": lambda t: torch.sort(SQUARE, out=(t, torch.empty(64, 64, dtype=torch.int64)))[0],
}


def tensor(kind="mxfp8"):
    fmt = KINDS[kind].format("weight") if kind in KINDS else None
    return QuantizedTensor.quantize(SQUARE * 0.9, fmt, columnwise=True)


SELF = "contiguous", "positive", "conj_physical"
"""What PyTorch defines to be the tensor itself."""


def checked_pairs(got, want):
    """Corresponding tensors of two results, which are alike in everything."""
    pairs = list(zip(*map(pytree.tree_leaves, (got, want)), strict=True))
    for g, w in pairs:
        if not isinstance(w, torch.Tensor):
            assert g == w
            continue
        values = g.dequantize() if isinstance(g, QuantizedTensor) else g
        assert (values.dtype, values.shape) == (w.dtype, w.shape)
        assert values.requires_grad == w.requires_grad
        torch.testing.assert_close(values, w, equal_nan=True)
    return [(g, w) for g, w in pairs if isinstance(w, torch.Tensor)]


@pytest.mark.parametrize("name", [*OPS, *DYNAMIC])
def test_values_and_gradients_are_those_of_an_ordinary_tensor(name):
    function = (OPS | DYNAMIC)[name]
    leaf = nn.Parameter(tensor())
    plain = nn.Parameter(leaf.dequantize().detach())
    pairs = checked_pairs(function(leaf), function(plain))
    kept = name in SELF or name in ("ravel", "flatten")
    assert kept or not any(isinstance(g, QuantizedTensor) for g, _ in pairs)
    outputs = [(g, w) for g, w in pairs if w.requires_grad and name not in SELF]
    # Of equal elements, torch 2.14 takes another one of a subclass than of an ordinary tensor.
    if outputs and not (name == "quantile" and torch.__version__ >= "2.14"):
        weights = [torch.full(w.shape, 0.5, dtype=w.dtype) for _, w in outputs]
        torch.autograd.backward([w for _, w in outputs], weights)
        torch.autograd.backward([g for g, _ in outputs], weights)
        assert type(leaf.grad) is torch.Tensor
        torch.testing.assert_close(leaf.grad, plain.grad, equal_nan=True)
    assert torch.equal(leaf.dequantize(), tensor().dequantize())


@pytest.mark.parametrize("part", range(4))
def test_compiled_in_one_graph(part):
    # PyTorch does not compile the covariance of any tensor, nor, before 2.13, these two.
    skipped = ["checkpoint", "cov", *SELF, *(["equal", "quantile"] if BEFORE_2_13 else [])]
    functions = [f for name, f in list(OPS.items())[part::4] if name not in skipped]

    def run(t):
        return [f(t) for f in functions]

    q = tensor()
    torch._dynamo.reset()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(q)
    assert checked_pairs(got, run(q.dequantize()))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_quantized_and_return_the_tensor(name, kind):
    q = tensor(kind)
    plain, pointer = q.dequantize(), q.rowwise_data.data_ptr()
    assert WRITES[name](q) is q
    WRITES[name](plain)
    assert q.rowwise_data.data_ptr() == pointer
    want = q.stored_alike(plain)
    for columnwise in (False, True):
        got = q.dequantize(columnwise=columnwise)
        assert torch.equal(got, want.dequantize(columnwise=columnwise))


def test_diagonal_with_history():
    """The gradient of what a diagonal had is zero; a tall matrix may have it wrap around."""
    leaf = nn.Parameter(fz.recipes.MXFP8Quantizer()(other(9, 4)))
    plain = nn.Parameter(leaf.dequantize().detach())
    results = [t.clone().fill_diagonal_(0.5, wrap=True) for t in (leaf, plain)]
    for result in results:
        (3 * result).sum().backward()
    assert torch.equal(results[0].dequantize(), leaf.stored_alike(results[1]).dequantize())
    assert torch.equal(leaf.grad, plain.grad)
    assert not plain.grad.all()


def test_views_of_other_values_are_copies():
    q = tensor()
    assert torch.equal(torch._neg_view(q).resolve_neg(), -q.dequantize())


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
def test_shapes_that_change_in_place(kind):
    def change(t):
        t.unsqueeze_(0)
        t.mul_(2)
        t.squeeze_(0).add_(1)
        t.unsqueeze_(0).unsqueeze_(0)
        return t.squeeze_()[3] + 1

    q, out_of_place = tensor(kind), tensor(kind)
    pointer, shape = q.rowwise_data.data_ptr(), q.shape
    got = change(q)
    out_of_place.mul_(2).add_(1)
    assert torch.equal(got, out_of_place[3] + 1)
    assert torch.equal(q.dequantize(), out_of_place.dequantize())
    assert (q.shape, q.rowwise_data.data_ptr()) == (shape, pointer)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("none", "nvfp4")])
def test_a_single_value_changes_to_no_dimensions_and_back(kind):
    q = QuantizedTensor.quantize(torch.full((1, 1), 3.0), KINDS[kind].format("weight"))
    assert q.squeeze_().shape == ()
    assert q.dequantize() == q.view(()).dequantize() == q + 0 == 3
    q.copy_(torch.tensor(2.0))
    q.unsqueeze_(0).unsqueeze_(0)
    assert torch.equal(q.dequantize(), torch.full((1, 1), 2.0))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("t_", ()),
        ("transpose_", (0, 1)),
        ("swapaxes_", (0, 1)),
        ("unsqueeze_", (2,)),
        ("resize_", ((16, 32),)),
        ("as_strided_", ((8, 32), (32, 1))),
    ],
)
def test_shapes_that_cannot_change_in_place(name, arguments):
    q = QuantizedTensor.quantize(SQUARE[:, :32], KINDS["mxfp8"].format("weight"))
    before = q.dequantize()
    called = "transpose" if name == "swapaxes_" else name
    with pytest.raises(ValueError, match=f"{called}.* must keep what is stored.*use an operation"):
        getattr(q, name)(*arguments)
    assert q.shape == (64, 32)
    assert torch.equal(q.dequantize(), before)


TENSORS = {
    "tensor": tensor,
    "view": lambda: tensor()[3:9],
    "groups": lambda: recipes.group_quantize(
        SQUARE, recipes.MXFP8Quantizer(), 2, torch.tensor([40, 24])
    ),
}


@pytest.mark.filterwarnings("ignore:An output with one or more")
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_an_output_of_another_shape_is_refused_and_stays(make):
    q = make()
    before, shape = q.copied_values(), q.shape
    with pytest.raises(ValueError, match=r"out of aten.add.out must have the shape"):
        torch.add(torch.ones(3, 3), 1, out=q)
    assert q.shape == shape
    assert torch.equal(q.copied_values(), before)
    assert torch.equal(q + 0, before)


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_what_reads_memory_gets_values(make):
    """PyTorch reads and writes the memory of a subclass itself in these, past all dispatch."""
    q = make()
    before = q.copied_values()
    for exchanged in (torch.from_dlpack(q), torch.from_numpy(np.from_dlpack(q).copy())):
        assert torch.equal(exchanged, before)
    with pytest.raises(BufferError, match="copy must be None or True"):
        torch.from_dlpack(q, copy=False)
    assert f"{q[0, 0]:.4f}" == f"{before[0, 0]:.4f}"
    assert q.apply_(lambda value: 2 * value) is q
    assert torch.equal(q.copied_values(), 2 * before)
    with pytest.raises(RuntimeError, match="map2_ is not supported for tensor subclasses"):
        q.map2_(q, before, lambda value, x, y: x - y)
    assert torch.equal(q.copied_values(), 2 * before)


@pytest.mark.parametrize("make", [tensor, TENSORS["groups"]], ids=["tensor", "groups"])
def test_what_reads_memory_past_python_is_an_error(make):
    """It read address 0, which ends the process."""
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(make())


def test_files_are_loaded_as_pytorch_does_by_default(tmp_path):
    for made in (tensor(), nn.Parameter(tensor()), TENSORS["groups"]()):
        torch.save({"weight": made}, tmp_path / "file")
        loaded = torch.load(tmp_path / "file")["weight"]
        assert type(loaded) is type(made)
        assert isinstance(loaded, nn.Parameter) == isinstance(made, nn.Parameter)
        assert torch.equal(loaded.dequantize(), made.dequantize())


def test_a_file_whose_pieces_do_not_fit_is_refused(tmp_path):
    damaged = tensor()
    damaged.store(damaged.pieces() | {"scale_inv": damaged.scale_inv[:32]})
    torch.save(damaged, tmp_path / "file")
    with pytest.raises(ValueError, match=r"scales and tensor scales of .* must be of shape"):
        torch.load(tmp_path / "file")


@pytest.mark.parametrize(
    "view", [lambda t: t[3], lambda t: t[32:40], lambda t: t.t(), lambda t: t.view(-1)[:3]]
)
def test_views_compiled_for_any_size(view):
    compiled = torch.compile(lambda t: view(t) * 2, fullgraph=True, backend="aot_eager")
    for rows in (64, 96, 160):  # the second one makes sizes symbolic
        q = recipes.MXFP8Quantizer()(other(rows, 64))
        assert torch.equal(compiled(q), view(q.dequantize()) * 2)


VALUES_AS_PLACES = {
    "narrow": lambda t, i: t.narrow(0, i, 2),
    "narrow rows": lambda t, i: t.narrow(1, i, 2),
    "to": lambda t, i: t[: i.item()],
    "from": lambda t, i: t[i.item() :],
    "columns": lambda t, i: t[..., : i.item()],
    "expand": lambda t, i: t[:1].expand(i.item() + 2, -1, -1),
    "of a view": lambda t, i: t[1:].narrow(0, i, 1),
}


@pytest.mark.parametrize("name", VALUES_AS_PLACES)
def test_compiled_slices_whose_places_are_values(name):
    def function(t, i):
        return VALUES_AS_PLACES[name](t, i) * 2

    q, i = recipes.MXFP8Quantizer()(other(4, 6, 32)), torch.tensor(1)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        result = torch.compile(function, fullgraph=True, backend="aot_eager")(q, i)
    assert torch.equal(result, function(q.dequantize(), i))


FORWARD_MODE = {
    "a product": lambda t: t * SQUARE,
    "a slice": lambda t: t[32:] * SQUARE[32:],
    "parts": lambda t: torch.cat([part.sin() for part in t.split(32)]),
    "a copy": lambda t: t.clone() * 3,
    "values": lambda t: (t if type(t) is torch.Tensor else t.dequantize()) @ SQUARE,
    "a view": lambda t: t.view(2, 32, 64) ** 2,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own use of it
@pytest.mark.parametrize("name", FORWARD_MODE)
@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_forward_mode_has_the_tangents_of_an_ordinary_tensor(name, kind):
    quantizer = recipes.Quantizer(KINDS[kind].format("input"))
    q, function = quantizer(SQUARE), FORWARD_MODE[name]
    ordinary = q.dequantize()
    tangents = []
    with forward_ad.dual_level():
        for t in (q, ordinary):
            dual = function(forward_ad.make_dual(t, SQUARE.clone()))
            tangents.append(forward_ad.unpack_dual(dual))
    for made, expected in zip(*tangents, strict=True):
        torch.testing.assert_close(made, expected)
    transformed = [torch.func.jvp(function, (t,), (SQUARE,)) for t in (q, ordinary)]
    torch.testing.assert_close(*transformed)


def test_a_view_that_is_written_shows_it_in_the_tensor():
    q = tensor()
    q[3].apply_(lambda value: 1.5)
    assert torch.equal(q[3] + 0, torch.full((64,), 1.5))


@pytest.mark.parametrize("activation", [F.silu, F.mish])  # with derivatives made of others, too
def test_derivatives_are_rounded_once(activation):
    leaf = nn.Parameter(recipes.MXFP8Quantizer()(SQUARE.bfloat16()))
    plain = nn.Parameter(leaf.detach().dequantize())
    for t in (leaf, plain):
        activation(t).backward(SQUARE.T.bfloat16())
    assert torch.equal(leaf.grad, plain.grad)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_backward_of_a_sparse_product():
    leaf = nn.Parameter(tensor())
    plain = nn.Parameter(leaf.detach().dequantize())
    for dense in (leaf, plain):
        torch.sparse.mm((SQUARE * MASK).to_sparse_csr(), dense, "amax").mul(SQUARE).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_compiled_writes():
    names = [name for name in WRITES if name not in ("t_", "out=", "sort, out=")]
    eager, compiled = tensor(), tensor()

    def some(t):
        for name in names:
            WRITES[name](t)
        t[3] = 0.5
        t[:, 2] = 1.0
        return t

    torch._dynamo.reset()
    assert torch.equal(
        torch.compile(some, fullgraph=True, backend="aot_eager")(compiled).dequantize(),
        some(eager).dequantize(),
    )
    assert torch.equal(compiled.dequantize(), eager.dequantize())


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (100,), (3, 5), (2, 0), (0,), (0, 64), (2, 0, 64), (0, 64, 64)]
)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
def test_any_shape_is_quantized(shape, kind):
    """One-dimensional tensors are one row; the last block, or byte, may be short."""
    x = other(*shape)
    fmt = KINDS[kind].format("input")
    q = fz.recipes.Quantizer(fmt)(x)
    assert (q.shape, q.dtype) == (x.shape, x.dtype)
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    padded = F.pad(rows, (0, -rows.shape[-1] % 128))
    for columnwise in (False, True):
        want = QuantizedTensor.quantize(padded, fmt, columnwise=True)
        want = want.dequantize(columnwise=columnwise)[:, : rows.shape[-1]].reshape(shape)
        assert torch.equal(q.dequantize(columnwise=columnwise), want)
    want = q.stored_alike(q.dequantize() + 1)
    assert torch.equal(q.add_(1).dequantize(), want.dequantize())
    state = fz.recipes.tensor_state(q)
    assert torch.equal(fz.recipes.tensor_from_state(state).dequantize(), q.dequantize())
    assert torch.equal(q.view(-1).dequantize(), q.dequantize().view(-1))
    assert torch.equal(q.clone() * 2, q.dequantize() * 2)
    assert torch.equal(q.new_zeros(q.shape), torch.zeros(shape))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
@pytest.mark.parametrize("shape", [(100,), (33, 33), (64, 64)])
def test_values_with_history_can_be_written_to(shape, kind):
    """As those of any operation, also by index into a clone of a parameter."""
    leaf = nn.Parameter(fz.recipes.Quantizer(KINDS[kind].format("input"))(other(*shape)))
    values, clone = leaf.dequantize(), leaf.clone()
    values[0] = 0.0
    clone[0] = 0.0
    (values.sum() + 2 * clone.dequantize().sum()).backward()
    want = torch.full(shape, 3.0)
    want[0] = 0.0
    assert torch.equal(leaf.grad, want)


def test_a_mode_that_does_not_see_writes_refuses_them():
    """`allow_mutation_on_saved_tensors` would let the backward read what was written later."""
    with fz.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        linear = fz.BasicLinear(32, 32)
    x = torch.randn(4, 32, requires_grad=True)
    linear(x).sum().backward()
    expected, before = x.grad.clone(), linear.weight.dequantize()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = linear(x).sum()
        with torch.no_grad(), pytest.raises(RuntimeError, match="must be written outside of"):
            linear.weight.mul_(2)
        x.grad = None
        y.backward()
    assert torch.equal(x.grad, expected)
    assert torch.equal(linear.weight.dequantize(), before)
