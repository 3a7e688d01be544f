"""The program that a command line or shell script starts and its flags, behind any launcher."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
_TOKEN = re.compile(
    r"""(?P<end>\n) | (?P<comment>\#[^\n]*) | (?P<process>[<>]\([^()]*\)) | (?P<redirection>[12&]?[<>][<>&|]*)
    | (?P<separator>[;&|]+)
    | (?P<word>(?:'[^']*' | "(?:[^"\\]|\\.)*" | \$'(?:[^'\\]|\\.)*' | \\.
        | \$\((?:[^()\n]|\([^()\n]*\))*\) | `[^`\n]*` | [^\s;&|<>'"\\])+)
    | (?P<unclosed>['"\\][^\n]*)""",
    re.VERBOSE | re.DOTALL,
)
"""Parts of a shell script; a # within a word begins no comment, quotes may contain newlines, and a command whose output is
substituted is part of a word."""
_HERE_DOCUMENT = re.compile(
    r"""(?<!<)<<-?[ \t]*(?P<quote>['"]?)(?P<end>[A-Za-z_]\w*)(?P=quote)(?P<rest>[^\n]*)\n"""
    r"""(?P<body>.*?)^[ \t]*(?P=end)[ \t]*$""",
    re.DOTALL | re.MULTILINE,
)
_QUOTED = re.compile(r"""\$'((?:[^'\\]|\\.)*)'|'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_USED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")


@dataclass(frozen=True)
class CommandLine:
    """The parts of one command."""

    framework: str
    program: str
    """``train_dpo``, for example, or ``dpo`` of TRL."""
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
    """Name of the Python script; empty for a command line or shell script."""

    @property
    def processes(self) -> int | None:
        """The number of processes that the launcher starts; None if it is unknown."""
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
    for statement in _statements(_without_blocks(text, variables)):
        assigned = [_ASSIGNED.fullmatch(word) for word in statement if word not in ("export", "local")]
        if all(assigned):  # otherwise they are set for the command behind them
            for name, more, value in (match.groups() for match in assigned if match):
                before = variables.get(name, "") if more else ""
                variables[name] = before + _unquoted(_expanded(value, variables))
        elif statement[0] not in ("echo", "printf", "pip", "read"):
            words = _words(_expanded(" ".join(statement), variables))
            yield from _command([_unquoted(word) for word in words])


def _without_blocks(text: str, variables: dict[str, str]) -> str:
    """The text without comment lines, here-documents and arrays, whose words become values of the variables that get them."""
    text = re.sub(r"^[ \t]*#[^\n]*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"\\[ \t\r]*(?:\n|\Z)", " ", text)
    text = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text)  # an array in quotes is several words, too

    def keep(block: re.Match[str]) -> str:
        parts = block.groupdict("")
        before = f"{variables.get(parts['name'], '')} " if parts.get("more") else ""
        variables[parts["name"]] = before + " ".join(_words(parts["body"]))
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


def _statements(text: str) -> Iterator[list[str]]:
    """The words of each statement, in their quotes and without redirections; here-documents, which may be scripts, come last.

    Raises UserError for a quote without an end.
    """
    # Each part separately: an apostrophe in a here-document begins no quote in the script around it.
    for part in (_HERE_DOCUMENT.sub(r"\g<rest>", text), *(block["body"] for block in _HERE_DOCUMENT.finditer(text))):
        yield from _statements_of_part(part)


def _statements_of_part(text: str) -> Iterator[list[str]]:
    words: list[str] = []
    is_target = False
    for token in _TOKEN.finditer(f"{text}\n"):
        kind = token.lastgroup
        if kind == "word" and not is_target:
            words.append(token[0])
        elif kind == "unclosed":
            line = " ".join((*words, token[0]))
            if any(name in line for name in ("openrlhf", "trl", "train_")):
                raise UserError(f"the command cannot be read: no closing quotation: {line[:60]} …")
            words = []
        elif kind in ("end", "separator") and words:
            yield words
            words = []
        is_target = kind == "redirection"


def _words(text: str) -> list[str]:
    """All words of a text, in their quotes."""
    return [token[0] for token in _TOKEN.finditer(text) if token.lastgroup == "word"]


def _unquoted(word: str) -> str:
    """A word without its quotes and escapes."""

    def content(part: re.Match[str]) -> str:
        ansi, single, double, escaped = part.groups()
        if ansi is not None:
            return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), ansi)
        if double is not None:
            return re.sub(r'\\(["\\])', r"\1", double)
        return escaped if single is None else single

    return _QUOTED.sub(content, word)


def _expanded(text: str, variables: Mapping[str, str], depth: int = 8) -> str:
    """The text with the values of variables that the script sets; other variables stay."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    new = _USED.sub(value, text)
    return new if new == text or not depth else _expanded(new, variables, depth - 1)


def _program(words: Sequence[str], number: int) -> tuple[str, str, int] | None:
    """Framework and program that word ``number`` names, and the position of the first flag."""
    word = words[number]
    if word.rpartition("/")[2] == "trl" and number + 1 < len(words) and words[number + 1] in _SUBCOMMANDS:
        return TRL, words[number + 1], number + 2
    for framework, pattern in _PROGRAMS:
        named = pattern.fullmatch(word)
        # a bare name after the first word is that of a folder or job
        is_file_or_module = number == 0 or "." in word.rpartition("/")[2]
        if named and is_file_or_module:
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
            yield CommandLine(framework, program, flags, launcher, variables, stray, repeated)
            return


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
