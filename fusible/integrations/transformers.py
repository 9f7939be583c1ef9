"""Hugging Face transformers: ``experts_implementation="fusible"`` for its models with experts."""

from __future__ import annotations

from fusible.integrations.transformers_experts import NAME, experts_forward

__all__ = ["experts_forward", "register"]


def register() -> None:
    """Let models of transformers that use its experts interface, and Llama-4, run experts here.

    After it, ``from_pretrained(..., experts_implementation="fusible")`` and
    ``model.set_experts_implementation("fusible")`` work. Calling it again changes nothing.

    Where transformers has implementations of expert parallelism (5.23), ``"fusible"`` is one of
    them too: ``DistributedConfig(ep_size=..., ep_implementation="fusible")``.

    Raises:
        ImportError: transformers is missing, or has no experts interface (it needs 5.17).
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "fusible.integrations.transformers needs transformers >= 5.17; "
            "pip install 'fusible[huggingface]'"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    from fusible.integrations.transformers_llama4 import adapt

    adapt()
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:
        pass
    else:
        ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    from transformers.quantizers.base import HfQuantizer

    if hasattr(HfQuantizer, "serialized_names"):
        from fusible.integrations import transformers_checkpoints

        transformers_checkpoints.register()
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return
    from fusible.integrations.transformers_ep import FusibleEP

    EPImplementationInterface.register(NAME, FusibleEP)
