"""``align up``, ``env``, ``down`` and ``status``: the services, and the latest runs."""

from __future__ import annotations

import os
import shlex
import time
from typing import Annotated, Any

import typer

from alignment.flows import access, run_queue
from alignment.flows.console import JsonOption, out, print_json
from alignment.flows.service import services
from alignment.flows.ui.token import token_file
from alignment_core import journal, network
from alignment_core.errors import EnvironmentFault, UserError

SHOWN_RUNS = 10
NOT_UP = 3
"""Exit code of `align status` without running services."""


def up(
    port: Annotated[int, typer.Option(help="Port of the Prefect server, on loopback.")] = 4200,
    database: Annotated[
        str | None,
        typer.Option(
            help="PostgreSQL URL (postgresql+asyncpg://…) for Prefect, or `sqlite`, the default, under ALIGN_HOME. "
            f"Command lines are visible to others: pass a URL with a password as {access.DATABASE}.",
        ),
    ] = None,
    max_runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar=run_queue.VARIABLE,
            help="Concurrent runs of the worker; further ones wait. The limit is kept. Default: the present limit, at first "
            f"{run_queue.MAX_RUNS}.",
        ),
    ] = None,
    foreground: Annotated[
        bool, typer.Option(help="Stay in the foreground, for a service manager; SIGTERM stops the services.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the Prefect server, a worker and the reconciler in the background, and register all deployments."""
    if max_runs is not None:
        os.environ[run_queue.VARIABLE] = str(max_runs)
    state = services.running()
    if state is not None and (foreground or state.phase == "ready"):
        if foreground or state.url != access.url_of(port):
            raise UserError(f"the services are already running, at {state.url}; `align down` stops them")
        wanted = access.shown_database(services.database_settings(database)) if database else None
        if wanted not in (None, state.database):
            raise UserError(f"the services are already running, with {state.database}; `align down` stops them")
        if max_runs is not None:
            services.use_if_running()
            run_queue.change_limit(max_runs)
            state = state.model_copy(update={"max_runs": max_runs})
    elif foreground:
        services.become(port, database)
    else:
        state = services.start(port, database)
    if as_json:
        return print_json(state.model_dump(mode="json"))
    _print_problems(state)
    page = state.url.removesuffix("/api")
    return out.print(
        f"Prefect runs at {page}, with a worker. In another shell:\n\n"
        '  eval "$(align env)"\n'
        "  prefect deployment run alignment/quickstart --watch\n\n"
        f"{run_queue.limit_in_words(max_runs or state.max_runs).capitalize()}; later ones wait in line.\n"
        f"The UI at {page} asks for a password, which is in {services.password_file()}.",
        *(
            [f"Artifacts, runs and nights: {state.pages} (changes ask for the token in {token_file()})."]
            if state.pages
            else []
        ),
        sep="\n",
        markup=False,
    )


def env(as_json: JsonOption = False) -> None:
    """Print the environment variables that connect a shell to the server of `align up`: eval "$(align env)"."""
    state = services.running()
    if state is None or state.phase != "ready":
        raise EnvironmentFault("no services are running; `align up` starts them")
    direct = network.without_proxy()
    if as_json:
        return print_json({access.URL: state.url, "token_file": str(services.token_file()), **direct})
    for name, value in {access.URL: state.url, **direct}.items():
        print(f"export {name}={shlex.quote(value)}")
    return print(f'export {access.TOKEN}="$(cat {shlex.quote(str(services.token_file()))})"')


def down(as_json: JsonOption = False) -> None:
    """Stop the services. The worker's runs save their progress and continue at the next `align up`.

    Runs that `align run` started continue with `align resume last`."""
    state = services.running()
    if state is not None:
        services.stop(state)
    if as_json:
        return print_json({"stopped": state is not None})
    return out.print("stopped" if state else "nothing was running")


def status(as_json: JsonOption = False) -> None:
    """Show the services and the latest runs. Exit code 3 if the services are not running."""
    state = services.running()
    latest = [run_row(record) for record in journal.runs()[-SHOWN_RUNS:]]
    services.use_if_running()
    queue = run_queue.read() if state is not None and state.phase == "ready" else None
    if as_json:
        shown = {"services": state, "queue": queue}
        print_json({name: value and value.model_dump(mode="json") for name, value in shown.items()} | {"runs": latest})
    else:
        _print_status(state, queue, latest)
    if state is None:
        raise typer.Exit(NOT_UP)


def _print_status(state: services.State | None, queue: run_queue.Queue | None, latest: list[dict[str, Any]]) -> None:
    if state is None:
        out.print("no services are running; `align up` starts them")
    else:
        out.print(f"{state.phase}: {state.url}, database {state.database}", markup=False)
        if state.pages:
            out.print(f"  artifacts, runs and nights: {state.pages}", markup=False)
        _print_problems(state)
        for service in state.services:
            again = (
                f", restarted {service.restarts} times: see {services.log_of(service.name)}" if service.restarts else ""
            )
            out.print(
                f"  {service.name:<12} {f'pid {service.pid}' if service.pid else 'restarting'}{again}", markup=False
            )
    if state is not None and state.phase == "ready" and queue is None:
        out.print("  the server does not answer: it is unknown which runs wait")
    if queue is not None:
        out.print(f"  {run_queue.limit_in_words(queue.max_runs)}: {len(queue.running)} under way", markup=False)
        for run_id in queue.waiting[:SHOWN_RUNS]:
            out.print(f"  {journal.short_id(run_id)}  {queue.reason(run_id) or 'is about to start'}", markup=False)
    for row in latest:
        attempt = f", attempt {row['attempt']}" if row["attempt"] > 1 else ""
        by = "a worker's" if row["deployed"] else "align run's"
        run = f"{journal.short_id(row['run'])}  {row['started']}  {row['name']:<20}"
        out.print(f"  {run} {row['status']} ({by}{attempt})", markup=False)
        for label, done in row["doing"].items():
            out.print(f"              {label}: {done}", markup=False)


def _print_problems(state: services.State) -> None:
    for name, problem in state.problems.items():
        out.print(f"[yellow]cannot run:[/] the deployment {name}: ", end="")
        out.print(problem, markup=False)


def run_row(record: journal.RunRecord) -> dict[str, Any]:
    """A run, as `align status` and `align explain` show it."""
    return {
        "run": record.run_id,
        "name": record.name,
        "started": record.started_at[:19].replace("T", " "),
        "status": journal.status_of(record),
        "attempt": record.attempt,
        "deployed": record.deployed,
        "doing": _doing(record),
    }


def _doing(record: journal.RunRecord) -> dict[str, str]:
    """The progress of the running stages of a live run, or the reason why they wait."""
    if not journal.is_alive(record):
        return {}
    running = {label for label, line in journal.stages(record.run_id).items() if line.state == "running"}
    doing = {label: progress.text for label, progress in journal.progress(record.run_id).items()}
    for label, wait in journal.waits(record.run_id).items():
        doing[label] = f"has waited {max(time.time() - wait.since, 0):.0f} s for {wait.reason}"
    return {label: text for label, text in doing.items() if label in running}
