"""From a command line of OpenRLHF or TRL to a recipe that does the same."""

from alignment_core.migrating.command_line import read
from alignment_core.migrating.recipe import Migration, migrate

__all__ = ["Migration", "migrate", "read"]
