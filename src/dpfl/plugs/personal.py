"""Parts of the model that stay at their clients (PPSGD, CENTAUR), or all of it."""

from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.layout import Layout
from dpfl.core.types import Terms
from dpfl.plugs.base import Gain, Plug


class Personal(Plug):
    """A part of the model that stays at the client, from round to round.

    Laws: what counts as the client's shared model depends on the private part only through local
    work, and the private part is never in a message. ``private`` is None before a client's first
    round. ``whole`` says that nothing is shared: clients train alone.
    """

    whole: ClassVar[bool] = False

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """Return the model the client works with."""
        raise NotImplementedError

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Part what came of the work into the shared model and the private part."""
        raise NotImplementedError


class WholeModel(Personal):
    """The whole model is the client's own; the shared one stays as it was."""

    whole: ClassVar[bool] = True

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """Go on with the client's own model; everyone starts with the same one."""
        return shared if private is None else private

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Keep all that came of the work; a model that is not finite is not kept."""
        return shared, (after if bool(torch.isfinite(after).all()) else before).clone()

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """Nobody's noise is averaged with anybody else's."""
        return Gain(noise=terms.expected_cohort)
