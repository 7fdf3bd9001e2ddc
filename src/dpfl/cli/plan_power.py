"""``dpfl plan-power``: how many directions, and how much of each client's power for noise, before
anybody transmits.

Printed are the number of directions, the noise and the bound on the optimality gap for a target
epsilon, or the curves of the paper's figures. Nothing is trained.
"""

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpfl.cli import options as o
from dpfl.cli.console import epsilon_text, print_facts, print_json, print_table
from dpfl.core.checks import check, one_of

MOST_LINES = 12


def plan_power(
    parameters: int = o.opt("Parameters of the model (d).", ...),
    rounds: int = o.opt("Rounds.", ...),
    delta: float = o.opt("Delta; with --accounting paper, of one round.", ...),
    epsilon: float | None = o.opt("What all rounds may cost a client."),
    gains: Path | None = o.opt("CSV with the columns id,gain; or --clients."),
    clients: int | None = o.opt("Draw this many Rayleigh gains instead."),
    seed: int = o.opt("Seed of drawn gains.", 0),
    accounting: str = o.opt("tight, or paper (linear composition).", "tight"),
    adjacency: str = o.opt("replace_one or zero_out.", "replace_one"),
    projection: str = o.opt("gaussian, achlioptas, fourier, ...", "rademacher"),
    power: float = o.opt("Average power of a client.", 1.0),
    clip: float = o.opt("Largest norm of a gradient.", 1.0),
    strong_convexity: float = o.opt("Of the loss, for the bound.", 1e-3),
    figures: bool = o.flag("--curves", "Write the paper's curves as JSON."),
    json: bool = o.JSON,
) -> None:
    """Plan a static over-the-air channel: the dimension to project onto, the power split, and the
    bound of Theorem 3.

    Gains are measured (--gains) or drawn (--clients). A target that no plan reaches is refused,
    with the smallest epsilon that is feasible.
    """
    from dpfl.experiments import power as library
    from dpfl.experiments import power_curves

    one = (gains is None) != (clients is None)
    check(one, "gains", "need either --gains or --clients", "give one of the two")
    named = power_curves.read_gains(gains) if gains else power_curves.draw_gains(clients or 0, seed)
    known = list(named.values())
    if figures:
        print_json(power_curves.paper_curves(known, parameters, rounds, delta, strong_convexity))
        return
    check(epsilon is not None, "--epsilon", "is missing", "say what all rounds may cost a client")
    one_of("--accounting", ("tight", "paper"), accounting=accounting)
    settings: dict[str, Any] = {"accounting": accounting, "adjacency": adjacency}
    settings |= {"kind": projection, "power": power, "clip": clip}
    settings["strong_convexity"] = strong_convexity
    target = epsilon or 0.0
    found = library.plan_power(known, parameters, rounds, target, delta, **settings)
    shares = dict(zip(named, found.artificial, strict=True))
    if json:
        meaning = {"unit": "client", "observer": "server", "adjacency": adjacency, "delta": delta}
        print_json({**asdict(found), "artificial": shares, **meaning, "composition": accounting})
        return
    mean, most = 100 * statistics.mean(found.artificial), 100 * max(found.artificial)
    uses = f"({found.dimension} channel uses a round)"
    facts = {
        "project onto": f"{found.dimension} of {parameters} numbers {uses}",
        "epsilon": f"{epsilon_text(found.epsilon)} (target {epsilon:g})",
        "meaning": f"per client, {adjacency} adjacency, against the server",
        "composition": accounting,
        "noise / signal": f"{found.noise_multiplier:.4g}",
        "bound (Theorem 3)": f"{found.bound:.6g}",
        "power for noise": f"{mean:.1f} % on average, most {most:.1f} %",
    }
    print_facts(facts)
    if len(named) <= MOST_LINES:
        signal = [100 * (min(known) / gain) ** 2 for gain in known]
        rows = [
            [client, f"{gain:.4g}", f"{own:.1f}", f"{100 * shares[client]:.1f}"]
            for (client, gain), own in zip(named.items(), signal, strict=True)
        ]
        print_table(("client", "gain", "signal %", "noise %"), rows)
