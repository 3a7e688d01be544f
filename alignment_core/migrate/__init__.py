"""From a command line of OpenRLHF or TRL, or a script that uses TRL, to the equivalent recipe."""

from alignment_core.migrate.command_line import read
from alignment_core.migrate.recipe import Migration, migrate
from alignment_core.migrate.script import read as read_script

__all__ = ["Migration", "migrate", "read", "read_script"]
