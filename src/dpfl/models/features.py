"""Feature maps by name: fixed and public, from a record to numbers of norm at most 1.

A linear model on good features needs far less signal than a network on pixels. A map has nothing to
learn and no statistics, so it costs no privacy: every constant is public, and a row depends on its
own record alone. ``make_features`` builds a map; ``auto_features`` chooses one.
"""

import inspect

from dpfl.core.checks import check
from dpfl.core.errors import unknown_name
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.models import feature_map as plain, image_features as images
from dpfl.models.feature_map import FeatureMap as FeatureMap, Kind as Kind, Shape, unit as unit

FEATURES: dict[str, type[FeatureMap]] = {
    "hog": images.Hog,
    "hog_colour": images.ColourHog,
    "hog_colour_conv": images.ColourHogConvolutions,
    "hog_fine": images.FineHog,
    "hog_fine_conv": images.FineHogConvolutions,
    "hog_small": images.SmallHog,
    "pixels": plain.PlainPixels,
    "table": plain.Table,
    "words": plain.Words,
    "words_folded": plain.FoldedWords,
}
"""Feature maps: ``FEATURES[name](shape, inputs)``."""

# From which signal S on a map is better than the one before it.
_FINE, _ALL_WORDS = 2_000.0, 1_000.0
_SMALL = 16  # pixels: smaller images have too few cells of 4 x 4


def about(name: str) -> str:
    """Return the first line of the description of the map called ``name``.

    >>> about("table")
    'Numbers of a table as they are, scaled to norm 1.'
    """
    return (inspect.getdoc(FEATURES[name]) or "").splitlines()[0]


def make_features(name: str, shape: Shape, inputs: Inputs = NUMBERS) -> FeatureMap:
    """Build a feature map; all builds of one map are equal.

    ``name`` is one of :data:`FEATURES`, ``shape`` that of one record, and ``inputs`` says how
    records are read.

    >>> make_features("hog", (1, 28, 28)).size
    441
    >>> make_features("hog", (30,))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpfl.core.errors.ConfigurationError: features 'hog': cannot take numbers of shape (30,); ...
    """
    if name not in FEATURES:
        raise unknown_name("features", "feature map", str(name), FEATURES)
    found = FEATURES[name]
    fitting = ", ".join(key for key, other in FEATURES.items() if other.fits(shape, inputs))
    what = "tokens" if isinstance(inputs, Tokens) else "numbers"
    check(
        found.fits(shape, inputs),
        f"features '{name}'",
        f"cannot take {what} of shape {shape}",
        f"choose one of {fitting}",
    )
    return found(shape, inputs)


def auto_features(shape: Shape, inputs: Inputs, signal: float | None) -> str:
    """Return the name of the map that suits the records and how much can be learned from them.

    ``shape`` is that of one record, and ``inputs`` says how records are read. ``signal`` is
    S = sqrt(sum of (mu_i n_i)^2) over clients of n_i records, with mu_i the inverse of the least
    noise multiplier that a budget allows; None where it is not known.

    >>> auto_features((1, 28, 28), NUMBERS, 500.0), auto_features((30,), NUMBERS, None)
    ('hog', 'table')
    """
    choices = _by_signal(shape, inputs)
    names = ", ".join(name for _, name in choices)
    check(
        signal is not None or len(choices) == 1,
        "features",
        "'auto' depends on budgets and numbers of records, which are not known here",
        f"name one of {names}",
    )
    return max(choice for choice in choices if choice[0] <= (signal or 0.0))[1]


def _by_signal(shape: Shape, inputs: Inputs) -> list[tuple[float, str]]:
    """From which signal on each of the maps that suit records is the best."""
    if isinstance(inputs, Tokens):
        folds = inputs.vocabulary > plain.FOLDED
        return [(0.0, "words_folded"), (_ALL_WORDS, "words")] if folds else [(0.0, "words")]
    small = min(plain.picture_of(shape, inputs)[1:], default=0) < _SMALL
    if small and images.SmallHog.fits(shape, inputs):
        return [(0.0, "hog_small")]
    if images.Hog.fits(shape, inputs):
        return [(0.0, "hog"), (_FINE, "hog_fine")]
    if images.ColourHogConvolutions.fits(shape, inputs):
        return [(0.0, "hog_colour_conv")]
    return [(0.0, "table" if len(shape) <= 1 else "pixels")]
