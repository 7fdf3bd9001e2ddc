"""What happens in two rounds of logistic regression, simulated and deployed in one process.

    python -m tools.trace_run [cli] [train] [deploy] [secure] [--json]
    python -m tools.trace_run --record tools/trace_limits.json     # write these numbers as limits

Four CSV clients are written to a temporary folder; a profile hook then counts what is entered and
what is made, by the *names* of classes and functions, so that moving them changes nothing:
``Strategy``, ``Federation``, ``Experiment``, ``StudyFile``, ``SiteFile``, ``Agreement``, ``enrol``.
Files that are read (``.toml``, ``.csv``) and ledgers that are opened (``sqlite3.connect``) are
counted by Python's audit hook, whoever opens them. Every scene has a process and an empty cache of
its own, so that what was played before changes nothing. Standard library only, beside the project.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
CLIENTS, RECORDS, FEATURES, ROUNDS = 4, 60, 8, 2
CLASSES = (
    *("Strategy", "Federation", "Experiment", "StudyFile", "SiteFile", "Agreement"),
    *("Simulation", "Prepared", "Coordinator", "Site", "StudySession", "Layout", "Ledger"),
)
FUNCTIONS = ("enrol", "check", "for_model", "of_module")
NOT_LIMITED = ("seconds", "messages", "deepest own stack")
ROUGH = ("functions", "modules", "calls", "check() calls")
SLACK = 1.05
"""How far the rough counts may rise: they follow from how code is cut, not from what is made."""


class Trace:
    """Counts calls of one package while it is switched on."""

    def __init__(self, package: str, cache: Path) -> None:
        self.package = package
        self.cache = str(cache)
        self.root = str(Path(str(importlib.import_module(package).__file__)).parent) + os.sep
        self.calls: Counter[tuple[str, str]] = Counter()
        self.made: Counter[str] = Counter()
        self.named: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.opened: Counter[str] = Counter()
        self.deepest = 0
        self.on = False
        self._importing = 0
        self._last: object = None
        self._ours: dict[str, str | None] = {}
        sys.addaudithook(self._audit)

    def _module(self, filename: str) -> str | None:
        """The module of a file of the package, None for another's."""
        if filename not in self._ours:
            inside = filename.startswith(self.root) and filename.endswith(".py")
            self._ours[filename] = filename[len(self.root) :] if inside else None
        return self._ours[filename]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "sqlite3.connect":
            if not str(arguments[0]).startswith(self.cache):
                self.opened["ledger (sqlite3.connect)"] += 1
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            name = Path(os.fsdecode(arguments[0])).name
            if name.endswith((".toml", ".csv", ".safetensors", ".jsonl")):
                writing = any(c in str(arguments[1] or "r") for c in "wax+")
                kind = "*.csv" if name.endswith(".csv") else name
                if not writing:
                    self.opened[f"read {kind}"] += 1

    def hook(self, frame: FrameType, event: str, value: Any) -> None:
        """Called for every call and return of a Python function."""
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_name == "<module>":  # what an import executes is not part of a run
            self._importing += 1 if event == "call" else -1
        if self._importing or not code.co_flags & inspect.CO_OPTIMIZED:  # a class's own body
            return
        if event == "call" and code.co_name in ("__init__", "model_validate"):
            self._note_made(frame)
        module = self._module(code.co_filename)
        if module is None:
            return
        if code.co_name.startswith("<"):  # comprehensions and lambdas are part of their function
            return
        if event == "call":
            self.calls[module, code.co_qualname] += 1
            if code.co_name in FUNCTIONS:
                self.named[code.co_name] += 1
            if not module.startswith(("core", "cli")):
                depth, at = 0, frame.f_back
                while at is not None:
                    depth += self._module(at.f_code.co_filename) is not None
                    at = at.f_back
                self.deepest = max(self.deepest, depth + 1)
        elif value is not None:
            self._note_returned(frame, module, value)

    def _note_made(self, frame: FrameType) -> None:
        """An object is being made: by its class's name, once for the outermost ``__init__``."""
        code = frame.f_code
        if not code.co_argcount:
            return
        first = frame.f_locals.get(code.co_varnames[0])
        kind = first if isinstance(first, type) else type(first)
        if not kind.__module__.startswith(f"{self.package}.") and kind.__module__ != self.package:
            return
        before = frame.f_back
        if before is not None and before.f_code.co_name == "__init__":
            if before.f_locals.get(before.f_code.co_varnames[0]) is first:
                return  # super().__init__
        for name in {base.__name__ for base in kind.__mro__} & {*CLASSES}:
            self.made[name] += 1

    def _note_returned(self, frame: FrameType, module: str, value: Any) -> None:
        """A method made a strategy, or models made a network, for somebody in another room."""
        room = module.split("/")[0]
        if room not in ("methods", "models"):
            return
        back = frame.f_back
        caller = None if back is None else self._module(back.f_code.co_filename)
        if caller is not None and caller.split("/")[0] == room:
            return
        names = {base.__name__ for base in type(value).__mro__}
        if value is self._last:  # handed on by a wrapper
            return
        self._last = value
        if room == "methods" and "Strategy" in names:
            self.returned["strategy, by a method's factory"] += 1
        if room == "models" and "Module" in names:
            self.returned["nn.Module, by dpfl.models"] += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Switch on."""
        self.on = True
        threading.setprofile(self.hook)
        sys.setprofile(self.hook)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self.on = False

    def summary(self) -> dict[str, Any]:
        """What was counted."""
        modules = {module for module, _ in self.calls}
        return {
            "functions": len(self.calls),
            "modules": len(modules),
            "calls": sum(self.calls.values()),
            "deepest own stack": self.deepest,
            **dict(sorted(self.returned.items())),
            **{f"{name} objects": self.made[name] for name in CLASSES if self.made[name]},
            **{f"{name}() calls": self.named[name] for name in FUNCTIONS if self.named[name]},
            **dict(sorted(self.opened.items())),
        }


# -- what is run -----------------------------------------------------------------------------------


def write_clients(folder: Path) -> Path:
    """Four CSV files: eight numbers and a label."""
    draw = random.Random(0)
    folder.mkdir()
    for client in range(CLIENTS):
        lines = [",".join([*(f"x{i}" for i in range(FEATURES)), "ill"])]
        for _ in range(RECORDS):
            row = [round(draw.gauss(0, 1), 3) for _ in range(FEATURES)]
            lines.append(",".join([*map(str, row), str(int(row[0] + 0.3 * row[1] > 0))]))
        (folder / f"client{client}.csv").write_text("\n".join(lines) + "\n")
    return folder


def run_cli(base: Path) -> Callable[[], object]:
    """``dpfl run`` on the four files."""
    from dpfl.cli.main import main

    clients = write_clients(base / "clients")
    command = ["run", "--dataset", str(clients), "--label", "ill", "--method", "weiavg"]
    command += ["--budgets", "2", "--delta", "1e-3", "--clip", "1", "--rounds", str(ROUNDS)]
    command += ["--model", "logistic", "--out", str(base / "run"), "--quiet"]

    def play() -> None:
        sys.argv = ["dpfl", *command]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                main()
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise RuntimeError(f"exit {ended.code}: {printed.getvalue()[-400:]}") from ended

    return play


def run_train(base: Path) -> Callable[[], object]:
    """``dpfl.train`` on the same files, from Python."""
    from torch import nn

    import dpfl

    clients = write_clients(base / "clients")
    files = {path.stem: path for path in sorted(clients.glob("*.csv"))}
    budgets = {name: dpfl.Budget(epsilon=2.0, delta=1e-3) for name in files}

    def play() -> None:
        federation = dpfl.Federation.from_files(clients, label="ill", budgets=budgets)
        strategy = dpfl.weiavg(lr=0.1, clip=1.0, batch_size=16, local_epochs=1)
        dpfl.train(nn.Linear(FEATURES, 2), federation, strategy, rounds=ROUNDS, progress=False)

    return play


def run_deploy(base: Path, method: str = "weiavg", **settings: Any) -> Callable[[], object]:
    """Three sites and a server on the in-process grid, with one record keeper, as a worker has."""
    from tests.deploy import federation as helpers

    values = helpers.study_values(method, rounds=ROUNDS, **settings)
    return _playing(helpers.Federation.of(base, values))


def _playing(federation: Any) -> Callable[[], object]:
    """Play a federation on the in-process grid; sites keep their records, as workers do."""
    from dpfl.deploy import client_app

    federation.grid.client_app = client_app.make_app({})

    def play() -> int:
        federation.play()
        return len(federation.grid.asked)

    return play


def run_secure(base: Path) -> Callable[[], object]:
    """The same over a secure sum."""
    from tests.deploy import federation as helpers, sums

    values = helpers.study_values("weiavg", rounds=ROUNDS, local_steps=1)
    values["secure_sum"] = {}
    federation = helpers.Federation.of(base, values)
    sums.pin(federation.sites)
    return _playing(federation)


SCENES: dict[str, Callable[[Path], Callable[[], object]]] = {
    "cli": run_cli,
    "train": run_train,
    "deploy": run_deploy,
    "secure": run_secure,
}


def play_here(scene: str) -> dict[str, Any]:
    """Play a scene in this process, and return what was counted."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = Path(folder) / "cache"
        os.environ["DPFL_CACHE"] = str(cache)
        play = SCENES[scene](Path(folder))
        trace = Trace("dpfl", cache)
        began = time.perf_counter()
        with trace.watching():
            messages = play()
        counts = trace.summary() | {"seconds": round(time.perf_counter() - began, 1)}
    return counts | ({"messages": messages} if isinstance(messages, int) else {})


