from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from pyarrow import parquet
from torch.utils.data import TensorDataset

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, ClientSettings
from dpfl.data.federation import Federation
from dpfl.data.partition import PARTITIONS, Partition
from dpfl.data.records import Dataset, Shard
from dpfl.datasets.named import load_dataset
from dpfl.tasks import Classification

BUDGET = Budget(epsilon=1.0, delta=1e-5)


def numbered(records: int, features: int = 3, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Records that can be told apart: the first feature is the record's own number."""
    x = np.zeros((records, features), dtype=np.float32)
    x[:, 0] = np.arange(start, start + records)
    return x, np.arange(records) % 2


def rows(*parts: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for part in parts for row in part]


# ---- arrays --------------------------------------------------------------------------------------


@given(records=st.integers(2, 60), seed=st.integers(0, 2**32))
def test_a_fifth_is_set_aside_for_testing_and_nothing_is_lost(records: int, seed: int) -> None:
    x, y = numbered(records)
    shard = Federation.from_arrays({"a": (x, y)}, classes=2, seed=seed).shards["a"]
    assert len(shard.test_labels) == max(1, round(0.2 * records))
    assert sorted(rows(shard.features, shard.test_features)) == sorted(rows(torch.from_numpy(x)))
    for features, labels in [
        (shard.features, shard.labels),
        (shard.test_features, shard.test_labels),
    ]:
        assert torch.equal(features[:, 0] % 2, labels.float()), "a label left its record"


def test_the_split_depends_on_seed_and_client_and_on_nothing_else() -> None:
    x, y = numbered(50)
    alone = Federation.from_arrays({"a": (x, y)}, seed=3)
    together = Federation.from_arrays({"b": (x, y), "a": (x, y)}, seed=3)
    reseeded = Federation.from_arrays({"a": (x, y)}, seed=4)
    assert torch.equal(alone.shards["a"].features, together.shards["a"].features)
    assert not torch.equal(alone.shards["a"].features, together.shards["b"].features)
    assert not torch.equal(alone.shards["a"].features, reseeded.shards["a"].features)


@pytest.mark.parametrize(
    "form", [np.asarray, torch.as_tensor, lambda x: np.asarray(x).tolist(), tuple]
)
def test_numpy_torch_and_lists_give_the_same_federation(form: object) -> None:
    x, y = numbered(10)
    expected = Federation.from_arrays({"a": (x, y)}).shards["a"]
    shard = Federation.from_arrays({"a": (form(x), form(y))}).shards["a"]  # type: ignore[operator]
    assert torch.equal(shard.features, expected.features)
    assert torch.equal(shard.labels, expected.labels)
    assert (shard.features.dtype, shard.labels.dtype) == (torch.float32, torch.int64)


def test_test_parts_that_are_given_are_kept_as_they_are() -> None:
    x, y = numbered(10)
    test_x, test_y = numbered(4, start=100)
    shard = Federation.from_arrays({"a": (x, y, test_x, test_y)}).shards["a"]
    assert torch.equal(shard.features, torch.from_numpy(x))
    assert torch.equal(shard.test_features, torch.from_numpy(test_x))
    assert torch.equal(shard.test_labels, torch.from_numpy(test_y))


def test_clients_come_in_canonical_order() -> None:
    federation = Federation.from_arrays({name: numbered(5) for name in ("c", "a", "b")})
    assert federation.ids == ("a", "b", "c")
    features, labels = federation.test_set()
    assert torch.equal(features, torch.cat([federation.shards[c].test_features for c in "abc"]))
    assert len(labels) == 3


def test_classes_are_counted_over_all_clients_or_taken_as_given() -> None:
    clients = {"a": ([[1.0]] * 10, [0, 2] * 5), "b": ([[1.0]] * 10, [1] * 10)}
    assert Federation.from_arrays(clients).classes == 3
    assert Federation.from_arrays(clients, classes=9).classes == 9


def test_a_class_that_nobody_has_is_refused_unless_the_classes_are_declared() -> None:
    clients = {"a": ([[1.0]] * 10, [0] * 10), "b": ([[1.0]] * 10, [1, 4] * 5)}
    with pytest.raises(DataError, match=r"nobody has a record of class 2, 3; .*classes = 5"):
        Federation.from_arrays(clients)
    assert Federation.from_arrays(clients, classes=5).classes == 5


@pytest.mark.parametrize(
    "dtype", ["uint8", "int16", "uint16", "int32", "uint32", "float32", "float64", "bool"]
)
def test_whole_labels_of_any_number_type_are_labels(dtype: str) -> None:
    x, y = numbered(10)
    assert Federation.from_arrays({"a": (x, y.astype(dtype))}).classes == 2


def test_arrays_that_must_not_be_written_to_are_accepted() -> None:
    x, y = numbered(10)
    x.setflags(write=False)
    y.setflags(write=False)
    assert Federation.from_arrays({"a": (x, y)}).shards["a"].examples == 8


def test_labels_in_a_column_are_labels() -> None:
    x, y = numbered(10)
    assert Federation.from_arrays({"a": (x, y[:, None])}).classes == 2


@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 6), st.integers(1, 3)),
        elements=st.floats(-1, 1, width=32),
    ),
    y=hnp.arrays(
        st.sampled_from([np.float64, np.int64]), st.integers(0, 6), elements=st.integers(-2, 3)
    ),
)
def test_any_pair_of_arrays_is_a_client_or_one_clear_error(x: np.ndarray, y: np.ndarray) -> None:
    good = len(x) == len(y) >= 2 and y.min() >= 0
    try:
        shard = Federation.from_arrays({"a": (x, y)}, classes=4).shards["a"]
    except DataError as error:
        assert not good
        assert "client 'a'" in str(error)
    else:
        assert good
        assert len(shard.features) == len(shard.labels)


