"""Individual clips: any model over a secure sum, with clips that follow from each client's budget.

Paper
    After Boenisch, Muhl, Dziedzic, Rinberg, Papernot: *Have it your way: Individualized Privacy
    Assignment for DP-SGD*, NeurIPS 2023 ("Scale", there for single records of one curator); a
    method of dpfl's own for clients of a secure sum (``docs/preconditioning.md``).

In one sentence
    All clients share one noise, and a client with a larger budget clips its records less, so that
    everyone's privacy loss is its own budget.

Equations
    Rate q_i, T rounds, z_i the multiplier that (epsilon_i, delta_i) asks for, Z the std of the
    noise that is counted on::

        C_i = Z / z_i,  with Z such that the mean of C_i over all records is C
        model <- model - lr m,  m <- momentum m + (1 / b) sum_i sum over a Poisson sample of
                 clip_{C_i}(gradient) + noise,  b the expected number of records of all samples

Formal guarantees
    Each record of client i within (epsilon_i, delta_i) under zero-out adjacency, against the server
    with the colluders that are planned for: of h honest shares, the sum is a Poisson-sampled
    Gaussian mechanism at the client's own rate with the multiplier Z / C_i = z_i, less what
    rounding costs. Each client derives z_i and C_i from its own budget; claims settle Z, which
    scales everyone's clip alike and nobody's cost.

Departures
    Clips are scaled per client, not per record. One gradient a round and client, because later
    steps of local training would depend on noise that is not there yet.
"""

from dataclasses import dataclass

from dpfl.core.types import Adjacency, ClientSettings, Observer, Unit
from dpfl.plugs.fixed_denominator import FixedDenominator
from dpfl.plugs.full_gradient import IndividualClips
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.shared_gradient import SHARED
from dpfl.plugs.step import LearningRate, ServerSgd
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import ASSUMPTIONS, OWN_NOISE


@dataclass(frozen=True, kw_only=True)
class ClippedWork:
    """Settings of individual clips. What decides privacy has no default.

    ``lr`` and ``server_momentum`` are those of the server's step; ``batch_size`` is the expected
    number of records that a client samples in a round, and ``clip`` the mean of the clients' clips,
    over all records. Everyone takes part, unless ``selection`` says otherwise.
    """

    lr: float
    clip: float
    batch_size: int
    server_momentum: float = 0.9
    selection: Selection | None = None


@method(
    family="heterogeneous",
    simplicity=26,
    needs="a secure sum",
    remark="for a model that is given; a linear head on public features learns more",
    secure=True,
)
def individual_clips(
    work: ClippedWork, *, tolerated_dropouts: int = 0, colluders: int = 1
) -> Strategy:
    """DP-SGD of any model over a secure sum: one noise for everybody, clips by each one's budget.

    The adversary is the server together with up to ``colluders`` members of a sum, which may lack
    ``tolerated_dropouts`` uploads.
    """
    channel = SecureSum(tolerated_dropouts=tolerated_dropouts, colluders=colluders)
    settings = ClientSettings(lr=1.0, batch_size=work.batch_size, local_steps=1)
    local = IndividualClips(
        client_settings=settings,
        clip=work.clip,
        tolerated_dropouts=tolerated_dropouts + colluders,
    )
    kept = [text for text in ASSUMPTIONS if text != OWN_NOISE]
    return Strategy(
        name="individual_clips",
        unit=Unit.RECORD,
        observer=Observer.SERVER,
        adjacency=Adjacency.ZERO_OUT,
        local=local,
        selection=work.selection or Everyone(),
        channel=channel,
        weights=FixedDenominator(),
        step=ServerSgd(lr=LearningRate(rate=work.lr), momentum=work.server_momentum),
        tolerated_dropouts=tolerated_dropouts,
        assumptions=(*channel.assumptions, *SHARED, *kept),
    )
