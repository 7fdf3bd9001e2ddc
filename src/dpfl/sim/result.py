"""What training gives back: the model, what was measured, what was spent; saved, shown, loaded."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import FolderError
from dpfl.core.html import html_table
from dpfl.core.layout import Layout
from dpfl.core.types import Plain
from dpfl.privacy.statement import Statements
from dpfl.rounds import write_buffers
from dpfl.rounds.record import RoundRecord
from dpfl.runs.display import Lines, frame_of, line_figure
from dpfl.runs.folder import RunFolder
from dpfl.runs.model_card import ModelCard, save_model
from dpfl.runs.predictor import load
from dpfl.runs.result import Summary
from dpfl.sim.loop import Simulation
from dpfl.sim.summary import card_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpfl.tasks import Task


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result:
    """What training gives back.

    ``model`` is the trained model, ``history`` has a record per round, ``summary`` says what came
    out and what limits its guarantee, ``timings`` holds the seconds of each round. ``card`` says
    what the model is, and ``description`` what was run, as a run folder keeps them; ``python`` says
    that it was started from Python. In a notebook a result shows itself as a table.
    """

    model: nn.Module
    history: list[RoundRecord]
    summary: Summary
    timings: list[dict[str, float]]
    card: ModelCard
    description: str
    python: bool

    def __repr__(self) -> str:
        facts = (f"{name}: {value}" for name, value in self._facts().items())
        return f"Result({', '.join(facts)})"

    @property
    def accuracy(self) -> float:
        """Accuracy of the final model on all clients' test records; NaN for a task without one."""
        return self.summary.accuracy

    @property
    def value(self) -> float:
        """The task's ranking metric on all clients' test records."""
        return self.summary.scores.value

    @property
    def spent(self) -> Statements:
        """What each client spent: an epsilon that names unit, adjacency and adversary."""
        return Statements.of(self.summary.statements)

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: Path | str) -> Path:
        """Write the result into a new ``folder``, and return its path.

        The folder is one that ``dpfl report``, :func:`dpfl.load` and :meth:`load` read. It has no
        ledger: where charges must add up over runs, train with ``folder=`` or ``ledger=``.
        """
        place = RunFolder(Path(folder))
        with place.locked():
            place.create(self.description, python=self.python)
            for record in self.history:
                place.append_round(record)
            for seconds in self.timings:
                place.append(place.timings, seconds)
            layout = Layout.of_module(self.model)
            buffers = dict(self.model.named_buffers())
            save_model(place, self.model, self.card, layout, buffers=buffers)
            place.save_summary(self.summary)
        return place.path

    @classmethod
    def load(
        cls, folder: Path | str, *, model: nn.Module | None = None, task: Task | None = None
    ) -> Result:
        """Read a finished run or a saved result back.

        ``folder`` is that of a run or of a saved result. ``model`` is a module like the one that
        was trained, where it is the user's own; ``task`` one with functions of the user's own.
        """
        place = RunFolder(Path(folder))
        check(
            place.holds_run,
            str(folder),
            "holds no result",
            "name the folder of a finished run, or of a saved result",
            FolderError,
        )
        python = place.training.exists()
        return cls(
            model=load(folder, model=model, task=task).model,
            history=place.read_rounds(),
            summary=place.read_summary(),
            timings=place.read_timings(),
            card=ModelCard.read(place.card),
            description=(place.training if python else place.experiment).read_text(),
            python=python,
        )

    # -- notebooks ---------------------------------------------------------------------------------

    def to_pandas(self) -> Any:
        """Return the history as a pandas frame, one row per round."""
        return frame_of([_row(record) for record in self.history], index="round")

    def plot(self) -> Figure:
        """Return a matplotlib figure: the ranking metric, the loss, and the weights of clients."""
        scored = {one.round + 1: one.scores for one in self.history if one.scores is not None}
        weights: dict[str, dict[int, float]] = {}
        for record in self.history:
            for client, weight in record.weights.items():
                weights.setdefault(client, {})[record.round + 1] = weight
        words = self.summary.scores.words
        value = {words.words: {r: words.scale * s.value for r, s in scored.items()}}
        loss = {"loss": {r: s.loss for r, s in scored.items()}}
        panels: dict[str, Lines] = {words.title: value, "loss": loss, "weights": weights}
        return line_figure(panels, x_label="round")

    def _facts(self) -> dict[str, str]:
        """What came out, in a few words."""
        summary = self.summary
        scores = self.summary.scores
        rounds = summary.rounds
        epsilon = summary.epsilon
        early = f" ({rounds.ended_early})" if rounds.ended_early else ""
        return {
            "method": summary.method,
            scores.words.words: f"{scores.words.show(scores.value)} ({summary.tested})",
            "rounds": f"{rounds.done} of {rounds.planned}{early}",
            "clients": f"{summary.clients}, of which {len(summary.clients_left)} ran out of budget",
            "epsilon spent": epsilon.words if epsilon else "nobody is protected",
        }

    def _repr_html_(self) -> str:
        flags = "".join(f"<p><b>{escape(str(flag))}</b></p>" for flag in self.summary.flags)
        return flags + html_table((), self._facts().items()) + self.spent._repr_html_()


def _row(record: RoundRecord) -> Plain:
    """The numbers of a round as cells of a frame."""
    scores = record.scores
    told = {scores.metric: scores.value, "loss": scores.loss} if scores else {}
    weights = {f"weight {client}": weight for client, weight in record.weights.items()}
    plain = ("bytes_up", "bytes_down", "update_norm", "published", "lost")
    counts = {"cohort": len(record.cohort), "arrived": len(record.arrived)}
    same = {name: getattr(record, name) for name in plain}
    return {"round": record.round + 1, **told, **counts, **same, **weights}


def result_of(
    simulation: Simulation, summary: Summary | None, *, description: str, python: bool
) -> Result:
    """Return the result of a ``simulation`` that was played to its ``summary``.

    ``description`` and ``python`` are those of the result.
    """
    assert summary is not None
    model = simulation.model
    simulation.layout.write(simulation.published(), model)
    write_buffers(model, simulation.state.buffers)
    return Result(
        model=model,
        history=simulation.history,
        summary=summary,
        timings=simulation.timings,
        card=card_of(simulation, summary.flags),
        description=description,
        python=python,
    )
