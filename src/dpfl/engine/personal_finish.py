"""The personal finish: after training, a client's own linear head with the common one as prior.

With x the inputs of a model's last layer, all computed once, W0 the common head and s the mean of
|x|^2 (1 behind maps that end on the unit sphere), a client minimises over its own n records ::

    both    (1 / n) sum CE(W x, y) + (lambda s / 2) |W - W0|^2
    local   (1 / n) sum CE(V z, y) + (lambda / 2) |V|^2,   z = unit((f - m) / sqrt(v + 0.1 mean v))

f are public features, m and v their mean and variance over the client's own records: nothing that
the federation has released is in the local model. Each lambda is the one of a fixed grid with the
least cross-entropy in five folds of the client's own training records; "both" may choose infinity,
which is the common head.

*Formal guarantees.* None are needed: everything is computed by the client from its own records and
a model that is released already. Neither heads nor scores may leave the client: no ledger covers
them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.threads import one_thread
from dpfl.core.types import Plain
from dpfl.data.inputs import Inputs
from dpfl.data.records import Shard
from dpfl.engine.finish_scores import FinishScores
from dpfl.engine.full_batches import public_maps
from dpfl.models.checks import in_mode
from dpfl.models.features import unit
from dpfl.models.preconditioning import Constant
from dpfl.tasks import Task

STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
"""The grid of lambda, the strongest pull towards the prior first."""

LEAST_RECORDS = 10
"""With fewer records a client keeps the common head."""

_UNTRIED = 0.01  # lambda of a local model where folds cannot choose it
_FOLDS, _GROUPS = 5, 40  # of training records; of test records that are left out in turn
_AT_ONCE = 512  # records that pass through the public maps together
_BIAS, _FLOOR = 0.5, 0.1  # the constant beside local inputs; share of the mean variance


@dataclass(frozen=True, kw_only=True, eq=False)
class PersonalFinish:
    """A client's own head, and what it is worth on the client's test records.

    ``head`` has a tensor for each parameter of the model, under its name there: it replaces the
    common one.
    """

    head: Mapping[str, Tensor]
    scores: FinishScores


def personal_finish(
    model: nn.Module, shard: Shard, inputs: Inputs, task: Task, *, released: Collection[str]
) -> PersonalFinish | None:
    """Fit a client's own head with that of ``model`` as prior, and compare it on test records.

    ``shard`` are the client's records, which ``inputs`` reads for the model. ``released`` names the
    model's buffers that the federation has released: a local model does without them, and without
    the maps behind them. None where nothing can be compared: for a model that is not a last linear
    layer behind public maps, a task that is not a classification of single records, and fewer than
    two test records, or records that do not define the metric.
    """
    layout = Layout.of_module(model)
    shard = shard.without_blanks()
    fitting = task.plain and task.softmax and public_maps(model, layout) is not None
    if not fitting or len(shard.test_labels) < 2:
        return None
    assert isinstance(model, nn.Sequential)
    *maps, linear = model
    assert isinstance(linear, nn.Linear)
    federated = {id(buffer) for name, buffer in model.named_buffers() if name in released}
    holding = (i for i, part in enumerate(maps) if federated & set(map(id, part.buffers())))
    cut = next(holding, len(maps))
    with torch.no_grad(), in_mode(model, training=False), _one_thread():
        stored = (shard.features, shard.test_features)
        features = [_mapped(maps[:cut], x, inputs) for x in stored]
        rows = [_mapped(maps[cut:], x).double() for x in features]
        prior = linear.weight.double()
        if linear.bias is not None:
            prior = torch.cat([prior, linear.bias.double()[:, None]], dim=1)
            rows = [torch.cat([x, x.new_ones(len(x), 1)], dim=1) for x in rows]
        head, strength, note = _own_head(rows[0], shard.labels, prior)
        outputs = [_local_outputs(features[0], features[1], shard.labels, len(prior))]
        outputs += [rows[1] @ one.T for one in (prior, head)]
        found = _compared(task, outputs, shard.test_labels)
    if found is None:
        return None
    scores = FinishScores(**found, strength=strength, note=note)
    sizes = [math.prod(block.shape[1:]) for block in layout]
    parts = torch.split(head.float(), sizes, dim=1)
    named = {b.name: x.reshape(b.shape) for b, x in zip(layout, parts, strict=True)}
    return PersonalFinish(head=named, scores=scores)


def fitted_head(
    rows: Tensor,
    labels: Tensor,
    prior: Tensor,
    strength: float,
    start: Tensor | None = None,
    *,
    tolerance: float = 1e-6,
) -> Tensor:
    """Minimise the mean cross-entropy + (strength s / 2) |W - prior|^2, with s the mean of |x|^2.

    ``rows`` x and ``prior`` are in double precision, and L-BFGS begins at ``start``, or else at the
    prior. It ends where no derivative is larger than ``tolerance``.

    >>> prior = torch.zeros(2, 1).double()
    >>> fitted_head(torch.ones(4, 1).double(), torch.tensor([0, 1, 1, 1]), prior, math.inf)
    tensor([[0.],
            [0.]], dtype=torch.float64)
    """
    if math.isinf(strength):
        return prior
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    x = rows.numpy()
    centre = prior.numpy()
    count = len(rows)
    target = labels.numpy()
    pull = strength * float(rows.square().sum() / count)
    places = np.arange(count), target

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        apart = flat.reshape(centre.shape) - centre
        logs = log_softmax(x @ (centre + apart).T, axis=1)
        slopes = np.exp(logs)
        slopes[places] -= 1
        value = -logs[places].mean() + pull / 2 * np.vdot(apart, apart)
        return float(value), (slopes.T @ x / count + pull * apart).ravel()

    first = (prior if start is None else start).numpy().ravel()
    options = {"maxiter": 500, "gtol": tolerance, "ftol": 1e-12}
    found = minimize(objective, first, jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x.reshape(centre.shape))


def _own_head(rows: Tensor, labels: Tensor, prior: Tensor) -> tuple[Tensor, float, str]:
    """The head of the personal finish, its strength, and why folds did not choose it."""
    if why := _too_little(labels):
        return prior, math.inf, f"{why}: the common head is kept"
    strength = _chosen(rows, labels, prior, (math.inf, *STRENGTHS))
    return fitted_head(rows, labels, prior, strength), strength, ""


def _local_outputs(own: Tensor, test: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Outputs for test records of a model that knows nothing of the federation but its features."""
    own, test = (x.flatten(1).double() for x in (own, test))
    mean = own.mean(dim=0)
    variance = own.var(dim=0, correction=0)
    scale = (variance + _FLOOR * variance.mean()).clamp_min(1e-30).rsqrt()
    rows, tests = (Constant(_BIAS).forward(unit((x - mean) * scale)) for x in (own, test))
    prior = rows.new_zeros(classes, rows.shape[1])
    strength = _UNTRIED if _too_little(labels) else _chosen(rows, labels, prior, STRENGTHS)
    return tests @ fitted_head(rows, labels, prior, strength).T


