"""Attack what dpfl releases, as an adversary would: inversion, membership, audits, poisoning.

Every attack plays a simulation through the functions that real sites call, and looks only at what
its adversary sees (:mod:`dpfl.attacks.observation`). None of them talks to a deployment: what a
site has sent is audited from the site's own folder, by those who may read it.

- :func:`dpfl.attacks.invert`: reconstruct records from what leaves a client;
- :func:`dpfl.attacks.membership`: tell who was trained on, from the model or the transcript;
- :func:`dpfl.attacks.audit`: lower bounds on epsilon, with confidence, beside what is claimed;
- :func:`dpfl.attacks.poison`: what one dishonest site can do to the model, and to the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpfl.core.errors import no_attribute

if TYPE_CHECKING:
    from dpfl.attacks.auditing.audit import audit as audit
    from dpfl.attacks.inverting.invert import invert as invert
    from dpfl.attacks.members.guess import membership as membership
    from dpfl.attacks.poisoning.poison import poison as poison

_HOMES = {
    "audit": "auditing.audit",
    "invert": "inverting.invert",
    "membership": "members.guess",
    "poison": "poisoning.poison",
}


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise no_attribute(__name__, name, _HOMES)
    return getattr(import_module(f"dpfl.attacks.{_HOMES[name]}"), name)
