"""Where a file may be changed: every node but those whose change nobody could or need notice.

Left alone are docstrings, annotations, decorators, bases of classes, imports, blocks for type checkers, what the log
says, the text of errors, `assert` and what checks as it does (`strict=True`), `__repr__` and what it shows of a field,
and the numbers of an Enum.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from operators import FunctionNode, Site, Source

_LOGGERS = {"logger", "logging", "warnings"}
_TYPING_CALLS = {"cast", "TypeVar", "NewType", "getLogger"}
_UNREAD_FUNCTIONS = {"__repr__", "__str__"}
_UNREAD_NAMES = {"__all__", "__slots__"}


def sites_of(text: str) -> Iterator[tuple[str, Site]]:
    """Yields the nodes that may be changed, each with the dotted name of the function or class around it."""
    source = Source(text)
    yield from _visit(ast.parse(text), source, "", None, {})


def _visit(
    node: ast.AST, source: Source, place: str, function: FunctionNode | None, bound: dict[str, None]
) -> Iterator[tuple[str, Site]]:
    if _is_unread(node):
        return
    if isinstance(node, ast.ClassDef | FunctionNode):
        place = f"{place}.{node.name}".lstrip(".")
    if isinstance(node, FunctionNode):
        function = node
        arguments = node.args
        bound = dict.fromkeys(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    yield place, Site(node, source, function, frozenset(bound))
    if isinstance(node, ast.Raise):
        return  # what remains is the error's text
    for child in _children(node):
        yield from _visit(child, source, place, function, bound)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        bound[node.id] = None


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the parts of a node that may be changed."""
    skipped = {"annotation", "returns", "decorator_list", "bases"}
    if isinstance(node, ast.ClassDef):
        skipped.add("keywords")
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_unread(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef(name=name):
            return name in _UNREAD_FUNCTIONS
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.ClassDef(bases=bases):
            return any("Enum" in ast.unparse(base) for base in bases)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name in _UNREAD_NAMES
        case ast.keyword(arg="repr") | ast.keyword(arg="strict", value=ast.Constant(value=True)):
            return True
        case ast.Expr(value=ast.Call(func=func)):
            return _root(func) in _LOGGERS
        case ast.Call(func=func):
            return _root(func) in _LOGGERS or _last(func) in _TYPING_CALLS
    return False


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
