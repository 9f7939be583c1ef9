"""Write the table of fusion rules into README.md, from the rules themselves."""

from __future__ import annotations

from pathlib import Path

import fusible.fused
from fusible.fuser.rules import support_table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- rules: written by make docs -->", "<!-- end of rules -->"


def with_table(text: str) -> str:
    """``text`` with the table of rules between its markers brought up to date."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{support_table(fusible.fused.RULES)}\n{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
