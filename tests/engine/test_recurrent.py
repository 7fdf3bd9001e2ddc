"""Recurrent layers: unrolled they are torch's own, and their clipped sums are those of a loop over
records.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.data.inputs import Tokens
from dpfl.engine import ghost_clipping
from dpfl.engine.base import Batch, Job
from dpfl.engine.coverage import can_ghost_clip
from dpfl.engine.ghost_clipping import GhostClipping
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.recurrent import can_unroll, unroll
from dpfl.engine.stacked import Stacked
from dpfl.engine.trace import NotCovered

TOLERANCE = 5e-5
CLASSES, VOCABULARY, WIDTH = 3, 7, 3

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="tanh", **options),
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
KIND = pytest.mark.parametrize("kind", KINDS)
SEEDS = st.integers(0, 10**6)
OPTIONS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 3),
        "bidirectional": st.booleans(),
        "bias": st.booleans(),
        "batch_first": st.booleans(),
    }
)


def made(build: Callable[[], Any], seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=PublicSeed(seed).generator())


def texts(seed: int, records: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (records, length), generator=PublicSeed(seed).generator())


def labels_of(features: Tensor) -> Tensor:
    return torch.arange(len(features)) % CLASSES


class Reader(nn.Module):
    """Tokens (or vectors, without an embedding), a recurrent layer, and a look at what it says."""

    def __init__(self, inner: nn.RNNBase, look: str = "last", *, embedded: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, inner.input_size) if embedded else nn.Identity()
        self.inner, self.look = inner, look
        width = inner.proj_size or inner.hidden_size
        self.top = nn.Linear(
            width * (2 if inner.bidirectional and look in ("last", "mean") else 1), CLASSES
        )

    def read(self, x: Tensor) -> Any:
        return self.inner(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        outputs, state = self.read(x if self.inner.batch_first else x.transpose(0, 1))
        if self.look == "state":
            return self.top(state[0][-1] if isinstance(state, tuple) else state[-1])
        if self.look == "cell":
            return self.top(state[1][0])
        outputs = outputs if self.inner.batch_first else outputs.transpose(0, 1)
        return self.top(outputs[:, -1] if self.look == "last" else outputs.mean(dim=1))


def reader(kind: str, look: str = "last", **options: Any) -> Reader:
    return Reader(KINDS[kind](WIDTH, 4, **({"batch_first": True} | options)), look)


def gradients(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """A row a record, in double precision, by torch alone."""
    model = copy.deepcopy(model).double()
    features = features.double() if features.is_floating_point() else features
    parameters = list(model.parameters())
    rows = []
    for i in range(len(labels)):
        loss = F.cross_entropy(model(features[i : i + 1]), labels[i : i + 1])
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


def summed(rows: Tensor, clip: float) -> Tensor:
    return sum(
        (row * min(1.0, clip / max(float(row.norm()), 1e-300)) for row in rows),
        torch.zeros_like(rows[0]),
    )


def clip_for(rows: Tensor, who: str) -> float:
    """A clip below all norms, above all of them, or between the smallest and the largest."""
    norms = rows.norm(dim=1)
    low, high = float(norms.min()), float(norms.max())
    return {"all": low / 2, "some": (low * high) ** 0.5, "none": high * 2}[who]


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative; where nothing is wanted, none at all or all of it."""
    apart = float((got - wanted).norm())
    return apart / float(wanted.norm()) if apart else 0.0


def clipped_sum(
    model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor, clip: float
) -> Tensor:
    """The sum by ghost clipping."""
    batch = Batch(features, labels)
    return ghost_clipping.clipped_sum(model, layout, vector, batch, clip)


def by_rules(model: nn.Module, features: Tensor, clip: float) -> Tensor:
    layout = Layout.of_module(model)
    return clipped_sum(model, layout, layout.read(model), features, labels_of(features), clip)


def by_engine(model: nn.Module, features: Tensor, clip: float) -> Tensor:
    """What the default engine adds up in one step that takes every record."""
    layout, count = Layout.of_module(model), len(features)
    step = Phase(steps=1, batch_size=count, sampling="poisson", lr=float(count), clip=clip)
    job = Job(
        client="a",
        start=layout.read(model),
        phases=(step,),
        features=features,
        labels=labels_of(features),
        rng=SecretRng.simulated(PublicSeed(0)),
    )
    (after,) = Stacked().run(model, layout, [job])
    return job.start - after


