"""``align nights``: the batches of an inbox, and the decision about batches that were given up."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json
from alignment_core.artifacts import open_store
from alignment_core.errors import UserError

nights_app = typer.Typer(
    name="nights",
    no_args_is_help=True,
    help="List the batches of nightly runs, and return or discard batches that were given up.",
)
InboxArgument = Annotated[
    str, typer.Argument(metavar="INBOX", help="Name of the ledger: `nightly.inbox`, by default the recipe's name.")
]
BatchArgument = Annotated[
    str, typer.Argument(metavar="BATCH", help="Reference of the rows, or the first characters of its digest.")
]


@nights_app.command("list")
def list_(
    inbox: Annotated[
        str | None,
        typer.Argument(metavar="INBOX", help="Name of the ledger: `nightly.inbox`, by default the recipe's name."),
    ] = None,
    given_up: Annotated[bool, typer.Option("--given-up", help="Only batches that were given up.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the batches with their last outcome, the oldest first; without INBOX, of every inbox in the store."""
    from alignment_core.nights.ledger import GIVEN_UP, History, inboxes, summary

    opened = open_store(store, writes=False)
    known = inboxes(opened)
    if inbox is not None and inbox not in known:
        raise UserError(f"{inbox}: no night has run with an inbox of this name; there are {', '.join(known) or 'none'}")
    chosen = {name: History(opened, name).batches() for name in ([inbox] if inbox else known)}
    shown = {
        name: [entry for entry in batches if not given_up or entry.state == GIVEN_UP]
        for name, batches in chosen.items()
    }
    if as_json:
        return print_json(
            {name: [entry.model_dump(mode="json") for entry in batches] for name, batches in shown.items()}
        )
    for name, batches in shown.items():
        out.print(f"{name}: {len(batches)} batch{'' if len(batches) == 1 else 'es'} of rows", markup=False)
        for entry in batches:
            out.print(f"  {entry.batch}\n    {summary(entry)}", markup=False)
    return None


@nights_app.command("return")
def return_(inbox: InboxArgument, batch: BatchArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Return a batch that was given up to the next night, with as many attempts as a new one."""
    _decide(inbox, batch, "returned", store, as_json)


@nights_app.command("discard")
def discard(inbox: InboxArgument, batch: BatchArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Discard a batch that was given up, for good; its rows stay in the store."""
    _decide(inbox, batch, "discarded", store, as_json)


def _decide(inbox: str, batch: str, state: Literal["returned", "discarded"], store: str | None, as_json: bool) -> None:
    from alignment_core.nights.ledger import History, summary

    entry = History(open_store(store), inbox).decide(batch, state)
    if as_json:
        return print_json(entry.model_dump(mode="json"))
    return out.print(summary(entry), markup=False)
