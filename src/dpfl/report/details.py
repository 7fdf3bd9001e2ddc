"""Figures of what happens inside the methods: weights, noise, subspaces, spectra, smoothness."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpfl.report.charts import MANY, Chart, Heat, Series, Values, chosen, wide
from dpfl.report.reading import Material, ReadRun


def detail_charts(material: Material) -> dict[str, list[Chart]]:
    """By method, of the first seed; a method of which nothing is told has none."""
    makers = (
        weights,
        noise_left,
        noise_estimates,
        subspace,
        spectra,
        smoothness,
        central_noise,
        channel,
    )
    found = {}
    for label, run in chosen(material.cases[0]).items():
        charts = [chart for maker in makers for chart in maker(label, run)]
        if charts:
            found[label] = charts
    return found


def _by_grant(run: ReadRun, clients: Sequence[str]) -> list[str]:
    granted = {line["account"]: line["budget"] for line in run.summary.get("statements", [])}
    return sorted(clients, key=lambda client: (granted.get(client) or 0.0, client))


def _axis(clients: Sequence[str]) -> tuple[Values, str]:
    if len(clients) <= MANY:
        return list(clients), "client"
    return list(range(1, len(clients) + 1)), "clients, by what they granted"


def _means(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each client's mean over the rounds it appears in."""
    sums: dict[str, list[float]] = {}
    for line in lines:
        for client, value in line.items():
            sums.setdefault(client, []).append(value)
    return {client: statistics.mean(values) for client, values in sums.items()}


def weights(label: str, run: ReadRun) -> list[Chart]:
    """What each client's update weighed, beside the weights that would have left the least noise."""
    mean = _means(
        [line["weights"] for line in run.history if isinstance(line.get("weights"), dict)]
    )
    oracle = _means(
        [
            line["simulated_truth"]["oracle_weights"]
            for line in run.history
            if "oracle_weights" in line.get("simulated_truth", {})
        ]
    )
    if not mean or all(
        max(own.values()) < 1.0001 * min(own.values()) for own in (mean, oracle) if own
    ):
        return []  # equal weights need no picture
    clients = _by_grant(run, list(mean))
    x, axis = _axis(clients)
    series = [
        Series(name="weight", x=x, y=[mean[c] for c in clients], text=list(clients), kind="points")
    ]
    if oracle:
        least = [oracle.get(c) for c in clients]
        series.insert(
            0,
            Series(
                name="least noise (a simulator's knowledge)",
                x=x,
                y=least,
                text=clients,
                kind="rings",
            ),
        )
    return [
        Chart(
            name=f"weights-{label}",
            title=f"{label}: weights",
            x_label=axis,
            y_label="weight, mean over rounds",
            caption="Clients from the smallest to the largest grant."
            + (
                " The least noise is left by weights that go with the inverse of the true noise."
                if oracle
                else ""
            ),
            series=series,
            log_y=wide([*mean.values(), *oracle.values()]),
            part=label,
        )
    ]


def noise_left(label: str, run: ReadRun) -> list[Chart]:
    """How much more noise than necessary the aggregate carried, round by round."""
    truths = [(line["round"] + 1, line.get("simulated_truth", {})) for line in run.history]
    points = [
        (round_, truth["aggregate_noise_variance"] / truth["least_noise_variance"])
        for round_, truth in truths
        if "aggregate_noise_variance" in truth and truth["least_noise_variance"] > 0
    ]
    if not points:
        return []
    rounds = [round_ for round_, _ in points]
    ratios = [ratio for _, ratio in points]
    return [
        Chart(
            name=f"noise-left-{label}",
            title=f"{label}: noise in the aggregate",
            x_label="round",
            y_label="times the least possible",
            caption="Variance of the noise in the weighted mean over the least that any weights could leave; 1 is perfect.",
            series=[Series(name=label, x=list(rounds), y=list(ratios))],
            log_y=max(ratios) > 20,
            part=label,
        )
    ]


def noise_estimates(label: str, run: ReadRun) -> list[Chart]:
    """Robust-HDP: what the server made of the rows, beside what was really added."""
    estimates: dict[str, list[float]] = {}
    truths: dict[str, list[float]] = {}
    for line in run.history:
        found = line.get("weights_metrics", {}).get("estimated_noise")
        truth = line.get("simulated_truth", {}).get("noise_variance")
        if found and truth:
            for client, value in zip(line["weights"], found, strict=False):
                estimates.setdefault(client, []).append(value)
                truths.setdefault(client, []).append(truth[client])
    if not estimates:
        return []
    clients = sorted(estimates)
    true = [statistics.mean(truths[c]) for c in clients]
    seen = [statistics.mean(estimates[c]) for c in clients]
    ends = [min(true), max(true)]
    scale = statistics.median(s / t for s, t in zip(seen, true, strict=True) if t > 0)
    return [
        Chart(
            name=f"noise-estimates-{label}",
            title=f"{label}: estimated and true noise",
            x_label="true noise variance",
            y_label="estimated",
            caption="A point a client, means over rounds. Only ratios between clients matter: the dashed line "
            f"is {scale:.3g} times the truth.",
            series=[
                Series(
                    name="clients", x=list(true), y=list(seen), text=list(clients), kind="points"
                ),
                Series(
                    name="in proportion",
                    x=list(ends),
                    y=[scale * end for end in ends],
                    kind="dashes",
                ),
            ],
            log_x=True,
            log_y=True,
            part=label,
        )
    ]


