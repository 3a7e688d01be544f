"""A Python script that trains with TRL, as the equivalent command of TRL. The script is parsed and never run.

The keywords of ``GRPOConfig(…)`` and its like are flags of that command; those of the trainer, of its model, rows and adapters
are mapped to flags here. A part that cannot be read becomes a sentence with its line.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment_core.errors import UserError
from alignment_core.migrate.command_line import TRL, CommandLine
from alignment_core.migrate.python_source import Source, Unreadable, argument, is_main_guard, root, shown
from alignment_core.migrate.script_rows import rows_of
from alignment_core.migrate.trl import FRAMEWORK, MODEL_REWARD

TRAINERS = {f"{name}Trainer": name.lower() for name in ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO")}
POSITIONS = {
    **dict.fromkeys(("grpo", "rloo"), ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")),
    **dict.fromkeys(("dpo", "kto"), ("model", "ref_model", "args")),
    **dict.fromkeys(("sft", "reward"), ("model", "args")),
}
"""Parameters of trainers in their order, as far as scripts give them by position."""
ROUTINE = {
    *("train", "evaluate", "end", "print", "print_trainable_parameters", "save_model", "save_state", "save_pretrained"),
    *("push_to_hub", "create_model_card", "log_metrics", "save_metrics", "is_world_process_zero"),
}
"""Methods that do not affect training: a run trains, saves and evaluates in any case."""
MODEL_FLAGS = FRAMEWORK.commands["sft"].rules
"""Among them are those for the arguments of ``LoraConfig``, ``from_pretrained`` and ``BitsAndBytesConfig``."""
PEFT_DEFAULTS = {"lora_r": ["8"], "lora_alpha": ["8"], "lora_dropout": ["0.0"]}
"""Defaults of ``LoraConfig`` that differ from those of TRL's commands."""
PARSERS = ("TrlParser", "HfArgumentParser", "ArgumentParser")
MOST_BYTES = 1 << 20


def read(path: Path, folder: Path) -> CommandLine:
    """The command that is equivalent to a script, with paths relative to ``folder``.

    Raises UserError if it does not use exactly one of the trainers.
    """
    try:
        source = Source(ast.parse(path.read_bytes()[:MOST_BYTES].decode()))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as Python: {' '.join(str(error).split())}") from None
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    trainers = [call for call in calls if source.called(call) in TRAINERS]
    if not trainers:
        others = [call for call in calls if source.called(call).endswith("Trainer")]
        hints = (
            f"; {source.called(call)} in line {call.lineno} is not supported (docs/migrating.md)" for call in others[:3]
        )
        raise UserError(f"{path}: it uses none of the supported trainers {', '.join(TRAINERS)} of TRL{''.join(hints)}")
    if len(trainers) > 1:
        places = ", ".join(f"{source.called(call)} in line {call.lineno}" for call in trainers)
        raise UserError(
            f"{path}: it uses {len(trainers)} trainers ({places}): leave one in a copy of the script at a time; sections of "
            "one recipe can follow each other, such as `sft` and `dpo` (docs/tutorials/from-trl.md)"
        )
    try:
        return _Reader(source, path, folder, trainers[0]).command()
    except RecursionError:
        raise UserError(f"{path}: an expression in it is nested too deeply") from None


