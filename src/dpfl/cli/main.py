"""The entry point: the table of commands, and one sentence with the documented exit code for
everything that goes wrong.

A command's module is imported when the command runs, so that ``dpfl --help``, ``dpfl --version``
and a misspelt command answer at once.
"""

import os
import sys
import traceback
from pkgutil import resolve_name
from typing import Any

import click
import typer
from typer.core import TyperGroup

import dpfl
from dpfl.cli.options import opt
from dpfl.cli.usage import usage_sentence
from dpfl.core.errors import DpflError, disk_error

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run:run", "Train one model with one method, and say what every client spent."),
    "compare": ("compare:compare", "Compare methods over paired seeds."),
    "sweep": ("studies:sweep", "Vary a field: score by value, for each method."),
    "tune": ("studies:tune", "Choose every method's settings by the same search."),
    "study": ("studies:study", "Run a study file, or show what was recorded."),
    "describe": ("plan:describe", "Print pipeline, promise, epsilons, noise and bytes."),
    "plan": ("plan:plan", "Plan methods before training, and say what to try first."),
    "attack": ("attack:app", "Attack a simulation: inversion, membership, poisoning."),
    "audit": ("audit:audit", "Audit methods: lower bounds on epsilon beside what they claim."),
    "predict": ("predict:predict", "Predict with a trained model for the records of a file."),
    "report": ("report:report", "Write an HTML page about runs."),
    "watch": ("report:watch", "Serve the report of a run while it is running."),
    "account": ("account:account", "Turn noise into epsilon, epsilon into noise."),
    "ledger": ("account:ledger_app", "Check that nothing in a ledger was changed or lost."),
    "site": ("site:app", "One site of a deployed federation."),
    "server": ("server:app", "The server of a deployed federation."),
    "deploy": ("deploy:app", "Try a deployment on this machine."),
    "methods": ("lists:methods", "List the methods."),
    "datasets": ("lists:datasets", "List the data sets, and the ways to share them out."),
    "budgets": ("lists:budgets", "List the distributions of epsilon."),
    "models": ("lists:models", "List the models."),
    "features": ("lists:features", "List the public features that models can be built on."),
    "tasks": ("lists:tasks", "List the tasks and their metrics."),
}
"""Every command: where it is defined, and what it does in a line."""


class LazyGroup(TyperGroup):
    """A group that lists and completes its commands by name, and imports the one that is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, about) in COMMANDS.items():
            self.add_command(click.Command(name, short_help=about))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is used, and import it."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and imported(str(listed.name)), rest


def imported(name: str) -> click.Command:
    """Import a command's module and build the command: from a function, or from a group."""
    found: Any = resolve_name(f"dpfl.cli.{COMMANDS[name][0]}")
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command()(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    for one in (command, *getattr(command, "commands", {}).values()):
        # typer's help lists the arguments already, and click 8.5 would list them once more
        vars(one)["format_arguments"] = lambda *_: None
    return command


app = typer.Typer(
    name="dpfl",
    cls=LazyGroup,
    help="Differentially private federated learning for federations whose members have different "
    "budgets.",
    epilog="Exit codes: 0 done, 1 internal error, 2 usage or configuration, 3 data, 4 privacy "
    "refusal, 5 ledger, checkpoint or folder, 6 disk, 7 network or peer, 130 interrupted "
    "(resumable).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    """Print the version and end."""
    if value:
        typer.echo(dpfl.__version__)
        raise typer.Exit


_VERSION = opt("Print the version.", False, "--version", callback=_version, is_eager=True)


@app.callback()
def _top(version: bool = _VERSION) -> None:
    """Take the options of ``dpfl`` itself."""


def main() -> None:
    """Run a command and end with its exit code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run a command and return its exit code.

    Whatever goes wrong on purpose is one sentence on stderr; only an internal error shows where it
    comes from.

    >>> run_command(["methods", "--family", "nothing"])
    2
    """
    try:
        result = typer.main.get_command(app)(arguments, prog_name="dpfl", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except BrokenPipeError:  # the reader left, which is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        sentence, code = _explained(error)
        click.echo(f"dpfl: {sentence}", err=True)
        return code


def _explained(error: BaseException) -> tuple[str, int]:
    """One sentence and the exit code for what went wrong.

    Usage errors come from typer; errors of dpfl bring their own code; one of the operating system
    becomes the error of dpfl that fits it; anything else is shown with its traceback.
    """
    if isinstance(error, click.UsageError):
        return usage_sentence(error), 2
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "stopped by you", 130
    if isinstance(error, OSError):
        error = disk_error(str(error.filename or "file"), error)
    if isinstance(error, DpflError):
        return str(error), error.exit_code
    click.echo("".join(traceback.format_exception(error)), err=True)
    return "internal error: please report it with the lines above", 1


if __name__ == "__main__":
    main()
