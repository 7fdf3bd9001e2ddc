"""Parts of the model that stay at their clients."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from dpfl.core.layout import Layout


@runtime_checkable
class Personal(Protocol):
    """A part of the model that stays at the client, from round to round (PPSGD, CENTAUR).

    Laws: what counts as the client's shared model depends on the private part only through local
    work, and the private part is never in a message. ``private`` is None before a client's first
    round.
    """

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        """The model the client works with."""
        ...

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Part what came of the work into the shared model and the private part."""
        ...
