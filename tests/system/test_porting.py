"""Pipelines written for Transformer Engine run here, and give the FP64 values."""

import re

import porting
import pytest


@pytest.mark.parametrize("group", porting.GROUPS_OF_CASES)
def test_pipelines(group):
    wrong = [
        f"{case}\n  {why}"
        for case, why in porting.outcomes(group)
        if why and not any(re.search(sentence, why) for sentence in porting.PENDING)
    ]
    assert not wrong, "\n".join(wrong)