BAD_ARRAYS = {
    "negative": (([[1.0]] * 4, [0, 1, -1, 0]), "has label -1"),
    "fractional": (([[1.0]] * 4, [0, 1, 0.5, 0]), "not whole numbers"),
    "not a number": (([[1.0]] * 4, [0, 1, float("nan"), 0]), "not finite numbers"),
    "infinite": (([[1.0]] * 4, [float("inf")] * 4), "label"),
    "one-hot": (([[1.0]] * 6, np.eye(6)), "label"),
    "words": (([[1.0]] * 4, ["a", "b", "a", "b"]), "label"),
    "ragged": (([[1.0], [1.0, 2.0]], [0, 1]), "client 'b'"),
    "empty": (([], []), "client 'b'"),
    "one record": (([[1.0]], [0]), r"has 1 record\(s\)"),
    "lengths": (([[1.0]] * 4, [0, 1]), "has 4 records and 2 labels"),
    "three arrays": (([[1.0]] * 4, [0] * 4, [[1.0]]), "has 3 arrays"),
    "test lengths": (([[1.0]] * 4, [0] * 4, [[1.0]], [0, 1]), "has 1 records and 2 labels"),
    "no train records": ((np.zeros((0, 1)), [], [[1.0]], [0]), "client 'b': has no data"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_client_that_cannot_be_used_is_named_with_the_reason(case: str) -> None:
    arrays, reason = BAD_ARRAYS[case]
    with pytest.raises(DataError, match=reason) as caught:
        Federation.from_arrays({"a": ([[1.0]] * 4, [0, 1, 0, 1]), "b": arrays})
    assert "client 'b'" in str(caught.value)


@pytest.mark.parametrize(
    "arrays", [([[1.0]] * 9, [2] * 9), ([[1.0]] * 4, [0, 1, 0, 1], [[1.0]], [2])]
)
def test_a_label_beyond_the_classes_is_refused_in_either_part(arrays: tuple[object, ...]) -> None:
    with pytest.raises(DataError, match=r"client 'a': has label 2, outside 0..1"):
        Federation.from_arrays({"a": arrays}, classes=2)


@given(seed=st.integers(0, 2**32))
def test_a_rare_class_counts_even_if_its_one_record_is_set_aside_for_testing(seed: int) -> None:
    x, _ = numbered(10)
    assert Federation.from_arrays({"a": (x, [0] * 9 + [1])}, seed=seed).classes == 2


def test_clients_with_records_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="different shapes"):
        Federation.from_arrays({"a": numbered(5, 3), "b": numbered(5, 4)})


def test_test_records_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match="shape"):
        Federation.from_arrays({"a": (*numbered(5, 3), *numbered(5, 4))})


def test_a_federation_of_nobody_is_refused() -> None:
    with pytest.raises(DataError, match="has no clients"):
        Federation.from_arrays({})


