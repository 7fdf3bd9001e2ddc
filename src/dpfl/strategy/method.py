"""How a method declares itself: one decorated factory, in one file.

::

    @method(family="heterogeneous", simplicity=30)
    def my_method(work: RecordWork, *, power: float = 1.0) -> Strategy:
        '''FedAvg over DP-SGD clients, weighted by a power of the claimed epsilon.'''
        return record_level("my_method", work, weights=PowerWeights(power=power))

The first argument, if it is annotated with a dataclass of shared settings, is assembled from
keyword arguments, so that every method of a kind takes the same ones and none repeats them. What
:func:`method` returns is called with keywords only: ``my_method(lr=0.1, clip=1.0, batch_size=32,
local_steps=4, power=2.0)``.

A package of its own makes a method known through the entry-point group ``dpfl.methods``::

    [project.entry-points."dpfl.methods"]
    my_method = "my_package.my_module:my_method"
"""

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from dpfl.core.checks import check
from dpfl.core.errors import did_you_mean
from dpfl.strategy.fit import Strategy

Factory = Callable[..., Strategy]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: how it is built, and what everything above it needs to know.

    ``family``: the methods it is worth comparing with. ``simplicity``: among methods that would do
    equally well, the one with the smallest number is preferred. ``search``: the settings that are
    its own, and what a search tries; a fraction for a whole-number setting is a share of the
    model's parameters. ``sampling``: how its paper draws cohorts. ``needs``: what a federation
    must have. ``remark``: what to bear in mind when it is recommended. ``reference``: shown
    beside the others of every family, and never ranked. ``fixed``: shared settings that it
    decides itself, and does not take.
    """

    name: str
    factory: Factory
    family: str
    simplicity: int
    search: Mapping[str, tuple[float | str, ...]] = field(default_factory=dict)
    sampling: Literal["uniform", "poisson"] = "uniform"
    needs: str = ""
    remark: str = ""
    reference: bool = False
    fixed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.search if name not in self.settings]
        problem = f"its search names '{unknown[0]}', which is not a setting" if unknown else ""
        check(not unknown, self._where, problem, "name a setting of the factory")

    def __call__(self, **settings: Any) -> Strategy:
        """Build the strategy from keyword arguments."""
        return self.build(settings)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return inspect.getdoc(self.factory) or ""

    @property
    def about(self) -> str:
        """The first paragraph of the factory's docstring, on one line."""
        return " ".join(self.__doc__.partition("\n\n")[0].split())

    @property
    def _where(self) -> str:
        return f"method '{self.name}'"

    @property
    def _shared(self) -> type | None:
        """The dataclass of shared settings that the first argument is made of, if there is one."""
        names = list(inspect.signature(self.factory).parameters)
        hint = typing.get_type_hints(self.factory).get(names[0]) if names else None
        return hint if isinstance(hint, type) and is_dataclass(hint) else None

    @property
    def settings(self) -> dict[str, inspect.Parameter]:
        """The keyword arguments it takes, shared ones first; those without a default must be
        given.
        """
        own = list(inspect.signature(self.factory).parameters.values())
        hints, found = typing.get_type_hints(self.factory), []
        if self._shared is not None:
            shared, own = typing.get_type_hints(self._shared), own[1:]
            taken = [f for f in fields(self._shared) if f.name not in self.fixed]
            found = [_parameter(f.name, shared[f.name], f.default) for f in taken]
        found += [_parameter(p.name, hints[p.name], p.default) for p in own]
        # Required ones first, as in any signature.
        found.sort(key=lambda p: p.default is not inspect.Parameter.empty)
        return {p.name: p for p in found}

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.Signature(list(self.settings.values()), return_annotation=Strategy)

    def build(self, settings: Mapping[str, Any]) -> Strategy:
        """Build the strategy from settings by name, as an experiment file gives them.

        A setting that the method does not know is refused with the nearest one that it does; one
        that it lacks is named, since what decides privacy has no default; and a value of the wrong
        kind is refused before the factory sees it.
        """
        known = self.settings
        for name, value in settings.items():
            hint = did_you_mean(name, known)
            check(name in known, self._where, f"has no setting '{name}'", hint)
            _check_kind(self._where, known[name], value)
        missing = [
            p.name for p in known.values() if p.default is p.empty and p.name not in settings
        ]
        needed = f"needs {' and '.join(missing)}"
        check(not missing, self._where, needed, "give a value: it has no default")
        if self._shared is None:
            return self.factory(**settings)
        names = {f.name for f in fields(self._shared)}
        shared = self._shared(**{k: v for k, v in settings.items() if k in names})
        return self.factory(shared, **{k: v for k, v in settings.items() if k not in names})


def method(*, family: str, simplicity: int, **about: Any) -> Callable[[Factory], Method]:
    """Declare a factory as a method; :class:`Method` has all the arguments.

    The decorated name becomes a :class:`Method`, which is called with keywords as the factory would
    be. Its name is the factory's, its description the factory's docstring.
    """

    def declare(factory: Factory) -> Method:
        name, known = factory.__name__, {"family": family, "simplicity": simplicity, **about}
        return Method(name=name, factory=factory, **known)

    return declare


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    absent = default is MISSING or default is inspect.Parameter.empty
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if absent else default,
        annotation=annotation,
    )


def _check_kind(where: str, setting: inspect.Parameter, value: Any) -> None:
    """Refuse text where only numbers belong, what is not a number, and fractions of whole ones."""
    kinds = _kinds(setting.annotation) & {int, float, str}
    given = f"{setting.name} = {value!r}"
    if isinstance(value, str) and kinds:
        check(str in kinds, where, f"{given} is not a number", "give a number")
    if isinstance(value, float) and kinds:
        check(not math.isnan(value), where, given, "give a number")
        check(float in kinds or value.is_integer(), where, given, "give a whole number")


def _kinds(annotation: Any) -> set[Any]:
    """The plain kinds a setting may have: of float | Literal["auto"] they are float and str."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return {type(value) for value in parts}
    return {kind for part in parts for kind in _kinds(part)} if parts else {annotation}
