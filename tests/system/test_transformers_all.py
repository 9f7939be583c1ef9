"""Every experts module that the installed transformers has, against its own eager code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
from fusible.integrations import transformers as integration  # noqa: E402

MARKED = re.compile(
    r"^@use_experts_implementation(?P<flags>.*)\nclass (?P<name>\w+)\(.*(?P<body>(?:\n(?: .*)?)+)",
    re.MULTILINE,
)


def experts_classes() -> dict[str, str]:
    """The module of each class that uses the experts interface, one of those with the same code."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for marked in MARKED.finditer(file.read_text(encoding="utf-8")):
            body = re.sub(r"config: \w+|config\.\w+", "config", marked["body"]).strip()
            module = f"transformers.models.{file.parent.name}.{file.stem}"
            found.setdefault((marked["flags"], body), (marked["name"], module))
    return dict(found.values())


class Config:
    """What any of them asks of its configuration, by how that is called."""

    _experts_implementation = "eager"
    hidden_act = "silu"
    KINDS = {  # noqa: RUF012 - read only
        "limit|clamp": 1.5,
        "alpha|beta": 1.3,
        "softcap": 3.0,
        "act": "silu",
        "num.*expert|n_routed": 4,
        "intermediate|ffn": 24,
        "hidden|embed|latent|dim": 32,
        "eps": 1e-6,
    }

    def __getattr__(self, name: str) -> Any:
        for kind, value in self.KINDS.items():
            if re.search(kind, name):
                return value
        raise AttributeError(name)


def outcome(experts: nn.Module, implementation: str) -> list[torch.Tensor]:
    """Output and gradients."""
    torch.manual_seed(1)
    x = torch.randn(11, 32, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(11)])
    weights = torch.rand(11, 3, dtype=torch.float64, requires_grad=True)
    experts.config._experts_implementation = implementation
    y = experts(x, ids, weights)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, weights, *experts.parameters()])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "module"), experts_classes().items())
def test_output_and_gradients_are_eagers(name: str, module: str) -> None:
    integration.register()
    experts = getattr(importlib.import_module(module), name)(Config()).double()
    for p in experts.parameters():
        nn.init.normal_(p, std=0.3)
    for got, want in zip(outcome(experts, "fusible"), outcome(experts, "eager"), strict=True):
        # Some sum in FP32.
        assert want.norm() > 0
        # FP32 rounds by 2^-24; sums of 64 terms add up the root of that, in eight products in turn.
        assert (got - want).norm() < 8 * 8 * 2**-24 * want.norm()
