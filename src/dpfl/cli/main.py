"""The door: commands, and one sentence with the documented exit code for everything that goes
wrong.
"""

from __future__ import annotations

import os
import sys
import traceback

import click
import typer

import dpfl
from dpfl.cli import (
    account,
    compare,
    deploy,
    describe,
    ledger,
    lists,
    plan,
    plan_power,
    report,
    run,
    server,
    site,
    study,
    sweep,
    tune,
    watch,
)
from dpfl.cli.console import err
from dpfl.core.errors import DpflError, did_you_mean, disk_error

app = typer.Typer(
    name="dpfl",
    help="Differentially private federated learning for federations that do not agree on how much privacy they need.",
    epilog="Exit codes: 0 done, 1 defect of ours, 2 usage or configuration, 3 data, 4 privacy refusal, 5 ledger, checkpoint "
    "or folder, 6 disk, 7 network or peer, 130 interrupted (resumable).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(run.run)
app.command()(compare.compare)
app.command()(sweep.sweep)
app.command()(tune.tune)
app.command()(report.report)
app.command()(watch.watch)
app.command()(study.study)
app.command()(describe.describe)
app.command()(account.account)
app.command()(plan.plan)
app.command(name="plan-power")(plan_power.plan)
app.add_typer(ledger.app, name="ledger")
app.add_typer(site.app, name="site")
app.add_typer(server.app, name="server")
app.add_typer(deploy.app, name="deploy")
app.command()(lists.methods)
app.command()(lists.datasets)
app.command()(lists.budgets)
app.command()(lists.models)


def _version(value: bool) -> None:
    if value:
        typer.echo(dpfl.__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Differentially private federated learning for federations that do not agree on how much
    privacy they need.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end with its exit code."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: list[str]) -> int:
    """Run a command and return its exit code; errors are one sentence on stderr."""
    try:
        result = typer.main.get_command(app).main(
            arguments, prog_name="dpfl", standalone_mode=False
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        err.print(error.format_message(), markup=False)
        return 2
    except click.UsageError as error:
        return _say(f"usage: {_with_hint(error)}", 2)
    except click.exceptions.Exit as error:
        return int(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _say("stopped by you", 130)
    except DpflError as error:
        return _say(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the reader left: that is no error of ours
        return 0
    except OSError as error:
        named = disk_error(str(error.filename or "file"), error)
        return _say(str(named), named.exit_code)
    except Exception:
        err.print(traceback.format_exc(), markup=False)
        return _say("this is a defect of dpfl: please report it with the lines above", 1)


def _with_hint(error: click.UsageError) -> str:
    message = error.format_message()
    if (
        message.startswith("No such command")
        and error.ctx is not None
        and isinstance(error.ctx.command, click.Group)
    ):
        name = message.split("'")[1]
        return f"No such command '{name}'; {did_you_mean(name, error.ctx.command.commands)}"
    return message


def _say(sentence: str, code: int) -> int:
    err.print(f"dpfl: {sentence}", markup=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
