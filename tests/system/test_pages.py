"""The pages: their links lead somewhere, and the API reference has every public name once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fusible
import fusible.testing

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (fusible, fusible.extend, fusible.recipes)
    for name in module.__all__
    if name not in ("extend", "ops", "recipes")
}
PUBLIC["fusible.testing.assume_target"] = fusible.testing.assume_target


def without_code(text: str) -> str:
    """A page's text less its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "NOTES.md"):
        return  # of their time
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:fusible|tests|docs|examples|benchmarks)/[\w./*]+)`", text)
    assert [name for name in named if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_profiler_ranges_that_a_page_names_are_those_of_ops(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    sources = "".join(path.read_text() for path in (ROOT / "fusible").rglob("*.py"))
    for name in re.findall(r"`fusible::(\w+) \[", text):
        assert f"class {name}(" in sources + text, f"{page.name} has a range of {name}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to a page's headings."""
    headings = re.findall(
        r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            to = (page.parent / path).resolve() if path else page
            assert to.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(to), f"{page.name} links to {link}"


def test_reference_has_every_public_name_once() -> None:
    documented: dict[int, list[str]] = {}
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        module = ""
        for kind, name in re.findall(r"^\.\. ([\w]+):: ([\w.]+)$", page.read_text(), re.MULTILINE):
            if kind == "currentmodule":
                module = name
            elif f"{module}.{name}" in PUBLIC:
                documented.setdefault(id(PUBLIC[f"{module}.{name}"]), []).append(name)
    assert sorted({name for name, thing in PUBLIC.items() if id(thing) not in documented}) == []
    assert [names for names in documented.values() if len(names) > 1] == []


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 6 * 1024
