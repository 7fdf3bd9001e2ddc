from __future__ import annotations

import gzip
import struct
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.datasets import heart
from dpfl.datasets.named import DATASETS, data_folders, load_dataset

EMBEDDED = [name for name, source in DATASETS.items() if source.embedded]
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    header = struct.pack(
        f">{1 + array.ndim}I", 0x800 + array.ndim if magic is None else magic, *array.shape
    )
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def write_images(folder: Path, records: int = 3, largest_label: int = 9) -> Path:
    """Write four small files as MNIST has them; ``records`` tells one folder from another."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.arange(records * 784).reshape(records, 28, 28) % 256
    labels = np.full(records, largest_label)
    for name, array in [
        (IMAGES, images),
        (LABELS, labels),
        (TEST_IMAGES, images),
        (TEST_LABELS, labels),
    ]:
        (folder / name).write_bytes(idx(array))
    return folder


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data but what the test writes."""
    monkeypatch.delenv("DPFL_DATA", raising=False)
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path / "cache"))
    return tmp_path


# ---- what ships with the package -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "counts"),
    [
        ("digits", (1797, 64), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]),
        ("breast_cancer", (569, 30), [212, 357]),
        ("heart_disease", (920, 32), [411, 509]),
    ],
)
def test_embedded_sets_have_their_published_shapes_and_class_counts(
    name: str, shape: tuple[int, int], counts: list[int]
) -> None:
    data = load_dataset(name)
    assert tuple(data.features.shape) == shape
    assert torch.bincount(data.labels).tolist() == counts
    assert data.classes == len(counts)
    assert data.features.dtype == torch.float32
    assert data.labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("digits", 0, 1), ("breast_cancer", -1.05, 1.05), ("heart_disease", -3, 3)],
)
def test_embedded_features_are_finite_and_bounded(name: str, low: float, high: float) -> None:
    features = load_dataset(name).features
    assert bool(torch.isfinite(features).all())
    assert low <= float(features.min()) < float(features.max()) <= high


@pytest.mark.parametrize("name", EMBEDDED)
def test_no_embedded_feature_is_a_constant(name: str) -> None:
    """But for digits, whose corner pixels nobody ever wrote on."""
    features = load_dataset(name).features
    constant = int((features.amax(0) == features.amin(0)).sum())
    assert constant == (3 if name == "digits" else 0)


def test_heart_disease_has_the_published_patients_of_each_hospital() -> None:
    data = load_dataset("heart_disease")
    assert data.silos is not None
    ill = {name: (int(data.labels[a:b].sum()), b - a) for name, (a, b) in data.silos.items()}
    assert ill == {
        "cleveland": (139, 303),
        "hungarian": (106, 294),
        "switzerland": (115, 123),
        "va": (149, 200),
    }
    everyone = torch.cat([torch.arange(a, b) for a, b in data.silos.values()])
    assert torch.equal(everyone.sort().values, torch.arange(920))


def raw_heart_table() -> list[list[str]]:
    folder = resources.files("dpfl.datasets").joinpath("embedded")
    texts = [
        folder.joinpath(f"processed.{hospital}.data").read_text() for hospital in heart.HOSPITALS
    ]
    return [line.split(",") for text in texts for line in text.split()]


def test_a_missing_value_is_marked_and_a_cholesterol_or_pressure_of_zero_is_missing() -> None:
    raw = raw_heart_table()
    marks = load_dataset("heart_disease").features[:, -10:]
    for column in range(3, 13):
        missing = [
            row[column] == "?" or (column in (3, 4) and float(row[column]) == 0) for row in raw
        ]
        assert marks[:, column - 3].tolist() == [float(x) for x in missing], f"raw column {column}"


def test_a_missing_number_counts_as_the_centre_of_its_range() -> None:
    features = load_dataset("heart_disease").features
    cholesterol, mark = features[:, 2], features[:, -9]
    assert int(mark.sum()) == 202  # 172 zeros and 30 question marks
    assert bool((cholesterol[mark == 1] == 0).all())


