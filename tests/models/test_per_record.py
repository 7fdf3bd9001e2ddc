"""Operations on tensors of records, carried out for many at once, against a loop over records."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpfl.core.errors import PrivacyRefusal
from dpfl.models.per_record import Plan, apart, mode_active, plan_for, rows_of

COUNT = 5
NUMBERS = {"Tensor", "number", "int", "float", "bool"}


def pointwise() -> Iterator[Any]:
    """Operations that torch calls pointwise, of tensors and numbers."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else []:
            func = getattr(packet, overload)
            needed = [x for x in func._schema.arguments if not x.has_default_value()]
            plain = all(str(x.type).replace("Scalar", "number") in NUMBERS for x in needed)
            if torch.Tag.pointwise in func.tags and "out" not in overload and plain:
                yield func


def arguments(func: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Tensors of these shapes, in turn, and numbers."""
    left = iter(shapes * 4)
    kinds = {"int": 2, "bool": True}
    return [
        0.1 + 0.8 * torch.rand(COUNT, *next(left))
        if str(x.type) == "Tensor"
        else kinds.get(str(x.type), 0.5)
        for x in func._schema.arguments
        if not x.has_default_value()
    ]


@pytest.mark.parametrize("func", list(pointwise()), ids=str)
@pytest.mark.parametrize(
    "shapes", [[(3,)], [(2, 3), (3,)], [(2, 1), (1, 3)], [(1, 1), (3,), ()]], ids=str
)
def test_pointwise_operations_are_those_of_single_records(
    func: Any, shapes: list[tuple[int, ...]]
) -> None:
    """Also where one of their arguments is the same for all records."""
    torch.manual_seed(0)
    given = arguments(func, shapes)
    tensors = [x for x in given if isinstance(x, Tensor)]
    for fixed in (None, *range(len(tensors))):
        rows = [x for i, x in enumerate(tensors) if i != fixed]
        if not rows:
            continue

        def compute(*records: Tensor, fixed: int | None = fixed) -> list[Tensor]:
            left, number, found = iter(records), 0, []
            for x in given:
                if not isinstance(x, Tensor):
                    found.append(x)
                    continue
                found.append(x[0] if number == fixed else next(left)[0].clone())
                number += 1
            result = func(*found)
            return list(result) if isinstance(result, tuple) else [result]

        try:
            wanted = [compute(*(x[i : i + 1] for x in rows)) for i in range(COUNT)]
        except (RuntimeError, NotImplementedError):
            continue  # not for such numbers or shapes
        try:
            got, _ = apart(compute, rows, Plan(False, 0))
        except PrivacyRefusal:
            assert func._schema.is_mutable
            continue
        for i in range(COUNT):
            for own, other in zip(got, wanted[i], strict=True):
                torch.testing.assert_close(own[i], other, equal_nan=True)


def test_draws_differ_from_record_to_record_and_the_code_cannot_see_how_many_there_were() -> None:
    seen: list[Tensor] = []

    def compute(x: Tensor) -> list[Tensor]:
        found = F.dropout(x, 0.5)
        seen.append(torch.rand(3))
        return [found, torch.rand_like(x)]

    for count in (3, 9):
        torch.manual_seed(0)
        dropped, drawn = apart(compute, [torch.ones(count, 64)], Plan(False, 0))[0]
        assert len({tuple(row.flatten().tolist()) for row in dropped}) == count
        assert len({tuple(row.flatten().tolist()) for row in drawn}) == count
        assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(seen[0], seen[1])


def test_values_are_those_of_a_loop_also_where_results_are_several_or_lists() -> None:
    def compute(x: Tensor) -> list[Tensor]:
        first, second = x.flatten(1).split(3, dim=1)
        values, places = torch.sort(torch.cat([second, first], dim=1))
        written = torch.zeros_like(values).scatter_(1, places, values)
        turned = written.clone().unsqueeze_(0).transpose_(1, 2)
        return [values, places, turned.squeeze(0), torch.stack(values.unbind(1)).cumsum(0)]

    x = torch.randn(COUNT, 2, 3)
    for wraps in (False, True):
        got, _ = apart(compute, [x], Plan(wraps, 0))
        for i in range(COUNT):
            for own, other in zip(got, compute(x[i : i + 1]), strict=True):
                assert torch.equal(own[i], other)


def test_rows_of_no_records_have_their_shape() -> None:
    assert rows_of(lambda x: [x * 2], [torch.zeros(0, 4)]).shape == (0, 4)


kept: list[Any] = []


def earlier(x: Tensor) -> Tensor:
    kept.append(x)
    return x + kept[0]


def in_a_thread(x: Tensor) -> Tensor:
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(x.sum())
        except PrivacyRefusal:
            found.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]
    return x.item()  # type: ignore[return-value]


def caught(x: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(x.reshape(1, 1))
    except Exception:
        return -x
    return x


def into_a_list(x: Tensor) -> Tensor:
    torch.add(x, 1, out=constant)
    return x


def profiled(x: Tensor) -> Tensor:
    with torch.autograd.profiler.profile(record_shapes=True) as seen:
        y = x * 2
    return y * max(one.input_shapes[0][0] for one in seen.function_events if one.input_shapes)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Equal(Operations):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Seeing(Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*(x.as_subclass(Tensor) if type(x) is cls else x for x in args))

    def __new__(cls, values: Tensor) -> Seeing:
        return Tensor._make_subclass(cls, values)


def below(x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return x * 2


def in_place_of_the_device(x: Tensor) -> Tensor:
    torch.set_default_device(None)
    Functions().__enter__()
    return x


def entered(mode: Any) -> float:
    mode.__enter__()
    return 1.0


constant = torch.zeros(1, 1)
READING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "a branch": lambda x: x if x > 0 else -x,
    "a number": float,
    "an index": lambda x: [1, 2][x.long()],
    "numpy": lambda x: x.numpy(),
    "a list": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "a function of values": lambda x: x.apply_(abs),
    "a capsule": lambda x: torch.utils.dlpack.from_dlpack(x),
    "text": repr,
    "into a constant": into_a_list,
    "what is in memory": lambda x: x.resize_(100),
    "another's memory": lambda x: torch.empty(0).set_(x.untyped_storage()),
    "memory": lambda x: x + torch.empty(0).resize_(1, 1),
    "an earlier record": earlier,
    "a copy of an earlier record": lambda x: earlier(copy.deepcopy(x)),
    "strides": lambda x: x.as_strided((1, 1), (1, 1), 1),
    "a thread": in_a_thread,
    "a failure": caught,
    "its own generator": lambda x: x.bernoulli(0.5, generator=torch.Generator()),
    "a generator by place": lambda x: torch.poisson(x.abs(), torch.Generator()),
    "memory of a constant": lambda x: x + torch.zeros(1).as_strided((1, 1), (1, 1)),
    "how many there are": profiled,
    "a mode of functions": lambda x: x + entered(Functions()),
    "a mode of operations": lambda x: x + entered(Operations()),
    "a subclass beside": lambda x: x + Seeing(torch.ones(1)),
    "other memory": lambda x: x + torch.ops.prims.resize(torch.zeros(1), [1, 1]),
    "a slot below": lambda x: x + entered(FakeTensorMode(allow_non_fake_inputs=True)),
    "a slot below for a while": below,
    "a result that it gives": lambda x: torch.ops.aten.sigmoid_backward.grad_input(
        x, x, grad_input=x[:, :0]
    ),
    "a mode that equals all": lambda x: x + entered(Equal()) + entered(Equal()),
    "a mode for another": in_place_of_the_device,
    "two modes": lambda x: x + entered(Operations()) + entered(Functions()) + entered(Operations()),
}


@pytest.fixture
def modes_left() -> Iterator[None]:
    """Leave the modes that a test's code did not leave."""
    yield
    while torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    while torch._C._len_torch_dispatch_stack():
        torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    assert not mode_active()
    assert torch.equal(constant, torch.zeros(1, 1))


@pytest.mark.usefixtures("modes_left")
@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("wraps", [False, True])
def test_what_reads_values_or_keeps_records_ends_the_work(name: str, wraps: bool) -> None:
    """Whatever the code catches."""
    kept.clear()

    def catching(x: Tensor) -> list[Tensor]:
        try:
            return [READING[name](x)]
        except Exception:
            return [torch.zeros(1)]

    def compute(x: Tensor) -> list[Tensor]:
        return [READING[name](x)]

    x = torch.tensor([[4.0], [-4.0], [1.0]])
    for code in (compute, catching):
        try:
            for _ in range(2):
                found, _ = apart(code, [x], Plan(wraps, 0))
        except (PrivacyRefusal, RuntimeError, TypeError, ValueError, BufferError):
            continue
        assert torch.equal(found[0], torch.zeros(3, 1))  # all were treated alike


def test_a_pickle_of_a_record_holds_nothing_of_it() -> None:
    texts: list[bytes] = []

    def compute(x: Tensor) -> list[Tensor]:
        texts.append(pickle.dumps(x))
        return [x]

    for value in (1.0, 2.0):
        apart(compute, [torch.full((2, 3), value)], Plan(False, 0))
    assert texts[0] == texts[1]


def test_memory_that_was_not_written_to_is_cleared() -> None:
    def compute(x: Tensor) -> list[Tensor]:
        made = torch.empty_like(x), x.new_empty(3), torch.empty(3), torch.Tensor(3)
        return [x * 0 + 1.0, *made]

    apart(compute, [torch.full((64, 3), 7.0)], Plan(False, 0))
    for wraps in (False, True):
        found, _ = apart(compute, [torch.ones(64, 3)], Plan(wraps, 0))
        assert not any(bool(x.any()) for x in found[1:])


def test_how_code_is_computed_is_found_out_on_blanks() -> None:
    def writes(x: Tensor) -> list[Tensor]:
        made = torch.zeros(1, 3)
        made[:] = x
        return [made]

    def reads(x: Tensor) -> list[Tensor]:
        return [x * float(torch.ones(1))]

    assert plan_for(writes, [torch.ones(2, 3)]).wraps
    assert not plan_for(reads, [torch.ones(2, 3)]).wraps


def test_nothing_is_computed_while_a_mode_is_active_but_a_device() -> None:
    with torch.device("cpu"):
        assert apart(lambda x: [x], [torch.ones(2, 1)], Plan(False, 0))[0][0].sum() == 2
    with Functions(), pytest.raises(PrivacyRefusal, match="a mode of torch's is active"):
        apart(lambda x: [x], [torch.ones(2, 1)], Plan(False, 0))


def test_which_values_an_operation_failed_for_is_not_told() -> None:
    with pytest.raises(PrivacyRefusal) as refused:
        apart(lambda x: [torch.ones(5)[x.long()]], [torch.full((2, 1), 7771.0)], Plan(False, 0))
    assert "7771" not in str(refused.value)


def test_what_looks_at_functions_does_not_see_other_records() -> None:
    seen: list[Tensor] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            seen.extend(x for x in args if isinstance(x, Tensor))
            return func(*args, **(kw or {}))

    weight = torch.ones(1, requires_grad=True)

    def compute(x: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            y = x * weight
        with Watching():
            y.grad_fn(x * 1.0)  # type: ignore[misc]
            return [x * 2]

    apart(compute, [torch.full((5, 1), 7.0)], Plan(False, 0))
    assert all(x.shape[0] == 1 for x in seen)
    assert not any(type(x) is Tensor and (x == 7.0).any() for x in seen)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_strides_are_those_of_one_record(count: int) -> None:
    seen: list[tuple[int, ...]] = []

    def compute(x: Tensor) -> list[Tensor]:
        rows = F.embedding(torch.tensor([0]), x.expand(3, 4) * 1.0)
        seen.extend((rows.stride(), (x.T + 1).stride(), torch.stack([x, x], 2).stride()))
        return [rows]

    apart(compute, [torch.ones(count, 4)], Plan(False, 0))
    assert seen == [(4, 1), (1, 1), (8, 2, 1)]
