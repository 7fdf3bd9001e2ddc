"""Who holds which stretch of one storage: views and no copies, fingerprints, tokens, silos drawn by
seed, real texts.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget
from dpfl.data.federation import Federation
from dpfl.data.inputs import NUMBERS, Pixels, Tokens
from dpfl.data.partition import Partition
from dpfl.data.records import Dataset, Records, Shard
from dpfl.datasets.named import load_dataset
from dpfl.datasets.shakespeare import WINDOW, read_shakespeare
from dpfl.models import make_model
from dpfl.tasks import Classification

NATURAL = Partition(kind="natural")


def arrays(clients: int = 3, records: int = 10, test: int = 3) -> dict[str, tuple[np.ndarray, ...]]:
    """Records that can be told apart, each with its label."""
    rng = np.random.default_rng(0)
    each = (
        (rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n))
        for n in [records, test] * clients
    )
    parts = list(each)
    return {f"site-{i}": (*parts[2 * i], *parts[2 * i + 1]) for i in range(clients)}


def with_silos(silos: int = 6, own_test: bool = True) -> Dataset:
    """Silos of 5 + i records, numbered through; with test records of their own (numbered from
    1,000), or without.
    """
    ends = np.cumsum([0, *(5 + i for i in range(silos))]).tolist()
    tests = np.cumsum([0, *(1 + i for i in range(silos))]).tolist()
    names = [f"silo-{i}" for i in range(silos)]
    numbers, test_numbers = torch.arange(ends[-1]), 1000 + torch.arange(tests[-1])
    return Dataset(
        name="made-up",
        features=numbers[:, None].float(),
        labels=numbers % 2,
        classes=2,
        test=(test_numbers[:, None].float(), test_numbers % 2) if own_test else None,
        silos=dict(zip(names, pairwise(ends), strict=True)),
        test_silos=dict(zip(names, pairwise(tests), strict=True)) if own_test else None,
    )


def pieces(shard: Shard) -> list[Tensor]:
    return [shard.features, shard.labels, shard.test_features, shard.test_labels]


def storages(federation: Federation) -> list[set[int]]:
    """Where each of the four kinds of tensors lies, over all clients."""
    every = [pieces(shard) for shard in federation.shards.values()]
    return [
        {piece.untyped_storage().data_ptr() for piece in kind} for kind in zip(*every, strict=True)
    ]


# ---- views ---------------------------------------------------------------------------------------


FEDERATIONS: dict[str, Any] = {
    "arrays": lambda: Federation.from_arrays(arrays()),
    "tokens": lambda: Federation.from_arrays(
        {c: (np.arange(40).reshape(10, 4), [0, 1] * 5) for c in "ab"}, tokens=40
    ),
    "a named set": lambda: Federation.from_dataset(
        load_dataset("digits"), Partition(), 7, PublicSeed(0)
    ),
    "natural silos": lambda: Federation.from_dataset(
        load_dataset("heart_disease"), NATURAL, None, PublicSeed(0)
    ),
    "silos with tests": lambda: Federation.from_dataset(with_silos(), NATURAL, None, PublicSeed(0)),
}


@pytest.mark.parametrize("name", FEDERATIONS)
def test_all_clients_share_four_storages_and_reading_copies_nothing(name: str) -> None:
    """Thousands of storages would be thousands of file descriptors in a worker."""
    federation = FEDERATIONS[name]()
    assert [len(kind) for kind in storages(federation)] == [1, 1, 1, 1]
    assert (
        len({id(records) for s in federation.shards.values() for records in (s.train, s.test)}) == 2
    )
    for shard in federation.shards.values():
        assert [piece.data_ptr() for piece in pieces(shard)] == [
            piece.data_ptr() for piece in pieces(shard)
        ]
        start = shard.train.features.data_ptr() + shard.span[0] * shard.train.features[0].nbytes
        assert shard.features.data_ptr() == start


@pytest.mark.parametrize("name", FEDERATIONS)
def test_no_two_clients_hold_the_same_stretch(name: str) -> None:
    shards = FEDERATIONS[name]().shards.values()
    for spans in (sorted(s.span for s in shards), sorted(s.test_span for s in shards)):
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_natural_silos_with_tests_are_views_of_the_data_set_itself() -> None:
    data = with_silos()
    federation = Federation.from_dataset(data, NATURAL, None, PublicSeed(0))
    assert data.silos is not None
    for name, shard in federation.shards.items():
        assert shard.features.data_ptr() == data.features[data.silos[name][0]].data_ptr()


def test_every_client_holds_its_own_records_in_the_order_given() -> None:
    given_ = arrays()
    federation = Federation.from_arrays(dict(reversed(given_.items())))
    for client, parts in given_.items():
        for piece, array in zip(pieces(federation.shards[client]), parts, strict=True):
            assert np.array_equal(piece.numpy(), array)


# ---- the test set --------------------------------------------------------------------------------


def concatenated(federation: Federation) -> tuple[Tensor, Tensor]:
    shards = [federation.shards[client] for client in federation.ids]
    return torch.cat([s.test_features for s in shards]), torch.cat([s.test_labels for s in shards])


def is_view(federation: Federation) -> bool:
    first = federation.shards[federation.ids[0]]
    return (
        federation.test_set()[0].untyped_storage().data_ptr()
        == first.test.features.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("own_test", [True, False])
@given(clients=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_the_test_set_is_everybody_s_test_part_in_canonical_order(
    clients: int, seed: int, own_test: bool
) -> None:
    """Silos drawn from a set with tests of its own leave gaps: those must not be tested on."""
    federation = Federation.from_dataset(
        with_silos(own_test=own_test), NATURAL, clients, PublicSeed(seed)
    )
    for got, wanted in zip(federation.test_set(), concatenated(federation), strict=True):
        assert torch.equal(got, wanted)


def test_the_test_set_is_a_view_where_parts_are_neighbours_and_a_copy_where_they_are_not() -> None:
    whole = Federation.from_arrays(arrays(4))
    assert is_view(whole)
    some = replace(whole, shards={c: whole.shards[c] for c in ("site-0", "site-2")})
    turned = replace(whole, shards={f"x-{9 - i}": whole.shards[f"site-{i}"] for i in range(4)})
    apart = replace(whole, shards={c: Shard.of(*pieces(s)) for c, s in whole.shards.items()})
    for federation in (some, turned, apart):
        assert not is_view(federation)
    for federation in (whole, some, turned, apart):
        for got, wanted in zip(federation.test_set(), concatenated(federation), strict=True):
            assert torch.equal(got, wanted)


def test_equal_spans_of_different_storages_are_not_taken_for_neighbours() -> None:
    """The first ends where the second begins, but in another storage."""
    whole = Federation.from_arrays(arrays(2))
    first, second = whole.shards.values()
    other = Records(first.test.features + 1, first.test.labels.clone())
    federation = replace(whole, shards={"a": first, "b": replace(second, test=other)})
    assert torch.equal(federation.test_set()[0], concatenated(federation)[0])


# ---- fingerprints --------------------------------------------------------------------------------


def changed(what: str) -> Federation:
    given_ = {client: tuple(part.copy() for part in parts) for client, parts in arrays().items()}
    options: dict[str, Any] = {"classes": 3}
    match what:
        case "a record":
            given_["site-1"][0][4, 2] += 1e-6
        case "a label":
            given_["site-1"][1][4] = (given_["site-1"][1][4] + 1) % 3
        case "a test record":
            given_["site-2"][2][0, 0] = -0.0 if given_["site-2"][2][0, 0] else 1.0
        case "a test label":
            given_["site-2"][3][0] = (given_["site-2"][3][0] + 1) % 3
        case "a name":
            given_["site-9"] = given_.pop("site-2")
        case "two owners":
            given_["site-0"], given_["site-1"] = given_["site-1"], given_["site-0"]
        case "the order of records":
            given_["site-0"] = tuple(part[::-1].copy() for part in given_["site-0"])
        case "a record's owner":
            x0, y0, *rest0 = given_["site-0"]
            x1, y1, *rest1 = given_["site-1"]
            given_["site-0"] = (x0[:-1], y0[:-1], *rest0)
            given_["site-1"] = (
                np.concatenate([x0[-1:], x1]),
                np.concatenate([y0[-1:], y1]),
                *rest1,
            )
        case "a client fewer":
            del given_["site-2"]
    return Federation.from_arrays(given_, **options)


CHANGES = [
    "a record",
    "a label",
    "a test record",
    "a test label",
    "a name",
    "two owners",
    "the order of records",
    "a record's owner",
    "a client fewer",
]


def test_equal_data_has_equal_fingerprints_whoever_asks_and_whatever_the_budgets() -> None:
    first, again = changed("nothing"), changed("nothing")
    assert first.fingerprint() == again.fingerprint() == first.fingerprint()
    budgets = {client: Budget(epsilon=1.0, delta=1e-5) for client in first.ids}
    assert first.with_budgets(budgets).fingerprint() == first.fingerprint()


@pytest.mark.parametrize("what", CHANGES)
def test_a_fingerprint_changes_with(what: str) -> None:
    assert changed(what).fingerprint() != changed("nothing").fingerprint()


def test_every_change_has_a_fingerprint_of_its_own() -> None:
    assert len({changed(what).fingerprint() for what in ["nothing", *CHANGES]}) == 1 + len(CHANGES)


def test_a_fingerprint_changes_with_how_records_are_read() -> None:
    whole = changed("nothing")
    ways = [NUMBERS, Pixels(mean=(0.5,), deviation=(0.5,)), Pixels(mean=(0.5,), deviation=(0.25,))]
    tokens = Federation.from_arrays({"a": (np.zeros((10, 2), int), [0, 1] * 5)}, tokens=5)
    more = Federation.from_arrays({"a": (np.zeros((10, 2), int), [0, 1] * 5)}, tokens=6)
    assert len({replace(whole, inputs=way).fingerprint() for way in ways}) == 3
    assert tokens.fingerprint() != more.fingerprint()


def test_a_fingerprint_tells_windows_from_other_windows_of_the_same_text() -> None:
    """Views of one storage differ in nothing but where and how they lie."""
    text = torch.arange(20, dtype=torch.uint8) % 5
    y = torch.zeros(8, dtype=torch.int64)

    def of(features: Tensor) -> str:
        shard = Shard.of(features, y[: len(features)], features, y[: len(features)])
        return Federation(
            shards={"a": shard}, task=Classification(classes=1), inputs=Tokens(5)
        ).fingerprint()

    views = [
        text.unfold(0, 4, 2)[:8],
        text.unfold(0, 4, 1)[:8],
        text[1:].unfold(0, 4, 2)[:8],
        text.unfold(0, 3, 2)[:8],
    ]
    assert len({of(view) for view in views}) == len(views)


# ---- tokens --------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(["uint8", "int16", "int32", "int64", "uint16", "list", "torch"]),
    tokens=st.lists(st.integers(0, 99), min_size=20, max_size=20),
)
def test_tokens_of_any_whole_type_are_kept_as_they_are(kind: str, tokens: list[int]) -> None:
    table: Any = np.array(tokens).reshape(10, 2)
    table = {"list": table.tolist(), "torch": torch.tensor(table)}[kind] if kind in ("list", "torch") else (
        table.astype(kind)
    )  # fmt: skip
    federation = Federation.from_arrays({"a": (table, [0, 1] * 5, table, [0, 1] * 5)}, tokens=100)
    assert federation.inputs == Tokens(100)
    assert federation.shards["a"].features.flatten().tolist() == tokens
    assert federation.shards["a"].features.dtype == torch.int64


GOOD = np.arange(20).reshape(10, 2)
BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "at the vocabulary": (GOOD + 1, "has token 20, outside 0..19"),
    "far outside": (GOOD * 1000, "has token 19000, outside 0..19"),
    "negative": (GOOD - 1, "has token -1, outside 0..19"),
    "halves": (GOOD / 2, "has tokens of type float64"),
    "whole but floating": (GOOD.astype(np.float32), "has tokens of type float32"),
    "truths": (GOOD > 3, "has tokens of type bool"),
    "digits as text": (GOOD.astype(str), "has tokens of type"),
    "words": (np.full((10, 2), "word"), "has tokens of type"),
    "not a number": (np.full((10, 2), np.nan), "client 'b': has"),
    "infinite": (np.full((10, 2), np.inf), "client 'b': has"),
    "complex": (GOOD + 1j, "client 'b': has"),
    "beyond 64 bits": (np.full((10, 2), 10**30, dtype=object), "client 'b': has"),
    "beyond signed 64 bits": (
        np.full((10, 2), 2**64 - 1, dtype=np.uint64),
        f"has token {2**64 - 1}",
    ),
}


@pytest.mark.parametrize(
    "case",
    BAD_TOKENS,
)
def test_tokens_that_are_none_are_refused_by_client(case: str) -> None:
    table, words = BAD_TOKENS[case]
    with pytest.raises(DataError) as caught:
        Federation.from_arrays({"a": (GOOD, [0, 1] * 5), "b": (table, [0, 1] * 5)}, tokens=20)
    assert "client 'b'" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", [0, 2], ids=["train", "test"])
def test_a_token_outside_the_vocabulary_is_found_in_either_part(part: int) -> None:
    parts: list[Any] = [GOOD.copy(), [0, 1] * 5, GOOD.copy(), [0, 1] * 5]
    parts[part][7, 1] = 20
    with pytest.raises(DataError, match=r"client 'a': has token 20, outside 0\.\.19"):
        Federation.from_arrays({"a": parts}, tokens=20)


def test_a_label_outside_the_classes_is_found_in_the_client_who_has_it() -> None:
    """The range of the whole storage is looked at first, and must not be blamed on whoever comes
    first.
    """
    x = np.zeros((10, 2))
    with pytest.raises(
        DataError, match=r"client 'b': has label 5, outside 0\.\.1; number the classes from 0"
    ):
        Federation.from_arrays(
            {"a": (x, [0, 1] * 5), "b": (x, [0, 5] * 5), "c": (x, [1] * 10)}, classes=2
        )


@pytest.mark.parametrize("vocabulary", [0, -3, 2.5, "20"])
def test_a_vocabulary_that_is_none_is_refused_as_such(vocabulary: Any) -> None:
    with pytest.raises(ConfigurationError, match="tokens"):
        Federation.from_arrays({"a": (np.zeros((10, 2), int) + 1, [0, 1] * 5)}, tokens=vocabulary)


# ---- natural silos -------------------------------------------------------------------------------


@pytest.mark.parametrize("own_test", [True, False])
@given(clients=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_fewer_clients_than_silos_are_drawn_by_the_seed_and_keep_their_records(
    clients: int, seed: int, own_test: bool
) -> None:
    data = with_silos(own_test=own_test)
    federation = Federation.from_dataset(data, NATURAL, clients, PublicSeed(seed))
    again = Federation.from_dataset(data, NATURAL, clients, PublicSeed(seed))
    assert federation.ids == again.ids
    assert federation.fingerprint() == again.fingerprint()
    assert len(federation.ids) == clients
    assert data.silos is not None
    for name, shard in federation.shards.items():
        held = [
            *shard.features.flatten().tolist(),
            *([] if own_test else shard.test_features.flatten().tolist()),
        ]
        assert sorted(held) == list(range(*data.silos[name]))


def test_other_seeds_draw_other_silos_and_every_silo_is_drawn_now_and_then() -> None:
    drawn = [
        Federation.from_dataset(with_silos(), NATURAL, 2, PublicSeed(seed)).ids
        for seed in range(40)
    ]
    assert len(set(drawn)) > 8  # of 15
    assert {name for ids in drawn for name in ids} == {f"silo-{i}" for i in range(6)}


@pytest.mark.parametrize("clients", [0, -1, 7])
def test_more_clients_than_silos_or_none_are_refused(clients: int) -> None:
    with pytest.raises(ConfigurationError, match=f"'made-up' has 6 natural silos, not {clients}"):
        Federation.from_dataset(with_silos(), NATURAL, clients, PublicSeed(0))


@pytest.mark.parametrize("own_test", [True, False])
@pytest.mark.parametrize("records", [1, 4, 7, 100])
def test_records_limits_what_a_silo_trains_on_and_leaves_its_test_part(
    own_test: bool, records: int
) -> None:
    data = with_silos(own_test=own_test)
    whole = Federation.from_dataset(data, NATURAL, None, PublicSeed(0))
    law = Partition(kind="natural", records=records)
    limited = Federation.from_dataset(data, law, None, PublicSeed(0))
    for name in whole.ids:
        all_, some = whole.shards[name], limited.shards[name]
        assert some.examples == min(records, all_.examples)
        assert torch.equal(some.features, all_.features[:records])
        assert torch.equal(some.labels, all_.labels[:records])
        assert torch.equal(some.test_features, all_.test_features)


def test_a_set_with_silos_may_be_shared_out_otherwise() -> None:
    federation = Federation.from_dataset(with_silos(own_test=False), Partition(), 5, PublicSeed(0))
    held = [v for s in federation.shards.values() for v in s.features.flatten().tolist()]
    assert len(set(held)) == len(held)
    assert len(federation.ids) == 5


# ---- Shakespeare ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plays(real_data: Path) -> Dataset:
    return load_dataset("shakespeare")


@pytest.mark.data
def test_a_role_s_windows_are_its_own_and_never_touch_its_test_text(
    real_data: Path, plays: Dataset
) -> None:
    roles = read_shakespeare(real_data / "shakespeare" / "moby-shakespeare.tar.xz")
    federation = Federation.from_dataset(plays, NATURAL, None, PublicSeed(0))
    assert federation.ids == roles.names
    base = plays.features.data_ptr()
    for i, name in enumerate(roles.names):
        shard = federation.shards[name]
        train, test = roles.split(i)
        first = int(roles.offsets[i])
        start = (
            shard.features.data_ptr() - base
        )  # one byte a character: where its first window begins in the text
        end = start + shard.examples - 1 + WINDOW  # and where its last one ends
        assert (start, end + 1) == (
            first,
            first + len(train),
        )  # the last character is a label, no input
        assert len(shard.test_labels) == (len(test) - 1) // WINDOW
        assert torch.equal(shard.test_features.flatten(), test[: WINDOW * len(shard.test_labels)])


@pytest.mark.data
def test_a_label_is_the_character_that_follows(real_data: Path, plays: Dataset) -> None:
    roles = read_shakespeare(real_data / "shakespeare" / "moby-shakespeare.tar.xz")
    federation = Federation.from_dataset(plays, NATURAL, None, PublicSeed(0))
    for name in ("hamlet/HAMLET", roles.names[0], roles.names[-1], "macbeth/LADY MACBETH"):
        shard = federation.shards[name]
        train, test = (part.tolist() for part in roles.split(roles.names.index(name)))
        for place in (0, 1, shard.examples // 2, shard.examples - 1):
            assert shard.features[place].tolist() == train[place : place + WINDOW]
            assert shard.labels[place : place + 1].tolist() == [train[place + WINDOW]]
        assert shard.labels.tolist() == train[WINDOW:]
        assert shard.test_labels.tolist() == test[WINDOW::WINDOW][: len(shard.test_labels)]


@pytest.mark.data
def test_windows_cost_the_text_and_not_eighty_times_it(real_data: Path, plays: Dataset) -> None:
    federation = Federation.from_dataset(plays, NATURAL, None, PublicSeed(0))
    shard = federation.shards["hamlet/HAMLET"]
    windows = sum(shard.examples for shard in federation.shards.values())
    assert windows > 3_000_000
    assert shard.features.untyped_storage().nbytes() < windows * WINDOW / 40
    assert [len(kind) for kind in storages(federation)] == [1, 1, 1, 1]


@pytest.mark.data
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to see this process's own peak"
)
def test_making_a_federation_of_windows_does_not_write_them_out(real_data: Path) -> None:
    code = (  # not getrusage, whose peak is inherited from the process that started this one
        "from pathlib import Path\nfrom dpfl.core.random import PublicSeed\nfrom dpfl.datasets.named import load_dataset\n"
        "from dpfl.data.federation import Federation\nfrom dpfl.data.partition import Partition\n"
        "peak = lambda: int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) // 1024\n"
        "data = load_dataset('shakespeare')\nbefore = peak()\n"
        "Federation.from_dataset(data, Partition(kind='natural'), 20, PublicSeed(0)).fingerprint()\n"
        "print(peak() - before)"
    )
    grown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert int(grown) < 150


@pytest.mark.data
def test_the_same_seed_draws_the_same_roles(real_data: Path, plays: Dataset) -> None:
    first, again, other = (
        Federation.from_dataset(plays, Partition(kind="natural", records=50), 20, PublicSeed(seed))
        for seed in (3, 3, 4)
    )
    assert first.ids == again.ids
    assert first.ids != other.ids
    assert len(first.ids) == 20
    assert all(shard.examples <= 50 for shard in first.shards.values())
    for got, wanted in zip(first.test_set(), concatenated(first), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(ConfigurationError, match="'shakespeare' has 857 natural silos, not 858"):
        Federation.from_dataset(plays, NATURAL, 858, PublicSeed(0))


@pytest.mark.data
def test_shared_out_otherwise_no_test_text_is_trained_on(real_data: Path, plays: Dataset) -> None:
    federation = Federation.from_dataset(
        plays, Partition(kind="iid", records=2000), 50, PublicSeed(0)
    )
    trained = {
        row.tobytes() for shard in federation.shards.values() for row in shard.features.numpy()
    }
    assert plays.test is not None
    assert (
        sum(row.tobytes() in trained for row in plays.test[0].numpy()) < 20
    )  # a few lines are spoken twice


# ---- one round on real data ----------------------------------------------------------------------


def budgets(federation: Federation) -> Federation:
    return federation.with_budgets(
        {client: Budget(epsilon=8.0, delta=1e-3) for client in federation.ids}
    )


def subset(data: Dataset, records: int, tests: int) -> Dataset:
    assert data.test is not None
    x, y = data.test
    return replace(
        data,
        features=data.features[:records],
        labels=data.labels[:records],
        test=(x[:tests], y[:tests]),
    )


@pytest.mark.data
def test_photographs_stay_bytes_and_train_a_small_network(real_data: Path) -> None:
    data = subset(load_dataset("cifar10"), 200, 60)
    federation = budgets(Federation.from_dataset(data, Partition(), 4, PublicSeed(0)))
    assert all(shard.features.dtype == torch.uint8 for shard in federation.shards.values())
    assert federation.shards["client-0"].train.features.untyped_storage().nbytes() == 200 * 3072
    assert isinstance(federation.inputs, Pixels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(196, 10))
    result = dpfl.train(
        model, federation, dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=10, local_steps=2), rounds=1
    )
    assert result.history[0].arrived == federation.ids
    assert not torch.equal(result.model[0].weight, model[0].weight)
    assert 0.0 <= result.accuracy <= 1.0
    # What the model was evaluated on is what a person would compute: scaled pixels, all clients'
    # test records.
    x, y = federation.test_set()
    scaled = (
        x.float() / 255 - torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
    ) / torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]
    with torch.no_grad():
        right = (result.model(scaled).argmax(1) == y).float().mean().item()
    assert result.accuracy == pytest.approx(right, abs=1.5 / len(y))


@pytest.mark.data
def test_reviews_train_the_lstm(real_data: Path) -> None:
    data = subset(load_dataset("imdb"), 40, 10)
    federation = budgets(Federation.from_dataset(data, Partition(), 2, PublicSeed(0)))
    assert federation.shards["client-0"].features.dtype == torch.int16
    model = make_model(
        "lstm", federation.feature_shape, federation.classes, PublicSeed(0), 8, federation.inputs
    )
    result = dpfl.train(
        model, federation, dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=4, local_steps=1), rounds=1
    )
    assert result.history[0].arrived == ("client-0", "client-1")
    for (name, before), after in zip(
        model.named_parameters(), result.model.parameters(), strict=True
    ):
        assert bool(torch.isfinite(after).all()), name
        assert not torch.equal(before, after), name
