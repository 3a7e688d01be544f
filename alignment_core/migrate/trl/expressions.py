"""Values of a Python script as its source writes them; nothing of it is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from alignment_core.migrate.rules import SECRET

SHOWN = 60
"""Characters of an expression that a message shows."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
_CONDITIONAL = ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.Match


class Unreadable(Exception):
    """A part of a script that has no value unless it is run; the message says which, and why."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.line: int = getattr(node, "lineno", 0)


@dataclass(frozen=True)
class Binding:
    """A place where a name gets a value."""

    scope: ast.AST
    """The function in which it is, or the module."""
    end: int
    """Last line of the statement."""
    value: ast.expr | None
    """None if it is no plain assignment, or happens under a condition."""


class Source:
    """A parsed script, its names and the modules that it imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.imported: dict[str, tuple[str, str | None]] = {}
        """By the name in the script: the module, and what of it is imported (None: the module itself)."""
        self.defined: dict[str, ast.stmt] = {}
        """Functions and classes of the module itself."""
        self.used: set[str] = set()
        """Names whose values were looked up."""
        self._bindings: dict[str, list[Binding]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}
        """Of names that are read."""
        self._collect(tree, tree, False)

    def _collect(self, node: ast.AST, scope: ast.AST, conditional: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = child if isinstance(child, _SCOPES) else scope
            if isinstance(child, ast.Name):
                self._scopes[child] = scope
            if isinstance(child, ast.Import | ast.ImportFrom):
                self._import(child)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if scope is self.tree:
                    self.defined[child.name] = child
            elif isinstance(child, ast.arg):
                self._bind(child.arg, scope, child, None)
            elif isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Name):
                self._bind(child.targets[0].id, scope, child, None if conditional else child.value)
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                self._bind(child.target.id, scope, child, None if conditional else child.value)
            elif isinstance(child, ast.stmt):
                for name in _stored(child):
                    self._bind(name, scope, child, None)
            is_conditional = isinstance(child, _CONDITIONAL) and not is_main_guard(child)
            self._collect(child, inner, (conditional or is_conditional) and inner is scope)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                self.imported[alias.asname or alias.name] = ("." * node.level + (node.module or ""), alias.name)
            else:
                self.imported[alias.asname or alias.name.partition(".")[0]] = (alias.name, None)

    def _bind(self, name: str, scope: ast.AST, node: Any, value: ast.expr | None) -> None:
        self._bindings.setdefault(name, []).append(Binding(scope, node.end_lineno or node.lineno, value))

    def resolved(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for, and any other expression as it is. Raises Unreadable."""
        if not isinstance(node, ast.Name):
            return node
        self.used.add(node.id)
        bindings = self._bindings.get(node.id, [])
        if not bindings:
            return node
        scope = self._scopes.get(node, self.tree)
        before = [one for one in bindings if one.scope is scope and one.end < node.lineno]
        if not any(one.scope is scope for one in bindings):  # of the module, which a function reads when it is called
            before = [one for one in bindings if one.scope is self.tree]
        if not before or (before[0].scope is not scope and len(before) > 1):
            raise Unreadable(node, f"`{node.id}` has no value that is written in one place")
        last = max(before, key=lambda one: one.end)
        if last.value is None:
            raise Unreadable(node, f"`{node.id}` depends on what the script does")
        return self.resolved(last.value)

    def called(self, node: ast.expr) -> str:
        """The name of what a call calls, as its module has it: ``SFTTrainer`` of ``trl.SFTTrainer(…)``, an alias undone."""
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, ("", None))[1] or node.id
        return ""

    def value(self, node: ast.expr) -> Any:
        """The plain value of an expression. Raises Unreadable."""
        node = self.resolved(node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(one) for one in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {self.value(key): self.value(one) for key, one in zip(node.keys, node.values, strict=True) if key}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.value(node.left), self.value(node.right)
            if all(isinstance(one, int | float) for one in (left, right)) or isinstance(node.op, ast.Add):
                try:
                    return _OPERATORS[type(node.op)](left, right)
                except (TypeError, ArithmeticError):
                    raise self.unreadable(node) from None
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(one)) for one in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return self.value(node.value)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":  # a number format, as torch.bfloat16
            return node.attr
        raise self.unreadable(node)

    def unreadable(self, node: ast.AST) -> Unreadable:
        """That an expression has no value that can be read."""
        return Unreadable(node, f"`{shown(node)}` has a value only when the script runs")


def is_main_guard(node: ast.AST) -> bool:
    """Whether a statement is ``if __name__ == "__main__":``."""
    return isinstance(node, ast.If) and ast.unparse(node.test).replace("'", '"') in (
        '__name__ == "__main__"',
        '"__main__" == __name__',
    )


def shown(node: ast.AST) -> str:
    """An expression in one short line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def argument(name: str, node: ast.AST) -> str:
    """An argument as a message shows it: without its value where that may be a secret."""
    return name if SECRET.search(name) else f"{name}={shown(node)}"


def root(node: ast.AST) -> str:
    """The name with which a dotted or indexed expression begins; empty if it begins otherwise."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _stored(statement: ast.AST) -> Iterator[str]:
    """The names that a statement gives values, but for those of the statements and comprehensions in it."""
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.expr | ast.withitem):
            inner = {
                name for one in ast.walk(part) if isinstance(one, ast.comprehension) for name in ast.walk(one.target)
            }
            for one in ast.walk(part):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one not in inner:
                    yield one.id
