"""docs/training.md: its code runs, and its table is what the ops save."""

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def saved_bytes(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    sys.modules.pop("saved_bytes", None)
    import saved_bytes

    return saved_bytes


def test_the_code_runs():
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)
    assert len(blocks) > 5
    for block in blocks:
        exec(block, names)


def test_the_table_is_what_the_ops_save(saved_bytes):
    """Each of its lines; a new rule adds lines by ``make docs``."""
    page = saved_bytes.PAGE.read_text(encoding="utf-8")
    shown = page.partition(saved_bytes.BEGIN)[2].partition(saved_bytes.END)[0].split("\n")[3:]
    made = saved_bytes.table().split("\n")[2:]
    assert [line for line in shown if line and line not in made] == [], "run `make docs`"
    assert sum("unfused" in line for line in shown) == len(saved_bytes.RECIPES)
