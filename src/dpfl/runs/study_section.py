"""What a study is about: the section [study] of its file, and the task for sites."""

import warnings
from dataclasses import replace
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from dpfl.core.checks import check
from dpfl.core.types import Plain
from dpfl.data.schema import Schema
from dpfl.runs import sections
from dpfl.runs.site_file import Name
from dpfl.runs.toml_file import Section
from dpfl.tasks import Classification, Task

with warnings.catch_warnings():  # pydantic's models have an old method of the name schema
    warnings.simplefilter("ignore", UserWarning)

    class StudySection(Section):
        """What the study is called, who may take part, and what every site's records look like.

        ``classes`` is how many classes there are, for tasks that learn classes. ``schema`` is what
        all sites must prepare their records by, if they must; shape and classes follow from it.
        ``unit`` is the word for the persons whom all sites protect, instead of single records.
        """

        name: str = Field(min_length=1)
        sites: list[Name] = Field(min_length=1)
        feature_shape: list[PositiveInt] = Field(min_length=1)
        classes: int | None = Field(default=None, ge=2)
        schema: Plain | None = None  # type: ignore[assignment]
        unit: str | None = None

        @model_validator(mode="before")
        @classmethod
        def _follow_schema(cls, values: Any) -> Any:
            """Fill what the schema says; its columns become a list, which keeps their order.

            A path is not read here: a site must not open files that a server names.
            """
            given = values.get("schema") if isinstance(values, dict) else None
            if given is None:
                return values
            schema = Schema.from_dict(given, "[study] schema")
            known: Plain = {"feature_shape": [len(schema.feature_names)], "classes": schema.classes}
            for name, value in known.items():
                check(
                    values.get(name, value) == value,
                    f"[study] {name}",
                    f"{values.get(name)} was given, and the schema makes it {value}",
                    "leave it out",
                )
            return {**values, **known, "schema": schema.to_lists()}

        def described(self) -> Schema | None:
            """The schema, None if sites are free."""
            return None if self.schema is None else Schema.from_dict(self.schema, "[study] schema")


def site_task(section: sections.TaskSection | None, classes: int | None, where: str) -> Task:
    """Build a task for sites, whose records have one target each: a class or a number.

    ``classes`` is how many classes there are, None where targets are numbers; ``where`` names it.
    """
    task = (section or sections.TaskSection()).task()
    check(
        task.targets == "classes" or (task.targets == "numbers" and task.width == 1),
        "[task]",
        f"{task.name} has several targets per record, and a site's table has one column",
        "choose classification, binary or regression of one number",
    )
    if task.targets == "numbers":
        check(classes is None, where, f"{classes} classes for {task.name}", "leave it out")
        return task
    if isinstance(task, Classification) and task.classes is None and classes is not None:
        task = replace(task, classes=classes)
    own = Classification(classes=classes or 2)
    check(
        classes is not None or task.takes(own),
        where,
        "is missing",
        "say how many classes there are, 2 or more",
    )
    check(
        classes is None or (task.takes(own) and own.takes(task)),
        where,
        f"{classes} classes do not fit {task}",
        "give their number once",
    )
    return task