# ---- unrolled, a layer is torch's own ------------------------------------------------------------


def same_as_torch(layer: nn.RNNBase, x: Tensor) -> None:
    outputs, state, _ = unroll(layer, x)
    wanted, wanted_state = layer(x)
    pairs = [(outputs, wanted)]
    if isinstance(wanted_state, tuple):
        assert isinstance(state, tuple)
        pairs += zip(state, wanted_state, strict=True)
    else:
        assert isinstance(state, Tensor)
        pairs.append((state, wanted_state))
    for got, expected in pairs:
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)


@KIND
@settings(max_examples=25)
@given(SEEDS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), OPTIONS)
def test_an_unrolled_layer_gives_what_torchs_own_gives(
    kind: str,
    seed: int,
    records: int,
    steps: int,
    inputs: int,
    hidden: int,
    options: dict[str, Any],
) -> None:
    layer = made(lambda: KINDS[kind](inputs, hidden, **options), seed)
    x = draw(seed, records, steps, inputs)
    with torch.no_grad():
        for parameter in layer.parameters():  # far from where all gates are half open
            parameter.mul_(1.5)
    same_as_torch(layer, x if options["batch_first"] else x.transpose(0, 1))


@KIND
def test_dropout_between_layers_rests_in_evaluation(kind: str) -> None:
    layer = made(lambda: KINDS[kind](3, 4, num_layers=3, dropout=0.9, bidirectional=True)).eval()
    same_as_torch(layer, draw(0, 5, 2, 3))


@KIND
@pytest.mark.parametrize("layers", [2, 3])
def test_dropout_acts_between_all_layers_and_not_after_the_last(kind: str, layers: int) -> None:
    """All dropped, nothing is left to chance, and torch's own layer gives the same numbers."""
    layer = made(lambda: KINDS[kind](3, 4, num_layers=layers, dropout=1.0)).train()
    x = draw(0, 5, 2, 3)
    same_as_torch(layer, x)
    assert torch.equal(unroll(layer, x)[0], unroll(layer, 2 * x)[0])
    assert not torch.equal(unroll(layer, x)[0], torch.zeros(5, 2, 4))


def test_dropout_scales_what_it_keeps_and_drops_afresh_at_every_step_and_record() -> None:
    layer = made(
        lambda: nn.RNN(4, 4, 2, nonlinearity="relu", bias=False, dropout=0.75, batch_first=True)
    ).train()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.eye(4) if "ih" in name else torch.zeros(4, 4))
    outputs = made(lambda: unroll(layer, torch.ones(40, 30, 4))[0])
    assert set(outputs.unique().tolist()) == {0.0, 4.0}
    assert float((outputs > 0).double().mean()) == pytest.approx(0.25, abs=0.03)
    for step in range(1, 30):
        assert not torch.equal(outputs[:, 0], outputs[:, step])
    for record in range(1, 40):
        assert not torch.equal(outputs[0], outputs[record])


def test_only_layers_whose_arithmetic_is_known_are_unroll() -> None:
    class Own(nn.LSTM):
        def forward(self, x: Tensor, state: Any = None) -> Any:
            return super().forward(2 * x, state)

    assert all(can_unroll(build(3, 4)) for build in KINDS.values())
    assert not can_unroll(Own(3, 4))
    assert not can_unroll(nn.LSTM(3, 4, proj_size=2))


# ---- clipped sums --------------------------------------------------------------------------------


def agrees(model: nn.Module, features: Tensor, who: str) -> None:
    rows = gradients(model, features, labels_of(features))
    clip = clip_for(rows, who)
    clipped = int((rows.norm(dim=1) > clip).sum())
    assert clipped == {"all": len(rows), "none": 0}.get(who, clipped)
    assert can_ghost_clip(model)
    assert error(by_rules(model, features, clip), summed(rows, clip)) <= TOLERANCE


@KIND
@settings(max_examples=25)
@given(
    seed=SEEDS,
    records=st.integers(1, 5),
    steps=st.integers(1, 6),
    inputs=st.integers(1, 4),
    hidden=st.integers(1, 5),
    look=st.sampled_from(["last", "mean", "state"]),
    who=st.sampled_from(["all", "some", "none"]),
    options=OPTIONS,
)
def test_the_clipped_sum_is_that_of_a_loop_over_records(
    kind: str, seed: int, records: int, steps: int, inputs: int, hidden: int, look: str, who: str, options: dict[str, Any]
) -> None:  # fmt: skip
    model = made(lambda: Reader(KINDS[kind](inputs, hidden, **options), look), seed)
    agrees(model, texts(seed, records, steps), who)


