"""Language-model alignment as Prefect flows of cached, retryable, traceable stages.

Exit codes: 0 success, 1 a run failed, 2 invalid input, 3 a problem with the environment, 4 not promoted (a gate rejected
the policy, or another run moved the tag first), 5 promoted but not published, 6 a night gave up rows of earlier nights,
7 some branches of the run failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated

import typer

from alignment.flows import access
from alignment.flows.cli import chat as cli_chat
from alignment.flows.cli import check as cli_check
from alignment.flows.cli import deploy as cli_deploy
from alignment.flows.cli import doctor as cli_doctor
from alignment.flows.cli import explain as cli_explain
from alignment.flows.cli import fields as cli_fields
from alignment.flows.cli import generate as cli_generate
from alignment.flows.cli import init as cli_init
from alignment.flows.cli import labels as cli_labels
from alignment.flows.cli import lineage as cli_lineage
from alignment.flows.cli import migrate as cli_migrate
from alignment.flows.cli import nights as cli_nights
from alignment.flows.cli import plan as cli_plan
from alignment.flows.cli import report as cli_report
from alignment.flows.cli import reproduce as cli_reproduce
from alignment.flows.cli import resume as cli_resume
from alignment.flows.cli import run as cli_run
from alignment.flows.cli import samples as cli_samples
from alignment.flows.cli import serve as cli_serve
from alignment.flows.cli import services as cli_services
from alignment.flows.cli import storage as cli_storage
from alignment.flows.cli import store as cli_store
from alignment.flows.cli import touched as cli_touched
from alignment.flows.cli import transfer as cli_transfer
from alignment.flows.cli import trust as cli_trust
from alignment.flows.cli import ui as cli_ui
from alignment.flows.console import Unbroken, err, print_json
from alignment_core import network
from alignment_core.credentials import cut
from alignment_core.errors import AlignmentError, EnvironmentFault, UserError, one_line

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after SIGTERM, as shells have them."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
cli_transfer.register(cli_store.artifacts_app)
cli_trust.register(cli_store.artifacts_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"alignment {metadata.version('alignment')}")
        raise typer.Exit


@app.callback(help=__doc__)
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options in front of a command."""


PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Start": (cli_doctor.doctor, cli_init.init, cli_migrate.migrate, cli_fields.fields, cli_check.check, cli_plan.plan),
    "Run": (cli_run.run, cli_resume.resume, cli_reproduce.reproduce),
    "Look": (
        cli_services.status,
        cli_deploy.watch,
        cli_samples.samples,
        cli_report.report,
        cli_explain.explain,
        cli_ui.ui,
        cli_lineage.lineage,
        cli_touched.touched,
        cli_lineage.diff,
        cli_store.artifacts_app,
    ),
    "Serve": (
        cli_store.promote,
        cli_store.rollback,
        cli_store.tags_app,
        cli_chat.chat,
        cli_generate.generate,
        cli_serve.serve,
        cli_serve.serve_reward,
    ),
    "Operate": (
        cli_services.up,
        cli_services.env,
        cli_services.down,
        cli_deploy.deployments,
        cli_deploy.deploy,
        cli_storage.store_app,
        cli_nights.nights_app,
        cli_labels.labels_app,
    ),
}
"""The commands by panel of ``align --help``, in the order in which a user meets them."""

for panel, commands in PANELS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=command.info.name, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(command)


@contextmanager
def _errors_as_sentences(as_json: bool) -> Iterator[None]:
    try:
        yield
    except AlignmentError as error:
        _fail(str(error), error.exit_code, as_json)
    except typer.Exit:
        raise
    except Exception as error:
        if os.environ.get("ALIGN_DEBUG"):
            raise
        if unreachable := access.unreachable(error):
            _fail(unreachable, EnvironmentFault.exit_code, as_json)
        _fail(f"{type(error).__name__}: {one_line(error)} (ALIGN_DEBUG=1 shows where)", 1, as_json)
    except SystemExit as end:
        if end.code not in (INTERRUPTED, TERMINATED):  # the former is typer's answer to Ctrl-C
            raise
        _fail(_after_interruption(sys.argv[1:]), end.code, as_json)


@contextmanager
def _output_written() -> Iterator[None]:
    """Fail if standard output could not be written, except for runs, whose result is in the store."""
    try:
        yield
    except SystemExit as end:
        lost = getattr(sys.stdout, "lost", None)
        if lost and not end.code and sys.argv[1:2] not in (["run"], ["resume"]):
            raise EnvironmentFault(f"standard output could not be written: {lost.strerror}") from None
        raise


def _after_interruption(arguments: list[str]) -> str:
    """The sentence after Ctrl-C or SIGTERM."""
    if arguments[:1] == ["reproduce"]:
        return "finished stages are kept: the same command with the same --home continues where it stopped"
    if arguments[:1] not in (["run"], ["resume"], ["generate"]):
        return "nothing was changed in part"
    return "finished stages are kept; `align resume last`, or the same command again, continues where it stopped"


def _fail(message: str, code: int, as_json: bool) -> None:
    message = cut(message)
    kinds = {
        UserError.exit_code: "invalid input",
        EnvironmentFault.exit_code: "environment problem",
        INTERRUPTED: "interrupted",
        TERMINATED: "terminated",
    }
    kind = kinds.get(code, "failed")
    if as_json:
        print_json(
            {
                "status": "interrupted" if code in (INTERRUPTED, TERMINATED) else "failed",
                "error": message,
                "exit_code": code,
            }
        )
    err.print(f"[red]{kind}:[/] ", end="")
    err.print(message, markup=False)
    raise SystemExit(code)


def _on_sigterm(*_: object) -> None:
    """Exit like Ctrl-C: context managers close, and the last line tells how to continue."""
    raise SystemExit(TERMINATED)


def main() -> None:
    """Entry point of the ``align`` command."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    network.prepare()
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None if it is closed
            setattr(sys, name, Unbroken(stream))
    with _errors_as_sentences("--json" in sys.argv), _output_written():
        app()


if __name__ == "__main__":
    main()
