"""Log a run to tools that people already use: TensorBoard and MLflow, where they are installed."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dpfl.core.errors import ConfigurationError, unknown_name
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.result import Summary


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


class Backend(NamedTuple):
    """What a tool can do: log numbers at a step, show flags, and be closed."""

    log: Callable[[dict[str, float], int], Any]
    flag: Callable[[list[str]], Any]
    close: Callable[[], Any]


def _tensorboard(library: Any, folder: Path, settings: dict[str, str]) -> Backend:
    """Write event files into the run folder."""
    writer = library.SummaryWriter(str(folder / "tensorboard"))
    text = "\n".join(f"{name} = {value}  " for name, value in settings.items())
    writer.add_text("experiment", text)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return Backend(log, lambda flags: writer.add_text("flags", "\n\n".join(flags)), writer.close)


def _mlflow(library: Any, folder: Path, settings: dict[str, str]) -> Backend:
    """Write to the tracking server that the user has set, else into the run folder."""
    # Where the user's own settings say, else beside the run; never to a server nobody named.
    if not library.is_tracking_uri_set():
        library.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.sqlite').absolute()}")
    library.set_experiment("dpfl")
    library.start_run(run_name=folder.name)
    library.log_params(settings)

    def flag(flags: list[str]) -> None:
        library.set_tags({f"flag {number}": flag for number, flag in enumerate(flags, 1)})

    return Backend(library.log_metrics, flag, library.end_run)


_KINDS = {"tensorboard": ("torch.utils.tensorboard", _tensorboard), "mlflow": ("mlflow", _mlflow)}


class Logger:
    """Logs every round as it ends, and the summary. What it logs is the operator's record.

    The backend is opened with the first round, so that a run that is refused leaves nothing behind.
    Where the backend fails, ``complain`` is called once and the run goes on without it.
    """

    def __init__(
        self, name: str, make: Callable[[], Backend], complain: Callable[[str], None]
    ) -> None:
        self.name = name
        self._make = make
        self._complain = complain
        self._backend: Backend | None = None
        self._failed = False

    def round(self, number: int, record: RoundRecord) -> None:
        """Log the numbers of a round."""
        numbers = dict(numbers_of(record.to_dict()))
        self._do(lambda backend: backend.log(numbers, number))

    def end(self, summary: Summary) -> None:
        """Log the final scores, what was spent, and the flags."""
        scores = summary.scores
        told = {f"final/{scores.metric}": scores.value, "final/loss": scores.loss}
        if summary.epsilon is not None:
            told |= dict(numbers_of(summary.epsilon.spent.to_dict(), "epsilon_spent/"))
        self._do(lambda backend: backend.log(told, summary.rounds.done))
        self._do(lambda backend: backend.flag([str(raised) for raised in summary.flags]))

    def close(self) -> None:
        """Close the backend, if it was opened."""
        if self._backend is not None:
            self._do(lambda backend: backend.close())

    def _do(self, act: Callable[[Backend], Any]) -> None:
        """Let the backend act; open it first if need be, and give it up if it fails."""
        if self._failed:
            return
        try:
            self._backend = self._backend or self._make()
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
    if name not in _KINDS:
        raise unknown_name("--log", "logger", name, _KINDS)
    module, make = _KINDS[name]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            "--log", f"{name} is not installed", f"pip install {name}, or leave --log out"
        ) from error
    settings = dict(_settings(experiment.to_dict()))
    with closing(Logger(name, lambda: make(library, folder, settings), complain)) as logger:
        yield logger
