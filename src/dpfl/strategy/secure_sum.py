"""A method over a secure sum: the server learns sums, and is the adversary.

Noise that clients share is made for the honest ones among them; noise that a trusted server would
add is shared out among the clients instead. What needs single uploads is refused.
"""

from dataclasses import replace

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.plugs.secure_sum import COMPUTATIONAL, OUTSIDERS, SecureSum
from dpfl.plugs.shared_gradient import ALONE, SHARED, OnCommonGrid, SharedGradient
from dpfl.plugs.stages import GaussianNoise
from dpfl.strategy.client_level import DRAWN, HIDDEN_DRAW, SHARES, TRUSTED
from dpfl.strategy.fit import PROTOTYPE, Strategy
from dpfl.strategy.record_level import OWN_NOISE

_SUPERSEDED = {SHARES, TRUSTED, HIDDEN_DRAW}


def with_secure_sum(
    strategy: Strategy, *, tolerated_dropouts: int = 0, colluders: int = 1
) -> Strategy:
    """Return a strategy whose uploads travel over a secure sum, and whose promise is against the
    server.

    The adversary is the server together with up to ``colluders`` members of a sum. A sum holds the
    uploads of all drawn clients but at most ``tolerated_dropouts``; with more missing, the round is
    lost. So the noise of h = drawn - tolerated_dropouts - colluders shares is what counts. A method
    that needs single uploads, or whose clients add all of the noise themselves, is refused.

    >>> import dpfl
    >>> plain = dpfl.udp_fedavg(lr=0.1, clip=1.0, batch_size=8, local_steps=1)
    >>> dpfl.with_secure_sum(plain, tolerated_dropouts=2).stages[-1].tolerated_dropouts
    3
    """
    channel = SecureSum(tolerated_dropouts=tolerated_dropouts, colluders=colluders)
    _check_sums(strategy)
    if strategy.unit.of_data:
        return _record_level(strategy, channel)
    return _client_level(strategy, channel)


def _check_sums(strategy: Strategy) -> None:
    """Refuse what cannot be a sum of single uploads at all."""
    where = f"secure sum of '{strategy.name}'"
    other = "use another method"
    kind = type(strategy.channel).__name__
    check(
        strategy.channel.sees_rows,
        where,
        f"its uploads have a channel of their own ({kind})",
        other,
    )
    check(not strategy.local.pooled, where, "its records are pooled: there are no uploads", other)
    alone = strategy.personal is not None and strategy.personal.whole
    check(not alone, where, "its clients share nothing: there are no uploads", other)
    check(
        strategy.observer is not Observer.NOBODY,
        where,
        "it protects nobody, and a sum without noise may tell all about a client",
        "use a method that is private",
        PrivacyRefusal,
    )
    check(
        strategy.selection.sampling != "poisson",
        where,
        "cohorts of a random size: its roster and its shares of noise tell who was drawn",
        "draw a fixed number of clients: sampling = 'uniform'",
        PrivacyRefusal,
    )
    if strategy.clean is not None:
        check(
            False,
            where,
            f"{type(strategy.clean).__name__} needs single uploads, and a sum has none",
            strategy.clean.without_rows,
        )
    nonlinear = [type(stage).__name__ for stage in strategy.stages if not stage.linear]
    check(
        not nonlinear,
        where,
        f"the server half of {' and '.join(nonlinear)} needs single uploads",
        other,
    )


def _client_level(strategy: Strategy, channel: SecureSum) -> Strategy:
    """Share noise out among the clients, for the honest ones of them."""
    where = f"secure sum of '{strategy.name}'"
    missing = channel.tolerated_dropouts
    given = strategy.tolerated_dropouts
    check(
        given in (0, missing),
        where,
        f"the method tolerates {given} dropouts, the secure sum {missing}",
        "say it once, for the secure sum",
    )
    local = strategy.central_noise is None and not _shares(strategy)
    check(
        not local,
        where,
        "every client adds all of the noise itself, which a sum would add up",
        "use noise = 'distributed'",
        PrivacyRefusal,
    )
    check(
        strategy.weights.constant,
        where,
        f"{type(strategy.weights).__name__} are not constants fixed beforehand",
        "use ExpectedCohortWeights",
        PrivacyRefusal,
    )
    check(
        strategy.resolve(PROTOTYPE).sent(1, PROTOTYPE).failure == 0,
        where,
        "its bound may fail for what the server draws, and the server is the adversary",
        "use a bound that does not fail: clip_after",
        PrivacyRefusal,
    )
    if strategy.central_noise is not None:
        strategy = _without_trust(strategy)
    check(
        strategy.stages[-1].shares_noise,
        where,
        "its last client stage adds no noise, and only integers with noise are added up",
        "let the noise come last",
    )
    shares = missing + channel.colluders
    drawn = strategy.selection.sampling == "uniform"
    kept = [text for text in strategy.assumptions if text not in {*_SUPERSEDED, *DRAWN}]
    draw = (OUTSIDERS, *DRAWN[1:]) if drawn and strategy.hides_the_draw else ()
    return replace(
        strategy,
        observer=Observer.SERVER,
        channel=channel,
        stages=tuple(stage.sharing_noise(shares) for stage in strategy.stages),
        denoise=tuple(denoise.sharing_noise(shares) for denoise in strategy.denoise),
        tolerated_dropouts=missing,
        assumptions=(*channel.assumptions, *draw, *kept),
    )


def _without_trust(strategy: Strategy) -> Strategy:
    """The strategy with a trusted server's noise in shares of the clients."""
    assert strategy.central_noise is not None
    check(
        not _shares(strategy),
        f"secure sum of '{strategy.name}'",
        "its clients add noise too, and only one of the two can be shared out",
        "drop one",
    )
    noise = GaussianNoise(
        noise_multiplier=strategy.central_noise.noise_multiplier,
        clip=strategy.resolve(PROTOTYPE).contribution_bound(PROTOTYPE),
        distributed=True,
        tolerated_dropouts=strategy.tolerated_dropouts,
    )
    return replace(strategy, central_noise=None, stages=(*strategy.stages, noise))


def _record_level(strategy: Strategy, channel: SecureSum) -> Strategy:
    """Weigh updates at the clients, by constants; share the noise of a single local step."""
    where = f"secure sum of '{strategy.name}'"
    local = strategy.local
    check(
        strategy.personal is None and not strategy.stages,
        where,
        "its clients keep parts of the model, or send something else than their updates",
        "use a method that averages updates",
    )
    weights = strategy.weights.by_clients()
    problem = f"{type(strategy.weights).__name__} are not constants that claims settle beforehand"
    remedy = "use a method that weighs all alike, or by what they claim"
    if weights is None:
        raise ConfigurationError(where, problem, remedy)
    missing = channel.tolerated_dropouts
    shared = local.one_step
    sharing = shared or bool(strategy.releases)
    seen = channel.assumptions if sharing else (channel.hides, COMPUTATIONAL)
    kept = [text for text in strategy.assumptions if not shared or text != OWN_NOISE]
    stages = () if shared else (OnCommonGrid(),)
    if shared:
        local = SharedGradient.of(local, missing + channel.colluders)
    return replace(
        strategy,
        local=local,
        channel=channel,
        stages=stages,
        weights=weights,
        tolerated_dropouts=missing,
        assumptions=(*seen, *(SHARED if shared else (ALONE,)), *kept),
    )


def _shares(strategy: Strategy) -> bool:
    return any(stage.shares_noise for stage in strategy.stages)
