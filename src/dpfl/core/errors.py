"""Every error dpfl raises on purpose, each with the exit code the command line ends with.

::

    DpflError                  1   an internal error, or the base to catch everything
    ├── ConfigurationError     2   usage, experiment file, arguments, pieces that do not fit
    ├── DataError              3   a data set that is absent, malformed or too small
    ├── PrivacyRefusal         4   what was asked cannot be done within the stated guarantee
    ├── StateError             5   ledger, checkpoint or run folder
    │   ├── LedgerError
    │   ├── CheckpointError
    │   └── FolderError
    ├── DiskError              6   no space, or a file that cannot be written
    ├── PeerError              7   network, or something a peer sent
    └── Interrupted          130   stopped by the user; the run can be resumed

A message is one sentence of one shape: ``where: what was given and why it cannot be; what to do``.
"""

import difflib
import errno
import json
from collections.abc import Iterable


class DpflError(Exception):
    """One clear sentence: where, what is wrong, what to do."""

    exit_code = 1

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(where, problem, remedy)
        self.where = where
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.remedy}"


class ConfigurationError(DpflError):
    """Usage, an experiment file, an argument, or pieces that do not fit together."""

    exit_code = 2


class DataError(DpflError):
    """A data set that is absent, malformed or too small for what was asked."""

    exit_code = 3


class PrivacyRefusal(DpflError):
    """What was asked cannot be done within the stated guarantee."""

    exit_code = 4


class StateError(DpflError):
    """Something durable (ledger, checkpoint, run folder) is not as it must be."""

    exit_code = 5


class LedgerError(StateError):
    """The ledger is missing, unreadable, or does not belong to this run."""


class CheckpointError(StateError):
    """The checkpoint is missing, unreadable, or does not belong to this run."""


class FolderError(StateError):
    """The run folder holds something else, or is in use."""


class DiskError(DpflError):
    """A file could not be written."""

    exit_code = 6


class PeerError(DpflError):
    """Something that arrived over the wire is not what was agreed."""

    exit_code = 7


class Interrupted(DpflError):
    """Stopped by the user; everything charged and checkpointed is kept."""

    exit_code = 130


class NotPrivateWarning(UserWarning):
    """Training whose noise comes from a known seed: repeatable, and protecting nobody."""


_FULL = "free some space and resume; nothing already recorded is lost"
_CANNOT_WRITE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    errno.EROFS: "choose a place that can be written",
}


def disk_error(where: str, error: OSError) -> DpflError:
    """Turn an operating-system error while writing into the right member of the tree."""
    there = error.errno == errno.EEXIST
    reason = "there is a file of this name" if there else error.strerror or str(error)
    if error.errno in _CANNOT_WRITE:
        return DiskError(where, f"cannot be written ({reason})", _CANNOT_WRITE[error.errno])
    return FolderError(where, f"cannot be used ({reason})", "check the path and its permissions")


def read_problem(error: Exception) -> str:
    """Why a file cannot be read, in plain words.

    >>> read_problem(KeyError("cells"))
    'it lacks cells'
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]}"
    kinds = {json.JSONDecodeError: "it is not JSON", UnicodeDecodeError: "it is not text in UTF-8"}
    return next((said for kind, said in kinds.items() if isinstance(error, kind)), str(error))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Name the nearest known word, else list them all.

    >>> did_you_mean("weiavgg", ["fedavg", "weiavg"])
    "did you mean 'weiavg'?"
    >>> did_you_mean("xyz", ["b", "a"])
    'choose one of a, b'
    """
    words = sorted(known)
    if name in words:  # remedies are written down before it is known whether they are needed
        return f"did you mean '{name}'?"
    near = difflib.get_close_matches(str(name).lower(), words, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(words)}"


def no_attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Build the error for a name that a module does not have, with the nearest that it has.

    >>> no_attribute("dpfl", "weiavgg", ["train", "weiavg"])
    AttributeError("module 'dpfl' has no attribute 'weiavgg'; did you mean 'weiavg'?")
    """
    near = did_you_mean(name, names)
    hint = f"; {near}" if near.endswith("?") else ""  # of so many names a list helps nobody
    return AttributeError(f"module '{module}' has no attribute '{name}'{hint}")


def unknown_name(where: str, kind: str, name: str, known: Iterable[str]) -> ConfigurationError:
    """Build the error for a name that is not in a registry."""
    return ConfigurationError(where, f"there is no {kind} '{name}'", did_you_mean(name, known))
