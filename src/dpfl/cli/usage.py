"""A command that was typed wrongly: one sentence in dpfl's own words."""

import re
from typing import Any

import click

from dpfl.core.errors import did_you_mean

_KINDS = {"integer": "a whole number", "float": "a number", "boolean": "true or false"}


def usage_sentence(error: click.UsageError) -> str:
    """Say what was typed, why it cannot be, and what to type instead."""
    message = error.format_message()
    command = error.ctx and error.ctx.command
    see = f"see {error.ctx.command_path} --help" if error.ctx else "see dpfl --help"
    if isinstance(error, click.NoSuchOption):
        given = error.option_name
        options = getattr(command, "params", ())
        known = [name.lstrip("-") for own in options for name in own.opts]
        near = did_you_mean(given.lstrip("-"), known).replace("'", "'--", 1)
        return f"there is no option '{given}'; {near if '?' in near else see}"
    if isinstance(error, click.BadOptionUsage):
        missing = "requires" in message
        problem = "has no value; give one after it" if missing else "takes no value; leave it out"
        return f"{error.option_name}: {problem}"
    if isinstance(error, click.MissingParameter):
        return f"{_name(error)}: is missing; give it, or {see}"
    if isinstance(error, click.BadParameter):
        if path := re.match(r"Path '(.*)' is not (readable|writable)", error.message):
            return f"{_name(error)}: '{path[1]}' is not {path[2]}; check its permissions"
        return f"{_name(error)}: {_given(error.message)}; give {_wanted(error.param)}"
    if extra := re.match(r"Got unexpected extra arguments? \((.*)\)", message):
        return f"'{extra[1]}': there is no such argument; leave it out, or {see}"
    if message.startswith("No such command") and isinstance(command, click.Group):
        name = message.split("'")[1]
        return f"there is no command '{name}'; {did_you_mean(name, command.commands)}"
    return message


def _name(error: click.BadParameter) -> str:
    """The option or argument that is meant, as one types it."""
    own = error.param
    if isinstance(own, click.Option):
        return max(own.opts, key=len)
    return str(error.param_hint or (own and own.human_readable_name) or "argument").strip("'\"")


def _given(message: str) -> str:
    """What was typed; the validator quotes it before it says what is wrong."""
    found = re.match(r"(.*) is not (a valid|in the range|one of)", message)
    return f"'{found[1].strip(chr(39))}' was given" if found else message.rstrip(".")


def _wanted(parameter: Any) -> str:
    """What kind of value a parameter takes."""
    kind = getattr(parameter, "type", None)
    name = _KINDS.get(getattr(kind, "name", "").removesuffix(" range"), "another value")
    low = getattr(kind, "min", None)
    high = getattr(kind, "max", None)
    if low is None:
        return name
    return f"{name} from {low} to {high}" if high is not None else f"{name} of at least {low}"
