"""Data as people have them: one federation, whatever it comes from, and one sentence if it cannot."""

import itertools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

import dpfl
from dpfl.core.errors import ConfigurationError, DataError
from dpfl.data.loaders import read_items
from dpfl.data.schema import Schema
from dpfl.data.sources import by_client, client_names, dense, is_mapped
from dpfl.engine.phase_block import side_by_side
from dpfl.methods import make_strategy

FEATURES = torch.arange(40, dtype=torch.float32).reshape(20, 2) / 40
LABELS = torch.arange(20) % 2
TABLE = {
    "site": ["b"] * 10 + ["a"] * 10,
    "x": FEATURES[:, 0].tolist(),
    "y": FEATURES[:, 1].tolist(),
    "ill": LABELS.tolist(),
}
WORK: Any = {"lr": 0.1, "batch_size": 4, "local_steps": 1}
BY_SITE = {"b": (FEATURES[:10], LABELS[:10]), "a": (FEATURES[10:], LABELS[10:])}


class Numbers(IterableDataset[Any]):
    """Records without a length."""

    def __init__(self, last: int | None) -> None:
        self.last = last

    def __iter__(self) -> Iterator[Any]:
        numbers = itertools.count() if self.last is None else range(self.last)
        return ((torch.ones(100) * i, i % 2) for i in numbers)


