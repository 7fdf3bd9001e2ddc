"""The personal finish at a site: its own head beside the model that was delivered.

::

    models/RUN/finish.json       what own records alone, the common model and both score here
    models/RUN/finish.html       the same as a page
    models/RUN/head.safetensors  the site's own head, in place of the common one

It is made after the delivery was answered: the server does not see how long it takes, nor whether
it fails. Nothing of it leaves the site, since no ledger covers it.
"""

import hashlib
import json
from contextlib import closing
from pathlib import Path

from safetensors import torch as safetensors

from dpfl.core.errors import DpflError
from dpfl.core.files import parsed, write_safely
from dpfl.data.federation import Federation
from dpfl.deploy.outcome import Outcome, outcomes
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.site_folder import FINISH
from dpfl.engine.finish_scores import FinishScores
from dpfl.engine.personal_finish import PersonalFinish, personal_finish
from dpfl.report.finish_page import finish_page
from dpfl.rounds import buffer_shapes
from dpfl.runs.predictor import HEAD

FINISH_PAGE = "finish.html"
FINISH_FILES = (FINISH, FINISH_PAGE, HEAD)


def finish_delivered(site: LoadedSite, last: int = 1) -> None:
    """Make the personal finish of the ``last`` models that were delivered to a site; 0 means all.

    What goes wrong is logged, and stops nothing: the models are there.
    """
    try:
        delivered = outcomes(site.folder)
    except DpflError as error:
        site.log(f"personal finish: {error}")
        return
    for outcome in delivered[-last:]:
        try:
            finish_of(outcome, site)
        except Exception as error:
            site.log(f"personal finish of {outcome.name}: {type(error).__name__}: {error}")


def finish_of(outcome: Outcome, site: LoadedSite, metric: str | None = None) -> FinishScores | None:
    """Return what a model and its personal finish are worth to a site; None if it has none.

    Of a model that was delivered the finish is kept beside it, and is made again for another model
    or other records. That of a model brought by other means, or by another ``metric`` than the
    study's, is not kept.
    """
    federation = site.federation()
    place = outcome.model.parent
    if metric is not None or not outcome.delivered:
        made = _made(outcome, site.id, federation, metric)
        return None if made is None else made.scores
    key = hashlib.sha256(outcome.model.read_bytes() + federation.fingerprint().encode()).hexdigest()
    if (known := _kept(place / FINISH, key)) is not None:
        return known
    withdrawn = site.withdrawn()
    with closing(site.checked_ledger()) as ledger, ledger.nobody_leaves():
        for name in FINISH_FILES:
            (place / name).unlink(missing_ok=True)
    made = _made(outcome, site.id, federation)
    if made is None:
        return None
    about = {"run": outcome.name, "site": site.id, "key": key, "sentence": made.scores.sentence}
    told = json.dumps({**about, **made.scores.to_dict()}, indent=2) + "\n"
    page = finish_page(site.id, outcome.name, made.scores)
    head = safetensors.save({name: x.contiguous() for name, x in made.head.items()})
    with closing(site.checked_ledger()) as ledger, ledger.nobody_leaves():
        site.enter(ledger, None)
        if site.withdrawn() == withdrawn:
            write_safely(place / HEAD, head, secret=True)
            write_safely(place / FINISH_PAGE, page.encode(), secret=True)
            write_safely(place / FINISH, told.encode(), secret=True)
            return made.scores
    return finish_of(outcome, site)


def _kept(path: Path, key: str) -> FinishScores | None:
    """Read a finish that is kept; None where there is none for the model and records of a key."""
    try:
        values = parsed(path.read_text())
        return FinishScores.from_dict(values) if values["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _made(
    outcome: Outcome, site: str, federation: Federation, metric: str | None = None
) -> PersonalFinish | None:
    """Make the personal finish of a model; None where it has none."""
    if outcome.study.strategy().personal is not None:  # a part of the model is the site's already
        return None
    learned = outcome.learned(federation, metric)
    model = outcome.loaded()
    shard = learned.shards[site]
    task = learned.task
    first, strategy = outcome.study.trained()
    released = buffer_shapes(first, strategy.releases)
    return personal_finish(model, shard, learned.inputs, task, released=released)
