"""``experts_implementation="fusible"`` for Llama-4, which does not use transformers' interface.

Its mixture layer runs all experts on all tokens, times scores that are zero but for those chosen.
Here each token goes to its chosen experts only, its row times the score, which is the same sum.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from fusible.integrations.transformers_experts import NAME, experts_forward


def adapt() -> None:
    """Let Llama-4's mixture layers, also of models there are, follow their model's configuration.

    Calling it again changes nothing.
    """
    llama4: Any = importlib.import_module("transformers.models.llama4.modeling_llama4")
    layer, experts = llama4.Llama4TextMoe, llama4.Llama4TextExperts
    if hasattr(experts, "scales_input"):
        return
    experts.has_gate, experts.has_bias, experts.is_transposed = True, False, True
    experts.scales_input = True
    experts.config, experts._apply_gate = None, _apply_gate
    layer.config = None
    layer.__init__ = _with_config(layer.__init__)
    layer.forward = _chosen(layer.forward)
    experts.forward = _of_choices(experts.forward)
    # What transformers would find by the name of its decorator in the source.
    llama4.Llama4PreTrainedModel._can_set_experts_implementation_cached_value = True
    configure_models(llama4)


def configure_models(llama4: Any) -> None:
    """Give the mixture layers of models that there are the configurations of these."""
    for model in gc.get_objects():
        if type(model) is llama4.Llama4TextModel:
            for module in model.modules():
                if type(module) is llama4.Llama4TextMoe:
                    module.config = module.experts.config = model.config


def _apply_gate(experts: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _with_config(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def keep_config(self: Any, config: Any) -> None:
        init(self, config)
        self.config = self.experts.config = config

    return keep_config


def _chosen(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def of_implementation(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens ``[tokens, hidden]`` and the router's logits."""
        if getattr(self.config, "_experts_implementation", None) != NAME:
            return forward(self, hidden_states)
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        ids = logits.topk(self.top_k, dim=1).indices  # as the router chose
        routed = self.experts(x, ids, scores.gather(1, ids))  # a wrapper of it, its hooks too
        return self.shared_expert(x) + routed, logits

    return of_implementation


def _of_choices(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def of_each_or_of_chosen(self: Any, hidden_states: Tensor, *choices: Tensor) -> Tensor:
        """Of rows for each expert, or of tokens, their chosen experts and scores."""
        if choices:
            return experts_forward(self, hidden_states, *choices)
        return forward(self, hidden_states)

    return of_each_or_of_chosen
