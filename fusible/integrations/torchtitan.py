"""torchtitan's routed experts as one run of ops: an override of its configs, by name.

    torchtitan's trainer --override.imports fusible.integrations.torchtitan.routed_experts

Or in a config, with arguments of :func:`routed_experts`::

    OverrideConfig(imports=[("fusible.integrations.torchtitan.routed_experts", {"send": "all"})])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusible import recipes
from fusible.fuser.module_names import ATTRIBUTE
from fusible.integrations.transformers_experts import ExpertsLinear, dispatch_over
from fusible.ops import Combine, ScaledSwiGLU, Sequential
from fusible.ops.exchange import Send
from fusible.recipes.autocast import autocast
from fusible.recipes.mixed import ByOp, ByPass
from fusible.recipes.recipe import Recipe
from fusible.recipes.sharding import local

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
except ImportError as error:
    raise ImportError(
        "fusible.integrations.torchtitan needs torchtitan >= 0.3; pip install 'fusible[torchtitan]'"
    ) from error

__all__ = ["FusibleExperts", "FusibleRoutedExperts", "routed_experts"]

# Stock parameters of gate and linear, which are halves of ours.
_HALVES = ("w1_EFD", "w3_EFD")


class FusibleExperts(GroupedExperts):
    """All experts of a layer: dispatch, grouped products and the weighted sums, as ops.

    The weight before the activation is one, ``w13`` ``[num_experts, hidden_dim / b, 2, b, dim]``:
    blocks of b = 32 features of the gate (stock ``w1_EFD``) and of the linear part (``w3_EFD``)
    alternate, as the kernels want them; b = 1 if ``hidden_dim`` is no multiple of 32. Expert
    parallelism and FSDP shard dimension 0, FSDP of many processes and tensor parallelism dimension
    1, as they do stock weights. State dicts hold the stock parameters, of the same values.

    As there products are computed in BF16, whatever the parameters' dtype. Here sums over a token's
    experts are taken in FP32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The config of torchtitan's ``GroupedExperts``, and options of :func:`routed_experts`."""

        send: Send | None = None
        receive_factor: float | None = None
        recompute_rows: bool = False
        recipe: str | None = None

    has_bias = is_transposed = False  # as ExpertsLinear asks
    ep_mesh: Any = None

    def __init__(self, config: FusibleExperts.Config) -> None:
        super().__init__(config)
        self.config = config
        self.recipe = None if config.recipe is None else _recipe(config.recipe)
        self.block_size = 32 if config.hidden_dim % 32 == 0 else 1
        blocks = config.hidden_dim // self.block_size, 2, self.block_size
        for name in _HALVES:
            delattr(self, name)
        self.w13 = nn.Parameter(torch.empty(config.num_experts, *blocks, config.dim))
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    @property
    def before(self) -> Tensor:
        """The weight ``[E, 2 * hidden_dim, dim]`` before the activation, of the experts here."""
        return local(self.w13).flatten(1, 3)

    @property
    def after(self) -> Tensor:
        """The weight ``[E, dim, hidden_dim]`` after it."""
        return local(self.w2_EDF)

    def forward(self, x: Tensor, scores: Tensor, expert_ids: Tensor) -> Tensor:
        """The weighted sums ``[T, dim]`` of what experts make of tokens x ``[T, dim]``.

        ``scores`` and ``expert_ids`` ``[T, k]`` are of a token's experts, among all.
        """
        # Its sizes are those of the weights after sharding.
        block = self.__dict__.get(ATTRIBUTE)
        if block is None:
            block = self.__dict__[ATTRIBUTE] = self._ops()
        recipe = self.recipe
        scope = autocast(recipe is not None, recipe=recipe)
        with torch.autocast(x.device.type, torch.bfloat16), scope:
            y = block(x, scores, expert_ids)
        return y.type_as(x)

    def _ops(self) -> Sequential:
        config, group = self.config, self.ep_mesh
        options: dict[str, Any] = {"recompute_rows": config.recompute_rows}
        if group is not None:
            options |= {"send": config.send, "receive_factor": config.receive_factor}
        return Sequential(
            dispatch_over(group, self.num_experts, **options),
            ExpertsLinear(self, "before"),
            ScaledSwiGLU(self.block_size),
            ExpertsLinear(self, "after"),
            Combine(process_group=group),
        )