@KIND
@pytest.mark.parametrize("steps", [2, 40], ids=["few steps", "many steps"])
@pytest.mark.parametrize("who", ["all", "some", "none"])
def test_both_ways_of_taking_norms_serve_recurrent_layers(kind: str, steps: int, who: str) -> None:
    model = made(lambda: Reader(KINDS[kind](12, 9, batch_first=True), "mean"))
    agrees(model, texts(3, 4, steps), who)


@pytest.mark.parametrize("who", ["all", "none"])
def test_a_last_cell_state_is_as_good_as_an_output(who: str) -> None:
    """Of the first direction of the first layer: the other taps get no gradient at all."""
    model = made(lambda: reader("lstm", "cell", num_layers=2, bidirectional=True))
    agrees(model, texts(1, 4, 5), who)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_two_halves_of_a_gru_have_gradients_of_their_own(
    layers: int, bidirectional: bool
) -> None:
    """The reset gate stands between them: they agree on the first two thirds, and nowhere else."""
    model = made(lambda: reader("gru", "mean", num_layers=layers, bidirectional=bidirectional))
    features = texts(0, 5, 4)
    rows = gradients(model, features, labels_of(features))
    clip = clip_for(rows, "some")
    got, wanted = by_rules(model, features, clip), summed(rows, clip)
    blocks = {block.name: block.slice for block in Layout.of_module(model)}
    for at in blocks.values():
        assert error(got[at], wanted[at]) <= TOLERANCE
    for name in blocks:
        if "bias_ih" in name:
            ours, theirs = got[blocks[name]], got[blocks[name.replace("ih", "hh")]]
            assert torch.allclose(ours[:8], theirs[:8], rtol=1e-4, atol=1e-7)
            assert error(ours[8:], theirs[8:]) > 0.1


@KIND
def test_every_block_of_a_deep_layer_is_right_on_its_own(kind: str) -> None:
    """A relative error over the whole vector would forgive a small block that is wrong altogether."""
    model = made(lambda: reader(kind, "mean", num_layers=3, bidirectional=True))
    features = texts(5, 4, 4)
    rows = gradients(model, features, labels_of(features))
    clip = clip_for(rows, "some")
    got, wanted = by_rules(model, features, clip), summed(rows, clip)
    for block in Layout.of_module(model):
        assert error(got[block.slice], wanted[block.slice]) <= TOLERANCE, block.name


@KIND
def test_dropout_in_training_is_part_of_what_is_differentiated(kind: str) -> None:
    model = made(lambda: reader(kind, num_layers=2, dropout=1.0)).train()
    features = texts(0, 4, 3)
    rows = gradients(model, features, labels_of(features))
    clip = clip_for(rows, "some")
    got = by_rules(model, features, clip)
    assert error(got, summed(rows, clip)) <= TOLERANCE
    blocks = {block.name: block.slice for block in Layout.of_module(model)}
    assert bool((got[blocks["inner.weight_ih_l0"]] == 0).all()), (
        "nothing flows through what was dropped"
    )
    assert bool((got[blocks["inner.bias_ih_l1"]] != 0).all())


@KIND
def test_every_text_is_within_the_clip(kind: str) -> None:
    model = made(lambda: reader(kind, num_layers=2))
    with torch.no_grad():
        model.top.weight.mul_(100)
    for seed in range(5):
        assert float(by_rules(model, texts(seed, 1, 6), 0.25).double().norm()) <= 0.25


@KIND
def test_an_empty_batch_of_texts_gives_zero(kind: str) -> None:
    model = made(lambda: reader(kind))
    layout = Layout.of_module(model)
    nothing = by_rules(model, texts(0, 0, 4), 1.0)
    assert torch.equal(nothing, torch.zeros(layout.size))


@KIND
def test_a_large_batch_in_small_pieces_gives_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(lambda: reader(kind))
    layout, features = Layout.of_module(model), texts(0, 7, 4)
    whole = by_rules(model, features, 0.1)
    monkeypatch.setattr(ghost_clipping, "MICRO_BATCH", 3)
    in_parts = GhostClipping().clipped_sum(
        model, layout, layout.read(model), Batch(features, labels_of(features)), 0.1
    )
    assert error(in_parts, whole) <= 1e-5


