"""Experts shared among gloo processes, compared with one process that holds all of them."""

import datetime
from unittest.mock import Mock, patch

import expert_parallel as ep
import pytest
import reference as ref
import torch
import torch.distributed as dist
from expert_parallel import Case, shared_memory

import fusible as fz
from fusible.ops import dispatch, exchange, peer_memory

BF16 = torch.bfloat16
OPTIONS = [
    {"scale_input": True},
    {"weighted": True},
    {"capacity_factor": 1.0},
    {"twice": True},
    {"checkpointed": True},
    {"recompute": True},
    {"dims": 3},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 4, "recipe": "MXFP8BlockScaling"},
    {"top_k": 8, "tokens": "uneven"},
    {"top_k": 1, "weighted": True, "routing": "outside"},
    {"tokens": "uneven"},
    {"tokens": "none"},
    {"routing": "last"},
    {"routing": "outside"},
    {"recipe": "MXFP8BlockScaling"},
    *[
        {"recipe": recipe, "quantized_send": True, **options}
        for recipe in ("MXFP8BlockScaling", "Float8BlockScaling")
        for options in ({"tokens": "uneven"}, {"tokens": "none", "weighted": True, "top_k": 4})
    ],
]
CASES = [
    Case(send, dtype, **options)
    for send in ("rows", "tokens", "all", None)
    for dtype in (torch.float32, BF16)
    for options in ({}, *OPTIONS)
]
# Some processes get no token or one.
CASES += [
    Case(send, torch.float64, routing=routing, top_k=top_k)
    for send in ("rows", "tokens", "all")
    for routing in ("random", "last")
    for top_k in (1, 2)
]
NAMES = ("output", "gradient of x", "of probs", "of FC1's weight", "of FC2's weight")


@pytest.fixture(scope="module", params=(2, 4))
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("meet")
    return ep.results(request.param, folder, CASES, ep.compared, datetime.timedelta(seconds=60))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_one_process(seen, case):
    for rank, results in enumerate(seen):
        pairs = results[str(case)]
        assert not isinstance(pairs, str), f"process {rank}:\n{pairs}"
        for name, (got, want) in zip(NAMES, pairs, strict=True):
            assert got.dtype == want.dtype
            summed = name in NAMES[:2] and case.send != "rows"
            if summed:
                # Each of up to four partial sums is rounded, in BF16 to 8 bits, then their sum.
                scale = want.double().abs().amax() if want.numel() else torch.tensor(0.0)
                bound = 5 * torch.finfo(case.dtype).eps / 2 * 2 * scale
                assert ((got.double() - want.double()).abs() <= bound).all(), (rank, name)
            else:
                assert torch.equal(got, want), (rank, name)


# --- the ops over a group ----------------------------------------------------------


def loads(name, group, rank, processes):
    """Choices of the tokens here, and the router's bias moved by those of the group."""
    block = fz.Sequential(
        fz.TopKRouter(ep.HIDDEN, ep.EXPERTS, 2, expert_bias=True),
        fz.Dispatch(ep.EXPERTS, process_group=group),
    )
    torch.manual_seed(0)
    router = block[0]
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape))
    x = torch.randn(2, 9, ep.HIDDEN)
    _, ids = router(x)[1:3]
    _, *extra = block(x[rank])
    load = extra[-1]
    assert torch.equal(load, ids[rank].flatten().bincount(minlength=ep.EXPERTS))
    router.update_expert_bias(load, 0.5, process_group=group)
    total = ids.flatten().bincount(minlength=ep.EXPERTS).float()
    assert torch.equal(router.expert_bias, 0.5 * torch.sign(total.mean() - total))
    assert torch.equal(load, ids[rank].flatten().bincount(minlength=ep.EXPERTS))


def refused(name, group, rank, processes):
    with pytest.raises(ValueError, match="num_experts of Dispatch must be a multiple of the gro"):
        fz.Dispatch(7, process_group=group)
    with pytest.raises(ValueError, match="max_tokens of Dispatch must be None with a capacity"):
        fz.Dispatch(8, process_group=group, max_tokens=4, capacity_factor=1.0)
    with pytest.raises(ValueError, match="send of Dispatch must be None or one of"):
        fz.Dispatch(8, process_group=group, send="some")
    ops = fz.Dispatch(8, process_group=group), fz.GroupedLinear(8, 64, 64), fz.Combine()
    with pytest.raises(ValueError, match="num_groups of GroupedLinear must be the 4 experts"):
        fz.Sequential(*ops)(torch.randn(2, 64), torch.rand(2, 1), torch.zeros(2, 1).long())
    with pytest.raises(ValueError, match="process_group of Combine must be that of the Dispatch"):
        fz.Sequential(fz.Dispatch(8, process_group=group), fz.Combine())(
            torch.randn(2, 64), torch.rand(2, 1), torch.zeros(2, 1).long()
        )
    if rank == 0:  # alone: were it to communicate, it would not return
        case = Case(dtype=BF16)
        block, inputs = ep.block(case, group, 0, 2), ep.tensors(case, 0, 2)[:3]
        assert "experts are shared among 2 processes; sends rows" in str(fz.explain(block, *inputs))
        assert "moe_experts_sm90" in str(fz.explain(block, *inputs, target="sm90"))