class Images(Dataset[Any]):
    """Images of one colour, as torchvision gives them without a transform."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return Image.new("RGB", (4, 3), (51 * (index % 2), 0, 255)), index % 2


def federation(clients: Any, **options: Any) -> dpfl.Federation:
    return dpfl.Federation.from_torch(clients, **options)


# -- one federation --------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [dict, pd.DataFrame, pl.DataFrame])
def test_a_column_of_clients_makes_the_federation_of_their_arrays(made: Any) -> None:
    wanted = dpfl.Federation.from_arrays(BY_SITE, seed=3).fingerprint()
    found = dpfl.Federation.from_frame(made(TABLE), client="site", target="ill", seed=3)
    assert found.fingerprint() == wanted
    apart = {
        site: made({name: own[cut] for name, own in TABLE.items() if name != "site"})
        for site, cut in (("b", slice(10)), ("a", slice(10, 20)))
    }
    assert dpfl.Federation.from_frame(apart, target="ill", seed=3).fingerprint() == wanted


def test_hugging_face_datasets_are_tables_and_sources() -> None:
    datasets = pytest.importorskip("datasets")
    wanted = dpfl.Federation.from_arrays(BY_SITE, seed=3).fingerprint()
    whole = datasets.Dataset.from_dict(TABLE)
    found = dpfl.Federation.from_frame(whole, client="site", target="ill", seed=3)
    assert found.fingerprint() == wanted
    apart = datasets.DatasetDict(
        {
            site: datasets.Dataset.from_dict({"x": x.tolist(), "label": y.tolist()})
            for site, (x, y) in BY_SITE.items()
        }
    )
    found = federation(apart, features="x", target="label", seed=3)
    assert found.fingerprint() == wanted
    pictures = {"image": [Images()[i][0] for i in range(6)], "label": [0, 1] * 3}
    typed = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    stored = datasets.Dataset.from_dict(pictures, features=typed)
    assert federation({"a": stored}, features="image", target="label").feature_shape == (3, 3, 4)


@pytest.mark.parametrize(
    "made",
    [
        lambda x, y: TensorDataset(x, y),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=3),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=None),
        lambda x, y: iter(list(zip(x, y, strict=True))),
        lambda x, y: [(x[i].numpy(), int(y[i])) for i in range(len(x))],
    ],
)
def test_every_source_of_records_gives_the_same_federation(made: Any) -> None:
    wanted = dpfl.Federation.from_arrays(BY_SITE).fingerprint()
    assert federation({site: made(*own) for site, own in BY_SITE.items()}).fingerprint() == wanted


def test_a_loader_that_takes_some_records_is_held_to_them() -> None:
    whole, chosen = TensorDataset(FEATURES, LABELS), [9, 3, 5]
    loader = DataLoader(whole, batch_size=2, sampler=SubsetRandomSampler(chosen))
    features, _ = read_items("client 'a'", loader)
    assert features.tolist() == FEATURES[sorted(chosen)].tolist()


def test_an_iterable_is_read_to_its_end_and_images_become_numbers() -> None:
    features, targets = read_items("client 'a'", Numbers(7))
    assert features.shape == (7, 100) and targets.tolist() == [0, 1, 0, 1, 0, 1, 0]
    loader: Any = DataLoader(Numbers(7), batch_size=2)
    assert np.array_equal(read_items("client 'a'", loader)[0], features)
    features, _ = read_items("client 'a'", Images())
    assert features.shape == (6, 3, 3, 4) and features[1, :, 0, 0].tolist() == pytest.approx(
        [0.2, 0, 1]
    )
    features, _ = read_items("client 'a'", Images(), transform=lambda image: image.size)
    assert features.tolist() == [[4, 3]] * 6


def test_float_targets_are_not_cut_off() -> None:
    halves = TensorDataset(FEATURES, LABELS + 0.5)
    found = federation({"a": halves}, task="regression")
    assert set(found.shards["a"].labels.flatten().tolist()) == {0.5, 1.5}
    with pytest.raises(DataError, match="client 'a': has labels that are not whole numbers"):
        federation({"a": halves})


def test_sparse_matrices_are_stored_dense() -> None:
    wanted = dpfl.Federation.from_arrays(BY_SITE).fingerprint()
    for made in (scipy.sparse.csr_matrix, scipy.sparse.coo_array, Tensor.to_sparse):
        clients = {
            s: (made(x.double() if made is not Tensor.to_sparse else x), y)
            for s, (x, y) in BY_SITE.items()
        }
        assert dpfl.Federation.from_arrays(clients).fingerprint() == wanted


# -- who -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), min_size=1, unique=True))
def test_numbered_clients_keep_their_order_as_text(numbers: list[int]) -> None:
    names = client_names(numbers)
    assert [names[one] for one in sorted(numbers)] == sorted(names.values())
    assert [int(names[one]) for one in numbers] == numbers


def test_budgets_of_numbered_clients_are_found() -> None:
    clients = dict.fromkeys((2, 10), BY_SITE["a"])
    budgets = {number: dpfl.Budget(epsilon=float(number), delta=1e-3) for number in clients}
    settings = {10: dpfl.ClientSettings(lr=0.5)}
    found = dpfl.Federation.from_arrays(clients, budgets=budgets, client_settings=settings)
    assert found.ids == ("02", "10") and found.budgets["02"].epsilon == 2.0
    assert found.client_settings["10"].lr == 0.5
    grouped = by_client({"who": np.array([10, 2, 10]), "x": [1, 2, 3]}, "who")
    assert {who: own["x"].tolist() for who, own in grouped.items()} == {2: [2], 10: [1, 3]}


def test_a_unit_of_ones_own_is_named_and_accounted() -> None:
    found = dpfl.Federation.from_arrays(BY_SITE, unit="patient")
    assert "patients of shape (2,)" in repr(found)
    assert found.fingerprint() != dpfl.Federation.from_arrays(BY_SITE).fingerprint()
    with pytest.raises(ConfigurationError, match="'client' is no word for a unit"):
        dpfl.Federation.from_arrays(BY_SITE, unit="client")


# -- larger than memory ----------------------------------------------------------------------------


def stored(path: Path, array: np.ndarray) -> np.ndarray:
    np.save(path, array)
    return np.load(path, mmap_mode="r")


def test_memory_mapped_records_stay_in_their_file_and_train_as_others_do(tmp_path: Path) -> None:
    whole = stored(tmp_path / "x.npy", FEATURES.numpy())
    clients = {"a": (whole[:10], LABELS[:10]), "b": (whole[10:], LABELS[10:])}
    budgets = {name: dpfl.Budget(epsilon=8.0, delta=1e-2) for name in clients}
    mapped = dpfl.Federation.from_arrays(clients, budgets=budgets)
    for name, (x, _) in clients.items():
        shard = mapped.shards[name]
        assert shard.features.data_ptr() == x.__array_interface__["data"][0]
        assert len(shard.features) == 8 and len(shard.test_features) == 2
    together, starts = side_by_side([mapped.shards[name].features for name in mapped.ids])
    assert starts == [0, 10] and together.data_ptr() == mapped.shards["a"].features.data_ptr()
    parts = {n: (x[:8], y[:8], x[8:], y[8:]) for n, (x, y) in clients.items()}
    copied = {n: (np.array(x), y, np.array(tx), ty) for n, (x, y, tx, ty) in parts.items()}
    plain = dpfl.Federation.from_arrays(copied, budgets=budgets)
    strategy = make_strategy("weiavg", {"clip": 1, "lr": 0.1, "batch_size": 4, "local_steps": 2})
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    one, two = (dpfl.train(model, own, strategy, rounds=2) for own in (mapped, plain))
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    other = stored(tmp_path / "z.npy", FEATURES.numpy() + 1)
    assert mapped.fingerprint() == dpfl.Federation.from_arrays(clients).fingerprint()
    changed = {"a": clients["a"], "b": (other[10:], LABELS[10:])}
    assert mapped.fingerprint() != dpfl.Federation.from_arrays(changed).fingerprint()


def test_large_files_are_not_copied_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, width = 1 << 18, 1 << 8  # 256 MiB, all holes
    whole = np.lib.format.open_memmap(
        tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(rows, width)
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + whole.nbytes * 3 // 4, hard))
    try:  # what is copied does not fit; what is mapped does not count
        clients = {
            "a": (whole[:200_000], np.arange(200_000) % 2),
            "b": (whole[200_000:], np.arange(rows - 200_000) % 2),
        }
        found = dpfl.Federation.from_arrays(clients)
        found.fingerprint()
        own = np.lib.format.open_memmap(
            tmp_path / "y.npy", mode="w+", dtype=np.float32, shape=(rows // 2, width)
        )
        two = {"a": (whole, np.arange(rows) % 2), "b": (own, np.arange(rows // 2) % 2)}
        apart = dpfl.Federation.from_arrays(two)
        monkeypatch.setattr("dpfl.engine.stacked._MOST_COPIED", 1)
        trained = dpfl.train(nn.Linear(width, 2), apart, dpfl.fedavg(**WORK), rounds=1)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert trained.summary.rounds.done == 1
    assert found.shards["a"].examples == 190_000 and is_mapped(whole[5:])
    assert len(found.shards["a"].test_features) == 10_000


def test_mapped_features_of_another_type_are_refused(tmp_path: Path) -> None:
    whole = stored(tmp_path / "x.npy", FEATURES.double().numpy())
    with pytest.raises(DataError, match="client 'a': has memory-mapped features of type float64"):
        dpfl.Federation.from_arrays({"a": (whole, LABELS)})


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Numbers(None), "client 'a': has a source without a length, and more than 0.000977 GiB"),
        (TensorDataset(FEATURES[:0], LABELS[:0]), "client 'a': has no data"),
        (TensorDataset(FEATURES), "a record is a tuple, not"),
        ([{"x": 1.0, "label": 2}], "a record is a dict of x, label; name them"),
        ([(torch.ones(2), 0), (torch.ones(3), 1)], "records of different shapes"),
        ([("some text", 0)], "features are a str, not numbers"),
        (3, "int is no source of records"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(source: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as refusal:
        federation({"a": source}, memory=1 << 20)
    assert refusal.value.exit_code == 3


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (TABLE, {"client": "sit"}, "no column 'sit'; did you mean 'site'"),
        (TABLE, {"client": "site", "target": "il"}, "no column 'il'; did you mean 'ill'"),
        (
            {**TABLE, "x": ["text"] * 20},
            {"client": "site"},
            "record 1, column 'x': 'text' is not a number",
        ),
        ({**TABLE, "site": ["a", None] * 10}, {"client": "site"}, "record 2 names no client"),
        ({**TABLE, "site": ["a"] * 19 + ["b"]}, {"client": "site"}, "client 'b': has 1 record"),
        (
            pd.DataFrame([["a", 1.0]], columns=["site", 0]),
            {"client": "site"},
            "column 0 is there twice, or",
        ),
        (pd.DataFrame([["a", 1, 2]], columns=["site", "x", "x"]), {"client": "site"}, "column 'x'"),
        ({"site": [], "x": [], "ill": []}, {"client": "site"}, "holds no record"),
    ],
)
def test_a_table_that_makes_no_clients_is_refused(table: Any, options: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        dpfl.Federation.from_frame(table, **options)


def test_a_table_without_clients_and_a_target_beside_a_schema_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one table and no clients"):
        dpfl.Federation.from_frame(TABLE, target="ill")
    columns = {n: {"type": "number"} for n in ("x", "y")} | {"ill": {"type": "boolean"}}
    schema = Schema.from_dict({"target": "ill", "columns": columns})
    with pytest.raises(ConfigurationError, match="a schema and a target 'ill'"):
        dpfl.Federation.from_frame(TABLE, client="site", target="ill", schema=schema)


def test_a_sparse_matrix_that_does_not_fit_is_refused() -> None:
    wide = scipy.sparse.csr_matrix((1000, 10**7))
    with pytest.raises(DataError, match=r"\(1000, 10000000\) takes 37.3 GiB when dense"):
        dense("client 'a'", wide)


def test_clients_whose_names_become_one_are_refused() -> None:
    with pytest.raises(DataError, match="two clients have one name"):
        dpfl.Federation.from_arrays({1: BY_SITE["a"], "1": BY_SITE["b"]})


def test_budgets_may_be_given_later_by_the_clients_numbers() -> None:
    arrays = (np.zeros((4, 2)), [0, 1, 0, 1])
    federation = dpfl.Federation.from_arrays(dict.fromkeys(range(11), arrays))
    budgets = {number: dpfl.Budget(epsilon=number + 1, delta=1e-3) for number in range(11)}
    given = federation.with_budgets(budgets).budgets
    assert {client: own.epsilon for client, own in given.items()} == {
        f"{number:02d}": number + 1 for number in range(11)
    }
    with pytest.raises(ConfigurationError, match="'12', who is not a client"):
        federation.with_budgets({12: dpfl.Budget(epsilon=1, delta=1e-3)})


def test_one_loader_for_all_clients_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="clients are a list; give"):
        dpfl.Federation.from_torch([(torch.zeros(2), 1)])  # type: ignore[arg-type]


PATIENTS = Schema.from_dict(
    {
        "target": "ill",
        "person": "who",
        "columns": {"x": {"type": "number", "range": [0, 100]}, "ill": {"type": "boolean"}},
    }
)


def hospital_of(who: list[Any], x: list[Any]) -> dpfl.Federation:
    count = len(who)
    cells = {"site": ["n"] * count, "who": who, "x": x, "ill": [i % 2 for i in range(count)]}
    return dpfl.Federation.from_frame(cells, client="site", schema=PATIENTS)


def test_one_person_s_id_does_not_change_the_others() -> None:
    """Whole numbers above 2^53 would become one another as floating-point numbers."""
    ids: list[Any] = [2**53 + i for i in range(39)]
    for last in (7, 7.5, "7", 2**70):
        shard = hospital_of([*ids, last], list(range(40))).shards["n"]
        assert shard.examples + len(shard.test_labels) == 40


def test_one_number_does_not_change_how_others_are_rounded() -> None:
    large: list[Any] = [(2**24 - 1 - i) * 2**36 + 2**35 + 1 for i in range(30)]
    made = []
    for last in (3, 3.5):
        cells = {"site": ["n"] * 31, "x": [*large, last], "ill": [i % 2 for i in range(31)]}
        shard = dpfl.Federation.from_frame(cells, client="site", target="ill").shards["n"]
        made.append({float(x) for x in torch.cat([shard.features, shard.test_features])})
    assert made[0] - {3.0} == made[1] - {3.5}


@pytest.mark.parametrize(
    ("who", "x", "words"),
    [
        (["\ud800", *"abcdefghi"], list(range(10)), "cannot be written as UTF-8"),
        (list("abcdefghij"), [10**400, *range(9)], "is not a number"),
    ],
)
def test_ids_and_numbers_that_cannot_be_are_refused(who: Any, x: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        hospital_of(who, x)


def test_frames_whose_columns_stand_in_another_order_are_not_mixed_up() -> None:
    x, y = FEATURES[:10].numpy().T
    ill = LABELS[:10].numpy()
    frames = {"a": {"x": x, "y": y, "ill": ill}, "b": {"y": y, "x": x, "ill": ill}}
    with pytest.raises(DataError, match=r"client 'b': has columns .* use the same columns"):
        dpfl.Federation.from_frame(frames, target="ill")


def test_a_task_without_classes_takes_those_of_the_schema() -> None:
    columns: Any = {"x": {"type": "number"}, "ill": {"type": "boolean"}}
    schema = Schema.from_dict({"target": "ill", "columns": columns})
    tables = {"a": {"x": FEATURES[:10, 0].numpy(), "ill": [1] * 5 + [0] * 5}}
    for task in ("classification", {"metric": "auc"}, dpfl.tasks.Classification(metric="auc")):
        federation = dpfl.Federation.from_frame(tables, schema=schema, task=task)
        assert federation.classes == 2 and not federation.inferred
