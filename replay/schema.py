"""JSON Schemas of the files that people write by hand, from the types that read them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import msgspec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def definitions(*types: type) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """References to the types and the definitions that they need, fields described by their docstrings.

    Args:
        types: `msgspec.Struct` classes of one module, which also holds those that they nest.
    """
    references, found = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for name, definition in found.items():
        cls = getattr(inspect.getmodule(types[0]), name)
        for field, text in _attribute_docs(cls).items():
            definition["properties"][field]["description"] = text
    return list(references), found


def _attribute_docs(cls: type) -> dict[str, str]:
    """The strings that stand below the attributes of a class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs
