"""The program that a command line or shell script starts and its flags, behind any launcher."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from alignment_core.errors import UserError

OPENRLHF, TRL = "OpenRLHF", "TRL"
_SUBCOMMANDS = ("sft", "dpo", "reward", "kto", "grpo", "rloo", "distillation", "vllm-serve", "env")
_PROGRAMS = (
    (OPENRLHF, re.compile(r"(?:.*[./])?openrlhf[./]cli[./](\w+?)(?:\.py)?")),
    (
        OPENRLHF,
        re.compile(r"(?:.*/)?(train_(?:sft|rm|prm|dpo|kto|kd|ppo_ray|ppo)|batch_inference|lora_combiner)(?:\.py)?"),
    ),
    (TRL, re.compile(rf"(?:.*[./])?scripts[./]({'|'.join(_SUBCOMMANDS)})(?:\.py)?")),
)
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")
"""The number of processes for accelerate, torchrun and deepspeed; for the last two it is that of each machine."""
_MACHINES = ("nnodes", "num_nodes")
_NEWLINE = "\ue000"
"""Stands for a newline in quotes while a script is read line by line."""
_ASSIGNED = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(?!\()(.*)", re.DOTALL)
_USED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")


@dataclass(frozen=True)
class CommandLine:
    """The parts of one command."""

    framework: str
    program: str
    """Such as ``train_dpo`` or, of TRL, ``dpo``."""
    flags: Mapping[str, Sequence[str]]
    """The words after each flag, by its name without dashes; for a repeated flag the last ones, as in argparse."""
    launcher: Sequence[str] = ()
    """Words before the program."""
    variables: Sequence[str] = ()
    """Names of environment variables that are set before the command."""
    stray: Sequence[str] = ()
    """Words that belong to no flag."""
    repeated: Sequence[str] = ()
    """Flags that occur more than once."""
    notes: Sequence[str] = ()
    """Sentences about parts of a Python script that are not in the flags."""
    script: str = ""
    """Name of the Python script, if it is none in a shell."""

    @property
    def processes(self) -> int | None:
        """The number of processes that the launcher starts, if it says so."""
        given = _flags(self.launcher)[0]
        processes = whole_number(given, _PROCESSES)
        if processes is None or "num_processes" in given:  # accelerate's number is for all machines
            return processes
        return processes * (whole_number(given, _MACHINES) or 1)


def whole_number(flags: Mapping[str, Sequence[str]], names: Sequence[str]) -> int | None:
    """The whole number after the first of these flags that has one."""
    first_words = (flags[name][0] for name in names if flags.get(name))
    return next((int(word) for word in first_words if word.isdigit()), None)


def read(text: str) -> CommandLine:
    """The command in ``text``: a command line, or a shell script that contains one.

    Raises UserError unless there is exactly one.
    """
    commands = {(command.framework, command.program, repr(command.flags)): command for command in _commands(text)}
    if not commands:
        raise UserError(
            "no command of OpenRLHF or TRL in it: give one such as 'python -m openrlhf.cli.train_dpo --pretrain …' or "
            "'trl sft --model_name_or_path …' in quotes, a shell script that contains one, or - for standard input; for a "
            "Python script that trains with TRL, give the file (`align migrate train.py`)"
        )
    if len(commands) > 1:
        programs = ", ".join(command.program for command in commands.values())
        raise UserError(
            f"{len(commands)} commands in it ({programs}): give one at a time, in quotes; a loop of generating and training "
            "is one recipe here, `iterative-dpo` or `rejection-sampling` (docs/migrating.md)"
        )
    return next(iter(commands.values()))


def _commands(text: str) -> Iterator[CommandLine]:
    variables: dict[str, str] = {}
    lines = _lines(_without_blocks(text, variables))
    for line in lines:
        if assigned := _ASSIGNED.fullmatch(line):
            words = _words(assigned[3])
            if len(words) <= 1:  # else a variable in front of a command
                before = variables.get(assigned[1], "") if assigned[2] else ""
                variables[assigned[1]] = before + _expanded(words[0] if words else "", variables)
                continue
        if line.split()[0] not in ("echo", "printf", "pip", "read"):
            yield from _command(_words(_expanded(line, variables)))


def _without_blocks(text: str, variables: dict[str, str]) -> str:
    """The text without here-documents and arrays that are assigned to variables; these get their words."""
    text = text.replace("\\\r\n", "\\\n")
    text = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text)  # an array in quotes is several words, too
    text = re.sub(r"\$'((?:[^'\\]|\\.)*)'", lambda quoted: shlex.quote(_unescaped(quoted[1])), text)

    def keep(block: re.Match[str]) -> str:
        name, body, before = block["name"], block["body"], ""
        if block.groupdict().get("more"):
            before = f"{variables.get(name, '')} "
        lines = body.replace("\\\n", "\n").splitlines()
        variables[name] = before + " ".join(_uncommented(line).strip() for line in lines)
        return ""

    text = re.sub(
        r"read\b[^\n]*?\s(?P<name>\w+)\s*<<-?\s*['\"]?(?P<end>\w+)['\"]?\n(?P<body>.*?)\n\s*(?P=end)\b",
        keep,
        text,
        flags=re.DOTALL,
    )
    return re.sub(
        r"^\s*(?P<name>\w+)(?P<more>\+?)=\((?P<body>[^\n]*?|\s*\n.*?\n\s*)\)\s*$",
        keep,
        text,
        flags=re.DOTALL | re.MULTILINE,
    )


def _uncommented(line: str) -> str:
    """A line without its comment. A # in quotes begins none, and quotes in a comment do not count."""
    quote = ""
    for number, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (number == 0 or line[number - 1].isspace()):
            return line[:number]
    return line


def _unescaped(text: str) -> str:
    escapes = {"n": _NEWLINE, "t": "\t", "\\": "\\", "'": "'", '"': '"'}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[0]), text)


def _lines(text: str) -> list[str]:
    """Lines, joined after a backslash at the end, without empty ones and comments."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(kept))
    return [*_with_quotes([line.strip() for line in joined.splitlines() if line.strip()])]


def _with_quotes(lines: list[str]) -> Iterator[str]:
    """The lines, joined from an opening quote to its end if that is among the next ones."""
    while lines:
        ends = (end for end in range(1, min(len(lines), 40) + 1) if _closed("\n".join(lines[:end])))
        end = next(ends, 1)
        yield "\n".join(lines[:end])
        lines = lines[end:]


def _closed(text: str) -> bool:
    with suppress(ValueError):
        shlex.split(_uncommented(text))
        return True
    return False


def _expanded(text: str, variables: Mapping[str, str], depth: int = 8) -> str:
    """The text with the values of variables that the script sets; others stay as they are."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    new = _USED.sub(value, text)
    return new if new == text or not depth else _expanded(new, variables, depth - 1)


def _words(line: str) -> list[str]:
    """The words of a line of the shell up to a pipe or redirection. Raises UserError for a quote without an end."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        for word in lexer:
            if word.startswith("#"):
                break
            if word and set(word) <= set(";&|<>"):
                if words and words[-1] in ("1", "2") and word[0] == ">":
                    words.pop()
                if set(word) & set(";|") or word == "&&":  # the words before it are another command, as in `cd x &&`
                    if any(_program(words, number) for number in range(len(words))):
                        break
                    words = []
                    continue
                break
            words.append(word.replace(_NEWLINE, "\n"))
    except ValueError as error:
        if any(name in line for name in ("openrlhf", "trl", "train_")):
            raise UserError(f"the command cannot be read: {str(error).lower()}: {line[:60]} …") from None
        return []
    return words


def _program(words: Sequence[str], number: int) -> tuple[str, str, int] | None:
    """Framework and program that word ``number`` names, and the position of the first flag."""
    word = words[number]
    if word.rpartition("/")[2] == "trl" and number + 1 < len(words) and words[number + 1] in _SUBCOMMANDS:
        return TRL, words[number + 1], number + 2
    for framework, pattern in _PROGRAMS:
        named = pattern.fullmatch(word)
        if named and (
            number == 0 or "." in word.rpartition("/")[2]
        ):  # elsewhere a bare name is that of a folder or job
            return framework, named[1], number + 1
    return None


def _command(words: Sequence[str]) -> Iterator[CommandLine]:
    for number in range(len(words)):
        if start := _program(words, number):
            framework, program, begin = start
            flags, stray, repeated = _flags(words[begin:])
            before = words[:number]
            variables = [word.partition("=")[0] for word in before if re.match(r"[A-Za-z_]\w*=", word)]
            launcher = [word for word in before if not re.match(r"[A-Za-z_]\w*=", word)]
            return (yield CommandLine(framework, program, flags, launcher, variables, stray, repeated))


def _flags(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """The flags with their words, words before any flag, and repeated flags."""
    flags: dict[str, list[str]] = {}
    stray: list[str] = []
    repeated = []
    last: list[str] | None = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if name in flags:
                repeated.append(name)
            last = flags[name] = [value] if equals else []
        elif last is None:
            stray.append(word)
        else:
            last.append(word)
    return flags, stray, repeated