@pytest.mark.parametrize(
    "field", [{"budgets": {"z": BUDGET}}, {"client_settings": {"z": ClientSettings(lr=0.1)}}]
)
def test_a_budget_or_settings_of_a_stranger_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="for 'z', who is not a client"):
        Federation.from_arrays({"a": numbered(5)}, **field)  # type: ignore[arg-type]


def test_one_budget_and_one_set_of_settings_are_for_all_clients() -> None:
    clients = {name: ([[0.0], [1.0]] * 5, [0, 1] * 5) for name in "ab"}
    settings = ClientSettings(lr=0.1)
    federation = Federation.from_arrays(clients, budgets=BUDGET, client_settings=settings)
    assert federation.budgets == {"a": BUDGET, "b": BUDGET}
    assert federation.client_settings == {"a": settings, "b": settings}
    table = {"site": ["a"] * 9 + ["b"] * 9, "dose": [0.1] * 18, "ill": [0, 1] * 9}
    assert Federation.from_frame(table, client="site", budgets=BUDGET).budgets["b"] == BUDGET
    other = Budget(epsilon=9.0, delta=1e-5)
    assert federation.with_budgets(other).budgets == {"a": other, "b": other}
    with pytest.raises(ConfigurationError, match=r"or one dpfl.Budget\(...\) for all"):
        federation.with_budgets(1.0)  # type: ignore[arg-type]


def test_budgets_may_be_given_later_and_are_checked_again() -> None:
    federation = Federation.from_arrays({"a": numbered(5)})
    assert federation.with_budgets({"a": BUDGET}).budgets["a"] == BUDGET
    with pytest.raises(ConfigurationError, match="for 'z', who is not a client"):
        federation.with_budgets({"z": BUDGET})


def test_a_shard_without_records_is_refused_even_when_built_by_hand() -> None:
    none, one = (torch.zeros(n, dtype=torch.int64) for n in (0, 1))
    empty = Shard.of(torch.zeros(0, 2), none, torch.zeros(1, 2), one)
    with pytest.raises(DataError, match="client 'a': has no data"):
        Federation(shards={"a": empty}, task=Classification(classes=2))


# ---- torch datasets ------------------------------------------------------------------------------


def test_torch_datasets_give_the_same_federation_as_their_arrays() -> None:
    x, y = numbered(12)
    dataset = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    expected = Federation.from_arrays({"a": (x, y)}, seed=5, budgets={"a": BUDGET})
    federation = Federation.from_torch({"a": dataset}, seed=5, budgets={"a": BUDGET})
    assert torch.equal(federation.shards["a"].features, expected.shards["a"].features)
    assert torch.equal(federation.shards["a"].test_labels, expected.shards["a"].test_labels)
    assert federation.budgets == expected.budgets


def test_an_empty_torch_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="client 'a': has no data"):
        Federation.from_torch({"a": TensorDataset(torch.zeros(0, 2), torch.zeros(0))})


# ---- files ---------------------------------------------------------------------------------------


def write_csv(path: Path, text: str) -> None:
    path.write_text(text.replace(" ", "").strip().replace("|", "\n") + "\n")


GOOD = "age,dose,ill | 1,2,0 | 3,4,1 | 5,6,0"


def test_a_folder_of_csv_files_is_a_federation_with_the_last_column_as_label(
    tmp_path: Path,
) -> None:
    write_csv(tmp_path / "a.csv", GOOD)
    write_csv(tmp_path / "b.csv", GOOD)
    (tmp_path / "notes.txt").write_text("not data")
    federation = Federation.from_files(tmp_path)
    assert federation.ids == ("a", "b")
    shard = federation.shards["a"]
    records = torch.cat([shard.features, shard.test_features])
    labels = torch.cat([shard.labels, shard.test_labels])
    together = torch.cat([records, labels[:, None]], dim=1)
    assert sorted(together.tolist()) == [[1, 2, 0], [3, 4, 1], [5, 6, 0]]


