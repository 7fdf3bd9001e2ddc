"""Local training and pooled training: what a federation stands between.

Paper
    Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: *Deep Learning with Differential
    Privacy*, CCS 2016 (DP-SGD); Boenisch, Muhl, Dziedzic, Rinberg, Papernot: *Have it your way:
    Individualized Privacy Assignment for DP-SGD*, NeurIPS 2023 (``pooled_dp``: budgets by sampling
    rates).

In one sentence
    Every client trains alone on its own records (``local_only``), or a trusted curator trains on
    the records of all of them (``pooled_dp``), with the budgets that the federation has.

Equations
    ``local_only``: model_i <- model_i + u_i, each client for itself. ``pooled_dp``: every step

        model <- model - lr (sum over sampled records of clip(gradient) + N(0, z^2 clip^2)) / batch,

    where records of client i are sampled with rate q_i: the one noise multiplier z and the rates
    q_i are such that all steps cost each client its own (epsilon, delta), and sum_i n_i q_i is the
    batch size.

Formal guarantees
    ``local_only``: each client's records, within its own (epsilon, delta) under zero-out adjacency,
    against whoever is given that client's models of all rounds. Nothing else leaves a client.
    ``pooled_dp``: each client's records, within its own (epsilon, delta) under zero-out adjacency,
    against everyone who sees the published models of all rounds. The curator sees the records
    themselves: against it every epsilon is infinite, and the run is flagged TRUSTED CURATOR.

Departures
    Both are shown for reference and never ranked, and exist in a simulation only. ``local_only``
    sends empty messages; the simulator still hands out the first model every round. ``pooled_dp``
    draws no cohort: all records are there in every round, which has as many steps as a client of
    mean size takes elsewhere, each of as many records as all clients take together, or fewer where
    that leaves less noise. Every client's row holds the curator's update, so the bytes that are
    counted are not those of sending records.
"""

from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.plugs.personal import WholeModel
from dpfl.plugs.pooled import PooledDpSgd
from dpfl.plugs.stages import Withheld
from dpfl.plugs.weights import UniformWeights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level

STAYS = "nothing leaves a client; its epsilon is what its own model tells whoever is given it"
TRUSTED = (
    "TRUSTED CURATOR: one party holds the records of all clients, and is counted on to publish "
    "nothing but the models",
    "neighbouring data sets differ in one record replaced by nothing; the number of records is "
    "public",
)


@method(family="heterogeneous", simplicity=90, needs="a simulation", baseline=True)
def local_only(work: RecordWork) -> Strategy:
    """Every client trains alone with DP-SGD within its own budget, and is tested on its own
    records: a reference.
    """
    slots = {"personal": WholeModel(), "stages": (Withheld(),)}
    return record_level("local_only", work, UniformWeights(), assumptions=(STAYS,), **slots)


@method(
    family="heterogeneous",
    simplicity=95,
    fixed=("spending",),
    needs="a trusted curator",
    baseline=True,
)
def pooled_dp(work: RecordWork) -> Strategy:
    """DP-SGD on all clients' records pooled by a trusted curator, each within its own budget: a
    reference.
    """
    kept = {**work.optimiser, "clip": work.clip, "clipping": work.clipping}
    return Strategy(
        name="pooled_dp",
        unit=Unit.RECORD,
        observer=Observer.WORLD,
        adjacency=Adjacency.ZERO_OUT,
        local=PooledDpSgd(client_settings=work.client_settings, **kept),
        assumptions=TRUSTED,
    )
