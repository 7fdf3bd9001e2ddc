"""Folders: ledgers, checkpoints, run folders, results and models that somebody has changed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, strategies as st
from safetensors.torch import load, save

from dpfl.core.random import PublicSeed
from dpfl.experiments.results import StudyResult
from dpfl.models import make_model
from dpfl.models.pretrained import load_weights
from dpfl.runs.folder import tensors_digest
from tests.fuzz import examples
from tests.fuzz.doors import GIVEN, command, enter, fresh
from tests.fuzz.ledgers import change_ledger
from tests.fuzz.mutations import altered, as_csv, as_json, as_lines, damaged, files

# -- ledgers ---------------------------------------------------------------------------------------


@given(st.data())
def test_ledgers(data: st.DataObject) -> None:
    path = fresh(examples.finished_run()) / "ledger.sqlite"
    change_ledger(data, path)
    enter("dpfl ledger verify", command("ledger", "verify", path))
    enter("dpfl account --ledger", command("account", "--ledger", path, "--page", GIVEN / "p.html"))


@given(st.data())
def test_ledgers_that_are_written_to(data: st.DataObject) -> None:
    path = fresh(examples.interrupted_run()) / "ledger.sqlite"
    change_ledger(data, path)
    enter("dpfl run --resume, ledger", command("run", "--resume", GIVEN, "--quiet"))


@given(st.data())
def test_ledgers_of_sites(data: st.DataObject) -> None:
    folder = fresh(examples.federation()) / "a"
    change_ledger(data, folder / "ledger.sqlite")
    enter("dpfl site spend", command("site", "spend", folder, "--page", GIVEN / "p.html"))
    enter("dpfl site status", command("site", "status", folder))


# -- tensors ---------------------------------------------------------------------------------------


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its numbers."""
    (size,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def tensors(content: bytes) -> st.SearchStrategy[bytes]:
    """A safetensors file, damaged or with another header."""
    header, numbers = parts(content)

    def written(told: Any) -> bytes:
        text = as_json(told)
        return struct.pack("<Q", len(text)) + text + numbers

    return st.one_of(altered(header).map(written), damaged(content), forged(content))


@st.composite
def forged(draw: Any, content: bytes) -> bytes:
    """A safetensors file with other metadata, or another model, and a digest that fits."""
    told, found = dict(parts(content)[0].get("__metadata__", {})), load(content)
    if told and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(told)))
        told[key] = draw(
            st.one_of(st.text(max_size=9), st.sampled_from(["-1", "[1]", "{}", "9" * 99]))
        )
    else:
        name = draw(st.sampled_from(sorted(found)))
        tensor = found.pop(name)
        kinds = [torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8, tensor.dtype]
        tensor = tensor.to(draw(st.sampled_from(kinds)))
        shapes = [tensor, tensor.flatten(), tensor[:0], tensor.reshape(1, -1), tensor.flatten()[0]]
        tensor = draw(st.sampled_from([*shapes, torch.zeros(0)])).clone()
        found[draw(st.sampled_from([name, name, "", "x", "../x", "a/b/c"]))] = tensor
    digest = {"sha256": tensors_digest(found)} if "sha256" in told else {}
    return save(found, metadata={**told, **digest})


@given(st.data())
def test_checkpoints(data: st.DataObject) -> None:
    path = fresh(examples.interrupted_run()) / "checkpoint" / "state.safetensors"
    path.write_bytes(data.draw(tensors(path.read_bytes())))
    enter("checkpoint", command("run", "--resume", GIVEN, "--quiet"))


@given(st.data())
def test_models(data: st.DataObject) -> None:
    folder = fresh(examples.finished_run())
    card, model = folder / "model.json", folder / "model.safetensors"
    if data.draw(st.booleans()):
        card.write_bytes(data.draw(files(json.loads(card.read_text()), as_json)))
    else:
        model.write_bytes(data.draw(tensors(model.read_bytes())))
    records = folder / "new.csv"
    names = ",".join(f"x{n}" for n in range(64))
    records.write_text(f"{names}\n{','.join(['0.5'] * 64)}\n")
    out = ["--out", folder / "predictions.csv"] if data.draw(st.booleans()) else ["--probabilities"]
    enter("dpfl predict", command("predict", folder, records, *out))