def _split(module: FusibleExperts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The stock parameters of a state dict, from ours."""
    w13 = state.pop(f"{prefix}w13")
    for half, name in enumerate(_HALVES):
        state[f"{prefix}{name}"] = w13[:, :, half].flatten(1, 2)


def _join(module: FusibleExperts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Ours, from the stock parameters of a state dict."""
    names = [f"{prefix}{name}" for name in _HALVES]
    if all(name in state for name in names):
        halves = [state.pop(name).unflatten(1, (-1, module.block_size)) for name in names]
        state[f"{prefix}w13"] = torch.stack(halves, 2)


class FusibleRoutedExperts(RoutedExperts):
    """torchtitan's ``RoutedExperts``, whose dispatch and combine are ops of its experts.

    In a mesh with a dimension ``ep`` tokens are sent over it as ``Dispatch`` says; the config's
    token dispatcher is not used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """The config of torchtitan's ``RoutedExperts``."""

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """The weighted sums ``[B, L, dim]`` of tokens ``x_BLD``; arguments as there.

        Sharding configs name them. The last one, the tokens of each expert, is not needed.
        """
        inputs = x_BLD, topk_scores_BLK, topk_expert_ids_BLK
        return self.inner_experts(*[t.flatten(0, 1) for t in inputs]).view(x_BLD.shape)

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the weights, and give the experts their processes."""
        super(RoutedExperts, self).parallelize(parallel_dims)
        self.inner_experts.ep_mesh = parallel_dims.get_optional_mesh("ep")


@override(
    target=RoutedExperts.Config,
    exact=True,
    description="Dispatch, experts and combine as fused ops of fusible",
)
def routed_experts(
    config: Any,
    *,
    send: Send | None = None,
    receive_factor: float | None = None,
    recompute_rows: bool = False,
    recipe: str | None = None,
) -> Any:
    """The config of :class:`FusibleRoutedExperts` in place of one of ``RoutedExperts``.

    Router, balance, shared experts and how weights and tokens are sharded stay torchtitan's.

    Args:
        config: to be replaced, whose experts are torchtitan's ``GroupedExperts``.
        send: as of ``Dispatch``, with expert parallelism.
        receive_factor: as of ``Dispatch``, with expert parallelism.
        recompute_rows: as of ``Dispatch``.
        recipe: the name of one of ``fusible.recipes``, as ``"MXFP8BlockScaling"``; None for BF16.

    Raises:
        ValueError: experts of another kind (of GPT-OSS, or of a converter), or an unknown recipe.
    """
    inner = config.inner_experts
    if type(inner) is not GroupedExperts.Config:
        raise ValueError(
            "inner_experts of RoutedExperts must be torchtitan's GroupedExperts, got "
            f"{type(inner).__qualname__}; name the layers that have them by fqns of an own override"
        )
    if recipe is not None:
        _recipe(recipe)
    experts = derive(
        inner,
        FusibleExperts.Config,
        param_init=_init(inner.param_init),
        sharding_config=_sharding(inner.sharding_config),
        send=send,
        receive_factor=receive_factor,
        recompute_rows=recompute_rows,
        recipe=recipe,
    )
    return derive(config, FusibleRoutedExperts.Config, inner_experts=experts)


def _recipe(name: str) -> Recipe:
    """The recipe of a name, with its defaults."""
    kind = getattr(recipes, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)) or issubclass(kind, ByOp | ByPass):
        raise ValueError(
            "recipe must be the name of a class of fusible.recipes that needs no arguments, such "
            f"as MXFP8BlockScaling, got {name!r}"
        )
    return kind()


def _init(stock: Mapping[str, Callable[[Tensor], Any]] | None) -> dict[str, Any] | None:
    """Initializers of our parameters, from those of the stock ones."""
    if stock is None:
        return None
    ours = {name: init for name, init in stock.items() if name not in _HALVES}

    def init_halves(w13: Tensor) -> None:
        for half, name in enumerate(_HALVES):
            stock[name](w13[:, :, half])

    return {**ours, "w13": init_halves}


def _sharding(stock: Any) -> Any:
    """How our parameters are sharded: as the stock ones."""
    if stock is None:
        return None
    states = dict(stock.state_shardings)
    states["w13"], _ = [states.pop(name) for name in _HALVES]
    return replace(stock, state_shardings=states)