class _Reader:
    """Collects the flags of one script, with a note for each part that it cannot read."""

    def __init__(self, source: Source, path: Path, folder: Path, trainer: ast.Call) -> None:
        self.source = source
        self.path = path
        self.folder = folder
        self.trainer = trainer
        self.flags: dict[str, list[str]] = {}

    def command(self) -> CommandLine:
        program = TRAINERS[self.source.called(self.trainer)]
        given = self.source.arguments(self.trainer, POSITIONS[program])
        # in this order: rewards need the weights in `args`, and other models are compared with `model`
        readers = {
            "model": self._model,
            "args": self._settings,
            "reward_funcs": self._rewards,
            "train_dataset": self._rows,
            "eval_dataset": self._held_out,
            "peft_config": self._adapters,
            "ref_model": self._same_model,
            "processing_class": self._same_model,
            "tokenizer": self._same_model,
        }
        for name, read_argument in readers.items():
            try:
                if name in given:
                    read_argument(given[name])
            except Unreadable as error:
                self.source.note(error, f"`{name}`: {error}")
        for name in given.keys() - readers:
            self.source.note(given[name], f"`{argument(name, given[name])}` of the trainer is not in the recipe")
        if "args" not in given:
            self.source.note(self.trainer, "the trainer has no `args`: TRL's defaults apply")
        self._note_changes()
        lines = sorted((line, sentence) for sentence, line in self.source.notes.items())
        notes = [f"Line {line} of {self.path.name}: {sentence}." for line, sentence in lines]
        return CommandLine(TRL, program, self.flags, notes=notes, script=self.path.name)

    def _put(self, flag: str, node: ast.expr, name: str) -> None:
        """Set a flag to the value of an expression, or note why it cannot be read."""
        try:
            self.flags[flag] = _words(self.source.value(node))
        except Unreadable as error:
            self.source.note(error, f"`{name}`: {error}; set its value in the recipe")

    def _put_known(self, name: str, node: ast.expr, prefix: str, owner: str) -> None:
        """Set the flag of an argument that is no setting of the trainer, or note that TRL's commands have none."""
        flag = next((flag for flag in (f"{prefix}_{name}", name) if flag in MODEL_FLAGS), None)
        if flag is None:
            self.source.note(node, f"`{argument(name, node)}` of {owner} is not in the recipe")
        else:
            self._put(flag, node, name)

    def _settings(self, node: ast.expr) -> None:
        call = self.source.resolved(node)
        if not isinstance(call, ast.Call) or not self.source.called(call).endswith(("Config", "Arguments")):
            raise Unreadable(node, f"`{shown(node)}` is not a configuration with its settings in the source")
        for name, value in self.source.arguments(call, ("output_dir",)).items():
            if name == "model_init_kwargs":
                self._loading(self.source.items(value))
            else:
                self._put(name, value, name)

    def _model(self, node: ast.expr) -> None:
        call = self.source.resolved(node)
        if isinstance(call, ast.Call) and self.source.called(call) == "get_peft_model" and len(call.args) == 2:
            self._model(call.args[0])
            return self._adapters(call.args[1])
        if isinstance(call, ast.Call) and self.source.called(call) == "from_pretrained":
            given = self.source.arguments(call, ("pretrained_model_name_or_path",))
            names = ("pretrained_model_name_or_path", "model_name")
            call = next((given.pop(name) for name in names if name in given), call)
            self._loading(given)
        self.flags["model_name_or_path"] = [self.source.text(call)]
        return None

    def _loading(self, given: Mapping[str, ast.expr]) -> None:
        """Arguments of ``from_pretrained``, and of the ``BitsAndBytesConfig(…)`` among them."""
        for name, value in given.items():
            if name == "quantization_config":
                self._loading(self.source.items(value))
            else:
                self._put_known(name, value, "model", "the model")

    def _adapters(self, node: ast.expr) -> None:
        call = self.source.resolved(node)
        if isinstance(call, ast.Constant) and call.value is None:
            return
        if not isinstance(call, ast.Call) or self.source.called(call) != "LoraConfig":
            raise Unreadable(node, f"`{shown(call)}` is not a LoraConfig with its settings in the source")
        self.flags |= {"use_peft": ["true"], **PEFT_DEFAULTS}
        for name, value in self.source.arguments(call).items():
            if not (name == "bias" and shown(value) == "'none'"):
                self._put_known(name, value, "lora", "LoraConfig")

    def _same_model(self, node: ast.expr) -> None:
        """A tokenizer or reference that has to be the model's own, which needs no field."""
        call = self.source.resolved(node)
        if isinstance(call, ast.Constant) and call.value is None:
            return
        name = call.args[0] if isinstance(call, ast.Call) and call.args else call
        if [self.source.text(name)] != self.flags.get("model_name_or_path"):
            raise Unreadable(node, f"`{shown(call)}` differs from the model's")

    def _rows(self, node: ast.expr) -> None:
        self.flags |= rows_of(self.source, node).flags()

    def _held_out(self, node: ast.expr) -> None:
        rows = rows_of(self.source, node)
        if not rows.paths or [*rows.paths] != self.flags.get("dataset_name") or rows.are_files:
            raise Unreadable(
                node, f"rows for evaluation, of {', '.join(rows.paths)}: add them as a source with `held_out: true`"
            )
        self.flags["dataset_test_split"] = [rows.split or "test"]

    def _rewards(self, node: ast.expr) -> None:
        listed = self.source.resolved(node)
        weights = self.flags.get("reward_weights", [])
        nodes = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [node]
        rewards: dict[int, str] = {}
        for number, item in enumerate(nodes):
            try:
                rewards[number] = self._reward(item)
            except Unreadable as error:
                self.source.note(error, f"`reward_funcs`: {error}")
        if len(weights) == len(nodes):
            self.flags["reward_weights"] = [weights[number] for number in rewards]
        if rewards:
            self.flags["reward_funcs"] = [*rewards.values()]

    def _reward(self, node: ast.expr) -> str:
        """A reward as a word of `--reward_funcs`. Raises Unreadable."""
        if isinstance(node, ast.Attribute) and (module := self._module(node.value)):
            return self._function(module, node.attr)
        if isinstance(node, ast.Name) and node.id in self.source.imported:
            module, function = self.source.imported[node.id]
            return self._function(module, function or node.id)
        if isinstance(node, ast.Name) and node.id in self.source.defined:
            if _runs_on_import(self.source, self.trainer):
                raise Unreadable(
                    node,
                    f"`{node.id}` is defined in this script, which would train whenever it is loaded: move the function to a "
                    f"file of its own, and add `{{function: FILE.py:{node.id}}}` to `rl.rewards`",
                )
            return f"{os.path.relpath(self.path, self.folder)}:{node.id}"
        value = self.source.resolved(node)
        if isinstance(value, ast.Call) and self.source.called(value) == "from_pretrained" and value.args:
            value = value.args[0]
        if isinstance(value, ast.Constant | ast.JoinedStr):
            return f"{MODEL_REWARD}{self.source.text(value)}"
        raise Unreadable(
            node,
            f"`{shown(node)}` is made while the script runs: write a function that has a name, and add it to `rl.rewards`",
        )

    def _module(self, node: ast.expr) -> str:
        """The module that a dotted name stands for; empty for an object."""
        first, _, inner = ast.unparse(node).partition(".")
        module, attribute = self.source.imported.get(first, ("", None))
        if attribute and not module.strip("."):  # `from . import b`
            module, attribute = attribute, None
        if not module or (attribute and self._file_of(module).is_file()):  # an object that the file defines
            return ""
        if attribute:
            module = f"{module}.{attribute}"
        elif module.startswith(f"{first}."):  # `import a.b` binds `a`
            module = first
        return f"{module}.{inner}" if inner else module

    def _file_of(self, module: str) -> Path:
        return self.path.parent / Path(*module.lstrip(".").split(".")).with_suffix(".py")

    def _function(self, module: str, function: str) -> str:
        file = self._file_of(module)
        return f"{os.path.relpath(file, self.folder)}:{function}" if file.is_file() else f"{module}:{function}"

    def _note_changes(self) -> None:
        """Note settings from the command line, and statements that change the trainer or its arguments."""
        source = self.source
        nodes = [*ast.walk(source.tree)]
        assigned = [node.targets for node in nodes if isinstance(node, ast.Assign) and node.value is self.trainer]
        names = source.used | {target.id for targets in assigned for target in targets if isinstance(target, ast.Name)}
        for node in nodes:
            is_set = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
            if is_set and root(node) in names | {"os"}:
                cure = ": set it before `align run`, too" if root(node) == "os" else ""
                source.note(node, f"`{shown(node)}` is set, which the recipe does not do{cure}")
            called = source.called(node) if isinstance(node, ast.Call) else ""
            if called in PARSERS:
                source.note(
                    node, "settings come from the command line: give `align migrate` a command of TRL with them"
                )
            if called == "setattr" and isinstance(node, ast.Call) and node.args and root(node.args[0]) in names:
                source.note(node, f"`{shown(node.args[0])}` is changed by setattr, which the recipe does not do")
            method = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr not in ROUTINE and root(method) in names:
                source.note(node, f"`{shown(node)}` is not read")


def _words(value: Any) -> list[str]:
    """A value as the words of a flag."""
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _runs_on_import(source: Source, trainer: ast.Call) -> bool:
    """Whether importing the script creates the trainer: outside of functions or in one that is named there, without a check of
    ``__name__``."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    executed = [node for node in source.tree.body if not isinstance(node, definitions) and not is_main_guard(node)]
    for statement in executed:  # the loop appends the functions that are named
        for node in ast.walk(statement):
            if node is trainer:
                return True
            function = source.defined.get(node.id) if isinstance(node, ast.Name) else None
            if function is not None and function not in executed:
                executed.append(function)
    return False
