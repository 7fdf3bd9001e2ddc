"""Everything that is sent is in one flat vector, and comes out of it again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from dpfl.core.errors import PeerError
from dpfl.core.layout import Layout

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
NAMES = st.text(alphabet="abc._", min_size=1, max_size=5)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Tensor]:
    """Named tensors whose every value a float32 can hold."""
    tree = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        shape, dtype = draw(SHAPES), draw(DTYPES)
        size = math.prod(shape)
        if dtype.is_floating_point:
            width = 16 if dtype == torch.float16 else 32
            elements = st.floats(width=width, allow_nan=False, allow_infinity=False)
        elif dtype == torch.bool:
            elements = st.booleans()
        else:
            elements = st.integers(0, 255) if dtype == torch.uint8 else st.integers(-(2**24), 2**24)
        values = draw(st.lists(elements, min_size=size, max_size=size))
        tree[name] = torch.tensor(values, dtype=dtype).reshape(shape)
    return tree


@given(trees())
def test_flattening_and_unflattening_returns_the_tree(tree: dict[str, Tensor]) -> None:
    layout = Layout.of(tree)
    vector = layout.flatten(tree)
    assert vector.dtype == torch.float32
    assert vector.shape == (layout.size,)
    back = layout.unflatten(vector)
    assert list(back) == list(tree)
    for name, tensor in tree.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)


@given(trees())
def test_blocks_cover_the_vector_without_gap_or_overlap(tree: dict[str, Tensor]) -> None:
    layout = Layout.of(tree)
    end = 0
    for block in layout:
        assert block.slice == slice(end, end + tree[block.name].numel())
        end += block.size
    assert end == layout.size == sum(tensor.numel() for tensor in tree.values())


@given(trees())
def test_the_norm_of_the_vector_is_the_joint_norm_of_everything_sent(
    tree: dict[str, Tensor],
) -> None:
    """Buffers, integers and scalars count: what is clipped is what is sent."""
    joint = math.sqrt(
        math.fsum(float(x) ** 2 for tensor in tree.values() for x in tensor.flatten().tolist())
    )
    norm = torch.linalg.vector_norm(Layout.of(tree).flatten(tree), dtype=torch.float64).item()
    assert norm == pytest.approx(joint, rel=1e-9)


@given(trees(), st.randoms(use_true_random=False))
def test_the_order_in_which_tensors_arrive_does_not_matter(
    tree: dict[str, Tensor], random: object
) -> None:
    layout = Layout.of(tree)
    names = list(tree)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert torch.equal(layout.flatten({name: tree[name] for name in names}), layout.flatten(tree))


@given(trees(), st.integers(0, 3))
def test_a_matrix_is_unflattened_row_by_row(tree: dict[str, Tensor], rows: int) -> None:
    layout = Layout.of(tree)
    vector = layout.flatten(tree)
    stacked = layout.unflatten(
        torch.stack([vector] * rows) if rows else torch.zeros(0, layout.size)
    )
    for name, tensor in tree.items():
        assert stacked[name].shape == (rows, *tensor.shape)
        assert all(torch.equal(row, tensor) for row in stacked[name])


def test_a_module_with_batch_norm_round_trips_with_its_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.train()
    module(torch.randn(5, 3))
    tree = module.state_dict()
    layout = Layout.of(tree)
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= {
        block.name for block in layout
    }
    back = layout.unflatten(layout.flatten(tree))
    assert back["1.num_batches_tracked"].item() == 1
    assert all(torch.equal(back[name], tree[name]) for name in tree)


def test_integers_are_rounded_to_the_nearest_not_cut_off() -> None:
    layout = Layout.of({"count": torch.tensor([0, 0, 0])})
    assert layout.unflatten(torch.tensor([1.9, -1.9, 0.2]))["count"].tolist() == [2, -2, 0]


def test_reading_and_writing_a_module_moves_exactly_its_parameters() -> None:
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    layout = Layout.of_module(module)
    layout.write(layout.read(module), other)
    assert torch.equal(module.weight, other.weight) and torch.equal(module.bias, other.bias)
    assert not layout.read(module).requires_grad
    vector = layout.read(module)
    vector += 1
    assert torch.equal(layout.read(module), layout.read(other))


AGREED = {"weight": torch.zeros(2, 3), "count": torch.tensor(0)}


@pytest.mark.parametrize(
    "sent",
    [
        {"weight": torch.zeros(2, 3)},
        {**AGREED, "extra": torch.zeros(1)},
        {"weight": torch.zeros(2, 3), "Count": torch.tensor(0)},
        {},
    ],
    ids=["missing", "extra", "renamed", "nothing"],
)
def test_wrong_names_are_refused(sent: dict[str, Tensor]) -> None:
    with pytest.raises(PeerError, match="not those agreed"):
        Layout.of(AGREED).flatten(sent)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(2, 3, 1),
        torch.zeros(1, 3),
        torch.zeros(0),
        torch.tensor(0.0),
    ],
    ids=["transposed", "flat", "one more axis", "broadcastable", "empty", "scalar"],
)
def test_wrong_shapes_are_refused_even_where_the_count_or_a_broadcast_would_fit(
    weight: Tensor,
) -> None:
    with pytest.raises(PeerError, match=r"'weight'.*not those agreed"):
        Layout.of(AGREED).flatten({**AGREED, "weight": weight})


@pytest.mark.parametrize("length", [0, 6, 8])
def test_a_vector_of_the_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(PeerError, match="send 7 numbers"):
        Layout.of(AGREED).unflatten(torch.zeros(length))
