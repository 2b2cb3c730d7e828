"""The ``deltafuse`` command: registers the commands, and turns what a user can act on into one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from .._version import __version__
from ..core.errors import DeltaFuseError, unknown_name

COMMAND_MODULES = ("demo", "train", "explain", "doctor", "tune", "verify", "bench")
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # typer >= 0.20 carries its own copy of click's classes
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_app() -> typer.Typer:
    """The application with every command of :data:`COMMAND_MODULES`."""
    app = typer.Typer(
        name="deltafuse",
        help="Train, show and check LoRA-family adapters. Start with: deltafuse demo",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in COMMAND_MODULES:
        import_module(f"{__package__}.{name}").register(app)
    return app


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"deltafuse {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train, show and check LoRA-family adapters. Start with: deltafuse demo"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns 0, 2 (a message on stderr says what to change) or 130 (interrupted)."""
    command = typer.main.get_command(build_app())
    try:
        outcome = command.main(list(arguments) or ["--help"], prog_name="deltafuse", standalone_mode=False)
    except DeltaFuseError as error:
        return _refuse(str(error))
    except USAGE_ERROR as error:
        return _refuse(_usage_message(command, error, arguments))
    except (KeyboardInterrupt, typer.Abort):
        print("deltafuse: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return outcome if isinstance(outcome, int) else 0


def _refuse(message: str) -> int:
    print(f"deltafuse: error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _usage_message(command: Any, error: Any, arguments: Sequence[str]) -> str:
    """The parser's message; for an unknown option or command with the nearest and the legal names."""
    context = error.ctx
    asked = getattr(error, "option_name", None)
    if asked and context is not None:
        legal = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        return unknown_name("option", asked, legal, where=f"of '{context.command_path}'")
    names = getattr(context.command, "commands", None) if context is not None else None
    if asked is None and names is not None and context.invoked_subcommand is None:
        depth = len(context.command_path.split()) - 1
        words = [word for word in arguments if not word.startswith("-")][depth : depth + 1]
        if words and words[0] not in names:
            where = f"of '{context.command_path}'" if depth else ""
            return unknown_name("command", words[0], names, where)
    text = str(error.format_message())
    where = f"{context.command_path}: " if context is not None else ""
    return f"{where}{text} See '{context.command_path if context else 'deltafuse'} --help'."