# ---- records that are not numbers ----------------------------------------------------------------


@KIND
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("everywhere", [True, False], ids=["all of it", "one number"])
def test_a_poisoned_record_counts_as_zero_and_changes_no_other(
    kind: str, poison: float, everywhere: bool
) -> None:
    model = made(
        lambda: Reader(KINDS[kind](3, 4, 2, batch_first=True, bidirectional=True), embedded=False)
    )
    features = draw(0, 4, 5, 3)
    layout, labels = Layout.of_module(model), labels_of(features)
    others = torch.tensor([0, 1, 3])
    clean = clipped_sum(model, layout, layout.read(model), features[others], labels[others], 0.2)
    features[2 if everywhere else (2, 1, 0)] = poison
    dirty = clipped_sum(model, layout, layout.read(model), features, labels, 0.2)
    assert error(dirty, clean) <= 1e-5


@KIND
def test_a_word_that_is_no_number_silences_the_texts_that_hold_it(kind: str) -> None:
    model = made(lambda: reader(kind))
    with torch.no_grad():
        model.embedding.weight[0] = float("nan")  # type: ignore[index]
    features = texts(1, 6, 3).clamp_min(1)
    features[1, 0] = features[4, 2] = 0
    layout, labels = Layout.of_module(model), labels_of(features)
    others = torch.tensor([0, 2, 3, 5])
    rows = gradients(model, features[others], labels[others])
    wanted = summed(rows, 0.1)
    assert (
        error(clipped_sum(model, layout, layout.read(model), features, labels, 0.1), wanted)
        <= TOLERANCE
    )


# ---- what is not covered is still right ----------------------------------------------------------


class Started(Reader):
    def read(self, x: Tensor) -> Any:
        state = torch.full((1, len(x), self.inner.hidden_size), 0.5, dtype=x.dtype)
        return self.inner(x, (state, -state) if isinstance(self.inner, nn.LSTM) else state)


class StartedByName(Reader):
    def read(self, x: Tensor) -> Any:
        return self.inner(x, hx=torch.full((1, len(x), self.inner.hidden_size), 0.5, dtype=x.dtype))


class Packed(Reader):
    def forward(self, tokens: Tensor) -> Tensor:
        lengths = [tokens.shape[1] - 1] * len(tokens)
        _, state = self.inner(
            pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True)
        )
        return self.top(state[0][-1])


class Again(Reader):
    def read(self, x: Tensor) -> Any:
        return self.inner(self.inner(x)[0])


class Altered(Reader):
    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__(inner)
        self.between = nn.Linear(4, 4)

    def read(self, x: Tensor) -> Any:
        return self.inner(F.relu_(self.between(x)))


