"""What must hold at every door, whatever comes in.

A door is anything that reads what dpfl did not just write itself: a file, a folder, a message. What
comes in is accepted, or refused by a :class:`DpflError`; either way soon, within some memory, and
without writing anywhere but in the folder that was given. Nothing is executed for it. What came
from a peer opens nothing else either, to read it.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import dpfl
from dpfl.cli.main import run_command
from dpfl.core.errors import DpflError
from tests.audited import listening, reaches_out

HOME = Path(tempfile.mkdtemp(prefix="dpfl-fuzz-")).resolve()
GIVEN, OUTSIDE, CURRENT = HOME / "given", HOME / "outside", HOME / "current"
"""The folder that doors may write in, one with files that must stay, and the current folder."""

LONGEST_SECONDS = 20.0
LARGEST_BYTES = 2 << 30
REFUSALS = range(2, 8)
COUNTS: dict[str, Counter[str]] = {}

_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_NEVER = {"os.system", "os.exec", "os.fork", "subprocess.Popen", "socket.connect"}
_NEVER |= {"pickle.find_class"}
_OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Hung(BaseException):
    """An example took too long; nothing that catches exceptions may catch this one."""


class Refused(Exception):
    """A command has refused what it was given, with an exit code that is documented."""


def enter(name: str, door: Callable[[], Any], *, peer: bool = False) -> Any:
    """Open a door once and check all that must hold; return what it returns, None if it refuses.

    With ``peer``, what comes in is a message: nothing is read but the given folder and caches.

    ``name`` is what its examples are counted under.
    """
    counts, found = COUNTS.setdefault(name, Counter()), None
    with _confined(peer), _bounded():
        try:
            found = door()
            counts["accepted"] += 1
        except (DpflError, Refused) as error:
            code = getattr(error, "exit_code", REFUSALS[0])
            assert code in REFUSALS, f"{type(error).__name__} is no refusal: {error}"
            counts["refused"] += 1
    return found


def command(*arguments: object) -> Callable[[], str]:
    """A command as a door, which returns what it prints."""

    def run() -> str:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as said:
            code = run_command(list(map(str, arguments)))
        assert code == 0 or code in REFUSALS, f"exit code {code}: {said.getvalue()}"
        if code:
            raise Refused(said.getvalue())
        return out.getvalue()

    return run


def fresh(template: Path | None = None) -> Path:
    """Empty the folder that is given to doors, or fill it with a copy of another one."""
    shutil.rmtree(GIVEN, ignore_errors=True)
    if template is None:
        GIVEN.mkdir()
    else:
        shutil.copytree(template, GIVEN)
    return GIVEN


@contextmanager
def _confined(peer: bool) -> Iterator[None]:
    """Refuse writing outside of the given folder, wherever that is, and running anything."""
    before = _tree()
    done: list[str] = []
    with listening(partial(_heard, done, peer)):
        yield
    assert not done, f"not within the given folder: {done}"
    assert _tree() == before, "files beside the given folder were changed"


def _tree() -> dict[str, str]:
    """Every file beside the given folder, by its content."""
    paths = (path for folder in (OUTSIDE, CURRENT) for path in folder.rglob("*"))
    beside = [*paths, *HOME.iterdir()]
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for p in beside
    }


def _heard(done: list[str], peer: bool, event: str, arguments: tuple[Any, ...]) -> None:
    """Note what the interpreter is about to do, if a door may not do it, and do not let it."""
    if event in _WRITES:
        paths = [path for path in arguments if isinstance(path, str | bytes | os.PathLike)]
    elif event == "open" and (arguments[2] or 0) & _OPENED_TO_WRITE:
        paths = [arguments[0]] if isinstance(arguments[0], str | bytes | os.PathLike) else []
    else:
        paths = []
    wrong = [path for path in map(os.fsdecode, paths) if not _allowed(path)]
    if wrong or event in _NEVER or (peer and _reads_elsewhere(event, arguments)):
        done.append(f"{event} {arguments!r:.300}")
        raise PermissionError(f"{event} is not allowed here")


def _reads_elsewhere(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a message makes somebody read or call what is not theirs; code may be imported."""
    code = map(Path, (sys.prefix, sys.base_prefix, dpfl.__path__[0]))
    caches = Path(os.environ["DPFL_CACHE"]), Path(os.devnull), Path("/proc/self")
    return reaches_out(event, arguments, within=(GIVEN, *caches, *code))


def _allowed(path: str) -> bool:
    """Whether a door may write there: in its folder, in caches, and nowhere else."""
    full = Path(os.path.realpath(path))
    cache = Path(os.path.realpath(os.environ["DPFL_CACHE"]))
    given = full.is_relative_to(GIVEN) or full.is_relative_to(cache)
    return given or full == Path(os.devnull) or "__pycache__" in full.parts


@contextmanager
def _bounded() -> Iterator[None]:
    """End what takes too long, and refuse memory by the gigabyte."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _too_long)
    # a call that never comes back to Python is ended with the process, and its place is printed
    faulthandler.dump_traceback_later(10 * LONGEST_SECONDS, exit=True, file=sys.__stderr__)
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGEST_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    began = time.monotonic()
    try:
        yield
    except Hung:
        raise AssertionError(f"took more than {LONGEST_SECONDS:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, handler)
    assert time.monotonic() - began < LONGEST_SECONDS, "took too long, and could not be ended"


def _too_long(*_: object) -> None:
    raise Hung


def _set_up() -> None:
    for folder in (OUTSIDE, CURRENT, GIVEN):
        folder.mkdir()
        (folder / "canary.txt").write_text("precious")
    atexit.register(shutil.rmtree, HOME, ignore_errors=True)


_set_up()
