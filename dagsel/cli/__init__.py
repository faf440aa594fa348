"""The command line: ``dagsel``.

Each command prints for people, or JSON with ``--json``, on standard output; what takes long shows
itself on standard error. It ends with 0 if all went well, 1 if something did not (the last line
says what, and the cure), 2 if it was not called rightly, and 130 after Ctrl-C.
"""

from __future__ import annotations

import logging

import click

from dagsel.cli.data import inspect, shard, verify
from dagsel.cli.doctor import doctor
from dagsel.cli.runs import report, status, stop, watch
from dagsel.cli.scripts import preview, run
from dagsel.verbosity import PrintableFormatter

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dagsel")
def main() -> None:
    """Model selection on Dask: the data stays on the workers, the models hop between them.

    Exit codes: 0 all went well, 1 something did not, 2 not called rightly, 130 ended by Ctrl-C.
    """
    if logging.lastResort is not None:  # it writes warnings where nobody has set up a log
        logging.lastResort.setFormatter(PrintableFormatter())


for command in (shard, inspect, verify, run, preview, status, watch, stop, report, doctor):
    main.add_command(command)