def test_the_label_column_may_be_named(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", "ill,dose | 0,7 | 1,8 | 0,7")
    shard = Federation.from_files(tmp_path, label="ill").shards["a"]
    assert set(torch.cat([shard.features, shard.test_features]).flatten().tolist()) == {7.0, 8.0}
    assert set(torch.cat([shard.labels, shard.test_labels]).tolist()) == {0, 1}


def test_parquet_and_csv_of_the_same_table_give_the_same_client(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", GOOD)
    (tmp_path / "other").mkdir()
    table = pa.table({"age": [1.0, 3.0, 5.0], "dose": [2, 4, 6], "ill": [0, 1, 0]})
    parquet.write_table(table, tmp_path / "other" / "a.parquet")
    csv_shard = Federation.from_files(tmp_path).shards["a"]
    parquet_shard = Federation.from_files(tmp_path / "other").shards["a"]
    assert torch.equal(csv_shard.features, parquet_shard.features)
    assert torch.equal(csv_shard.labels, parquet_shard.labels)


BAD_FILES = {
    "missing value": ("age,ill | 1,0 | ,1", "line 3, column 'age': has no value"),
    "missing label": ("age,ill | 1,0 | 2,", "line 3, column 'ill': has no value"),
    "not available": ("age,ill | 1,0 | NA,1", "line 3, column 'age': has no value"),
    "infinite": ("age,ill | 1,0 | inf,1", "line 3, column 'age': inf is not finite"),
    "word": ("age,ill | 1,0 | old,1", "line 3, column 'age': 'old' is not a number"),
    "short line": ("age,ill | 1,0 | 2", "line 3 has 1 cells for 2 columns"),
    "long lines": ("age,ill | 1,0,3 | 2,1,3", "line 2 has 3 cells for 2 columns"),
    "open quote": ('age,ill | 1,0 | 2,"1 | 3,0', "line 3: unexpected end of data"),
    "no records": ("age,ill", "holds no record"),
    "nothing at all": ("", "cannot be read as a table .it is empty"),
    "negative label": ("age,ill | 1,0 | 2,-1", "has label -1"),
    "fractional label": ("age,ill | 1,0 | 2,0.5", "not whole numbers"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_csv_file_that_cannot_be_used_is_named_with_the_reason(case: str, tmp_path: Path) -> None:
    text, reason = BAD_FILES[case]
    write_csv(tmp_path / "a.csv", text)
    with pytest.raises(DataError, match=reason) as caught:
        Federation.from_files(tmp_path)
    assert "a.csv" in str(caught.value) or "client 'a'" in str(caught.value)


def test_an_empty_csv_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        Federation.from_files(tmp_path)


def test_a_label_column_that_no_file_has_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", GOOD)
    with pytest.raises(DataError, match="has no column 'sick'; choose one of age, dose, ill"):
        Federation.from_files(tmp_path, label="sick")


@pytest.mark.parametrize("header", ["dose,age,ill", "age,dose,weight", "age,ill"])
def test_files_with_different_columns_are_refused(header: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", GOOD)
    width = header.count(",") + 1
    write_csv(
        tmp_path / "b.csv", "|".join([header, ",".join(["1"] * width), ",".join(["0"] * width)])
    )
    with pytest.raises(DataError, match=r"b\.csv: has columns .* another table has \[.age"):
        Federation.from_files(tmp_path)


def test_two_files_for_one_client_are_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", "age,ill | 1,0 | 2,1")
    parquet.write_table(pa.table({"age": [1, 2], "ill": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="client 'a' has two files"):
        Federation.from_files(tmp_path)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"age": [1, None], "ill": [0, 1]}, "record 2, column 'age': has no value"),
        ({"age": ["x", "y"], "ill": [0, 1]}, "record 1, column 'age': 'x' is not a number"),
    ],
)
def test_a_parquet_file_that_cannot_be_used_is_named_with_the_reason(
    columns: dict[str, list[object]], reason: str, tmp_path: Path
) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=reason):
        Federation.from_files(tmp_path)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more than that")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read"):
        Federation.from_files(tmp_path)


def test_a_folder_without_tables_or_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no .csv or .parquet file"):
        Federation.from_files(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        Federation.from_files(tmp_path / "absent")


def test_a_client_of_one_record_in_a_file_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", "age,ill | 1,0")
    with pytest.raises(DataError, match=r"client 'a': has 1 record\(s\)"):
        Federation.from_files(tmp_path)


# ---- named data sets -----------------------------------------------------------------------------


def distinct_dataset(records: int = 600, classes: int = 5) -> Dataset:
    """Every record is its own number, so that nobody can hold another's without being found out."""
    numbers = torch.arange(records)
    return Dataset(
        name="numbers", features=numbers[:, None].float(), labels=numbers % classes, classes=classes
    )


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
@given(seed=st.integers(0, 2**32), clients=st.integers(3, 12))
def test_no_record_is_ever_trained_on_twice_or_both_trained_on_and_tested(
    kind: str, seed: int, clients: int
) -> None:
    federation = Federation.from_dataset(
        distinct_dataset(), Partition(kind=kind), clients, PublicSeed(seed)
    )
    trained = [
        record
        for shard in federation.shards.values()
        for record in shard.features.flatten().tolist()
    ]
    tested = [
        record
        for shard in federation.shards.values()
        for record in shard.test_features.flatten().tolist()
    ]
    assert len(federation.ids) == clients
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(tested)
    for shard in federation.shards.values():
        assert len(shard.test_labels) >= 1
        assert torch.equal(shard.features.flatten().long() % 5, shard.labels)
        assert torch.equal(shard.test_features.flatten().long() % 5, shard.test_labels)


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "heart_disease"])
@pytest.mark.parametrize("kind", ["iid", "shards", "dirichlet"])
def test_every_client_of_an_embedded_set_has_train_and_test_parts_apart(
    name: str, kind: str
) -> None:
    """Embedded sets hold a few equal records, so records are counted, not compared."""
    data = load_dataset(name)
    federation = Federation.from_dataset(data, Partition(kind=kind), 8, PublicSeed(1))
    left = Counter(rows(data.features))
    for shard in federation.shards.values():
        assert shard.examples >= 1
        assert len(shard.test_labels) >= 1
        for row in rows(shard.features):
            left[row] -= 1
    assert min(left.values()) >= 0
    tested = set(rows(*(shard.test_features for shard in federation.shards.values())))
    assert all(left[row] >= 1 for row in tested)


