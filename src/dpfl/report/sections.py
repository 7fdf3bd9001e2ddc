"""The page's parts as HTML: everything that comes from data is escaped here, once."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpfl.core.version import __version__
from dpfl.experiments.ranking import Standing, grouped, remarks
from dpfl.privacy.accountant import shown
from dpfl.report import words
from dpfl.report.charts import Chart
from dpfl.report.reading import Case, Material, ReadRun

FOLDED = 25  # accounts that are shown without being asked for
GRAVE = ("NOT PRIVATE", "HYPOTHETICAL", "FALSE CLAIMS")


def text(value: object) -> str:
    """Escape; a name may hold anything."""
    return html.escape(str(value), quote=True)


def paragraph(sentence: str) -> str:
    """One sentence or several, escaped."""
    return f"<p>{text(sentence)}</p>"


def bullet_list(sentences: Iterable[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{text(sentence)}</li>" for sentence in sentences) + "</ul>"


def tile(fact: str, value: object, shown_as: str, label: str) -> str:
    """A number worth a glance; the exact value stays readable for a machine."""
    return (
        f'<div class="tile"><b data-fact="{text(fact)}" data-value="{text(value)}">{text(shown_as)}</b>'
        f"<span>{text(label)}</span></div>"
    )


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    name: str,
    words_first: int = 1,
    kinds: Sequence[str] = (),
) -> str:
    """A sortable table; a cell is a text, or (shown, value)."""
    head = "".join(
        f'<th class="{"name" if i < words_first else "number"}">{text(h)}</th>'
        for i, h in enumerate(headings)
    )
    lines = []
    for number, row in enumerate(rows):
        cells = []
        for i, cell in enumerate(row):
            seen, value = cell if isinstance(cell, tuple) else (cell, None)
            kept = "" if value is None else f' data-value="{text(value)}"'
            cells.append(
                f'<td class="{"name" if i < words_first else "number"}"{kept}>{text(seen)}</td>'
            )
        kind = f' class="{kinds[number]}"' if kinds and kinds[number] else ""
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    filtered = (
        f'<input class="filter" data-table="{text(name)}" placeholder="find a name" aria-label="find a name">'
        if len(rows) > FOLDED
        else ""
    )
    body = f'<table id="{text(name)}" class="sortable"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'{filtered}<div class="scroll">{body}</div>'


def figures(charts: Sequence[Chart]) -> str:
    """Places for figures, each with what it shows and how to read it."""
    if not charts:
        return ""
    drawn = "".join(
        f'<figure><h3>{text(chart.title)}</h3><div class="plot" id="figure-{text(chart.name)}" role="img" '
        f'aria-label="{text(chart.title)}"></div><figcaption>{text(chart.caption)}</figcaption></figure>'
        for chart in charts
    )
    return f'<div class="figures">{drawn}</div>'


def stamps_of(material: Material) -> str:
    """What must stand on top, with whose it is where not everyone's."""
    owners: dict[str, list[str]] = {}
    labels = {label for case in material.cases for label in case.methods}
    for case in material.cases:
        for label, runs in case.methods.items():
            for stamp in runs[0].summary.get("stamps", ()):
                if label not in owners.setdefault(stamp, []):
                    owners[stamp].append(label)
    lines = []
    for stamp, own in sorted(owners.items(), key=lambda pair: not pair[0].startswith(GRAVE)):
        mild = "" if stamp.startswith(GRAVE) else " mild"
        whose = "" if len(own) == len(labels) else f" [{', '.join(own)}]"
        lines.append(f'<div class="stamp{mild}">{text(stamp + whose)}</div>')
    return "".join(lines)


# -- the parts -------------------------------------------------------------------------------------