@given(st.data())
def test_records_to_predict(data: st.DataObject) -> None:
    folder = fresh(examples.finished_run())
    records = folder / "new.csv"
    cells = [[f"x{n}" for n in range(64)], [0.5] * 64, [1] * 64]
    records.write_bytes(data.draw(files(cells, as_csv)))
    enter("records to predict", command("predict", folder, records))


@given(st.data())
def test_weights(data: st.DataObject) -> None:
    whole = (examples.finished_run() / "model.safetensors").read_bytes()
    path = fresh() / "weights.safetensors"
    path.write_bytes(data.draw(tensors(whole)))
    model = make_model("logistic", (64,), 10, PublicSeed(0))
    enter("public weights", lambda: load_weights(model, path))


# -- what runs leave behind ------------------------------------------------------------------------


def change_file(data: st.DataObject, path: Path) -> None:
    """Change a file of JSON, of lines of JSON, or of bytes."""
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        lines = [*map(json.loads, content.splitlines())]
        path.write_bytes(data.draw(files(lines, as_lines)))
    elif path.suffix == ".json":
        path.write_bytes(data.draw(files(json.loads(content), as_json)))
    else:
        path.write_bytes(data.draw(damaged(content)))


RUN_FILES = ["rounds.jsonl", "timings.jsonl", "summary.json", "experiment.toml", "model.json"]


@given(st.data())
def test_finished_runs(data: st.DataObject) -> None:
    folder = fresh(examples.finished_run())
    change_file(data, folder / data.draw(st.sampled_from(RUN_FILES)))
    options = data.draw(st.sampled_from([[], ["--public"]]))
    enter("dpfl report", command("report", folder, *options))
    enter("dpfl run --resume", command("run", "--resume", folder, "--quiet"))


@given(st.data())
def test_interrupted_runs(data: st.DataObject) -> None:
    folder = fresh(examples.interrupted_run())
    change_file(data, folder / data.draw(st.sampled_from(["rounds.jsonl", "timings.jsonl"])))
    enter("dpfl run --resume", command("run", "--resume", folder, "--quiet"))


@given(st.data())
def test_results(data: st.DataObject) -> None:
    folder = fresh(examples.comparison())
    change_file(data, folder / "results" / "results.json")

    def shown() -> None:
        result = StudyResult.read(folder / "results")
        assert str(result)
        result.to_pandas()

    enter("results.json", shown)
    enter("dpfl report of results", command("report", folder / "results"))
    method = [
        "--methods",
        "weiavg",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--quiet",
        "--kept",
        folder / "kept",
    ]
    tuned = command(
        "compare", folder / "e.toml", "--tuned", folder / "results", *method, "--out", folder / "o"
    )
    enter("dpfl compare --tuned", tuned)


# -- what deployments leave behind -----------------------------------------------------------------


@given(st.data())
def test_folders_of_sites(data: st.DataObject) -> None:
    folder = fresh(examples.federation()) / "a"
    names = [
        "receipts.jsonl",
        "sent.jsonl",
        "token",
        "identity.key",
        "site.toml",
        "ledger.sqlite.head",
    ]
    names += sorted(str(path.relative_to(folder)) for path in folder.glob("models/*/*"))
    change_file(data, folder / data.draw(st.sampled_from(names)))
    for verb in ("status", "spend", "identity", "evaluate"):
        enter(f"dpfl site {verb}", command("site", verb, folder))


@given(st.data())
def test_folders_of_servers(data: st.DataObject) -> None:
    folder = fresh(examples.federation()) / "server"
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.suffix)
    change_file(data, folder / data.draw(st.sampled_from(names)))
    enter("dpfl server status", command("server", "status", folder))
