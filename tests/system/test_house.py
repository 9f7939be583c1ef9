"""Rules of the house: imports, what `import fusible` may touch, generated text, sizes."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fusible"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]

# Each may import itself and those before it; the matching core of the fuser imports none of them.
LAYERS = ("formulas", "recipes", "kernels", "fuser", "ops", "fused")
MATCHING_CORE = {"conditions", "rules", "plan", "target"}
KERNEL_PACKAGES = {"cutlass", "cudnn", "cuda", "triton", "tvm_ffi"}


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def layer(dotted: str) -> str | None:
    """The layer that a dotted name inside fusible belongs to, if any."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "fusible" and len(parts) > 1 and parts[1] in LAYERS else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_flow_one_way(path: Path) -> None:
    place = path.relative_to(PACKAGE).with_suffix("").parts
    used = {found for name in imports(path) if (found := layer(name))}
    if place[0] in LAYERS:
        allowed = set(LAYERS[: LAYERS.index(place[0]) + 1])
        assert used <= allowed, f"{path} imports {used - allowed}"
    if place[0] == "fuser" and place[-1] in MATCHING_CORE:
        assert used <= {"fuser"}
    packages = {name.split(".")[0] for name in imports(path)}
    if place[0] != "kernels":
        assert not packages & KERNEL_PACKAGES
    if place[0] != "testing":
        assert not any(name.startswith("fusible.testing") for name in imports(path))


def test_the_emulator_shares_no_code_with_what_it_checks() -> None:
    for path in (PACKAGE / "testing" / "emulator_sm100").glob("*.py"):
        ours = {name for name in imports(path) if name.startswith("fusible")}
        assert all(name.startswith("fusible.testing.emulator_sm100") for name in ours), path


def test_tests_of_two_folders_share_helpers_only() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        modules = re.findall(r"^(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        assert all((path.parent / f"{module}.py").exists() for module in modules), path


def test_no_modules_import_each_other() -> None:
    """Not for types either, nor inside functions."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {
        name: {m if m in modules else m.rpartition(".")[0] for m in imports(path)} & modules.keys()
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_no_two_modules_define_one_name() -> None:
    """Classes, types and public constants; functions may have the name of the op they implement.

    So may formulas. Constants of a kernel are in its ``spec``, ``limits`` and device code, which
    other kernels do not read. The emulator shares nothing with what it checks.
    """
    known: dict[str, Path] = {}
    for path in SOURCES:
        place = path.relative_to(PACKAGE).parts
        if place[0] in ("testing", "formulas.py"):
            continue
        of_kernel = "device" in place or path.stem in ("spec", "limits")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            names = {t.id for t in targets if isinstance(t, ast.Name) and t.id[0].isupper()}
            if of_kernel:
                names = {name for name in names if not name.isupper()}
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            for name in names - {"P", "R"}:
                assert name not in known, f"{name} of {path} is also in {known[name]}"
                known[name] = path


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_environment_variables(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "os.environ" not in text
    assert "getenv" not in text


def run_python(code: str) -> str:
    """What a fresh interpreter prints; it keeps compiled modules, as that of a user does."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    return done.stdout


def test_import_touches_no_gpu_and_no_kernel_package() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import fusible;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        f"print(sorted({KERNEL_PACKAGES!r} & new), torch.cuda.is_initialized())"
    )
    assert run_python(code).split() == ["[]", "False"]


def test_import_is_quick() -> None:
    """Of torch's own processor time, so that neither the machine nor its load decides."""
    code = (
        "from time import process_time; start = process_time(); import torch;"
        "ours = process_time(); import fusible;"
        "print((process_time() - ours) / (ours - start))"
    )
    assert any(float(run_python(code)) < 0.15 for _ in range(3))


def test_tables_of_pages_are_up_to_date() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import tables
    finally:
        sys.path.pop(0)
    for page in tables.TABLES:
        assert tables.with_tables(page) == (ROOT / page).read_text(encoding="utf-8"), "make docs"


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other; what they print is on the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(block, names)
    shown = "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    assert printed.getvalue().rstrip() in shown
    if page == "docs/guide.md":
        assert (tmp_path / "graph.svg").stat().st_size > 1000


def test_host_functions_stay_readable() -> None:
    """No host function over 50 lines; device code has its own folders and limits."""
    long = []
    for path in SOURCES:
        if path.parent.name == "device":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
                if lines > 50:
                    long.append(f"{path.name}:{node.name} has {lines} lines")
    assert not long


def _docstring_lines(node: ast.FunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return first.end_lineno - first.lineno + 1


def test_version_is_the_changelogs_newest() -> None:
    import fusible

    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert fusible.__version__ == newest[1]
