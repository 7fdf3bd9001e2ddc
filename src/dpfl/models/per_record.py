"""Records computed apart from each other, many at once, whatever code computes them.

Code that is not known to keep records apart (:mod:`dpfl.models.separation`) is given one record: a
:class:`RecordTensor`, which has a shape but no memory. Every operation that torch carries out with
it, forward and backward, reaches :class:`Watch`, which carries it out for many records at once, one
``torch.vmap`` an operation. The code sees neither the other records, nor how many they are.

*Formal guarantees.* What comes out for a record depends on that record, on what the code is given
beside it and on the code's own state, which no record can change: a value that is read into Python,
a record that is written where it outlives its call, a record of an earlier call and an operation
that fails end the work, whatever the code catches. A blank record is computed in every call, so
that shapes are those of a blank. Memory of tensors that nothing was written to is cleared, and
draws come from a generator that the code does not see. What no watch sees is named in
:data:`dpfl.models.separation.WATCHED`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
)

from dpfl.core.errors import PrivacyRefusal

_AT_ONCE = 512  # records of a forward without gradients
_REMEDY = "build the model of torch's own layers, or let it compute a record from that record alone"
_MEMORY = (Tensor.apply_, Tensor.__dlpack__)  # would read the memory that a record does not have
_PAST = ("set_", "resize", "_resize", "as_strided")  # operations that reach what nobody wrote
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)

_functorch: Any = torch._C._functorch
_overrides: Any = torch.overrides

Compute = Callable[..., Sequence[Tensor]]


class _Key:
    """What finds the values of a record's tensor; they go when it goes."""

    __slots__ = ("__weakref__",)


class RecordTensor(Tensor):
    """A tensor of one record, whose values are held elsewhere."""

    key: _Key

    @staticmethod
    def of(values: Tensor) -> "RecordTensor":
        """Stand for ``values``, which have the records on their first axis."""
        found = Tensor._make_wrapper_subclass(
            RecordTensor,
            values.shape[1:],
            strides=values.stride()[1:],
            dtype=values.dtype,
            device=values.device,
        )
        found.key = _Key()
        record: RecordTensor = found
        return record

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse the functions that would read memory."""
        if func in _MEMORY:
            raise _refusal(f"{func.__name__} reads a record's values")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what happens outside of a watch, such as in a thread or after the call."""
        raise _refusal(f"{func} is applied to a record after its call, or in a thread")


def _refusal(why: object) -> PrivacyRefusal:
    reason = str(why) or type(why).__name__
    return PrivacyRefusal("model", f"cannot be computed record by record ({reason:.200})", _REMEDY)


@dataclass(frozen=True)
class _Rule:
    """What an operation may do with records.

    ``writes`` are the arguments that it writes to, by place and name, and ``returns`` says for each
    result whether it is one of them. ``statistics`` is the place of running statistics, to which
    some operations write without saying so.
    """

    refused: str = ""
    past: bool = False
    writes: tuple[tuple[int, str], ...] = ()
    returns: tuple[tuple[int, str] | None, ...] = ()
    views: bool = False
    in_place_view: bool = False
    random: bool = False
    pointwise: bool = False
    cleared: bool = False
    statistics: int | None = None


