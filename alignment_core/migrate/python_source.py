"""The values that the source of a Python script states. The script is parsed and never run."""

from __future__ import annotations

import ast
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from alignment_core.migrate.convert import SECRET

SHOWN = 60
"""Characters of an expression that a message shows."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | _COMPREHENSIONS
_CONDITIONAL = ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.Match


class Unreadable(Exception):
    """A part of a script without a value in the source; the message names it with the reason."""

    def __init__(self, node: ast.AST, reason: str) -> None:
        super().__init__(reason)
        self.lineno: int = getattr(node, "lineno", 0)


@dataclass(frozen=True)
class Binding:
    """A place where a name gets a value."""

    scope: ast.AST
    """The function that contains it, or the module."""
    end: int
    """Last line of the statement."""
    value: ast.expr | None
    """None unless it is a plain, unconditional assignment."""


class Source:
    """A parsed script, its names and the modules that it imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.imported: dict[str, tuple[str, str | None]] = {}
        """By the name in the script: the module, and its attribute that is imported (None: the module itself)."""
        self.defined: dict[str, ast.stmt] = {}
        """Functions and classes of the module itself."""
        self.used: set[str] = set()
        """Names whose values were looked up."""
        self.notes: dict[str, int] = {}
        """Sentences about parts that are not read, with their lines."""
        self._bindings = defaultdict[str, list[Binding]](list)
        self._scopes: dict[ast.AST, ast.AST] = {}
        self._collect(tree, tree, False)

    def note(self, place: ast.AST | Unreadable, sentence: str) -> None:
        """Note that a part of the script is not read."""
        self.notes.setdefault(sentence, getattr(place, "lineno", 0))

    def _collect(self, node: ast.AST, scope: ast.AST, conditional: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = child if isinstance(child, _SCOPES) else scope
            if isinstance(child, ast.Import | ast.ImportFrom):
                self._import(child)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and scope is self.tree:
                self.defined[child.name] = child
            elif isinstance(child, ast.arg):
                self._bindings[child.arg].append(Binding(scope, child.lineno, None))
            elif isinstance(child, ast.Name):
                self._scopes[child] = scope
                if isinstance(child.ctx, ast.Store):
                    self._bindings[child.id].append(_binding(child, node, scope, conditional))
            is_conditional = isinstance(child, _CONDITIONAL) and not is_main_guard(child)
            self._collect(child, inner, (conditional or is_conditional) and inner is scope)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                self.imported[alias.asname or alias.name] = ("." * node.level + (node.module or ""), alias.name)
            else:
                self.imported[alias.asname or alias.name.partition(".")[0]] = (alias.name, None)

    def resolved(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for, and any other expression as it is. Raises Unreadable."""
        if not isinstance(node, ast.Name):
            return node
        self.used.add(node.id)
        bindings = self._bindings.get(node.id, [])
        if not bindings:
            return node
        scope = self._scopes.get(node, self.tree)
        before = [binding for binding in bindings if binding.scope is scope and binding.end < node.lineno]
        # A function sees the variables of the module as they are when it is called.
        if not any(binding.scope is scope for binding in bindings):
            before = [binding for binding in bindings if binding.scope is self.tree]
        if not before or (before[0].scope is not scope and len(before) > 1):
            raise Unreadable(node, f"`{node.id}` has no value that is written in one place")
        last = max(before, key=lambda binding: binding.end)
        if last.value is None:
            raise Unreadable(node, f"`{node.id}` depends on what the script does")
        return self.resolved(last.value)

    def called(self, node: ast.expr) -> str:
        """The name of a called function, without module and alias: ``SFTTrainer`` of ``trl.SFTTrainer(…)``."""
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, ("", None))[1] or node.id
        return ""

    def arguments(self, call: ast.Call, positions: tuple[str, ...] = ()) -> dict[str, ast.expr]:
        """The arguments of a call by name, with a note for those whose name is not in the source."""
        name = self.called(call)
        nodes: dict[str, ast.expr] = {}
        for number, node in enumerate(call.args):
            if number < len(positions) and not isinstance(node, ast.Starred):
                nodes[positions[number]] = node
            else:
                self.note(node, f"`{shown(node)}` of {name} has no name: its meaning is not read")
        for keyword in call.keywords:
            try:
                nodes |= {keyword.arg: keyword.value} if keyword.arg else self.items(keyword.value)
            except Unreadable:
                self.note(keyword.value, f"`**{shown(keyword.value)}` of {name} is not read")
        return nodes

    def items(self, node: ast.expr) -> dict[str, ast.expr]:
        """The items of a dict, or the arguments of a call such as ``dict(…)``. Raises Unreadable."""
        node = self.resolved(node)
        if isinstance(node, ast.Call):
            return self.arguments(node)
        if not isinstance(node, ast.Dict):
            raise self.unreadable(node)
        return {str(self.value(key)): value for key, value in zip(node.keys, node.values, strict=True) if key}

    def value(self, node: ast.expr) -> Any:
        """The plain value of an expression. Raises Unreadable."""
        node = self.resolved(node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {self.value(key): self.value(item) for key, item in zip(node.keys, node.values, strict=True) if key}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.value(node.left), self.value(node.right)
            if isinstance(node.op, ast.Add) or all(isinstance(side, int | float) for side in (left, right)):
                try:
                    return _OPERATORS[type(node.op)](left, right)
                except (TypeError, ArithmeticError):
                    raise self.unreadable(node) from None
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(part)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return self.value(node.value)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":  # a number format, as torch.bfloat16
            return node.attr
        raise self.unreadable(node)

    def text(self, node: ast.expr) -> str:
        """The text that an expression stands for. Raises Unreadable."""
        value = self.value(node)
        if not isinstance(value, str):
            raise self.unreadable(node)
        return value

    def unreadable(self, node: ast.AST) -> Unreadable:
        """The exception for an expression without a value in the source."""
        return Unreadable(node, f"`{shown(node)}` has a value only when the script runs")


def _binding(name: ast.Name, statement: ast.AST, scope: ast.AST, conditional: bool) -> Binding:
    """The binding of a name by the statement around it, with a value if that assigns to this name alone."""
    is_plain = isinstance(statement, ast.AnnAssign) or (
        isinstance(statement, ast.Assign) and len(statement.targets) == 1
    )
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not is_plain:
        return Binding(scope, name.lineno, None)
    return Binding(scope, statement.end_lineno or name.lineno, None if conditional else statement.value)


def is_main_guard(node: ast.AST) -> bool:
    """Whether a statement is ``if __name__ == "__main__":``."""
    guards = ("__name__ == '__main__'", "'__main__' == __name__")
    return isinstance(node, ast.If) and ast.unparse(node.test) in guards


def shown(node: ast.AST) -> str:
    """An expression in one short line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def argument(name: str, node: ast.AST) -> str:
    """The text of an argument in messages: without its value if that may be a secret."""
    return name if SECRET.search(name) else f"{name}={shown(node)}"


def root(node: ast.AST) -> str:
    """The name at the beginning of a dotted or indexed expression; empty if it begins otherwise."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
