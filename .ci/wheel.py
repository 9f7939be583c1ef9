"""Build the wheel, install it into an empty environment, and run the README's code from there.

The environment holds links to the installed files of the distributions that the wheel requires, and
of no others: nothing is downloaded again, and an undeclared requirement is not found.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def tracked(folder: str = ".") -> list[str]:
    """The files under ``folder`` that git tracks and that exist."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def build(into: Path) -> Path:
    """The wheel, built from the tracked files alone: a checkout may hold an older build."""
    sources = into / "sources"
    for name in tracked():
        copy = sources / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(sources))
    (wheel,) = into.glob("*.whl")
    return wheel


def pip(*arguments: str) -> None:
    """Run this environment's pip."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def check_contents(wheel: Path) -> None:
    """The wheel holds every tracked file of the package, its metadata, and nothing else."""
    with ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n and not n.endswith("/")}
    package = set(tracked("fusible"))
    assert names == package, (
        f"missing in the wheel: {sorted(package - names)}; not of the package: "
        f"{sorted(names - package)}"
    )
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 2**10:.0f} KiB")


def required(wheel: Path) -> dict[str, metadata.Distribution]:
    """The installed distributions that the wheel requires, directly or not, without extras."""
    (info,) = [part for part in ZipPath(wheel).iterdir() if part.name.endswith(".dist-info")]
    found: dict[str, metadata.Distribution] = {}
    waiting = [(text, "") for text in metadata.PathDistribution(info).requires or ()]
    seen = set()
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) not in seen:
                seen.add((requirement.name, wanted))
                found[requirement.name] = metadata.distribution(requirement.name)
                waiting += [(t, wanted) for t in found[requirement.name].requires or ()]
    return found


def environment(into: Path, wheel: Path) -> Path:
    """The Python of a new environment that holds the wheel and what it requires."""
    venv.create(into, with_pip=False)
    (packages,) = into.glob("lib/python*/site-packages")
    for distribution in required(wheel).values():
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                link = packages / file
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(distribution.locate_file(file))
    python = into / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    for arguments in (
        ["install", "--quiet", "--no-index", "-c", constraints, str(wheel)],
        ["check"],
    ):
        pip("--python", str(python), *arguments)
    return python


def run_readme(python: Path, into: Path) -> None:
    """Run the README's code blocks outside of the checkout; what they print is on the page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks, "README.md has no code"
    installed = "import fusible, sys\nassert fusible.__file__.startswith(sys.prefix)\n"
    example = into / "example.py"
    example.write_text("\n".join([installed, *blocks]), encoding="utf-8")
    done = subprocess.run(
        [str(python), "-I", str(example)], cwd=into, stdout=subprocess.PIPE, text=True, check=True
    )
    shown = "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    assert done.stdout.rstrip() in shown, done.stdout
    print(f"README.md: {len(blocks)} code blocks ran with the installed wheel")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        check_contents(wheel)
        python = environment(Path(folder) / "environment", wheel)
        run_readme(python, Path(folder))
