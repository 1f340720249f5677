"""Small wrong changes to one node of the syntax tree: what a tired programmer might have written instead.

Every change is an edit of the text between two offsets, so that the file stays otherwise as it was.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Edit:
    """The bytes from `start` up to `end` replaced by `text`.

    Attributes:
        operator: Which kind of mistake it is.
        start: Offset in the file's bytes.
        end: Offset behind the last byte that goes.
        text: What takes their place.
    """

    operator: str
    start: int
    end: int
    text: str


class Source:
    """A file's text, addressed by nodes of its syntax tree, whose columns count bytes."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self._line_starts = [0, *(match.end() for match in re.finditer(b"\n", self.data))]

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """Offset of a node's first byte."""
        return self._line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """Offset behind a node's last byte."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """What a node is written as; parentheses around it are not part of it."""
        return self.data[self.start(node) : self.end(node)].decode()

    def between(self, left: ast.expr, right: ast.expr, symbol: str) -> tuple[int, int] | None:
        """Where an operator stands between its operands; None where a comment makes that unsure."""
        begin, gap = self.end(left), self.data[self.end(left) : self.start(right)].decode()
        words = r"\s+".join(map(re.escape, symbol.split()))
        match = re.search(rf"\b{words}\b" if symbol.isascii() and symbol[0].isalpha() else words, gap)
        return None if match is None or "#" in gap else (begin + match.start(), begin + match.end())


@dataclass(frozen=True)
class Site:
    """A node, and what the operators must know of its surroundings.

    Attributes:
        node: The node.
        source: The file that it stands in.
        function: The innermost function around it; None at the top of a module or class.
        bound: Names that have a value before the node is reached: arguments, and what was assigned further up.
    """

    node: ast.AST
    source: Source
    function: FunctionNode | None
    bound: frozenset[str]

    def replace(self, operator: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        """An edit that replaces a whole node."""
        return Edit(operator, self.source.start(node), self.source.end(node), text)

    def swap(self, operator: str, left: ast.expr, right: ast.expr, symbol: str, other: str) -> Iterator[Edit]:
        """An edit that replaces the operator between two operands."""
        if place := self.source.between(left, right, symbol):
            yield Edit(operator, *place, other)


_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "append": "appendleft",
    "appendleft": "append",
    "popleft": "pop",
    "ceil": "floor",
    "floor": "ceil",
}
_SEQUENCES = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


def _comparison(site: Site) -> Iterator[Edit]:
    """`<` for `<=`, `!=` for `==`."""
    if isinstance(site.node, ast.Compare):
        operands = [site.node.left, *site.node.comparators]
        for left, operator, right in zip(operands, site.node.ops, operands[1:], strict=False):
            symbol, others = _COMPARISONS[type(operator)]
            for other in others:
                yield from site.swap("comparison", left, right, symbol, other)


def _arithmetic(site: Site) -> Iterator[Edit]:
    """`-` for `+`, also in `+=`; texts and lists are left alone: they can only be joined."""
    node = site.node
    if isinstance(node, ast.BinOp):
        left, right, sign = node.left, node.right, ""
    elif isinstance(node, ast.AugAssign):
        left, right, sign = node.target, node.value, "="
    else:
        return
    is_joined = any(isinstance(e, _SEQUENCES) and not _is_number(e) for e in (left, right))
    is_type = site.function is None and isinstance(node.op, ast.BitOr)
    if type(node.op) in _ARITHMETIC and not is_joined and not is_type:
        symbol, other = _ARITHMETIC[type(node.op)]
        yield from site.swap("arithmetic", left, right, symbol + sign, other + sign)


def _name(site: Site) -> Iterator[Edit]:
    """`max` for `min`, `all` for `any`, the other end of a queue."""
    if not isinstance(site.node, ast.Call):
        return
    func = site.node.func
    if isinstance(func, ast.Name) and func.id in _NAMES:
        yield site.replace("name", func, _NAMES[func.id])
    elif isinstance(func, ast.Attribute) and func.attr in _NAMES:
        yield site.replace("name", func, f"{site.source.text(func.value)}.{_NAMES[func.attr]}")


def _and_or(site: Site) -> Iterator[Edit]:
    """`or` for `and`."""
    if isinstance(site.node, ast.BoolOp):
        symbol, other = ("and", "or") if isinstance(site.node.op, ast.And) else ("or", "and")
        for left, right in zip(site.node.values, site.node.values[1:], strict=False):
            yield from site.swap("and-or", left, right, symbol, other)


def _condition(site: Site) -> Iterator[Edit]:
    """A forgotten `not`, or one too many; comparisons are turned round by their own operator."""
    node = site.node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield site.replace("condition", node, f"({site.source.text(node.operand)})")
    conditions: list[ast.expr] = []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        conditions = [node.test]
    elif isinstance(node, ast.comprehension):
        conditions = node.ifs
    elif isinstance(node, ast.BoolOp):
        conditions = node.values[:-1]  # the last may be a value
    for condition in conditions:
        if isinstance(condition, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield site.replace("condition", condition, f"(not {site.source.text(condition)})")


def _constant(site: Site) -> Iterator[Edit]:
    """A number that is one too large, or 0; a flag that is turned round."""
    if not isinstance(site.node, ast.Constant):
        return
    value = site.node.value
    if isinstance(value, bool):
        yield site.replace("flag", site.node, str(not value))
    elif isinstance(value, int | float):
        yield site.replace("constant", site.node, repr(value + 1))
        if value:
            yield site.replace("constant", site.node, repr(type(value)()))


def _statement(site: Site) -> Iterator[Edit]:
    """A statement that is missing. Attributes that `__init__` sets are left: nothing would work without them."""
    node = site.node
    match node:
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Return(value=None):
            yield site.replace("statement", node, "pass")
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield site.replace("statement", node, "pass")
        case ast.Assign(targets=[ast.Name(id=name)]) if name in site.bound:
            yield site.replace("statement", node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            if site.function is not None and site.function.name != "__init__":
                yield site.replace("statement", node, "pass")


def _returned(site: Site) -> Iterator[Edit]:
    """None, or the opposite of a yes or no."""
    if not isinstance(site.node, ast.Return) or site.function is None:
        return
    value, returns = site.node.value, site.function.returns
    if value is None or (isinstance(value, ast.Constant) and not _is_number(value)):
        return
    if isinstance(returns, ast.Name) and returns.id == "bool":
        yield site.replace("return", value, f"not ({site.source.text(value)})")
    else:
        yield site.replace("return", value, "None")


def _keyword(site: Site) -> Iterator[Edit]:
    """An argument that is left to its default; what is shown and what is checked is left alone, as in sites.py."""
    if not isinstance(site.node, ast.Call):
        return
    for keyword in site.node.keywords:
        if keyword.arg in (None, "repr", "strict"):
            continue
        start, end, data = site.source.start(keyword), site.source.end(keyword), site.source.data
        before = data[:start].rstrip()
        if before.endswith(b","):
            start = len(before) - 1
        elif follows := re.match(rb"\s*,\s*", data[end:]):
            end += follows.end()
        yield Edit("keyword", start, end, "")


def _order(site: Site) -> Iterator[Edit]:
    """The other way round."""
    match site.node:
        case ast.Call(func=ast.Name(id="reversed"), args=[value], keywords=[]):
            yield site.replace("order", site.node, f"list({site.source.text(value)})")
        case ast.Call(func=ast.Name(id="sorted") | ast.Attribute(attr="sort"), keywords=keywords):
            if all(keyword.arg != "reverse" for keyword in keywords):
                text = site.source.text(site.node).removesuffix(")").rstrip().removesuffix(",")
                comma = "" if text.endswith("(") else ", "
                yield site.replace("order", site.node, f"{text}{comma}reverse=True)")


def _loop(site: Site) -> Iterator[Edit]:
    """`continue` for `break`."""
    if isinstance(site.node, ast.Break):
        yield site.replace("loop", site.node, "continue")
    elif isinstance(site.node, ast.Continue):
        yield site.replace("loop", site.node, "break")


def _bound(site: Site) -> Iterator[Edit]:
    """The end of a slice or a range that lies one further; numbers are changed by their own operator."""
    ends: list[ast.expr | None] = []
    match site.node:
        case ast.Slice(lower=lower, upper=upper):
            ends = [lower, upper]
        case ast.Call(func=ast.Name(id="range"), args=[stop] | [_, stop] | [_, stop, _]):
            ends = [stop]
    for end in ends:
        if end is not None and not _is_number(end):
            yield site.replace("bound", end, f"({site.source.text(end)}) + 1")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


OPERATORS: tuple[Callable[[Site], Iterator[Edit]], ...] = (
    _comparison,
    _arithmetic,
    _name,
    _and_or,
    _condition,
    _constant,
    _statement,
    _returned,
    _keyword,
    _order,
    _loop,
    _bound,
)
