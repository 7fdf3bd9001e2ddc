"""Tell a run to the tools people already have: TensorBoard and MLflow, where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from dpfl.core.errors import ConfigurationError
from dpfl.runs.experiment import Experiment


class Logger(Protocol):
    """Told every round as it ends, and the summary at the end. What it is told is the operator's
    record.
    """

    def round(self, number: int, line: Mapping[str, Any]) -> None:
        """Take a round's numbers."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Take what came out."""


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every plain number of a round, under its path; lists and what is told of single clients are
    left out.

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


def _final(summary: Mapping[str, Any]) -> dict[str, float]:
    spent = summary["epsilon"].get("spent", {})
    told = {
        f"epsilon_spent/{name}": value
        for name, value in spent.items()
        if isinstance(value, int | float)
    }
    return {"final/accuracy": summary["accuracy"], "final/loss": summary["loss"], **told}


class _TensorBoard:
    module = "torch.utils.tensorboard"

    def __init__(self, library: Any, folder: Path, experiment: Experiment) -> None:
        self.writer = library.SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text(
            "experiment",
            "\n".join(f"{name} = {value}  " for name, value in _flat(experiment.to_dict())),
        )

    def round(self, number: int, line: Mapping[str, Any]) -> None:
        for name, value in numbers_of(line):
            self.writer.add_scalar(name, value, number)

    def end(self, summary: Mapping[str, Any]) -> None:
        for name, value in _final(summary).items():
            self.writer.add_scalar(name, value, summary["rounds"]["done"])
        self.writer.add_text("stamps", "\n\n".join(flag["text"] for flag in summary["flags"]))

    def close(self) -> None:
        self.writer.close()


class _MlFlow:
    module = "mlflow"

    def __init__(self, library: Any, folder: Path, experiment: Experiment) -> None:
        self.mlflow = library
        # Where the user's own settings say, else beside the run; never to a server nobody named.
        if not library.is_tracking_uri_set():
            library.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.sqlite').absolute()}")
        library.set_experiment("dpfl")
        library.start_run(run_name=folder.name)
        library.log_params(dict(_flat(experiment.to_dict())))

    def round(self, number: int, line: Mapping[str, Any]) -> None:
        self.mlflow.log_metrics(dict(numbers_of(line)), step=number)

    def end(self, summary: Mapping[str, Any]) -> None:
        self.mlflow.log_metrics(_final(summary), step=summary["rounds"]["done"])
        self.mlflow.set_tags(
            {f"flag {n}": flag["text"] for n, flag in enumerate(summary["flags"], start=1)}
        )

    def close(self) -> None:
        self.mlflow.end_run()


class _Careful:
    """Opens a logger with the first round, since a run that is refused leaves nothing behind; and
    goes on without it.
    """

    def __init__(
        self, name: str, make: Callable[[], _TensorBoard | _MlFlow], complain: Callable[[str], None]
    ) -> None:
        self.name = name
        self._make = make
        self._complain = complain
        self._logger: _TensorBoard | _MlFlow | None = None
        self._failed = False

    def round(self, number: int, line: Mapping[str, Any]) -> None:
        self._do(lambda logger: logger.round(number, line))

    def end(self, summary: Mapping[str, Any]) -> None:
        self._do(lambda logger: logger.end(summary))

    def close(self) -> None:
        if self._logger is not None:
            self._do(lambda logger: logger.close())

    def _do(self, tell: Callable[[_TensorBoard | _MlFlow], None]) -> None:
        if self._failed:
            return
        try:
            if self._logger is None:
                self._logger = self._make()
            tell(self._logger)
        except (
            Exception
        ) as error:  # whatever goes wrong in there: training was paid for and must not end by it
            self._failed = True
            self._complain(
                f"logging to {self.name} stopped ({type(error).__name__}: {error}); the run goes on"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if prefix == "" and name == "clients":
            continue  # of single clients nothing is told
        if isinstance(value, Mapping) and prefix:
            yield f"{prefix}{name}", f"{len(value)} values, by client"
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)[:500]


KINDS: dict[str, type[_TensorBoard | _MlFlow]] = {"tensorboard": _TensorBoard, "mlflow": _MlFlow}


@contextmanager
def logging_to(
    name: str | None, folder: Path, experiment: Experiment, complain: Callable[[str], None]
) -> Iterator[Logger | None]:
    """A logger by name, for as long as the run goes on."""
    if name is None:
        yield None
        return
    if name not in KINDS:
        raise ConfigurationError(
            "--log", f"there is no logger '{name}'", f"choose {' or '.join(KINDS)}"
        )
    try:
        library = importlib.import_module(KINDS[name].module)
    except ImportError as error:
        raise ConfigurationError(
            "--log", f"{name} is not installed", f"pip install {name}, or leave --log out"
        ) from error
    make: Any = KINDS[name]
    logger = _Careful(name, lambda: make(library, folder, experiment), complain)
    try:
        yield logger
    finally:
        logger.close()