def summary_part(material: Material) -> str:
    """What a board member reads first."""
    run = material.single
    if run is not None:
        return "<h2>In short</h2>" + stamps_of(material) + _one_run(run)
    first = material.runs[0]
    several = f"{len(material.cases)} cases" if len(material.cases) > 1 else "one federation"
    lead = (
        f"{len(material.cases[0].methods)} method(s) on {several} of {first.summary['clients']} clients, "
        f"{_seeds(material)} seed(s), {first.rounds} rounds each. "
        "Methods are ranked only against those that promise the same."
    )
    body = "<h2>In short</h2>" + stamps_of(material) + paragraph(lead)
    if material.tuning:
        body += paragraph(material.tuning)
    if len(material.cases) == 1:
        body += _standings(material.cases[0])
    else:
        body += _sweep_table(material)
    return body


def _seeds(material: Material) -> int:
    return len({run.seed for run in material.runs})


def _one_run(run: ReadRun) -> str:
    told = run.summary
    spent, granted = told["epsilon"].get("spent"), told["epsilon"].get("budget")
    sentences = [
        f"{told['clients']} sites trained one model together by the method '{run.method}', in {told['rounds']['done']} of "
        f"{told['rounds']['planned']} rounds.",
        words.promise(told),
    ]
    if spent and granted and told["observer"] != "nobody":
        sentences.append(
            f"The sites granted an epsilon between {_epsilon(granted['smallest'])} and {_epsilon(granted['largest'])}, and "
            f"spent between {_epsilon(spent['smallest'])} and {_epsilon(spent['largest'])}."
        )
        largest = [line for line in told["statements"] if line["epsilon"] == spent["largest"]]
        if isinstance(spent["largest"], int | float) and largest:
            sentences.append(words.meaning(told, float(spent["largest"]), largest[0]["delta"]))
    left = told["clients_left"]
    if left:
        sentences.append(
            f"{len(left)} site(s) left when their budget was spent; nothing was taken from them afterwards."
        )
    if told["rounds"]["ended_early"]:
        sentences.append(f"Training ended early, {told['rounds']['ended_early']}.")
    tiles = [
        tile(
            "accuracy",
            told["accuracy"],
            f"{100 * told['accuracy']:.1f} %",
            "test accuracy (a simulator's knowledge)",
        )
    ]
    for name, spread in (("spent", spent), ("budget", granted)):
        if spread:
            tiles.append(
                tile(
                    f"{name}-median",
                    spread["median"],
                    _epsilon(spread["median"]),
                    f"epsilon {name}, median over sites",
                )
            )
    if spent:
        tiles.append(
            tile(
                "spent-largest",
                spent["largest"],
                _epsilon(spent["largest"]),
                "epsilon spent, most of any site",
            )
        )
    tiles.append(
        tile(
            "clients-left",
            len(left),
            f"{len(left)} of {told['clients']}",
            "sites whose budget ran out",
        )
    )
    tiles.append(tile("bytes-up", told["bytes_up"], _bytes(told["bytes_up"]), "sent by all sites"))
    return "".join(map(paragraph, sentences)) + f'<div class="tiles">{"".join(tiles)}</div>'


def _standings(case: Case) -> str:
    found = ""
    for unit, mine in grouped(case.standings()).items():
        rows, kinds = [], []
        for one in mine:
            rows.append(_standing_row(one))
            kinds.append("reference" if one.reference else "best" if one.best else "")
        headings = (
            "method",
            "accuracy, %",
            "behind",
            "p",
            "against",
            "epsilon, median",
            "epsilon, largest",
            "left",
            "up",
        )
        found += f"<h3>Protecting a {text(unit)}</h3>" + table(
            headings, rows, name=f"standings-{unit}", kinds=kinds
        )
        meanings = sorted({str(one.promise) for one in mine if one.runs[0].protects})
        found += "".join(
            f'<p class="note">Epsilon: {text(meaning)}; means over seeds.</p>'
            for meaning in meanings
        )
        found += "".join(f'<p class="note">{text(remark)}.</p>' for remark in remarks(mine))
    return found + (
        '<p class="note">Accuracy: mean and standard deviation over seeds. Behind: points below the best of those that '
        "promise the same. p: paired t-test against it with Holm's adjustment; with few seeds only large differences show. "
        "Each run is billed alone: publishing more than one of them on the same data adds up.</p>"
    )


