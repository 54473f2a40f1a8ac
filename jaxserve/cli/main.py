"""Entry of the command line: finds the command, runs it, and turns what goes wrong into one line and an exit code.

    0    done
    1    it failed (the line says why)
    2    it was asked wrongly
    130  interrupted

A command is imported when it is asked for, and imports what it needs when it runs: `jaxserve serve` never imports JAX here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from jaxserve.cli.lazy_group import LazyGroup
from jaxserve.server.version import package_version

EXIT_INTERRUPTED = 130

_COMMANDS = {
    "serve": "jaxserve.cli.serve:serve",
    "chat": "jaxserve.cli.chat:chat",
    "generate": "jaxserve.cli.generate:generate",
    "check-env": "jaxserve.cli.check_env:check_env",
    "convert": "jaxserve.cli.convert:convert",
    "compile": "jaxserve.cli.compile:compile_command",
    "models": "jaxserve.cli.models:models",
    "bench": "jaxserve.cli.bench:bench",
}
_FIRST_STEPS = """\b
First steps, with the built-in model:
  jaxserve chat demo
  jaxserve serve demo
"""


@click.group(
    cls=LazyGroup,
    places=_COMMANDS,
    epilog=_FIRST_STEPS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_version(), prog_name="jaxserve")
def cli() -> None:
    """jaxserve: an LLM inference server on JAX."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns the exit code."""
    try:
        result = cli.main(args=list(arguments), prog_name="jaxserve", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        one_line = " ".join(error.format_message().split())  # libraries say some things in many
        click.echo(f"jaxserve: error: {one_line}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("jaxserve: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (jaxserve generate ... | head); nothing is left to say.
        sys.stderr.close()
        return 1
    except OSError as error:
        # Of files: an output that cannot be written, a folder that cannot be read.
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"jaxserve: error: {where}{error.strerror or error}.", err=True)
        return 1
    return result if isinstance(result, int) else 0
