"""Data that is absent, cut off, of the wrong shape or mislabelled: one sentence and exit code 3,
from both doors.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DataError
from dpfl.datasets.named import DATASETS, load_dataset
from dpfl.engine import make_engine

PRIVATE = [
    "--budgets",
    "2",
    "--delta",
    "1e-3",
    "--clip",
    "1",
    "--method",
    "weiavg",
    "--rounds",
    "1",
    "--quiet",
]
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
PLAYS, REVIEWS = "moby-shakespeare.tar.xz", "aclImdb-20k.tar.xz"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that ``DPFL_DATA`` names, and no cache of arrays from elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("DPFL_DATA", str(data))
    return data


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """Run, and return the one sentence; nothing half-made is left behind."""
    found = run_command(["run", *PRIVATE, *arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err, err
    assert (found, out) == (code, "")
    (sentence,) = err.strip().splitlines()
    assert sentence.startswith("dpfl: ")
    assert len(sentence) < 800
    assert not list(Path().rglob("experiment.toml"))
    return sentence


# ---- small but whole data sets ---------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return gzip.compress(
        struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    )


def write_idx(folder: Path, records: int = 40, label: int = 3, side: int = 28) -> None:
    images = np.zeros((records, side, 28), np.uint8)
    labels = np.full(records, label, np.uint8)
    for name, array in [
        (IMAGES, images),
        (LABELS, labels),
        (TEST_IMAGES, images),
        (TEST_LABELS, labels),
    ]:
        (folder / name).write_bytes(idx(array))


def write_cifar(folder: Path) -> None:
    for name in BATCHES:
        (folder / name).write_bytes(bytes([3, *([7] * 3072)]) * 8)


ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, <=50K"
)


def write_adult(folder: Path, *more: str) -> None:
    for part in ("data", "test"):
        (folder / f"adult.{part}.gz").write_bytes(
            gzip.compress("\n".join([ADULT] * 40 + list(more)).encode())
        )


BANK = (
    "age;job;marital;education;default;balance;housing;loan;contact;day;month;duration;campaign;pdays;previous;poutcome;y",
    "58;management;married;tertiary;no;2143;yes;no;unknown;5;may;261;1;-1;0;unknown;no",
)


def write_bank(folder: Path, header: str = BANK[0], *more: str) -> None:
    lines = [header, *[BANK[1]] * 40, *more]
    (folder / "bank-full.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def write_archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:xz") as stream:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            stream.addfile(member, io.BytesIO(content))


def write_imdb(folder: Path, **more: bytes) -> None:
    reviews = {
        f"aclImdb/{part}/{sentiment}/{i}_{rating}.txt": f"number {i} was {sentiment}".encode()
        for part in ("train", "test")
        for sentiment, rating in (("neg", 1), ("pos", 9))
        for i in range(20)
    }
    write_archive(folder / REVIEWS, reviews | more)


def write_shakespeare(folder: Path) -> None:
    play = "ACT I\n" + "".join(f"{role}\t{'word ' * 60}\n\n" for role in ["ANNA", "BOB"] * 4)
    write_archive(folder / PLAYS, {"moby/comedies/april": play.encode()})


# Name: the folder a message must name, the files it must name, and who writes them.
ABSENT: dict[str, tuple[str, list[str], Callable[[Path], None]]] = {
    "adult": ("adult", ["adult.data.gz", "adult.test.gz"], write_adult),
    "bank_marketing": ("bank-marketing", ["bank-full.csv.gz"], write_bank),
    "cifar10": (
        "cifar-10-binary",
        ["data_batch_1.bin", "data_batch_5.bin", "test_batch.bin"],
        write_cifar,
    ),
    "fashion_mnist": ("fashion-mnist", [IMAGES, LABELS, TEST_IMAGES, TEST_LABELS], write_idx),
    "imdb": ("imdb", [REVIEWS], write_imdb),
    "mnist": ("mnist", [IMAGES, LABELS, TEST_IMAGES, TEST_LABELS], write_idx),
    "shakespeare": ("shakespeare", [PLAYS], write_shakespeare),
}


# ---- absent ----------------------------------------------------------------------------------------------------------


def test_no_data_set_is_left_out_here() -> None:
    assert sorted(ABSENT) == sorted(
        name for name, source in DATASETS.items() if not source.embedded
    )


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_an_absent_data_set_says_which_files_to_put_where_and_there_they_are_found(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subfolder, files, write = ABSENT[name]
    sentence = refused(capsys, "--dataset", name, code=3)
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    assert sentence == f"dpfl: {caught.value}"
    assert f"data set '{name}'" in sentence
    assert all(file in caught.value.remedy for file in files)
    places = re.findall(r"/[^\s,;]+", caught.value.problem)
    assert places[0] == str(folder / subfolder)  # DPFL_DATA comes before the cache
    place = Path(places[0])
    place.mkdir(parents=True)
    write(place)
    assert len(load_dataset(name).labels) > 0


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_a_folder_given_is_the_only_one_looked_into(
    name: str, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subfolder, write = ABSENT[name][0], ABSENT[name][-1]
    for base in (folder, tmp_path / "cache" / "data"):
        (base / subfolder).mkdir(parents=True)
        write(base / subfolder)
    sentence = refused(capsys, "--dataset", name, "--data", str(tmp_path / "mine"), code=3)
    assert str(tmp_path / "mine" / subfolder) in sentence
    assert str(folder) not in sentence
    assert "cache" not in sentence


# ---- damaged ---------------------------------------------------------------------------------------------------------


def cut(path: Path, keep: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def cut_idx(folder: Path) -> None:
    write_idx(folder)
    cut(folder / TEST_IMAGES)


def idx_of_fewer_pixels_than_promised(folder: Path) -> None:
    write_idx(folder)
    content = gzip.decompress((folder / IMAGES).read_bytes())
    (folder / IMAGES).write_bytes(gzip.compress(content[:-28]))


def cut_cifar(folder: Path) -> None:
    write_cifar(folder)
    cut(folder / "data_batch_3.bin", 0.9)


def cut_packed_cifar(folder: Path) -> None:
    write_cifar(folder)
    path = folder / "test_batch.bin"
    (folder / "test_batch.bin.xz").write_bytes(lzma.compress(path.read_bytes())[:-20])
    path.unlink()


def mislabelled_cifar(folder: Path) -> None:
    write_cifar(folder)
    content = bytearray((folder / "data_batch_2.bin").read_bytes())
    content[5 * 3073] = 200
    (folder / "data_batch_2.bin").write_bytes(content)


def cut_adult(folder: Path) -> None:
    write_adult(folder)
    cut(folder / "adult.data.gz")


def cut_imdb(folder: Path) -> None:
    write_imdb(folder)
    cut(folder / REVIEWS)


def cut_shakespeare(folder: Path) -> None:
    write_shakespeare(folder)
    cut(folder / PLAYS)


def idx_without_test_records(folder: Path) -> None:
    write_idx(folder)
    (folder / TEST_IMAGES).write_bytes(idx(np.zeros((0, 28, 28), np.uint8)))
    (folder / TEST_LABELS).write_bytes(idx(np.zeros(0, np.uint8)))


# Data set, who spoils it, the file to be named (or another word of the sentence), and what it must
# say.
DAMAGED: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    "idx cut": ("mnist", cut_idx, TEST_IMAGES, "cannot be read"),
    "idx of fewer pixels than promised": (
        "mnist",
        idx_of_fewer_pixels_than_promised,
        IMAGES,
        "cannot be read",
    ),
    "idx of 27 rows": ("fashion_mnist", lambda f: write_idx(f, side=27), "27", "28"),
    "idx label 11": (
        "mnist",
        lambda f: write_idx(f, label=11),
        "label 11",
        "outside the 10 classes",
    ),
    "idx without test records": ("mnist", idx_without_test_records, "mnist", "test"),
    "cifar cut": (
        "cifar10",
        cut_cifar,
        "data_batch_3.bin",
        "no whole number of records of 3,073 bytes",
    ),
    "cifar packed and cut": (
        "cifar10",
        cut_packed_cifar,
        "test_batch.bin.xz",
        "cannot be unpacked",
    ),
    "cifar label 200": (
        "cifar10",
        mislabelled_cifar,
        "data_batch_2.bin",
        "label 200 of record 5 is outside the 10",
    ),
    "adult cut": ("adult", cut_adult, "adult.data.gz", "cannot be read"),
    "adult with a short row": (
        "adult",
        lambda f: write_adult(f, "39, Private, 3"),
        "adult.data.gz",
        "fetch",
    ),
    "adult with another label": (
        "adult",
        lambda f: write_adult(f, ADULT.replace("<=50K", "50K")),
        "adult.data.gz",
        "label '50K' is outside the classes <=50K, >50K",
    ),
    "adult with a word for an age": (
        "adult",
        lambda f: write_adult(f, f"old{ADULT[2:]}"),
        "adult.data.gz",
        "old",
    ),
    "bank with commas": (
        "bank_marketing",
        lambda f: write_bank(f, BANK[0].replace(";", ",")),
        "bank-full",
        "age",
    ),
    "bank without answers": (
        "bank_marketing",
        lambda f: write_bank(f, BANK[0][:-2]),
        "bank-full.csv.gz",
        "y",
    ),
    "bank cut in a row": (
        "bank_marketing",
        lambda f: write_bank(f, BANK[0], "58;management"),
        "bank-full",
        "fetch",
    ),
    "imdb cut": ("imdb", cut_imdb, REVIEWS, "cannot be unpacked"),
    "imdb with a rating of 5": (
        "imdb",
        lambda f: write_imdb(f, **{"aclImdb/train/pos/99_5.txt": b"so so"}),
        "99_5.txt",
        "rating from 7 to 10",
    ),
    "imdb without test reviews": (
        "imdb",
        lambda f: write_archive(
            f / REVIEWS, {"train/pos/1_9.txt": b"a", "train/neg/1_1.txt": b"b"}
        ),
        REVIEWS,
        "holds no review in test/neg",
    ),
    "shakespeare cut": ("shakespeare", cut_shakespeare, PLAYS, "cannot be unpacked"),
    "shakespeare without plays": (
        "shakespeare",
        lambda f: write_archive(f / PLAYS, {"moby/glossary": b"words"}),
        PLAYS,
        "holds no play",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_data_is_refused_by_its_file_in_one_sentence_from_both_doors(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, spoil, file, words = DAMAGED[case]
    place = folder / ABSENT[name][0]
    place.mkdir()
    spoil(place)
    sentence = refused(capsys, "--dataset", name, "--clients", "4", "--partition", "iid", code=3)
    assert file in sentence
    assert words in sentence
    if case != "idx without test records":  # which only its use refuses
        with pytest.raises(DataError) as caught:
            load_dataset(name)
        assert sentence == f"dpfl: {caught.value}"


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_the_same_data_undamaged_runs(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else everything above might be refused for another reason."""
    subfolder, _, write = ABSENT[name]
    (folder / subfolder).mkdir()
    write(folder / subfolder)
    text = name in ("imdb", "shakespeare")
    few = [] if name == "shakespeare" else ["--clients", "2", "--records", "6"]
    model = "lstm" if text else "logistic"
    client_settings = [
        "--model",
        model,
        "--batch-size",
        "2",
        "--local-steps",
        "1",
        "--rounds",
        "1",
        "--quiet",
    ]
    code = run_command(["run", "--method", "fedavg", "--dataset", name, *few, *client_settings])
    _, err = capsys.readouterr()
    assert code == 0, err


