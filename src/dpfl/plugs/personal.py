"""Parts of the model that stay at their clients (PPSGD, CENTAUR)."""

from torch import Tensor

from dpfl.core.layout import Layout
from dpfl.plugs.base import Plug


class Personal(Plug):
    """A part of the model that stays at the client, from round to round.

    Laws: what counts as the client's shared model depends on the private part only through local
    work, and the private part is never in a message. ``private`` is None before a client's first
    round.
    """

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """Return the model the client works with."""
        raise NotImplementedError

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Part what came of the work into the shared model and the private part."""
        raise NotImplementedError