def compiled(name, group, rank, processes):
    """All tokens to all processes: one graph, with the values of the calls without it."""
    sent_in_mxfp8 = {"recipe": "MXFP8BlockScaling", "quantized_send": True}
    for backend, options in (("aot_eager", {}), ("inductor", {}), ("aot_eager", sent_in_mxfp8)):
        case = Case("all", **options)
        module = ep.block(case, group, rank, processes)
        inputs = ep.tensors(case, rank, processes)
        eager = ep.run(module, case, *inputs)
        traced = torch.compile(module, fullgraph=True, backend=backend)
        recipe = fz.recipes.MXFP8BlockScaling() if options else None
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = traced(*inputs[:3])[0]
        parameters = [module[1].weight, module[3].weight]
        grads = torch.autograd.grad(y, [*inputs[:2], *parameters], inputs[3])
        torch.testing.assert_close([y.detach(), *grads], eager, rtol=1e-5, atol=1e-5)
        dist.barrier()


def unread(name, group, rank, processes):
    """As on a GPU, where no host reads sizes: tokens are padded to the most that are allowed."""
    for options in ({}, {"recompute": True}, {"weighted": True, "top_k": 5}):
        for tokens, most in (("uneven", 12), ("uneven", 20), ("none", 16)):
            case = Case("all", BF16, tokens=tokens, max_tokens=most, **options)
            wanted = ep.compared(case, group, rank, processes)
            with patch.object(exchange, "_reads_sizes", lambda _: False):
                made = ep.compared(case, group, rank, processes)
            for (got, _), (want, _) in zip(made, wanted, strict=True):
                assert torch.equal(got, want), case
    case = Case("all", tokens="uneven", max_tokens=11)  # one process has 12
    inputs = ep.tensors(case, rank, processes)[:3]
    with pytest.raises(ValueError, match="at most max_tokens of Dispatch, 11 tokens, got 12"):
        ep.block(case, group, rank, processes)(*inputs)
    on_device = patch.object(exchange, "_reads_sizes", lambda _: False)
    for most in (11, None):
        module = ep.block(Case("all", tokens="uneven", max_tokens=most), group, rank, processes)
        with on_device, pytest.raises((ValueError, RuntimeError), match=r"at most max_|disagree"):
            module(*inputs)
        dist.barrier()


BY_MEMORY = [
    Case("all", BF16, **options)
    for options in (
        {},
        {"recompute": True, "tokens": "many", "top_k": 4},
        {"scale_input": True},
        {"weighted": True, "top_k": 1},
        {"weighted": True, "top_k": 5},
        {"capacity_factor": 1.0},
        {"twice": True},
        {"checkpointed": True},
        {"dims": 3},
        {"routing": "outside"},
        {"routing": "last"},
        {"tokens": "uneven", "max_tokens": 20},
        {"tokens": "none", "max_tokens": 16, "top_k": 8},
        {"recipe": "MXFP8BlockScaling"},
        {"recipe": "MXFP8BlockScaling", "quantized_send": True},
    )
]


def by_memory(name, group, rank, processes):
    """Tokens and sums through memory of each other's: every bit as by collectives."""
    memory = shared_memory(group, rank, processes)
    exchanges = Mock(wraps=memory.begin)
    for case in BY_MEMORY:
        module, given = ep.block(case, group, rank, processes), ep.tensors(case, rank, processes)
        with patch.object(exchange, "_reads_sizes", lambda _: False):
            wanted = ep.run(module, case, *given)
            exchanges.reset_mock()
            with (
                patch.object(exchange, "_memory_for", lambda *_: memory),
                patch.object(dispatch, "peer_memory", lambda *_: memory),
                patch.object(memory, "begin", exchanges),
            ):
                made = ep.run(module, case, *given)
        for got, want in zip(made, wanted, strict=True):
            assert torch.equal(got, want), case
        assert not memory._in_use, case
        sent = 2 if case.quantized_send else 4
        sent *= 1.5 if case.twice or case.checkpointed else 1
        assert exchanges.call_count == sent, case


