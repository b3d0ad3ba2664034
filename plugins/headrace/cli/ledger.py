"""`headrace ledger migrate`: brings a ledger to this version's schema."""

from __future__ import annotations

import dataclasses

from headrace.cli.commands import examples
from headrace.cli.options import AsJson, LedgerUrl
from headrace.cli.output import echo, print_json


@examples("ledger migrate --ledger sqlite:////srv/orders/ledger.db")
def migrate(*, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Migrate a ledger to this version's schema, or create a new one. First stop what an older headrace runs on it.

    A ledger that has this schema is not changed. The migration is one transaction: either all of it is done or nothing.
    """
    from headrace.ledger import Ledger

    done = Ledger.migrate(ledger)
    if as_json:
        print_json({"ledger": ledger, **dataclasses.asdict(done)})
    elif done.before == done.after:
        echo(f"The ledger's schema is {done.after} already.")
    elif done.before is None:
        echo(f"Made a ledger of schema {done.after}.")
    else:
        echo(f"Migrated the ledger from schema {done.before} to {done.after}.")