@cache
def _rule(func: Any) -> _Rule:
    """The rule of an operation, from its schema."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    if func.namespace not in ("aten", "prims"):
        return _Rule(refused=f"{schema.name} is not an operation of torch")
    if any("Tensor" not in str(result.type) for result in schema.returns):
        return _Rule(refused=f"{name} reads a value of a record")
    if name.startswith(_PAST):
        return _Rule(refused=f"{name} reaches past a record", past=True)
    written = [
        (i, argument)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if any(argument.kwarg_only for _, argument in written):
        return _Rule(refused=f"{schema.name} writes to memory that it is given")
    writes = {str(sorted(own.alias_info.before_set)): (i, own.name) for i, own in written}
    aliases = [result.alias_info for result in schema.returns]
    return _Rule(
        writes=tuple(writes.values()),
        returns=tuple(
            writes[str(sorted(alias.before_set))] if alias is not None and alias.is_write else None
            for alias in aliases
        ),
        views=not writes and any(alias is not None for alias in aliases),
        in_place_view=torch.Tag.inplace_view in func.tags,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        pointwise=torch.Tag.pointwise in func.tags,
        cleared="empty" in name,
        statistics=None if "backward" in name else _place(schema, "running_mean"),
    )


def _place(schema: Any, name: str) -> int | None:
    """The place of an argument of an operation; None if it has none of this name."""
    names = [argument.name for argument in schema.arguments]
    return names.index(name) if name in names else None


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries operations out for ``count`` records at once, and ends what would let them meet.

    With ``wraps``, tensors that the code makes belong to the record: it may then write the record
    into them, but neither read nor keep them. ``numbers`` counts what a backward may need of one
    record, and ``failure`` is the first operation that failed.
    """

    def __init__(self, count: int, *, wraps: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.wraps = wraps
        self.numbers = 0
        self.failure: Exception | None = None
        self._values: WeakKeyDictionary[_Key, Tensor] = WeakKeyDictionary()
        self._draws: dict[torch.device, torch.Generator] = {}
        # In an operation's handler torch switches off what vmap works by.
        tls = torch._C
        self._outside = (
            tls._dispatch_tls_local_include_set(),
            tls._dispatch_tls_local_exclude_set(),
        )

    def hold(self, values: Tensor) -> RecordTensor:
        """Return the tensor that stands for ``values``, (records, ...)."""
        record = RecordTensor.of(values)
        self._values[record.key] = values
        return record

    def values_of(self, result: Tensor) -> Tensor:
        """The values of a result, (records, ...)."""
        if isinstance(result, RecordTensor):
            return self._value(result)
        return result.detach().expand(self.count, *result.shape)

    def forget(self) -> None:
        """Let go of all values: no tensor of this call can be used in a later one."""
        self._values.clear()

    def _value(self, record: RecordTensor) -> Tensor:
        values = self._values.get(getattr(record, "key", None))  # type: ignore[arg-type]
        if values is None:
            raise _refusal("it uses a tensor of an earlier record")
        return values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out one operation."""
        kwargs = kwargs or {}
        records: list[RecordTensor] = []
        with torch._C.DisableTorchFunction():  # no mode or subclass sees what follows
            try:
                records += _records((*args, *kwargs.values()))
                if torch._C._autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack():
                    raise _refusal("a profiler or mode of torch's would see all records")
                if not records:
                    return self._without_records(func, args, kwargs)
                return self._with_records(func, args, kwargs, records)
            except Exception as error:
                if records or isinstance(error, PrivacyRefusal):
                    self.failure = self.failure or error
                raise

    def _without_records(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on what does not depend on the record."""
        rule = _rule(func)
        if rule.past:
            raise _refusal(rule.refused)
        found = func(*args, **kwargs)
        if rule.cleared and isinstance(found, Tensor):
            found.zero_()
        made = func in _COPIES or not any(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        if self.wraps and made and type(found) is Tensor:
            return self.hold(found.detach().expand(self.count, *found.shape).clone())
        return found

    def _with_records(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], records: list[RecordTensor]
    ) -> Any:
        rule = _rule(func)
        if rule.refused:
            raise _refusal(rule.refused)
        for i, name in rule.writes:
            written = args[i] if i < len(args) else kwargs.get(name)
            targets = written if isinstance(written, list | tuple) else [written]
            if any(isinstance(x, Tensor) and type(x) is not RecordTensor for x in targets):
                raise _refusal(f"{func._schema.name} writes a record where it outlives its call")
        if rule.statistics is not None and args[rule.statistics] is not None:
            training = _place(func._schema, "training")
            if training is None or args[training]:
                raise _refusal(f"{func._schema.name} writes records into running statistics")
        results = self._results(func, args, kwargs, [self._value(record) for record in records])
        if rule.in_place_view:
            with no_dispatch():
                func(*args, **kwargs)  # its shape; and then its values
            self._values[args[0].key] = results[0]  # type: ignore[assignment]
            return args[0]
        found = [
            args[own[0]] if own[0] < len(args) else kwargs[own[1]]
            for own in rule.returns
            if own is not None
        ]
        if len(found) == len(rule.returns):
            return found[0] if len(found) == 1 else tuple(found) or None
        return self._wrapped(rule, func, results, found)

    def _wrapped(self, rule: _Rule, func: Any, results: Any, written: list[Any]) -> Any:
        """The results of an operation as tensors of the record."""

        def wrapped(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            if not rule.views:
                # Neither the layout in memory nor what was there before may say anything.
                values = values.contiguous().view(-1).view(values.shape)
                if torch.is_grad_enabled():  # backward keeps what forward has made, and little more
                    self.numbers += values.numel() // self.count
            return self.hold(values.zero_() if rule.cleared else values)

        several = len(rule.returns) > 1
        if not several and "List" in str(func._schema.returns[0].type):
            return [wrapped(values) for values in results]
        old = iter(written)
        found = [
            wrapped(values) if own is None else next(old)
            for own, values in zip(rule.returns, results, strict=True)
        ]
        return tuple(found) if several else found[0]

    def _results(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Tensor]
    ) -> list[Tensor | None]:
        """Carry out an operation for all records at once; its results have them on the first
        axis.
        """
        rule = _rule(func)
        # Records on the first axis of all of them meet only themselves.
        alike = len({x.ndim for x in values}) == 1 and values[0].ndim > 1
        direct = rule.pointwise and alike and not rule.random
        direct = direct and not any(
            isinstance(x, Tensor) and x.ndim > 0 and type(x) is not RecordTensor
            for x in (*args, *kwargs.values())
        )

        def run(own: Iterable[Tensor]) -> Any:
            left = iter(own)
            return func(
                *[_replaced(x, left) for x in args],
                **{name: _replaced(x, left) for name, x in kwargs.items()},
            )

        with torch._C._ForceDispatchKeyGuard(*self._outside), torch.no_grad():
            if direct:
                found = run(values)
                return list(found) if isinstance(found, tuple) else [found]
            if rule.random:
                if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
                    raise _refusal("it draws from a generator of its own")
                with self._drawing(values[0].device):
                    return self._mapped(run, values, "different")
            return self._mapped(run, values, "error")

    def _mapped(
        self, run: Callable[[Iterable[Tensor]], Any], values: list[Tensor], randomness: str
    ) -> list[Tensor | None]:
        """What ``torch.vmap`` does, for the one operation of ``run``."""
        level = _functorch._vmap_increment_nesting(self.count, randomness)
        try:
            found = run([_functorch._add_batch_dim(x, 0, level) for x in values])
            several = found if isinstance(found, tuple | list) else (found,)
            return [
                None if x is None else _functorch._remove_batch_dim(x, level, self.count, 0)
                for x in several
            ]
        finally:
            _functorch._vmap_decrement_nesting()

    @contextmanager
    def _drawing(self, device: torch.device) -> Iterator[None]:
        """Draw from a generator that the code does not see: how much is drawn follows from how many
        records there are.
        """
        usual = torch.default_generator
        if device.type == "cuda":
            usual = torch.cuda.default_generators[device.index or 0]
        if device not in self._draws:
            self._draws[device] = torch.Generator(device)
            self._draws[device].set_state(usual.get_state())
            usual.manual_seed(int(torch.randint(1 << 62, (), generator=usual, device=device)))
        before = usual.get_state()
        usual.set_state(self._draws[device].get_state())
        try:
            yield
        finally:
            self._draws[device].set_state(usual.get_state())
            usual.set_state(before)


def _records(values: Sequence[Any]) -> Iterator[RecordTensor]:
    """The tensors of records among an operation's arguments."""
    for value in values:
        if type(value) is RecordTensor:
            yield value
        elif type(value) in (list, tuple):
            yield from _records(value)
        elif isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
            raise _refusal(f"it uses a {type(value).__name__}, which may do anything")


def _replaced(value: Any, left: Iterator[Tensor]) -> Any:
    """The same argument with other tensors for those of records, in their order."""
    if type(value) is RecordTensor:
        return next(left)
    if type(value) in (list, tuple) and any(True for _ in _records(value)):
        return [_replaced(x, left) for x in value]
    return value


class Plan(NamedTuple):
    """How code is computed: whether tensors that it makes belong to the record, and about how many
    numbers are held for one.
    """

    wraps: bool
    numbers: int


def plan_for(compute: Compute, tensors: Sequence[Tensor]) -> Plan:
    """Find out on blank records of these shapes how code can be computed record by record.

    Code that cannot be is refused.
    """
    blanks = [x.new_zeros(1, *x.shape[1:]) for x in tensors]
    first = None
    with torch.random.fork_rng([x.device for x in tensors[:1] if x.is_cuda]):
        for wraps in (False, True):
            try:
                return Plan(wraps, apart(compute, blanks, Plan(wraps, 0))[1])
            except Exception as error:
                first = first or error.__cause__ or error  # of blanks all may be told
    raise first if isinstance(first, PrivacyRefusal) else _refusal(first) from first


def apart(compute: Compute, tensors: Sequence[Tensor], plan: Plan) -> tuple[list[Tensor], int]:
    """Return what ``compute`` gives for each record, with the records on the first axis of every
    result, and how many numbers were held for one record.

    ``tensors`` have the records on their first axis; ``compute`` is given one record of each, on a
    first axis of length 1.
    """
    count = len(tensors[0])
    if mode_active():
        raise _refusal("a mode of torch's is active")
    # One blank in every call, and never a single record, of which vmap could take shapes.
    padded = [torch.cat([x, x.new_zeros(2 if not count else 1, *x.shape[1:])]) for x in tensors]
    watch = Watch(len(padded[0]), wraps=plan.wraps)
    _functorch._set_vmap_fallback_warning_enabled(False)  # some layers are a loop
    fused = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(fused and not plan.wraps)  # whose recurrent layers vmap has not
    try:
        with watch, _no_mode_left(watch):
            results = compute(*(watch.hold(x[:, None]) for x in padded))
            values = [watch.values_of(result)[:count] for result in results]
    except Exception as error:
        if watch.failure is None:
            raise
        raise _ended(watch.failure) from error
    finally:
        watch.forget()
        _functorch._set_vmap_fallback_warning_enabled(True)
        torch._C._set_mkldnn_enabled(fused)
    if watch.failure is not None:
        raise _ended(watch.failure) from watch.failure
    return values, watch.numbers


def mode_active() -> bool:
    """Whether a mode of torch's may see or change what is computed; a device's does not."""
    kinds = set(map(type, _overrides._get_current_function_mode_stack())) - {DeviceContext}
    return bool(kinds) or torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def _no_mode_left(watch: Watch) -> Iterator[None]:
    """End the work of code that does not leave torch's modes as they were."""
    before = _overrides._get_current_function_mode_stack()
    try:
        yield
    finally:
        after = _overrides._get_current_function_mode_stack()
        same = [id(mode) for mode in before] == [id(mode) for mode in after]
        alone = torch._C._len_torch_dispatch_stack() == 1
        if not (same and alone and _get_current_dispatch_mode() is watch):
            watch.failure = _refusal("it does not leave torch's modes as they were")
        while (mode := _get_current_dispatch_mode()) is not None and mode is not watch:
            _pop_mode()


def _ended(failure: Exception) -> PrivacyRefusal:
    """How the work ends: which values made an operation fail is not told."""
    if isinstance(failure, PrivacyRefusal):
        return failure
    return _refusal(f"an operation failed: {type(failure).__name__}")


def rows_of(compute: Compute, tensors: Sequence[Tensor]) -> Tensor:
    """Return one row for each record: what ``compute`` gives, computed apart."""
    plan = plan_for(compute, tensors)
    batches = zip(*(torch.split(x, _AT_ONCE) for x in tensors), strict=True)
    return torch.cat([apart(compute, batch, plan)[0][0][:, 0] for batch in batches])
