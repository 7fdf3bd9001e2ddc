"""Log a run to tools that people already use: TensorBoard and MLflow, where they are installed."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.result import Summary

Numbers = Mapping[str, float]


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every plain number of a round under its path, without lists and without what is said of
    single clients.

    >>> dict(numbers_of({"accuracy": 0.5, "weights": {"a": 1.0}, "noise_metrics": {"norm": 2}}))
    {'accuracy': 0.5, 'noise_metrics/norm': 2.0}
    """
    for name, value in line.items():
        if name in ("round", "weights", "missing", "simulated_truth"):
            continue
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of an experiment under their paths; of single clients only how many there
    are.
    """
    for name, value in values.items():
        if prefix == "" and name == "clients":
            continue
        if not isinstance(value, Mapping):
            yield f"{prefix}{name}", str(value)[:500]
        elif prefix:
            yield f"{prefix}{name}", f"{len(value)} values, by client"
        else:
            yield from _settings(value, f"{name}.")


class _TensorBoard:
    """Writes event files into the run folder."""

    module = "torch.utils.tensorboard"

    def __init__(self, library: Any, folder: Path, settings: Mapping[str, str]) -> None:
        self.writer = library.SummaryWriter(str(folder / "tensorboard"))
        text = "\n".join(f"{name} = {value}  " for name, value in settings.items())
        self.writer.add_text("experiment", text)

    def log(self, numbers: Numbers, number: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, number)

    def flag(self, flags: list[str]) -> None:
        self.writer.add_text("flags", "\n\n".join(flags))

    def close(self) -> None:
        self.writer.close()


class _MlFlow:
    """Writes to the tracking server that the user has set, else into the run folder."""

    module = "mlflow"

    def __init__(self, library: Any, folder: Path, settings: Mapping[str, str]) -> None:
        self.mlflow = library
        # Where the user's own settings say, else beside the run; never to a server nobody named.
        if not library.is_tracking_uri_set():
            library.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.sqlite').absolute()}")
        library.set_experiment("dpfl")
        library.start_run(run_name=folder.name)
        library.log_params(dict(settings))

    def log(self, numbers: Numbers, number: int) -> None:
        self.mlflow.log_metrics(dict(numbers), step=number)

    def flag(self, flags: list[str]) -> None:
        self.mlflow.set_tags({f"flag {number + 1}": flag for number, flag in enumerate(flags)})

    def close(self) -> None:
        self.mlflow.end_run()


_Backend = _TensorBoard | _MlFlow
KINDS: dict[str, type[_Backend]] = {"tensorboard": _TensorBoard, "mlflow": _MlFlow}


class Logger:
    """Logs every round as it ends, and the summary. What it logs is the operator's record.

    The backend is opened with the first round, so that a run that is refused leaves nothing behind.
    Where the backend fails, ``complain`` is called once and the run goes on without it.
    """

    def __init__(
        self, name: str, make: Callable[[], _Backend], complain: Callable[[str], None]
    ) -> None:
        self.name = name
        self._make, self._complain = make, complain
        self._backend: _Backend | None = None
        self._failed = False

    def round(self, number: int, record: RoundRecord) -> None:
        """Log the numbers of a round."""
        numbers = dict(numbers_of(record.to_dict()))
        self._do(lambda backend: backend.log(numbers, number))

    def end(self, summary: Summary) -> None:
        """Log the final scores, what was spent, and the flags."""
        told = {"final/accuracy": summary.accuracy, "final/loss": summary.scores.loss}
        if summary.epsilon is not None:
            spent = dict(numbers_of(summary.epsilon.spent.to_dict(), "epsilon_spent/"))
            told |= spent
        self._do(lambda backend: backend.log(told, summary.rounds.done))
        self._do(lambda backend: backend.flag([str(raised) for raised in summary.flags]))

    def close(self) -> None:
        """Close the backend, if it was opened."""
        if self._backend is not None:
            self._do(lambda backend: backend.close())

    def _do(self, act: Callable[[_Backend], None]) -> None:
        """Let the backend act; open it first if need be, and give it up if it fails."""
        if self._failed:
            return
        try:
            if self._backend is None:
                self._backend = self._make()
            act(self._backend)
        except Exception as error:  # training was paid for and must not end by what logs it
            self._failed = True
            problem = f"{type(error).__name__}: {error}"
            self._complain(f"logging to {self.name} stopped ({problem}); the run goes on")


@contextmanager
def logging_to(
    name: str | None, folder: Path, experiment: Experiment, complain: Callable[[str], None]
) -> Iterator[Logger | None]:
    """Yield a logger by name for the time of a run; None where no name is given.

    ``complain`` receives the message if logging fails.
    """
    if name is None:
        yield None
        return
    known = f"choose {' or '.join(KINDS)}"
    check(name in KINDS, "--log", f"there is no logger '{name}'", known)
    kind: Any = KINDS[name]
    try:
        library = importlib.import_module(kind.module)
    except ImportError as error:
        remedy = f"pip install {name}, or leave --log out"
        raise ConfigurationError("--log", f"{name} is not installed", remedy) from error
    settings = dict(_settings(experiment.to_dict()))
    logger = Logger(name, lambda: kind(library, folder, settings), complain)
    try:
        yield logger
    finally:
        logger.close()
