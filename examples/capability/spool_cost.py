"""What GPU hours cost: a table `[cost]` of config.toml and a verb `spool cost`, as a capability of its own package.

A capability is a row of texts that name what it contributes (`spool.formats.capabilities`). Install it beside spool by
`pip install ./examples/capability`; then write `cost = { gpu_hour = 0.4 }` into config.toml and ask `spool cost`.
"""

from __future__ import annotations

import click

from spool import Client
from spool.formats.capabilities import Capability, ContributedVerb, Key, KeyTable, Part
from spool.formats.validation import PartReader
from spool.store.edited import Settings

_TABLE = KeyTable("CostTable", "Prices.", Key("gpu_hour", "number", "The price of a GPU hour.", least=0, default=0))

CONFIG = Part(
    Key("cost", _TABLE, "What `spool cost` multiplies by.", default={}), after="quotas", reader="spool_cost:READER"
)
READER = PartReader(lambda reading: reading.found["cost"])

CAPABILITY = Capability(
    "cost",
    "Says what GPU hours cost.",
    config="spool_cost:CONFIG",
    verbs={"cost": ContributedVerb("The machine", "spool_cost:command", "Show what each user's GPU hours cost.")},
)


@click.command()
@click.pass_obj
def command(root: str) -> int:
    """Show what each user's GPU hours cost."""
    price = (Settings(root).config.part("cost") or {}).get("gpu_hour", 0)
    for user, totals in Client(root).stats(by="user").groups:
        click.echo(f"{user or '-'}  {totals.gpu_hours * price:.2f}")
    return 0
