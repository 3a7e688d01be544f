"""Verifiers, by name or as user functions: a number in [0, 1] for each completion, or the reason of a failure."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from alignment_core.errors import UserError
from alignment_core.recipes.sections.rewards import VERIFIERS, is_named, plugin_name
from alignment_core.rewards.base import Rows
from alignment_core.rewards.named import NamedVerifier, Opened
from alignment_core.rewards.results import Account, Answers, numbers
from alignment_core.source_code import PACKAGE, digest_of_module, modules_behind
from alignment_core.user_code.errors import Failed
from alignment_core.user_code.functions import function_content
from alignment_core.user_code.pool import Elsewhere, FunctionPool

FIELD = "evaluation.verifier"


def verify(
    name: str,
    rows: Rows,
    timeout: float = 60.0,
    max_failed: float = 0.0,
    processes: int | None = 1,
    elsewhere: Elsewhere | None = None,
    load_timeout: float | None = None,
) -> list[float | None]:
    """A number in [0, 1] for each row of rollouts; None if the verifier failed or did not answer in ``timeout`` seconds.

    Raises DataError with the first failure once more than the share ``max_failed`` of the rows have failed; ``processes``,
    ``elsewhere`` and ``load_timeout`` as FunctionPool has them.
    """
    account = Account(f"the verifier {name}", max_failed, "evaluation.max_failed_rewards")
    with Verifier(name, timeout, FIELD, processes, elsewhere=elsewhere, load_timeout=load_timeout) as verifier:
        return numbers(account.settle(rows, verifier(rows)))


def verifier_content(name: str, field: str = FIELD) -> dict[str, Any]:
    """The verifier in stage keys: its name, or a function's name and the digest of its source."""
    named = _named(name, field)
    if named is None:
        return function_content(name, field)
    named.check()
    content: dict[str, Any] = {"name": name}
    if named.runs_python:
        content["python"] = ".".join(map(str, sys.version_info[:2]))
    if named.function is not None and not named.function.startswith(f"{PACKAGE}."):
        content["function"] = function_content(named.function, field)  # the processes load only counted files
    return content


def verifier_code(name: str) -> tuple[str, ...]:
    """Modules that compute the scores of a verifier that is known by name."""
    named = _named(name, FIELD) if is_named(name) else None
    if named is None:
        return ()
    function = (named.function or "").partition(":")[0]
    return tuple(dict.fromkeys(filter(None, (VERIFIERS.module(plugin_name(name)), function))))


def verifier_packages(name: str) -> tuple[str, ...]:
    """Distributions whose versions determine the scores of a verifier that is known by name."""
    named = _named(name, FIELD) if is_named(name) else None
    return named.packages if named else ()


def verifier_computed_by(name: str) -> dict[str, dict[str, str]]:
    """Digests of that code, and those versions, for a ``content`` of an environment."""
    modules = {module for code in verifier_code(name) for module in modules_behind(code)}
    return {
        "code": {module: digest_of_module(module) for module in sorted(modules)},
        "packages": {package: metadata.version(package) for package in verifier_packages(name)},
    }


class Verifier:
    """The open verifier of this name, with its processes; callable from any thread.

    Raises UserError if there is none, EnvironmentFault if this machine cannot run it.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        field: str = FIELD,
        processes: int | None = 1,
        files: dict[str, str] | None = None,
        elsewhere: Elsewhere | None = None,
        load_timeout: float | None = None,
    ) -> None:
        """``processes``, ``files``, ``elsewhere`` and ``load_timeout`` as FunctionPool has them."""
        named = _named(name, field)
        self._opened: Opened
        if named and named.open:
            self._opened = named.open(field)
        else:
            function = (named.function if named else None) or name
            pool = FunctionPool(
                function, timeout, field, processes, files, elsewhere=elsewhere, load_timeout=load_timeout
            )
            self._opened = _Function(pool)

    def __call__(self, rows: Rows) -> Answers:
        yield from self._opened(rows)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Function:
    """A function of prompt, completion and label."""

    def __init__(self, pool: FunctionPool) -> None:
        self._pool = pool

    def __call__(self, rows: Rows) -> Answers:
        calls = [[row["prompt_text"], row["completion_text"], row["label"]] for row in rows]
        for number, score in self._pool.answers(calls):
            bad = isinstance(score, float) and not 0 <= score <= 1  # as NaN is
            problem = f"returned {score}; a number in [0, 1] is needed"
            yield number, Failed("bad_number", problem) if bad else score

    def close(self) -> None:
        self._pool.close()


def _named(name: str, field: str) -> NamedVerifier | None:
    """The verifier that is known by this name; None for a function. Raises UserError if it can be neither."""
    if is_named(name):
        verifier: NamedVerifier = VERIFIERS.load(plugin_name(name))
        return verifier
    if ":" not in name:
        names = [plugin.replace("-", "_") for plugin in VERIFIERS.names()]
        known = " nor ".join(f"`{form}`" for form in (*names, "module:function", "file.py:function"))
        raise UserError(f"{field}: {name!r} is neither {known}")
    return None
