"""Sphinx's configuration: the pages of this folder, and the reference from the docstrings."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import inspect as sphinx_inspect

import fusible
import fusible.integrations.transformers
import fusible.testing
from fusible import extend, recipes

project = "fusible"
release = fusible.__version__
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_rtype = False
python_use_unqualified_type_names = True
nitpicky = True  # a reference to nothing is a warning, and `make site` fails on warnings

html_theme = "furo"  # brings its styles and scripts: nothing is fetched from the network
html_title = f"fusible {release}"
html_copy_source = False
html_show_copyright = False

PUBLIC: tuple[ModuleType, ...] = (fusible, extend, recipes)


def _named(target: str, modules: Iterable[str]) -> Any:
    """What a reference names: by its path, or by its name in one of the modules."""
    for path in (target, *[f"{module}.{target}" for module in modules], f"builtins.{target}"):
        with suppress(AttributeError, ImportError, ValueError):
            return pkgutil.resolve_name(path)
    return None


def resolve(app: Sphinx, env: Any, node: Any, contnode: nodes.Element) -> nodes.Element | None:
    """A reference by where an object is defined, as one to where it is documented.

    What exists and is not documented here (PyTorch's, Python's) is text without a link; what does
    not exist stays a warning.
    """
    ours = [name for name in sys.modules if name.partition(".")[0] == "fusible"]
    named = _named(node["reftarget"], ours) if node.get("refdomain") == "py" else None
    if named is None:
        return None
    domain = env.domains["py"]
    for module in PUBLIC:
        for name in module.__all__:
            public = f"{module.__name__}.{name}"
            if getattr(module, name) is named and public in domain.objects:
                where = env, node["refdoc"], app.builder
                return domain.resolve_xref(*where, "obj", public, node, contnode)
    return contnode


def signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, shown: str, returns: str
) -> tuple[str, None] | None:
    """A class's arguments are those of its ``__init__``, since ops have a ``__new__`` for any."""
    if what != "class" or not inspect.isfunction(obj.__init__):
        return None
    arguments = sphinx_inspect.signature(obj.__init__, bound_method=True)
    bare = arguments.replace(return_annotation=inspect.Signature.empty)
    return sphinx_inspect.stringify_signature(bare, unqualified_typehints=True), None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", signature)
    app.connect("missing-reference", resolve)