def played(scene: str) -> dict[str, Any]:
    """Play a scene in a process of its own."""
    command = [sys.executable, "-m", "tools.trace_run", "--here", scene]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"scene {scene}: {done.stderr[-2000:]}")
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


def excesses(counts: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """One sentence for each count above its limit; what was not recorded has none."""
    sentences = []
    for name, limit in limits.items():
        if name in NOT_LIMITED:
            continue
        most = int(limit * SLACK) if name in ROUGH else limit
        if counts.get(name, 0) > most:
            sentences.append(f"{name}: {counts[name]:,} exceeds {most:,}")
    return sentences


def main() -> None:
    """Play scenes, and print or record what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", type=Path, help="write these numbers as limits")
    parser.add_argument("--here", choices=SCENES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(play_here(arguments.here)))
        return
    results = {scene: played(scene) for scene in arguments.scenes or SCENES}
    if arguments.record:
        limits = {
            scene: {name: count for name, count in counts.items() if name not in NOT_LIMITED}
            for scene, counts in results.items()
        }
        arguments.record.write_text(json.dumps(limits, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    for scene, counts in results.items():
        print(f"== {scene}: {(SCENES[scene].__doc__ or '').strip()}")
        for name, count in counts.items():
            print(
                f"    {name:38} {count:>9,}" if isinstance(count, int) else f"    {name}: {count}"
            )


if __name__ == "__main__":
    main()