def test_a_present_number_is_scaled_by_the_fixed_range() -> None:
    raw = raw_heart_table()
    features = load_dataset("heart_disease").features
    expected = torch.tensor([(float(row[0]) - 55) / 25 for row in raw])
    assert torch.allclose(features[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize("hospital", ["cleveland", "hungarian", "switzerland", "va"])
def test_the_features_of_a_hospital_do_not_depend_on_the_others(
    hospital: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale learned from all hospitals would be a release that nobody billed."""
    together = load_dataset("heart_disease")
    assert together.silos is not None
    expected = together.features[slice(*together.silos[hospital])]
    monkeypatch.setattr(heart, "HOSPITALS", (hospital,))
    assert torch.equal(load_dataset("heart_disease").features, expected)


# ---- what does not ship --------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "smallest_class", "largest_class"),
    [("mnist", 5421, 6742), ("fashion_mnist", 6000, 6000)],
)
def test_image_sets_are_whole_and_scaled(
    name: str, smallest_class: int, largest_class: int, real_data: Path
) -> None:
    data = load_dataset(name, real_data)
    assert data.test is not None
    assert tuple(data.features.shape) == (60000, 1, 28, 28)
    assert tuple(data.test[0].shape) == (10000, 1, 28, 28)
    assert abs(float(data.features.mean())) < 1e-3
    assert abs(float(data.features.std()) - 1) < 1e-3
    counts = torch.bincount(data.labels)
    assert (len(counts), int(counts.min()), int(counts.max())) == (
        10,
        smallest_class,
        largest_class,
    )
    assert len(torch.bincount(data.test[1])) == 10


@pytest.mark.parametrize(
    ("name", "subfolder"), [("mnist", "mnist"), ("fashion_mnist", "fashion-mnist")]
)
def test_absent_files_say_what_to_put_where(name: str, subfolder: str, nowhere: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert str(nowhere / "cache" / "data" / subfolder) in message
    assert all(file in message for file in (IMAGES, LABELS, TEST_IMAGES, TEST_LABELS))


def test_one_absent_file_of_four_is_still_absent_data(nowhere: Path) -> None:
    (write_images(nowhere / "mine" / "mnist") / TEST_LABELS).unlink()
    with pytest.raises(DataError, match="its files are in none of"):
        load_dataset("mnist", nowhere / "mine")


def test_data_is_taken_from_the_given_folder_alone_else_the_environment_then_the_cache(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, named = nowhere / "given", nowhere / "named"
    monkeypatch.setenv("DPFL_DATA", str(named))
    write_images(nowhere / "cache" / "data" / "mnist", records=5)
    assert len(load_dataset("mnist").labels) == 5
    write_images(named / "mnist", records=4)
    assert len(load_dataset("mnist").labels) == 4
    with pytest.raises(DataError, match="given"):
        load_dataset("mnist", given)
    write_images(given / "mnist", records=3)
    assert len(load_dataset("mnist", given).labels) == 3
    assert data_folders(given) == [given]
    assert data_folders(None) == [named, nowhere / "cache" / "data"]


def test_a_small_idx_file_is_read_as_it_was_written(nowhere: Path) -> None:
    data = load_dataset("mnist", write_images(nowhere / "mine"))
    pixels = torch.arange(3 * 784).reshape(3, 1, 28, 28) % 256
    assert torch.allclose(data.features * 0.3081 + 0.1307, pixels / 255, atol=1e-6)
    assert data.labels.tolist() == [9, 9, 9]


def test_a_truncated_file_is_refused_by_name(nowhere: Path) -> None:
    path = write_images(nowhere / "mine") / IMAGES
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=IMAGES):
        load_dataset("mnist", nowhere / "mine")


def test_a_damaged_compressed_stream_is_refused_by_name(nowhere: Path) -> None:
    path = write_images(nowhere / "mine") / IMAGES
    content = bytearray(path.read_bytes())
    content[10] = 0xFF  # the first byte after gzip's own header: no such block type
    path.write_bytes(content)
    with pytest.raises(DataError, match=IMAGES):
        load_dataset("mnist", nowhere / "mine")


def test_a_file_that_is_not_compressed_is_refused_by_name(nowhere: Path) -> None:
    path = write_images(nowhere / "mine") / LABELS
    path.write_bytes(gzip.decompress(path.read_bytes()))
    with pytest.raises(DataError, match=LABELS):
        load_dataset("mnist", nowhere / "mine")


@pytest.mark.parametrize("magic", [0x801, 0x803 + 0x500, 0])
def test_a_wrong_magic_number_is_refused_by_name(magic: int, nowhere: Path) -> None:
    folder = write_images(nowhere / "mine")
    (folder / IMAGES).write_bytes(idx(np.zeros((3, 28, 28)), magic=magic))
    with pytest.raises(DataError, match=IMAGES):
        load_dataset("mnist", folder)


def test_a_header_that_promises_more_than_the_file_holds_is_refused(nowhere: Path) -> None:
    folder = write_images(nowhere / "mine")
    content = gzip.compress(struct.pack(">4I", 0x803, 2**31, 28, 28) + bytes(784))
    (folder / IMAGES).write_bytes(content)
    with pytest.raises(DataError, match=IMAGES):
        load_dataset("mnist", folder)


def test_a_label_above_nine_is_refused(nowhere: Path) -> None:
    with pytest.raises(DataError, match="label 10 is outside the 10 classes"):
        load_dataset("mnist", write_images(nowhere / "mine", largest_label=10))


def test_images_and_labels_that_do_not_belong_together_are_refused(nowhere: Path) -> None:
    folder = write_images(nowhere / "mine")
    (folder / LABELS).write_bytes(idx(np.zeros(2)))
    with pytest.raises(DataError, match="3 images and 2 labels"):
        load_dataset("mnist", folder)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'heart_disease'"):
        load_dataset("heart-disease")
    with pytest.raises(ConfigurationError, match="there is no data set '3'"):
        load_dataset(3)  # type: ignore[arg-type]


def test_a_data_set_names_itself_and_shows_no_record() -> None:
    shown = repr(load_dataset("digits"))
    assert shown == "Dataset('digits', 1797 records of shape (64,), 10 classes)"


@pytest.mark.data
def test_another_set_s_folder_is_not_taken_for_a_set_with_the_same_file_names(
    real_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DPFL_DATA")
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="fashion_mnist"):
        load_dataset("fashion_mnist", real_data / "mnist")
    assert len(load_dataset("mnist", real_data / "mnist").labels) == 60_000