# ---- models and devices that do not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["lstm", "lstm_shakespeare"])
def test_a_model_of_tokens_on_numbers_ends_with_2(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, "--dataset", "digits", "--model", model, code=2)
    assert (
        f"model '{model}': reads tokens, and the data are numbers; choose one of alexnet, cnn,"
        in sentence
    )


@pytest.mark.parametrize("model", ["logistic", "cnn"])
@pytest.mark.parametrize("name", ["imdb", "shakespeare"])
def test_a_model_of_numbers_on_tokens_ends_with_2(
    name: str, model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subfolder, _, write = ABSENT[name]
    (folder / subfolder).mkdir()
    write(folder / subfolder)
    few = [] if name == "shakespeare" else ["--clients", "2"]
    sentence = refused(capsys, "--dataset", name, *few, "--model", model, code=2)
    assert (
        "reads numbers, and the data are tokens; choose one of lstm, lstm_shakespeare" in sentence
    )


def test_a_network_for_images_on_vectors_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "--dataset", "digits", "--model", "cnn", code=2)
    assert "model 'cnn': cannot take records of shape (64,)" in sentence


NO_DEVICE = {
    "nonsense": "nonsense",
    "cuda:99": "cuda",
    "meta": "meta",
    "": "device",
    "mps": "mps",
    "hpu": "hpu",
}


def one_that_is_not_here(device: str) -> str:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has mps")
    return device


@pytest.mark.parametrize(
    "device",
    NO_DEVICE,
)
def test_a_device_that_is_not_here_ends_with_2_before_any_data_is_read(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = one_that_is_not_here(device)
    sentence = refused(capsys, "--dataset", "mnist", "--device", name, code=2)
    assert f"device '{name}': cannot be used here" in sentence
    assert sentence.endswith("use cpu")
    with pytest.raises(ConfigurationError, match="cannot be used here"):
        make_engine("stacked", name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("command", ["run", "compare"])
def test_cuda_where_there_is_none_ends_with_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    method = ["--methods", "weiavg"] if command == "compare" else ["--method", "weiavg"]
    private = ["--budgets", "2", "--delta", "1e-3", "--clip", "1", "--rounds", "1"]
    code = run_command([command, *private, *method, "--dataset", "digits", "--device", "cuda"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "device 'cuda': cannot be used here" in err
    assert len(err.strip().splitlines()) == 1
    assert not list(Path().rglob("experiment.toml"))