def test_natural_silos_keep_their_names_and_their_patients() -> None:
    data = load_dataset("heart_disease")
    federation = Federation.from_dataset(data, Partition(kind="natural"), None, PublicSeed(0))
    assert federation.ids == ("cleveland", "hungarian", "switzerland", "va")
    assert data.silos is not None
    for name, shard in federation.shards.items():
        mine = data.features[slice(*data.silos[name])]
        assert sorted(rows(shard.features, shard.test_features)) == sorted(rows(mine))
        assert len(shard.test_labels) == round(0.2 * len(mine))


def test_natural_silos_of_a_set_without_any_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'digits' has no natural silos"):
        Federation.from_dataset(
            load_dataset("digits"), Partition(kind="natural"), None, PublicSeed(0)
        )


def test_another_number_of_natural_silos_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has 4 natural silos, not 7"):
        Federation.from_dataset(
            load_dataset("heart_disease"), Partition(kind="natural"), 7, PublicSeed(0)
        )


def test_no_clients_are_refused_and_not_replaced_by_a_default() -> None:
    with pytest.raises(ConfigurationError, match="0 clients"):
        Federation.from_dataset(distinct_dataset(), Partition(), 0, PublicSeed(0))


def test_a_data_set_too_small_for_a_test_part_is_refused() -> None:
    tiny = distinct_dataset(records=6, classes=3)
    with pytest.raises(DataError, match="test"):
        Federation.from_dataset(tiny, Partition(), 2, PublicSeed(0))


def test_a_data_set_with_its_own_test_part_keeps_it_apart() -> None:
    data = distinct_dataset(100)
    numbers = torch.arange(1000, 1050)
    data = Dataset(
        name=data.name, features=data.features, labels=data.labels, classes=5,
        test=(numbers[:, None].float(), numbers % 5),
    )  # fmt: skip
    federation = Federation.from_dataset(data, Partition(), 5, PublicSeed(0))
    tested = torch.cat([shard.test_features for shard in federation.shards.values()]).flatten()
    assert sorted(tested.tolist()) == numbers.float().tolist()


def test_a_federation_shows_no_record_when_it_is_printed() -> None:
    federation = Federation.from_arrays({"a": ([[123.5], [456.5]] * 5, [0, 1] * 5)})
    for text in (repr(federation), str(federation), repr(federation.shards)):
        assert "123" not in text
        assert "456" not in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_features_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(DataError, match="not finite"):
        Federation.from_arrays({"a": ([[1.0], [value]] * 5, [0, 1] * 5)})


def test_a_number_that_is_no_label_is_not_taken_for_one() -> None:
    with pytest.raises(DataError, match="more than records"):
        Federation.from_arrays({"a": ([[1.0], [2.0]] * 5, [0, 1_000_000] * 5)})


def test_what_is_no_budget_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="is not a Budget"):
        Federation.from_arrays({"a": ([[1.0], [2.0]] * 5, [0, 1] * 5)}, budgets={"a": 1.0})  # type: ignore[dict-item]
