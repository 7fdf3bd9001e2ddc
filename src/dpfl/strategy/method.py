"""How a method declares itself: one decorated factory, in one file.

::

    @method(family="heterogeneous", simplicity=30)
    def my_method(work: RecordWork, *, power: float = 1.0) -> Strategy:
        '''FedAvg over DP-SGD clients, weighted by a power of the claimed epsilon.'''
        return record_level("my_method", work, weights=PowerWeights(power=power))

A positional argument that is annotated with a dataclass (the settings that methods of a kind share,
or a plug of the method's own) is assembled from keyword arguments, one for each of its fields, so
that no factory repeats them; a name that two of them share goes to both. What :func:`method`
returns is called with keywords only: ``my_method(lr=0.1, clip=1.0, batch_size=32, local_steps=4,
power=2.0)``.

A package of its own makes a method known through the entry-point group ``dpfl.methods``::

    [project.entry-points."dpfl.methods"]
    my_method = "my_package.my_module:my_method"
"""

import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from dpfl.core.checks import check, finite
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
    beside the others of every family, and never ranked. ``baseline``: what the others of its
    family are held against. ``fixed``: shared settings that it
    decides itself, and does not take. ``model``: the model section that it trains in place of an
    experiment's; such a method also plans its rounds. ``secure``: it is made for a secure sum, and
    takes the settings of one.
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
    baseline: bool = False
    fixed: tuple[str, ...] = ()
    model: Mapping[str, str] | None = None
    secure: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.search if name not in self.settings]
        check(
            not unknown,
            self._where,
            f"its search names '{unknown[0]}', which is not a setting" if unknown else "",
            "name a setting of the factory",
        )
        defaults: dict[str, Any] = {}
        for shared in (p for own in _collected(self.factory) for p in _parameters(own.annotation)):
            same = defaults.setdefault(shared.name, shared.default) == shared.default
            check(
                same or shared.name in self.fixed,
                self._where,
                f"two of its arguments have a setting '{shared.name}', with other defaults",
                "give them one default",
            )

    def __call__(self, **settings: Any) -> Strategy:
        """Build the strategy from keyword arguments."""
        return self.build(settings)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        kinds = [own.annotation for own in _collected(self.factory)]
        told = [text for kind in kinds for one in kind.__mro__ for text in _of_fields(one)]
        return "\n\n".join(filter(None, [inspect.getdoc(self.factory), *told]))

    def __repr__(self) -> str:
        """The call, with the settings that it takes."""
        return f"{self.name}({', '.join(self.settings)})"

    @property
    def about(self) -> str:
        """The first paragraph of the factory's docstring, on one line."""
        return " ".join(self.__doc__.partition("\n\n")[0].split())

    @property
    def _where(self) -> str:
        return f"method '{self.name}'"

    @property
    def settings(self) -> dict[str, inspect.Parameter]:
        """The keyword arguments it takes; those without a default, which must be given, come
        first.
        """
        found: dict[str, inspect.Parameter] = {}
        for own in _parameters(self.factory):
            taken = [own]
            if _collects(own):
                taken = [p for p in _parameters(own.annotation) if p.name not in self.fixed]
            found |= {p.name: p for p in taken if p.name not in found}
        return dict(sorted(found.items(), key=lambda item: item[1].default is not item[1].empty))

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
        for name in settings:
            check(
                name in known,
                self._where,
                f"has no setting '{name}'",
                "" if name in known else did_you_mean(name, known),
            )
        settings = {name: _of_kind(self._where, known[name], own) for name, own in settings.items()}
        needed = [name for name, setting in known.items() if setting.default is setting.empty]
        missing = [name for name in needed if name not in settings]
        check(
            not missing,
            self._where,
            f"needs {' and '.join(missing)}",
            "give a value: it has no default",
        )
        arguments = {}
        for own in _parameters(self.factory):
            if _collects(own):
                names = {p.name for p in _parameters(own.annotation)} & settings.keys()
                arguments[own.name] = own.annotation(**{name: settings[name] for name in names})
            elif own.name in settings:
                arguments[own.name] = settings[own.name]
        return self.factory(**arguments)


def method(*, family: str, simplicity: int, **about: Any) -> Callable[[Factory], Method]:
    """Declare a factory as a method; ``family``, ``simplicity`` and ``about`` are fields of
    :class:`Method`, which describes them.

    The decorated name becomes a :class:`Method`, which is called with keywords as the factory would
    be. Its name is the factory's, its description the factory's docstring.
    """
    known = {"family": family, "simplicity": simplicity, **about}
    return lambda factory: Method(name=factory.__name__, factory=factory, **known)


def _of_fields(kind: type) -> list[str]:
    """The paragraphs in which a class describes fields of its own."""
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    names = [f"``{name}``" for name in known & {*vars(kind).get("__annotations__", {})}]
    texts = inspect.cleandoc(vars(kind).get("__doc__") or "").split("\n\n")
    return [text for text in texts if any(name in text for name in names)]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a factory or a dataclass takes, with types as annotations."""
    hints = typing.get_type_hints(function)
    known = inspect.signature(function).parameters
    return [p.replace(annotation=hints[p.name]) for p in known.values()]


def _collects(parameter: inspect.Parameter) -> bool:
    """Whether an argument of a factory is made of settings: a positional one of a dataclass that
    has no default of its own.
    """
    given = parameter.default is not parameter.empty
    positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    return positional and not given and is_dataclass(parameter.annotation)


def _collected(factory: Factory) -> list[inspect.Parameter]:
    return [parameter for parameter in _parameters(factory) if _collects(parameter)]


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _of_kind(where: str, setting: inspect.Parameter, value: Any) -> Any:
    """Return a value as the setting's kind: 2.0 is a whole number where one belongs.

    Any other kind is refused: text or nothing where a number belongs, what is not a number, a
    fraction of a whole one.
    """
    kinds = _kinds(setting.annotation)
    if Any in kinds or value is setting.default:
        return value
    numbers_only = isinstance(value, str) and bool(kinds & {int, float})
    words = [word for kind, word in _WORDS.items() if kind in kinds]
    words = words or [f"a {kind.__name__}" for kind in kinds if kind is not type(None)]
    check(
        _fits(value, kinds),
        where,
        f"{setting.name} = {value!r:.60}" + " is not a number" * numbers_only,
        f"give {' or '.join(words)}",
    )
    whole = int in kinds and float not in kinds and isinstance(value, numbers.Real)
    return int(value) if whole and not isinstance(value, bool) else value


def _fits(value: Any, kinds: set[Any]) -> bool:
    """Whether a value is of one of the kinds; a whole number is a number, too."""
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, numbers.Integral):
        return int in kinds or (float in kinds and finite(value))
    if isinstance(value, numbers.Real):
        whole = int in kinds and float(value).is_integer()
        return not math.isnan(value) and (float in kinds or whole)
    return isinstance(value, tuple(kinds))


def _kinds(annotation: Any) -> set[Any]:
    """The kinds a setting may have: of float | Literal["auto"] they are float and str."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is Literal:
        return {type(value) for value in parts}
    if origin in (typing.Union, types.UnionType):
        return {kind for part in parts for kind in _kinds(part)}
    return {origin or annotation}
