"""``DistributedConfig(ep_implementation="fusible")``: expert parallelism of transformers >= 5.23.

A module of its own, since its class needs that of transformers to be defined.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllReduceEP, EPImplementation

from fusible.integrations.transformers_experts import EXPERTS_GROUP, NAME, experts_forward


class FusibleEP(EPImplementation):
    """The experts of a group of processes as one run of ops, ``Dispatch`` and ``Combine`` over it.

    Each process sends its tokens to the processes that have experts of them (``send="tokens"``),
    and their weighted sums come back. Processes of a tensor-parallel group, which hold one batch,
    send equal parts of it. Where the whole group holds one batch (``ep_size == tp_size``), no token
    is sent: each process computes what its experts make of all, and an all-reduce sums it.

    Args:
        experts: an experts module with the weights of this process's experts.
        ep_mesh: one-dimensional, of the processes that share the experts.
        tp_mesh: of those that hold this process's batch.

    Raises:
        ValueError: the model has another ``experts_implementation``.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        chosen = getattr(experts.config, "_experts_implementation", None)
        if chosen != NAME:
            raise ValueError(
                'ep_implementation="fusible" needs experts_implementation="fusible", got '
                f"{chosen!r}; give it to from_pretrained too"
            )
        self.experts = experts
        self.all_reduce = AllReduceEP(experts, ep_mesh, tp_mesh) if self.shares_batch else None
        if not self.shares_batch:
            experts.__dict__[EXPERTS_GROUP] = ep_mesh, "tokens"

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sums ``[tokens, hidden]``, of ids of all experts; arguments as there."""
        if self.all_reduce is not None:
            return self.all_reduce(hidden_states, top_k_index, top_k_weights)
        inputs = hidden_states, top_k_index, top_k_weights
        if self.tp_mesh.size() == 1:
            return experts_forward(self.experts, *inputs)
        parts = [self._part(t) for t in inputs]
        y = experts_forward(self.experts, *parts).contiguous()
        sharded = DTensor.from_local(
            y,
            self.tp_mesh,
            [Shard(0)],
            shape=hidden_states.shape,
            stride=(hidden_states.shape[1], 1),
        )
        return sharded.full_tensor()

    def _part(self, t: Tensor) -> Tensor:
        """The rows of this process, of what the tensor-parallel group holds."""
        whole = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()