def by_collectives(name, group, rank, processes):
    """Without symmetric_memory that of the group is not touched."""
    memory, off = shared_memory(group, rank, processes), {"symmetric_memory": False}
    of_group = {"process_group": group, **off}
    module = fz.Sequential(
        fz.Dispatch(ep.EXPERTS, send="all", **of_group),
        *ep.experts(Case(dtype=BF16), rank * 4, 4),
        fz.Combine(**of_group),
    )
    x, probs, ids, dy = ep.tensors(Case("all", BF16), rank, processes)
    with (
        patch.object(exchange, "_reads_sizes", lambda _: False),
        patch.object(exchange, "reserve", lambda *_: memory),
        patch.object(dispatch, "peer_memory", lambda *_: memory),
        patch.object(memory, "begin", Mock(side_effect=AssertionError)),
    ):
        module(x, probs, ids)[0].backward(dy)
    assert x.grad.isfinite().all()


def by_memory_in_turns(name, group, rank, processes):
    """Of two blocks whose exchanges overlap, one takes collectives; of too large ones all do."""
    memory = shared_memory(group, rank, processes)
    case = Case("all", BF16)
    first, second = (ep.block(case, group, rank, processes) for _ in range(2))
    x, probs, ids, dy = ep.tensors(case, rank, processes)
    both = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        *first,
        fz.Swap()
        .set_extra_input_channel(0, "tokens")
        .set_extra_output_channel(0, "routed", output_to_caller=False),
        *second,
        fz.AddExtraInput().set_extra_input_channel(0, "routed"),
    )

    def run(nbytes):
        room = patch.object(memory, "nbytes", nbytes)
        to_memory = patch.object(exchange, "_memory_for", lambda *_: memory)
        found = patch.object(dispatch, "peer_memory", lambda *_: memory)
        with room, to_memory, found, patch.object(exchange, "_reads_sizes", lambda _: False):
            y = both(x, probs, ids, probs, ids)
            y = y[0] if isinstance(y, tuple) else y
            return [y, *torch.autograd.grad(y, [x, probs, *both.parameters()], dy)]

    wanted = run(0)
    ref.assert_equal(run(1 << 20), wanted)


class Fails(fz.Identity):
    """A part of a shared expert that fails in the forward or the backward, while sums are sent."""

    at = ""

    def forward_impl(self, ctx, input_):
        if self.at == "forward":
            raise ValueError("fails")
        return super().forward_impl(ctx, input_)

    def backward_impl(self, ctx, grad_output):
        if self.at == "backward":
            raise ValueError("fails")
        return super().backward_impl(ctx, grad_output)


def memory_after_failure(name, group, rank, processes):
    """An op that fails in an exchange takes its memory with it; the next call gets other memory."""
    case, device = Case("all", BF16), torch.device("cpu")
    routed, fails = ep.block(case, group, rank, processes), Fails()
    module = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        *routed,
        fz.Swap()
        .set_extra_input_channel(0, "tokens")
        .set_extra_output_channel(0, "routed", output_to_caller=False),
        fails,
        fz.AddExtraInput().set_extra_input_channel(0, "routed"),
    )
    x, probs, ids, dy = ep.tensors(case, rank, processes)
    made = []

    def make(*_):
        made.append(shared_memory(group, rank, processes))
        return made[-1]

    def memory_for(*_):
        return peer_memory.reserve(group, device, 1 << 20)

    def run(at=""):
        fails.at = at
        y = module(x, probs, ids)
        y = y[0] if isinstance(y, tuple) else y
        return [y, *torch.autograd.grad(y, [x, probs, *module.parameters()], dy)]

    with (
        patch.object(exchange, "_reads_sizes", lambda _: False),
        patch.object(exchange, "_memory_for", memory_for),
        patch.object(peer_memory, "_make", make),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.dict(peer_memory._memories.data, clear=True),
    ):
        wanted = run()
        for count, at in enumerate(("forward", "backward"), 1):
            with pytest.raises(ValueError, match="fails"):
                run(at)
            assert len(made) == count
            assert made[-1]._in_use
            begin = peer_memory.PeerMemory.begin
            counted = {"autospec": True, "side_effect": begin}
            with patch.object(peer_memory.PeerMemory, "begin", **counted) as exchanges:
                again = run()
            assert exchanges.call_count == 4
            assert len(made) == count + 1
            assert not made[-1]._in_use
            ref.assert_equal(again, wanted)
        with pytest.raises(ValueError, match="expert_ids of Dispatch must be"):
            routed(x[1:], probs, ids)
        run()  # no exchange had begun
        assert len(made) == 3