def square(build: type[Reader], kind: str, **options: Any) -> Reader:
    return build(KINDS[kind](4, 4, batch_first=True, **options))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a first state, lstm": (lambda: square(Started, "lstm"), "given a state"),
    "a first state, gru": (lambda: square(Started, "gru"), "given a state"),
    "called twice": (lambda: square(Again, "tanh"), "'inner' is called twice"),
    "changed in place": (lambda: square(Altered, "lstm"), "changed in place"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("who", ["all", "some", "none"])
def test_what_the_rules_do_not_cover_is_noticed_and_still_right(name: str, who: str) -> None:
    build, why = REFUSED[name]
    model, features = made(build), texts(2, 4, 4)
    with pytest.raises(NotCovered, match=why):
        by_rules(model, features, 1.0)
    rows = gradients(model, features, labels_of(features))
    clip = clip_for(rows, who)
    assert error(by_engine(model, features, clip), summed(rows, clip)) <= TOLERANCE


def test_packed_texts_are_refused_by_name() -> None:
    with pytest.raises(NotCovered, match="layer 'inner' is given a state, or packed"):
        by_rules(made(lambda: square(Packed, "lstm")), texts(2, 4, 4), 1.0)


def test_packed_texts_have_shapes_that_follow_from_values_and_are_refused() -> None:
    model, features = made(lambda: square(Packed, "lstm")), texts(2, 4, 4)
    with pytest.raises(PrivacyRefusal, match="cannot be computed record by record"):
        by_engine(model, features, 0.1)


def test_a_first_state_given_by_name_is_still_right() -> None:
    model, features = made(lambda: square(StartedByName, "gru")), texts(2, 4, 4)
    wanted = summed(gradients(model, features, labels_of(features)), 0.1)
    assert error(by_engine(model, features, 0.1), wanted) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projected_lstm_goes_the_slow_way_and_is_right() -> None:
    model, features = made(lambda: square(Reader, "lstm", proj_size=2)), texts(2, 4, 4)
    assert not can_ghost_clip(model)
    rows = gradients(model, features, labels_of(features))
    clip = clip_for(rows, "some")
    assert error(by_engine(model, features, clip), summed(rows, clip)) <= TOLERANCE


class TimeFirst(nn.Module):
    """The usual way to feed a layer that is not batch_first: the embedding sees a step, not a
    record, first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.top = (
            nn.Embedding(VOCABULARY, 4),
            nn.GRU(4, 4),
            nn.Linear(4, CLASSES),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.top(self.inner(self.embedding(tokens.T))[0][-1])


class Placed(nn.Module):
    """An embedding of positions, looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.top = (
            nn.Embedding(VOCABULARY, 4),
            nn.Embedding(4, 4),
            nn.Linear(16, CLASSES),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.top(
            (self.words(tokens) + self.places(torch.arange(tokens.shape[1]))).flatten(1)
        )


class OneStepAfterTheOther(nn.Module):
    """Positions of all records in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.top = (
            nn.Embedding(VOCABULARY, 4),
            nn.Linear(4, 3),
            nn.Linear(12, CLASSES),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.words(tokens).reshape(-1, 4)))
        return self.top(x.reshape(len(tokens), -1))


@pytest.mark.parametrize(
    ("build", "records"),
    [(TimeFirst, 3), (TimeFirst, 4), (Placed, 3), (Placed, 4), (OneStepAfterTheOther, 3)],
)
def test_a_layer_whose_first_axis_is_not_the_records_is_still_right(
    build: Callable[[], nn.Module], records: int
) -> None:
    model, features = made(build), texts(2, records, 4)
    rows = gradients(model, features, labels_of(features))
    clip = clip_for(rows, "some")
    assert error(by_engine(model, features, clip), summed(rows, clip)) <= TOLERANCE


class Plain(nn.Module):
    """Two convolutions; a function, or a module, works in place on what one of them gives."""

    def __init__(self, change: Callable[[Tensor], Tensor], first: bool) -> None:
        super().__init__()
        self.one, self.two, self.top = (
            nn.Conv2d(2, 3, 3),
            nn.Conv2d(3, 4, 3),
            nn.Linear(4 * 9, CLASSES),
        )
        self.change, self.first = change, first

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(self.one(x)) if self.first else self.change(self.two(self.one(x)))
        return self.top((self.two(x) if self.first else x).flatten(1))


@pytest.mark.parametrize(
    ("change", "first"),
    [
        pytest.param(nn.ReLU(inplace=True), True, id="relu, first"),
        pytest.param(nn.ELU(inplace=True), False, id="elu, second"),
        pytest.param(F.relu_, False, id="relu_, second"),
        pytest.param(F.relu_, True, id="relu_, first"),
    ],
)
def test_an_activation_in_place_gives_what_a_loop_over_records_gives(
    change: Callable[[Tensor], Tensor], first: bool
) -> None:
    model, features = made(lambda: Plain(change, first)), draw(0, 4, 2, 7, 7)
    rows = gradients(model, features, labels_of(features))
    for who in ("all", "some", "none"):
        clip = clip_for(rows, who)
        assert error(by_engine(model, features, clip), summed(rows, clip)) <= TOLERANCE


def test_an_output_changed_in_place_by_a_function_is_noticed() -> None:
    with pytest.raises(NotCovered, match="changed in place"):
        by_rules(made(lambda: Plain(F.relu_, first=False)), draw(0, 4, 2, 7, 7), 1.0)


@KIND
@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(3), nn.ReLU(inplace=True)], ids=["mul_", "relu"]
)
def test_what_a_recurrent_layer_returns_may_be_changed_in_place(
    kind: str, change: Callable[[Tensor], Tensor]
) -> None:
    class Changed(Reader):
        def __init__(self, inner: nn.RNNBase) -> None:
            super().__init__(inner)
            self.change = change

        def read(self, x: Tensor) -> Any:
            outputs, state = self.inner(x)
            return self.change(outputs), state

    agrees(made(lambda: square(Changed, kind, num_layers=2)), texts(0, 4, 3), "some")


def test_an_input_changed_in_place_after_it_was_read_is_never_taken_for_what_was_read() -> None:
    """torch refuses to differentiate this; whatever the engine does, it must not return other
    numbers.
    """

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.top = nn.Linear(3, 3), nn.Linear(3, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            read = self.inner(x)
            return self.top(read + x.mul_(2))

    with pytest.raises((NotCovered, RuntimeError)):
        by_rules(made(Late), draw(0, 4, 3), 1.0)


# ---- the model is left as it was -----------------------------------------------------------------


def untouched(model: nn.Module) -> bool:
    return not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


class Failing(Reader):
    def forward(self, tokens: Tensor) -> Tensor:
        super().forward(tokens)
        raise ValueError("on purpose")


@KIND
def test_a_pass_leaves_the_model_as_it_was(kind: str) -> None:
    model, features = made(lambda: reader(kind, num_layers=2)), texts(0, 4, 3)
    before, vector = model(features), Layout.of_module(model).read(model)
    by_rules(model, features, 0.1)
    assert untouched(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(Layout.of_module(model).read(model), vector)
    assert torch.equal(model(features), before)


@pytest.mark.parametrize(
    ("build", "kind"),
    [(lambda: square(Failing, "lstm"), ValueError), (REFUSED["called twice"][0], NotCovered),
     (REFUSED["a first state, gru"][0], NotCovered), (REFUSED["changed in place"][0], NotCovered)],
    ids=["own error", "called twice", "first state", "in place"],
)  # fmt: skip
def test_an_exception_leaves_the_model_as_it_was(
    build: Callable[[], nn.Module], kind: type[Exception]
) -> None:
    model = made(build)
    with pytest.raises(kind):
        by_rules(model, texts(0, 4, 3), 1.0)
    assert untouched(model)


# ---- engines -------------------------------------------------------------------------------------


@KIND
@pytest.mark.parametrize("look", ["last", "mean"])
def test_the_engines_agree_on_texts_with_noise(kind: str, look: str) -> None:
    model = made(lambda: reader(kind, look, num_layers=2))
    layout = Layout.of_module(model)
    work = (
        Phase(steps=3, batch_size=4, sampling="poisson", lr=0.5, clip=0.1, noise_multiplier=0.8),
        Phase(steps=2, batch_size=4, sampling="shuffle", lr=0.5),
    )
    jobs = [
        Job(
            client=f"client-{seed}",
            start=layout.read(model),
            phases=work,
            features=texts(seed, 10, 5).to(torch.uint8),
            labels=torch.arange(10) % CLASSES,
            rng=SecretRng.simulated(PublicSeed(seed)),
            inputs=Tokens(VOCABULARY),
        )
        for seed in range(2)
    ]
    fast, slow = Stacked().run(model, layout, jobs), OneByOne().run(model, layout, jobs)
    for job, got, wanted in zip(jobs, fast, slow, strict=True):
        assert error(got - job.start, wanted - job.start) <= TOLERANCE
    assert error(fast[0] - jobs[0].start, fast[1] - jobs[1].start) > 0.1


def test_a_trial_is_remembered_by_the_model_and_not_by_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bool] = []
    real = ghost_clipping.records_at_once
    monkeypatch.setattr(
        ghost_clipping, "records_at_once", lambda *all_: tried.append(True) or real(*all_)
    )
    engine = ghost_clipping.GhostClipping()
    phase = Phase(steps=1, batch_size=2, sampling="poisson", lr=0.1, clip=1.0)
    features, labels = torch.rand(4, 3, 5), torch.tensor([0, 1, 0, 1])
    for _ in range(3):  # each is gone before the next is made, which may get its address
        model = nn.Sequential(nn.Linear(5, 2), nn.Flatten(), nn.Linear(6, 2))
        layout = Layout.of_module(model)
        rng = SecretRng.simulated(PublicSeed(0))
        job = Job(
            client="a",
            start=layout.read(model),
            phases=(phase,),
            features=features,
            labels=labels,
            rng=rng,
        )
        engine.run(model, layout, [job])
        engine.run(model, layout, [job])
        assert len(engine._at_once) == 1
        del model
        gc.collect()
        assert len(engine._at_once) == 0  # nothing is left for another model at the same address
    assert len(tried) == 3