def _standing_row(one: Standing) -> list[object]:
    spread = f" ± {100 * statistics.stdev(one.accuracies):.1f}" if len(one.accuracies) > 1 else ""
    spent = [run.epsilon.spent.to_dict() if run.epsilon else None for run in one.runs]
    epsilons = [_mean_epsilon([s[key] for s in spent if s]) for key in ("median", "largest")]
    return [
        one.label,
        (f"{100 * one.mean:.1f}{spread}", one.mean),
        "reference" if one.reference else "best" if one.best else "-" if one.behind is None or (one.p_value is None
        and one.behind == 0) else (f"{100 * one.behind:.1f}", one.behind),
        "-" if one.p_value is None else (f"{one.p_value:.2g}", one.p_value),
        one.against,
        *epsilons,
        f"{statistics.mean(run.clients_left for run in one.runs):g}/{one.runs[0].clients}",
        (_bytes(statistics.mean(r.bytes_up for r in one.runs)), statistics.mean(r.bytes_up for r in one.runs)),
    ]  # fmt: skip


def _mean_epsilon(values: list[Any]) -> object:
    numbers = [value for value in values if isinstance(value, int | float)]
    if not values or len(numbers) < len(values):
        return "infinite" if values else "-"
    mean = statistics.mean(numbers)
    return shown(mean), mean


def _sweep_table(material: Material) -> str:
    found = ""
    ranked = [case.standings() for case in material.cases]
    for unit, mine in grouped(ranked[0]).items():
        labels = [one.label for one in mine]
        rows = []
        for case, lines in zip(material.cases, ranked, strict=True):
            by_label = {one.label: one for one in lines}
            cells = [
                (
                    f"{100 * by_label[label].mean:.1f}{'*' if by_label[label].best else ''}",
                    by_label[label].mean,
                )
                for label in labels
            ]
            rows.append([*(str(value) for value in case.values.values()), *cells])
        fields = len(material.varied)
        found += f"<h3>Protecting a {text(unit)}: accuracy, %</h3>"
        found += table([*material.varied, *labels], rows, name=f"sweep-{unit}", words_first=fields)
    return found + '<p class="note">Means over seeds; * best of those that promise the same.</p>'


def accounts_part(material: Material, charts: Sequence[Chart]) -> str:
    """Who granted and spent what."""
    body = "<h2>What each site granted and spent</h2>"
    case = material.cases[0]
    if len(material.cases) > 1:
        body += paragraph(f"Of the first case: {_case_words(case)}.")
    by_name = {chart.name: chart for chart in charts}
    for label, runs in case.methods.items():
        run, lines = runs[0], runs[0].summary["statements"]
        if not lines or run.summary["observer"] == "nobody":
            continue
        chart = by_name.get(f"epsilon-{label}")
        rows = [_account(line) for line in lines]
        headings = ("site", "rounds", "epsilon spent", "budget", "delta", "accountant")
        inside = figures([chart] if chart else []) + table(headings, rows, name=f"accounts-{label}")
        inside += (
            f'<p class="note">{text(words.promise(run.summary))} Seed {run.seed}; rounded up.</p>'
        )
        opened = " open" if len(case.methods) == 1 else ""
        body += f"<details{opened}><summary>{text(label)}</summary>{inside}</details>"
    return body


def _case_words(case: Case) -> str:
    return ", ".join(f"{name} = {value}" for name, value in case.values.items())