def _too_little(labels: Tensor) -> str:
    """Why a client's records do not suffice to choose between heads; empty where they do."""
    if len(labels) < LEAST_RECORDS:
        return f"fewer than {LEAST_RECORDS} training records"
    return "training records of one class only" if bool((labels == labels[0]).all()) else ""


def _chosen(rows: Tensor, labels: Tensor, prior: Tensor, grid: Sequence[float]) -> float:
    """The strength with the least cross-entropy on records that were left out, fold by fold.

    Folds are dealt out in the order of the labels, so that each has its share of every class. From
    strong to weak, each fit begins at the one before it. Of equal strengths the strongest is taken.
    """
    fold = torch.empty(len(labels), dtype=torch.int64)
    losses = dict.fromkeys(grid, 0.0)
    fold[torch.argsort(labels, stable=True)] = torch.arange(len(labels)) % _FOLDS
    for number in range(_FOLDS):
        kept = fold != number
        head = prior
        for strength in grid:
            head = fitted_head(rows[kept], labels[kept], prior, strength, head, tolerance=1e-4)
            outputs = rows[~kept] @ head.T
            lost = nn.functional.cross_entropy(outputs, labels[~kept], reduction="sum")
            losses[strength] += float(lost)
    return min(grid, key=losses.__getitem__)


def _compared(task: Task, outputs: Sequence[Tensor], labels: Tensor) -> Plain | None:
    """What a local, the common and the personal model score; None where a score is not defined.

    The standard error of the difference to the local model is that of a jackknife over the test
    records, which every metric has; of an accuracy it is that of the paired comparison.
    """
    local, common, both = (task.score(one, labels) for one in outputs)
    better = outputs[1] if (common > both) == task.higher_is_better else outputs[2]
    groups = min(len(labels), _GROUPS)
    group = torch.arange(len(labels)) % groups
    apart = []
    for number in range(groups):
        kept = group != number
        one, other = (task.score(x[kept], labels[kept]) for x in (outputs[0], better))
        apart.append(one - other)
    known = np.array([value for value in apart if math.isfinite(value)])
    error = float(np.sqrt(len(known) - 1) * known.std()) if len(known) > 1 else math.nan
    if not all(map(math.isfinite, (local, common, both, error))):
        return None
    values = {"local": local, "common": common, "both": both, "error": error}
    return {**values, "metric": task.metric, "tested": len(labels)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, also in the BLAS that scipy comes with."""
    import scipy.optimize  # noqa: F401 - so that its BLAS is there

    with one_thread(), threadpool_limits(limits=1, user_api="blas"):
        yield


def _mapped(maps: Sequence[nn.Module], stored: Tensor, inputs: Inputs | None = None) -> Tensor:
    """What some maps make of stored records, or of what earlier maps made of them."""
    through = nn.Sequential(*maps)
    parts = torch.split(stored, _AT_ONCE)
    return torch.cat([through(part if inputs is None else inputs(part)) for part in parts])