def memory_asked_for(name, group, rank, processes):
    """What a call asks for is enough for its four exchanges, also where no process has tokens."""
    asks, gpu, made = exchange._memory_for, torch.device("cuda"), []

    def make(group, device, nbytes):
        made.append(shared_memory(group, rank, processes, nbytes))
        return made[-1]

    def memory_for(x, *given):
        return asks(Mock(device=gpu, element_size=x.element_size, shape=x.shape), *given)

    for options, tokens in (({}, 16), ({"weighted": True, "top_k": 1}, 16), ({}, 0)):
        case = Case("all", BF16, **options)
        module = ep.block(case, group, rank, processes)
        x, probs, ids, dy = [t[:tokens] for t in ep.tensors(case, rank, processes)]
        begin = peer_memory.PeerMemory.begin
        counted = {"autospec": True, "side_effect": begin}
        with (
            patch.object(exchange, "_reads_sizes", lambda _: False),
            patch.object(exchange, "_memory_for", memory_for),
            patch.object(dispatch, "peer_memory", lambda *_: made[-1]),
            patch.object(peer_memory, "_make", make),
            patch.object(peer_memory, "_GRANULE", 256),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
            patch.dict(peer_memory._memories.data, clear=True),
            patch.object(peer_memory.PeerMemory, "begin", **counted) as exchanges,
        ):
            module(x, probs, ids)[0].backward(dy)
        sizes = [call.args[1] for call in exchanges.call_args_list]
        assert len(sizes) == 4
        assert max(sizes) <= made[-1].nbytes


def sent_bytes(name, group, rank, processes):
    """Of all exchanges but those of sizes, choices and weights: elements and scales, no more."""
    for mode in ("rows", "tokens", "all"):
        for recipe in ("MXFP8BlockScaling", "Float8BlockScaling"):
            for quantized in (False, True):
                case = Case(mode, BF16, recipe=recipe, quantized_send=quantized)
                module, inputs = ep.block(case, group, rank, 2), ep.tensors(case, rank, 2)
                with patch.object(exchange, "begin_send", wraps=exchange.begin_send) as sends:
                    ep.run(module, case, *inputs)
                widths = [
                    call.args[0].shape[1] * call.args[0].itemsize for call in sends.mock_calls
                ]
                scales = 4 if recipe.startswith("Float8") else ep.HIDDEN // 32
                wide = ep.HIDDEN + scales if quantized else 2 * ep.HIDDEN
                choices = 8 if mode == "rows" else 16
                assert widths == [wide, choices, wide], (case, widths)
    recipe = fz.recipes.NVFP4BlockScaling()
    case = Case("all", BF16, recipe="NVFP4BlockScaling", quantized_send=True)
    module = ep.block(case, group, rank, 2)
    inputs = ep.tensors(case, rank, 2)[:3]
    with fz.autocast(recipe=recipe):
        assert "quantized_send has no effect without" in str(fz.explain(module, *inputs))
    with fz.autocast(recipe=fz.recipes.MXFP8BlockScaling()):
        assert "gradients, are sent in mxfp8" in str(fz.explain(module, *inputs))
    with (
        fz.autocast(enabled=rank == 0, recipe=fz.recipes.MXFP8BlockScaling()),
        pytest.raises(
            ValueError, match=r"format of tokens sent .*\['e4m3 with one e8m0_up .*', None\]"
        ),
    ):
        module(*inputs)
    for option, value in (("quantized_send", True), ("symmetric_memory", False)):
        with pytest.raises(ValueError, match=f"{option} of Combine must be that of the Dispatch"):
            fz.Sequential(
                fz.Dispatch(8, process_group=group, **{option: value}),
                fz.Combine(process_group=group),
            )(*inputs)


BEHAVIOUR = {
    f.__name__: f
    for f in (
        loads,
        refused,
        compiled,
        unread,
        by_memory,
        by_collectives,
        by_memory_in_turns,
        memory_after_failure,
        memory_asked_for,
        sent_bytes,
    )
}


def run_named(name, group, rank, processes):
    BEHAVIOUR[name](name, group, rank, processes)


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meet")
    return ep.results(2, folder, BEHAVIOUR, run_named, datetime.timedelta(seconds=120))


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_behaviour(behaviour, name):
    for rank, results in enumerate(behaviour):
        assert results[name] is None, f"process {rank}:\n{results[name]}"