def _account(line: Mapping[str, Any]) -> list[object]:
    granted = "-" if line["budget"] is None else (_epsilon(line["budget"]), line["budget"])
    delta = "-" if line["delta"] is None else f"{line['delta']:g}"
    return [
        line["account"],
        (str(line["rounds"]), line["rounds"]),
        (_epsilon(line["epsilon"]), line["epsilon"]),
        granted,
        delta,
        line["accountant"],
    ]


def outcome_part(charts: Sequence[Chart]) -> str:
    """What came out."""
    return "<h2>Accuracy</h2>" + figures(charts)


def details_part(charts: Mapping[str, Sequence[Chart]]) -> str:
    """What happened inside each method."""
    opened = " open" if len(charts) == 1 else ""
    return "<h2>Inside the methods</h2>" + "".join(
        f"<details{opened}><summary>{text(label)}</summary>{figures(own)}</details>"
        for label, own in charts.items()
    )


def cost_part(charts: Sequence[Chart]) -> str:
    """Bytes and seconds."""
    return "<h2>Cost</h2>" + figures(charts)


def guarantees_part(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Guarantees, assumptions and limits, in words."""
    body = "<h2>What is guaranteed, and on what it rests</h2>" + bullet_list(words.GUARANTEES)
    alike: dict[tuple[str, ...], list[str]] = {}
    for label, told in summaries.items():
        alike.setdefault((words.promise(told), *told["assumptions"]), []).append(label)
    for (said, *assumed), labels in alike.items():
        body += f"<h3>{text(', '.join(labels))}</h3>" + paragraph(said) + bullet_list(assumed)
    return body + "<h3>Not covered</h3>" + bullet_list(words.LIMITS)


def experiment_part(experiments: Mapping[str, str], command: str) -> str:
    """How to run it again."""
    blocks = "".join(
        f"<details><summary>{text(label)}</summary><pre>{text(toml)}</pre></details>"
        for label, toml in experiments.items()
    )
    say = f"Save an experiment as experiment.toml and run: {command}. The same file gives the same model, ledger and metrics."
    return (
        "<h2>The exact experiment</h2>"
        + paragraph(say)
        + blocks
        + paragraph(f"Written by dpfl {__version__}.")
    )


def progress_part(run: ReadRun) -> str:
    """Where a run that goes on has got to."""
    done = len(run.history)
    last = next((line["accuracy"] for line in reversed(run.history) if "accuracy" in line), None)
    tiles = [tile("rounds-done", done, f"{done} of {run.rounds}", "rounds done")]
    if last is not None:
        tiles.append(
            tile(
                "accuracy",
                last,
                f"{100 * last:.1f} %",
                "test accuracy so far (a simulator's knowledge)",
            )
        )
    up = sum(line.get("bytes_up", 0) for line in run.history)
    tiles.append(tile("bytes-up", up, _bytes(up), "sent by all sites"))
    if run.timings:
        pace = statistics.mean(line["seconds"] for line in run.timings[-10:])
        tiles.append(
            tile(
                "seconds-left",
                pace * (run.rounds - done),
                _seconds(pace * (run.rounds - done)),
                "to go, about",
            )
        )
    seeded = "NOT PRIVATE: SEEDED (anyone who knows the seed can subtract the noise; for simulations only)"
    stamp = (
        f'<div class="stamp">{seeded}</div>' if run.experiment["run"]["noise"] == "seeded" else ""
    )
    return (
        f"<h2>{text(run.method)}, going on</h2>{stamp}<progress max='{run.rounds}' value='{done}'></progress>"
        f'<div class="tiles">{"".join(tiles)}</div>'
        + paragraph(
            "What each site has spent is stated at the end; at any time by dpfl account --ledger on the run's ledger."
        )
    )


def _epsilon(value: Any) -> str:
    return "infinite" if value == "infinite" else shown(float(value))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _seconds(count: float) -> str:
    return (
        f"{count:.0f} s"
        if count < 90
        else f"{count / 60:.0f} min"
        if count < 5400
        else f"{count / 3600:.1f} h"
    )
