"""A Python script that trains with TRL, as the command of TRL's CLI that does the same. It is parsed, and never run.

The keywords of ``GRPOConfig(…)`` and its like are flags of that command already; those of the trainer, of its model, rows and
adapters are mapped to flags here. What cannot be read becomes a sentence that names the line.
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
from alignment_core.migrate.trl.datasets import Rows, rows_of
from alignment_core.migrate.trl.expressions import Source, Unreadable, argument, is_main_guard, root, shown
from alignment_core.migrate.trl.values import MODEL_REWARD

TRAINERS = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "RewardTrainer": "reward",
    "KTOTrainer": "kto",
    "GRPOTrainer": "grpo",
    "RLOOTrainer": "rloo",
}
POSITIONS = {
    **dict.fromkeys(("grpo", "rloo"), ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")),
    **dict.fromkeys(("dpo", "kto"), ("model", "ref_model", "args")),
    **dict.fromkeys(("sft", "reward"), ("model", "args")),
}
"""Parameters of trainers in their order, as far as scripts give them by position."""
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
}
"""Flags of PEFT's ``LoraConfig``."""
LOADING = {
    "torch_dtype": "dtype",
    "dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "trust_remote_code": "trust_remote_code",
    "revision": "model_revision",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_compute_dtype": "dtype",
}
"""Flags of ``from_pretrained`` and of ``BitsAndBytesConfig``."""
IGNORED = ("device_map", "use_cache", "low_cpu_mem_usage")
"""Of ``from_pretrained``: where a model lies while it trains is the trainers' business."""
ROUTINE = {
    *("train", "evaluate", "end", "print", "print_trainable_parameters", "save_model", "save_state", "save_pretrained"),
    *("push_to_hub", "create_model_card", "log_metrics", "save_metrics", "is_world_process_zero"),
}
"""Methods that say nothing about training: a run trains, saves and evaluates by itself."""
PARSERS = ("TrlParser", "HfArgumentParser", "ArgumentParser")
MOST_BYTES = 1 << 20


def read(path: Path, folder: Path) -> CommandLine:
    """The command that a script stands for, with paths relative to ``folder``.

    Raises UserError if it does not use exactly one of the trainers, or takes its settings from the command line.
    """
    try:
        text = path.read_bytes()[:MOST_BYTES].decode()
        source = Source(ast.parse(text))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as Python: {' '.join(str(error).split())}") from None
    trainers = [
        node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and source.called(node) in TRAINERS
    ]
    if not trainers:
        raise UserError(_no_trainer(source, path))
    if len(trainers) > 1:
        places = ", ".join(f"{source.called(one)} in line {one.lineno}" for one in trainers)
        raise UserError(
            f"{path}: {len(trainers)} trainers in it ({places}): leave one in a copy of the script at a time; sections of one "
            "recipe can follow each other, such as `sft` and `dpo` (docs/tutorials/from-trl.md)"
        )
    try:
        return _Reader(source, path, folder).command(trainers[0])
    except RecursionError:
        raise UserError(f"{path}: an expression in it is too deep to be read") from None


