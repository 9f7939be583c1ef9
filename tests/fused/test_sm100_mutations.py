"""Ways to get the SM100 grouped MLP wrong, each of which a named check must notice.

They are twelve pitfalls of cuDNN's kernels, and two of those for squared ReLU. A mutation changes
what the fused op asks of a kernel, or what it makes of an operand; the checks compare the op with
the unfused ones, and look at its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from test_sm100_mlp import (
    ACTS,
    BF16,
    DIFFERENCE,
    HIDDEN,
    MXFP8,
    NVFP4,
    OUT,
    SINGLE,
    SPLITS,
    Recorded,
    distance,
    inputs,
    no_tokens,
    randomize,
    run,
    unfused,
)
from torch import Tensor

import fusible as fz
from fusible.kernels.sm100 import limits, padding, products
from fusible.testing import emulator_sm100 as emulator

Change = Callable[[str, dict], dict]
Mutation = Callable[[pytest.MonkeyPatch], Change | None]

ROWS, SIZES = SPLITS["ragged"]
OTHER_SIZES = [0, 41, 0]
INNER = 192  # more than 128 features: where compact column scales differ from one region's

# The checks.
ACCEPTED, UNFUSED = "the kernels accept it", "it is the unfused ops"
ZERO = "rows of no group and groups of no rows are zero"
AMAX, WARM = "no maximum is computed that nobody reads", "one step warms up all others"


class Mutated(Recorded):
    """The emulator, with each call changed before it arrives; remembers what arrived."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self.change = change or (lambda name, arguments: arguments)
        self.results: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(emulator, name)

        def call(**arguments: Any) -> Any:
            kernel = name.removeprefix("grouped_gemm_").removesuffix("_wrapper_sm100")
            arguments = self.change(kernel, arguments)
            self.calls.append((kernel, arguments))
            self.results.append(function(**arguments))
            return self.results[-1]

        return call

    def configurations(self) -> set[tuple]:
        """What the front end keys its compiled kernels by: all but addresses and values."""

        def described(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.dtype, value.shape, value.stride()
            return value

        return {
            (kernel, *((name, described(value)) for name, value in sorted(arguments.items())))
            for kernel, arguments in self.calls
        }


def mlp(activation: str) -> fz.Sequential:
    act = ACTS[activation]()
    return fz.Sequential(
        fz.GroupedLinear(3, HIDDEN, (1 + act.gated) * INNER, dtype=BF16, **SINGLE),
        act,
        fz.GroupedLinear(3, INNER, OUT, dtype=BF16, **SINGLE),
    )


def failures(
    own_fusions: Any, recipe: Any, change: Change | None = None, activation: str = "swiglu"
) -> set[str]:
    """Names of the checks that fail, and of none if the op is right."""
    torch.manual_seed(0)
    module, given = mlp(activation), inputs(ROWS, SIZES)
    randomize(module, given)
    plain = unfused(own_fusions, module, given, recipe)
    kernels = Mutated(change)
    try:
        fused = run(module, given, recipe, provider=kernels)
    except ValueError:
        return {ACCEPTED}
    found = set()
    pairs = zip(fused, plain, strict=True)
    if not all(distance(mine, theirs) <= DIFFERENCE[recipe] for mine, theirs in pairs):
        found.add(UNFUSED)
    try:
        no_tokens(fused, ROWS, SIZES)
    except AssertionError:
        found.add(ZERO)
    gemms = [out for (kernel, _), out in zip(kernels.calls, kernels.results, strict=True)
             if kernel == "quant"]  # fmt: skip
    if any(out["amax_tensor"] is not None for out in gemms):
        found.add(AMAX)
    # Warmed up by one step, a captured step may ask for no kernel anew, whatever its splits.
    later = Mutated(change)
    splits = torch.tensor(OTHER_SIZES)
    run(module, (given[0], splits, given[2], splits), recipe, provider=later)
    if later.configurations() - kernels.configurations():
        found.add(WARM)
    return found


# Each mutates through ``monkeypatch``, or returns how to change the calls of the kernels.


def replace(kernels: str, **new: Callable[[Any], Any]) -> Mutation:
    """Change arguments of some kernels."""

    def change(kernel: str, arguments: dict) -> dict:
        if kernel not in kernels.split():
            return arguments
        return arguments | {name: to(arguments.get(name)) for name, to in new.items()}

    return lambda _: change


def only_groups_with_rows(_: pytest.MonkeyPatch) -> Change:
    """Weight gradients where there are rows only: another kernel for every number of them."""

    def change(kernel: str, arguments: dict) -> dict:
        if kernel != "wgrad":
            return arguments
        ends, out = arguments["offsets_tensor"], arguments["wgrad_tensor"]
        full = ends.diff(prepend=ends.new_zeros(1)) > 0
        out[~full] = 0
        addresses = torch.tensor([matrix.data_ptr() for matrix in out])
        return {name: value for name, value in arguments.items() if name != "wgrad_tensor"} | {
            "offsets_tensor": ends[full].clone(),
            "output_mode": "discrete",
            "wgrad_ptrs": addresses[full].clone(),
        }

    return change


def scheduler_by_turns(_: pytest.MonkeyPatch) -> Change:
    """An option that is part of what is compiled, and that changes with time."""
    turns = count()

    def change(kernel: str, arguments: dict) -> dict:
        if kernel != "glu":
            return arguments
        return arguments | {"use_dynamic_sched": next(turns) % 2 == 0}

    return change


def groups_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUP_ROWS", 128)


def padding_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows between groups hold what memory held."""
    whole = padding.pad_rows

    def pad_rows(t: Tensor, padded: Any) -> Tensor:
        out = whole(t, padded)
        if t.dtype.is_floating_point and t.dim() == 2 and padded.rows is not None:
            stale = torch.ones(len(out), dtype=torch.bool)
            stale[padded.rows[padded.rows < len(out)]] = False
            out[stale] = torch.nan
        return out

    monkeypatch.setattr(products, "pad_rows", pad_rows)


def tails_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that rows of no group are read from is not cleared."""
    whole = products.unpad_rows
    monkeypatch.setattr(products, "unpad_rows", lambda t, padded, out=None: whole(t + 1e-3, padded))


def weights_quantized_along_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data gradient reads what the forward reads, with the column-wise scales."""
    whole = products.pack_weights

    def pack_weights(weights: list[Any]) -> list[Any]:
        return [
            packed._replace(column=packed.column and packed.column._replace(data=weight.row.data))
            for packed, weight in zip(whole(weights), weights, strict=True)
        ]

    monkeypatch.setattr(products, "pack_weights", pack_weights)


def recomputed_along_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight gradient reads the elements of the forward, with the column-wise scales."""
    forward = emulator.grouped_gemm_srelu_wrapper_sm100
    backward = emulator.grouped_gemm_dsrelu_wrapper_sm100
    elements: list[Tensor] = []

    def srelu(**arguments: Any) -> Any:
        outputs = forward(**arguments)
        elements.append(outputs["d_tensor"])
        return outputs

    def dsrelu(**arguments: Any) -> Any:
        return {**backward(**arguments), "d_srelu_tensor": elements.pop()}

    monkeypatch.setattr(emulator, "grouped_gemm_srelu_wrapper_sm100", srelu)
    monkeypatch.setattr(emulator, "grouped_gemm_dsrelu_wrapper_sm100", dsrelu)


# pitfall: (recipe, mutation, the check that notices)
MUTATIONS: dict[str, tuple[Any, Mutation, str]] = {
    "1 dGLU squares alpha": (
        NVFP4, replace("dglu", alpha_tensor=lambda alpha: alpha**2), UNFUSED),
    "2 dGLU takes prob in FP32 only": (
        MXFP8, replace("dglu", prob_tensor=lambda prob: prob.to(BF16)), ACCEPTED),
    "3 dGLU adds to dprob as it finds it": (
        MXFP8, replace("dglu", dprob_tensor=lambda dprob: dprob.fill_(1000)), UNFUSED),
    "4 groups are of whole 256 rows": (MXFP8, groups_of_128, ACCEPTED),
    "4 rows between groups are summed by wgrad": (None, padding_as_it_was, UNFUSED),
    "4 rows past the last group are not written": (MXFP8, tails_as_they_were, ZERO),
    "5 column scales of a group are compact": (
        MXFP8, replace("glu dglu", discrete_col_sfd=lambda _: False), UNFUSED),
    "6 the data gradient reads weights column-wise": (
        MXFP8, weights_quantized_along_rows, UNFUSED),
    "7 a maximum costs a fill and atomics": (
        MXFP8, replace("quant", generate_amax=lambda _: True), AMAX),
    "8 FP8 outputs need norm_const": (
        MXFP8, replace("glu dglu", norm_const_tensor=lambda _: None), ACCEPTED),
    "9 a new wgrad reads its offsets on the host": (MXFP8, only_groups_with_rows, WARM),
    "10 a bias has strides (1, N)": (
        MXFP8, replace("glu quant", bias_tensor=lambda b: None if b is None else b.contiguous()),
        ACCEPTED),
    "11 C does not include prob": (MXFP8, replace("dglu", prob_tensor=torch.ones_like), UNFUSED),
    "12 every configuration is compiled once a process": (MXFP8, scheduler_by_turns, WARM),
}  # fmt: skip
SQUARED_RELU_MUTATIONS: dict[str, tuple[Any, Mutation, str]] = {
    "dSReLU multiplies by alpha once": (
        NVFP4, replace("dsrelu", alpha_tensor=lambda alpha: alpha**2), UNFUSED),
    "dSReLU computes the activation again column-wise": (MXFP8, recomputed_along_rows, UNFUSED),
}  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "recipe"),
    [
        *[("swiglu", recipe) for recipe in (None, MXFP8, NVFP4)],
        *[("srelu", recipe) for recipe in (MXFP8, NVFP4)],
    ],
    ids=["bf16", "mxfp8", "nvfp4", "srelu-mxfp8", "srelu-nvfp4"],
)
def test_no_check_fails_unmutated(activation: str, recipe: Any, own_fusions: Any) -> None:
    assert failures(own_fusions, recipe, activation=activation) == set()


@pytest.mark.parametrize("pitfall", MUTATIONS)
def test_mutation_is_noticed(
    pitfall: str, own_fusions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, mutate, check = MUTATIONS[pitfall]
    assert check in failures(own_fusions, recipe, mutate(monkeypatch))


@pytest.mark.parametrize("pitfall", SQUARED_RELU_MUTATIONS)
def test_mutation_of_squared_relu_is_noticed(
    pitfall: str, own_fusions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, mutate, check = SQUARED_RELU_MUTATIONS[pitfall]
    assert check in failures(own_fusions, recipe, mutate(monkeypatch), "srelu")


def test_every_pitfall_has_a_mutation() -> None:
    assert {int(pitfall.split()[0]) for pitfall in MUTATIONS} == set(range(1, 13))