def _by_round(run: ReadRun, slot: str, names: Mapping[str, str]) -> list[Series]:
    series = []
    for key, name in names.items():
        points = [
            (line["round"] + 1, line[slot][key])
            for line in run.history
            if isinstance(line.get(slot, {}).get(key), int | float)
        ]
        if points:
            series.append(
                Series(name=name, x=[r for r, _ in points], y=[float(v) for _, v in points])
            )
    return series


def subspace(label: str, run: ReadRun) -> list[Chart]:
    """PFA: how much of the updates lies in the public subspace, and the spectrum it was taken from."""
    names = {"private_energy_kept": "private updates", "public_energy_kept": "public updates"}
    series = _by_round(run, "clean_metrics", names)
    charts = []
    if series:
        charts.append(
            Chart(
                name=f"subspace-{label}",
                title=f"{label}: energy inside the public subspace",
                x_label="round",
                y_label="share of the squared norm",
                caption="What a projection keeps. Noise spreads over all directions, so almost none of it is kept.",
                series=series,
                log_y=True,
                part=label,
            )
        )
    last = next(
        (line["clean_metrics"] for line in reversed(run.history) if _spectra_of(line, "/spectrum")),
        None,
    )
    if last:
        charts.append(
            Chart(
                name=f"public-spectrum-{label}",
                title=f"{label}: spectrum of the public updates",
                x_label="direction",
                y_label="singular value, share of the largest",
                caption="Of the last round, tensor by tensor; the first k directions are kept.",
                series=[
                    Series(
                        name=name, x=list(range(1, len(values) + 1)), y=list(values), kind="line"
                    )
                    for name, values in _spectra_of({"clean_metrics": last}, "/spectrum").items()
                ],
                log_y=True,
                part=label,
            )
        )
    return charts


def _spectra_of(line: Mapping[str, Any], ending: str) -> dict[str, list[float]]:
    told = line.get("clean_metrics", {}) or line.get("denoise0_metrics", {})
    return {key.removesuffix(ending): value for key, value in told.items() if key.endswith(ending)}


def spectra(label: str, run: ReadRun) -> list[Chart]:
    """FedCEO: singular values of the stacks against the threshold they had to exceed, of the last
    smoothing.
    """
    last = next(
        (line for line in reversed(run.history) if _spectra_of(line, "/singular_values")), None
    )
    if last is None:
        return []
    told = last.get("clean_metrics", {}) or last.get("denoise0_metrics", {})
    series = []
    for name, values in _spectra_of(last, "/singular_values").items():
        slices = int(told[f"{name}/slices"])
        each = len(values) // slices
        first = values[:each]
        series.append(
            Series(name=f"{name}, first slice", x=list(range(1, each + 1)), y=list(first))
        )
        level = told[f"{name}/threshold"]
        series.append(
            Series(name=f"{name}, threshold", x=[1, each], y=[level, level], kind="dashes")
        )
    return [
        Chart(
            name=f"spectrum-{label}",
            title=f"{label}: spectrum and threshold, round {last['round'] + 1}",
            x_label="direction",
            y_label="singular value",
            caption="What is below the dashed line is taken away; what is above loses as much. "
            "The first slice is the sum over clients.",
            series=series,
            part=label,
        )
    ]


def smoothness(label: str, run: ReadRun) -> list[Chart]:
    """FedCEO's Figure 1: how far each client's weights of each class are from the others', before
    and after.
    """
    last = next(
        (
            line
            for line in reversed(run.history)
            if "smoothness_map_before" in line.get("clean_metrics", {})
        ),
        None,
    )
    if last is None:
        return []
    clients = list(last["arrived"])
    charts = []
    for when in ("before", "after"):
        flat = last["clean_metrics"][f"smoothness_map_{when}"]
        classes = len(flat) // len(clients)
        rows = [
            flat[number * len(clients) : (number + 1) * len(clients)] for number in range(classes)
        ]
        charts.append(
            Chart(
                name=f"smoothness-{when}-{label}",
                title=f"{label}: roughness {when} smoothing, round {last['round'] + 1}",
                x_label="client",
                y_label="class",
                caption="Mean squared distance of a client's weights of a class from the others'; small is smooth.",
                heat=Heat(x=clients, y=[str(number) for number in range(classes)], z=rows),
                part=label,
            )
        )
    return charts


def central_noise(label: str, run: ReadRun) -> list[Chart]:
    """The server's own noise beside the update it hides, before and after smoothing."""
    series = _by_round(
        run, "noise_metrics", {"norm": "noise", "norm_after": "noise after smoothing"}
    )
    if not series:
        return []
    updates = [
        (line["round"] + 1, line["update_norm"]) for line in run.history if "update_norm" in line
    ]
    series.append(
        Series(name="update, noise included", x=[r for r, _ in updates], y=[v for _, v in updates])
    )
    return [
        Chart(
            name=f"central-noise-{label}",
            title=f"{label}: noise and update",
            x_label="round",
            y_label="norm",
            caption="Where the update is no longer than the noise in it, a round teaches little.",
            series=series,
            log_y=True,
            part=label,
        )
    ]


def channel(label: str, run: ReadRun) -> list[Chart]:
    """Over the air: the weakest client's gain and the noise that arrived."""
    names = {"noise_multiplier_of_all": "noise over signal", "weakest_gain": "weakest gain"}
    series = _by_round(run, "channel_metrics", names)
    if not series:
        return []
    return [
        Chart(
            name=f"channel-{label}",
            title=f"{label}: the channel",
            x_label="round",
            y_label="ratio",
            caption="Noise of all clients and the receiver over one client's signal; the weakest gain that was heard.",
            series=series,
            log_y=True,
            part=label,
        )
    ]