def _no_trainer(source: Source, path: Path) -> str:
    others = [
        (source.called(node), node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and source.called(node).endswith("Trainer")
    ]
    found = "".join(f"; {name} in line {line} is another one (docs/migrating.md)" for name, line in others[:3])
    return f"{path}: no trainer in it that is read, which are {', '.join(TRAINERS)} of TRL{found}"


class _Reader:
    """Collects the flags of one script, and a sentence for each part that it cannot read."""

    def __init__(self, source: Source, path: Path, folder: Path) -> None:
        self.source, self.path, self.folder = source, path, folder
        self.flags: dict[str, list[str]] = {}
        self.notes: dict[str, int] = {}
        """Sentences, with their lines."""

    def command(self, trainer: ast.Call) -> CommandLine:
        program = TRAINERS[self.source.called(trainer)]
        given = self._arguments(trainer, POSITIONS[program], program)
        taken = {"model": self._model, "args": self._settings, "reward_funcs": lambda one: self._rewards(one, trainer)}
        taken |= {"train_dataset": self._rows, "eval_dataset": self._held_out, "peft_config": self._adapters}
        taken |= dict.fromkeys(("ref_model", "processing_class", "tokenizer"), self._same_model)
        order = [*taken]  # rewards need the settings' weights, other models the name of the first
        for name, node in sorted(given.items(), key=lambda one: order.index(one[0]) if one[0] in order else len(order)):
            if name not in taken:
                self._note(node, f"`{argument(name, node)}` of the trainer is not in the recipe")
                continue
            try:
                taken[name](node)
            except Unreadable as error:
                self._note(error, f"`{name}`: {error}")
        if "args" not in given:
            self._note(trainer, "the trainer has no `args`: what they would set is as TRL has it by default")
        self._changes(trainer)
        for call in ast.walk(self.source.tree):
            if isinstance(call, ast.Call) and self.source.called(call) in PARSERS:
                self._note(
                    call, "settings come from the command line: give `align migrate` a command of TRL's CLI with them"
                )
        notes = [f"Line {line} of {self.path.name}: {text}." for text, line in self.notes.items()]
        notes.sort(key=lambda one: int(one.split()[1]))
        return CommandLine(TRL, program, self.flags, notes=notes, script=self.path.name)

    def _note(self, node: Any, sentence: str) -> None:
        self.notes.setdefault(sentence, getattr(node, "lineno", None) or node.line)

    def _arguments(self, call: ast.Call, positions: tuple[str, ...], of: str) -> dict[str, ast.expr]:
        """The arguments of a call by name; a note for those that have none."""
        found: dict[str, ast.expr] = {}
        for number, node in enumerate(call.args):
            if number < len(positions) and not isinstance(node, ast.Starred):
                found[positions[number]] = node
            else:
                self._note(node, f"`{shown(node)}` of {of} has no name: its meaning is not read")
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
                continue
            try:
                values = self.source.resolved(keyword.value)
                if not isinstance(values, ast.Dict):
                    raise self.source.unreadable(values)
                found |= {
                    str(self.source.value(key)): one for key, one in zip(values.keys, values.values, strict=True) if key
                }
            except Unreadable:
                self._note(keyword.value, f"`**{shown(keyword.value)}` of {of} is not read")
        return found

    def _put(self, flag: str, node: ast.expr, name: str) -> None:
        """A flag with the value of an expression, or a note."""
        try:
            self.flags[flag] = _words(self.source.value(node))
        except Unreadable as error:
            self._note(error, f"`{name}`: {error}; set what it stands for in the recipe")

    def _settings(self, node: ast.expr) -> None:
        call = self.source.resolved(node)
        if not isinstance(call, ast.Call) or not self.source.called(call).endswith(("Config", "Arguments")):
            raise Unreadable(node, f"`{shown(node)}` is no configuration that the script writes down")
        for name, value in self._arguments(call, ("output_dir",), self.source.called(call)).items():
            if name == "model_init_kwargs":
                self._loading(self.source.resolved(value))
            else:
                self._put(name, value, name)

    def _model(self, node: ast.expr) -> None:
        call = self.source.resolved(node)
        if isinstance(call, ast.Call) and self.source.called(call) == "get_peft_model" and len(call.args) == 2:
            self._model(call.args[0])
            return self._adapters(call.args[1])
        if isinstance(call, ast.Call) and self.source.called(call) == "from_pretrained":
            given = self._arguments(call, ("pretrained_model_name_or_path",), "from_pretrained")
            names = ("pretrained_model_name_or_path", "model_name")
            call = next((given.pop(name) for name in names if name in given), call)
            self._loading_of(given)
        self.flags["model_name_or_path"] = [_text(self.source, call)]
        return None

    def _loading(self, node: ast.expr) -> None:
        """Keywords of ``from_pretrained`` as a dict, of ``dict(…)`` or of ``BitsAndBytesConfig(…)``."""
        if isinstance(node, ast.Call):
            return self._loading_of(self._arguments(node, (), self.source.called(node)))
        if not isinstance(node, ast.Dict):
            raise self.source.unreadable(node)
        named = zip(node.keys, node.values, strict=True)
        return self._loading_of({str(self.source.value(key)): value for key, value in named if key})

    def _loading_of(self, given: Mapping[str, ast.expr]) -> None:
        for name, value in given.items():
            if name == "quantization_config":
                self._loading(self.source.resolved(value))
            elif name in LOADING:
                self._put(LOADING[name], value, name)
            elif name not in IGNORED:
                self._note(value, f"`{argument(name, value)}` of the model is not in the recipe")

    def _adapters(self, node: ast.expr) -> None:
        call = self.source.resolved(node)
        if isinstance(call, ast.Constant) and call.value is None:
            return
        if not isinstance(call, ast.Call) or self.source.called(call) != "LoraConfig":
            raise Unreadable(node, f"`{shown(call)}` is no LoraConfig that the script writes down")
        self.flags["use_peft"] = ["true"]
        for name, value in self._arguments(call, (), "LoraConfig").items():
            if name in LORA:
                self._put(LORA[name], value, name)
            elif not (name == "bias" and shown(value) == "'none'"):
                self._note(value, f"`{argument(name, value)}` of LoraConfig is not in the recipe")

    def _same_model(self, node: ast.expr) -> None:
        """A tokenizer or reference that has to be the model's own, which needs no field."""
        call = self.source.resolved(node)
        if isinstance(call, ast.Constant) and call.value is None:
            return
        name = call.args[0] if isinstance(call, ast.Call) and call.args else call
        if [_text(self.source, name)] != self.flags.get("model_name_or_path"):
            raise Unreadable(node, f"`{shown(call)}` is another one than the model's")

    def _rows(self, node: ast.expr) -> None:
        rows = self._rows_of(node)
        self.flags |= rows.flags()

    def _rows_of(self, node: ast.expr) -> Rows:
        rows = rows_of(self.source, node)
        for line, sentence in rows.changes:
            self.notes.setdefault(sentence, line)
        return rows

    def _held_out(self, node: ast.expr) -> None:
        rows = self._rows_of(node)
        if rows.paths and [*rows.paths] == self.flags.get("dataset_name") and not rows.are_files:
            self.flags["dataset_test_split"] = [rows.split or "test"]
            return
        raise Unreadable(
            node, f"rows to measure on, of {', '.join(rows.paths)}: add them as a source with `held_out: true`"
        )

    def _rewards(self, node: ast.expr, trainer: ast.Call) -> None:
        listed = self.source.resolved(node)
        words: list[str | None] = []
        for one in listed.elts if isinstance(listed, ast.List | ast.Tuple) else [node]:
            try:
                words.append(self._reward(one, trainer))
            except Unreadable as error:
                words.append(None)
                self._note(error, f"`reward_funcs`: {error}")
        weights = self.flags.get("reward_weights")
        if weights and len(weights) == len(words):
            kept = [weight for weight, word in zip(weights, words, strict=True) if word]
            self.flags["reward_weights"] = kept
        if found := [word for word in words if word]:
            self.flags["reward_funcs"] = found

    def _reward(self, node: ast.expr, trainer: ast.Call) -> str:
        """A reward as the converter of `--reward_funcs` takes it."""
        name = node
        if isinstance(name, ast.Attribute) and (module := self._module(name.value)):
            return self._function(module, name.attr)
        if isinstance(name, ast.Name) and name.id in self.source.imported:
            module, function = self.source.imported[name.id]
            return self._function(module, function or name.id)
        if isinstance(name, ast.Name) and name.id in self.source.defined:
            return self._own(name, trainer)
        value = self.source.resolved(node)
        if isinstance(value, ast.Call) and self.source.called(value) == "from_pretrained" and value.args:
            value = value.args[0]
        if isinstance(value, ast.Constant | ast.JoinedStr):
            return f"{MODEL_REWARD}{_text(self.source, value)}"
        raise Unreadable(
            node,
            f"`{shown(node)}` is made while the script runs: write a function that has a name, and add it to `rl.rewards`",
        )

    def _module(self, node: ast.expr) -> str:
        """The module that a dotted name stands for; empty for an object."""
        first, _, inner = ast.unparse(node).partition(".")
        module, imported = self.source.imported.get(first, ("", None))
        if imported and not module.strip("."):  # `from . import b`
            module, imported = imported, None
        if not module or (imported and self._file_of(module).is_file()):  # a name that the file defines
            return ""
        if imported:
            module = f"{module}.{imported}"
        elif module.startswith(f"{first}."):  # `import a.b` binds `a`
            module = first
        return f"{module}.{inner}" if inner else module

    def _file_of(self, module: str) -> Path:
        return self.path.parent / Path(*module.lstrip(".").split(".")).with_suffix(".py")

    def _function(self, module: str, function: str) -> str:
        file = self._file_of(module)
        return f"{os.path.relpath(file, self.folder)}:{function}" if file.is_file() else f"{module}:{function}"

    def _own(self, node: ast.Name, trainer: ast.Call) -> str:
        """A function of the script itself, which is loaded from there unless that would train."""
        if _runs_on_import(self.source, trainer):
            raise Unreadable(
                node,
                f"`{node.id}` is defined in this script, which would train whenever it is loaded: move the function to a file "
                f"of its own, and add `{{function: FILE.py:{node.id}}}` to `rl.rewards`",
            )
        return f"{os.path.relpath(self.path, self.folder)}:{node.id}"

    def _changes(self, trainer: ast.Call) -> None:
        """Notes for statements that change what the trainer got, or the trainer itself."""
        names = self.source.used | {"os"}
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Assign) and node.value is trainer:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(self.source.tree):
            is_set = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
            if is_set and root(node) in names:
                cure = ": set it before `align run`, too" if root(node) == "os" else ""
                self._note(node, f"`{shown(node)}` is set, which the recipe does not do{cure}")
            changed = node.args[:1] if isinstance(node, ast.Call) and self.source.called(node) == "setattr" else []
            for one in changed:
                if root(one) in names:
                    self._note(node, f"`{shown(one)}` is changed by setattr, which the recipe does not do")
            call = node.value if isinstance(node, ast.Expr) else None
            method = call.func if isinstance(call, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr not in ROUTINE and root(method) in names - {"os"}:
                self._note(node, f"`{shown(node)}` is not read")


def _text(source: Source, node: ast.expr) -> str:
    value = source.value(node)
    if not isinstance(value, str):
        raise source.unreadable(node)
    return value


def _words(value: Any) -> list[str]:
    """A value as the words of a flag."""
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, list) and not any(isinstance(one, dict | list) for one in value):
        return [str(one) for one in value]
    return [json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _runs_on_import(source: Source, trainer: ast.Call) -> bool:
    """Whether the trainer is made when the script is imported: outside of functions, or in one that is named there, and behind
    no check of ``__name__``."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    executed: list[ast.AST] = [
        statement
        for statement in source.tree.body
        if not isinstance(statement, definitions) and not is_main_guard(statement)
    ]
    for statement in executed:  # grows by the functions that are named
        for node in ast.walk(statement):
            if node is trainer:
                return True
            function = source.defined.get(node.id) if isinstance(node, ast.Name) else None
            if function is not None and function not in executed:
                executed.append(function)
    return False
