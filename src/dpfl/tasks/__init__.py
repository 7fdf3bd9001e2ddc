"""What is learned: losses per record, metrics, shapes of targets.

``base``            what a task is
``metrics``         metrics by name
``classification``  one of several classes, one logit
``multi_label``     several labels at once
``regression``      numbers, by squared or Huber loss
``tokens``          the next token at every position
``custom``          a user's own loss
``persons``         any of these, of persons who have several records each

>>> make_task({"name": "regression", "loss": "huber"}).metric
'rmse'
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, did_you_mean, unknown_name
from dpfl.tasks.base import Task as Task
from dpfl.tasks.classification import Binary as Binary, Classification as Classification
from dpfl.tasks.custom import CustomTask as CustomTask, cannot_load
from dpfl.tasks.metrics import METRICS as METRICS, MetricWords as MetricWords
from dpfl.tasks.multi_label import MultiLabel as MultiLabel
from dpfl.tasks.persons import PerPerson as PerPerson
from dpfl.tasks.regression import Regression as Regression
from dpfl.tasks.tokens import TokenPrediction as TokenPrediction

CLASSIFICATION = Classification()
TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (Classification, Binary, MultiLabel, Regression, TokenPrediction)
}
"""The tasks that a file can name."""


def make_task(given: Mapping[str, Any] | str | Task | None) -> Task:
    """Build a task from what is ``given``: its name, plain values with a ``name``, or a task
    itself.

    None means classification. Unknown names and settings are refused with the nearest known one.

    >>> make_task("binary").metric
    'auc'
    """
    if given is None or isinstance(given, Task):
        return Classification() if given is None else given
    check(
        isinstance(given, str | Mapping),
        "task",
        f"{getattr(given, '__name__', given)!r:.60} is not a task",
        "give its name, such as 'regression', or an object, such as Regression()",
    )
    values = {"name": given} if isinstance(given, str) else dict(given)
    name = str(values.pop("name", "classification"))
    if name == CustomTask.name:
        raise cannot_load()
    if name not in TASKS:
        raise unknown_name("task", "task", name, TASKS)
    known = {field.name for field in fields(TASKS[name])}
    for key in values:
        check(key in known, f"task {key}", f"is not a setting of {name}", did_you_mean(key, known))
    settings: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
    }
    try:
        return TASKS[name](**settings)
    except TypeError as error:
        raise ConfigurationError("task", str(error), "check the settings' types") from error
