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

from dpfl.core.files import parsed, write_safely
from dpfl.core.layout import Layout
from dpfl.data.federation import Federation
from dpfl.deploy.outcome import Outcome, outcomes
from dpfl.deploy.records import LoadedSite, Records
from dpfl.deploy.site_folder import FINISH, log
from dpfl.engine.finish_scores import FinishScores
from dpfl.engine.personal_finish import PersonalFinish, personal_finish
from dpfl.report.finish_page import finish_page

FINISH_PAGE, HEAD = "finish.html", "head.safetensors"
FINISH_FILES = (FINISH, FINISH_PAGE, HEAD)


def finish_delivered(folder: Path, records: Records | None = None) -> None:
    """Make the personal finish of the model that was delivered last to the site in a folder.

    ``records`` are those that were read before. What goes wrong is logged, and stops nothing: the
    model is there.
    """
    try:
        site, made_of = LoadedSite(folder, records), None
        while made_of is not (federation := site.federation()):  # nobody was withdrawn meanwhile
            made_of = federation
            for outcome in outcomes(folder)[-1:]:
                finish_of(outcome, site.id, federation)
            with closing(site.ledger(reading=True)) as ledger:
                site.enter(ledger, None)
    except Exception as error:
        log(folder, f"personal finish: {type(error).__name__}: {error}")


def finish_of(
    outcome: Outcome, site: str, federation: Federation, metric: str | None = None
) -> FinishScores | None:
    """Return what a model and its personal finish are worth to a ``site``; None if it has none.

    ``federation`` is the site alone, with all of its records. Of a model that was delivered the
    finish is kept beside it, and is made again for another model or other records. That of a model
    brought by other means, or by another ``metric`` than the study's, is not kept.
    """
    place = outcome.model.parent
    if metric is not None or not outcome.delivered:
        made = _made(outcome, site, federation, metric)
        return None if made is None else made.scores
    key = hashlib.sha256(outcome.model.read_bytes() + federation.fingerprint().encode()).hexdigest()
    if (known := _kept(place / FINISH, key)) is not None:
        return known
    for name in FINISH_FILES:
        (place / name).unlink(missing_ok=True)
    made = _made(outcome, site, federation)
    if made is not None:
        about = {"run": outcome.name, "site": site, "key": key, "sentence": made.scores.sentence}
        told = json.dumps({**about, **made.scores.to_dict()}, indent=2) + "\n"
        page = finish_page(site, outcome.name, made.scores)
        head = safetensors.save({name: x.contiguous() for name, x in made.head.items()})
        for name, content in ((HEAD, head), (FINISH_PAGE, page.encode()), (FINISH, told.encode())):
            write_safely(place / name, content, secret=True)
    return None if made is None else made.scores


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
    model, vector, buffers = outcome.loaded()
    Layout.of_module(model).write(vector, model)
    shard, task = learned.shards[site], learned.task
    return personal_finish(model, shard, learned.inputs, task, released=buffers)
