"""A strategy: plugs in a fixed order, checked for fit, folded over data and over exposures.

``slots``         the slots and their order
``accounting``    what a round releases of one unit, and to whom
``fit``           :class:`Strategy`; building one proves that its pieces fit, or raises
``method``        how a method declares itself
``work``          settings that methods share
``record_level``  what methods with DP-SGD at every client share
``client_level``  what methods that protect whole clients share
``wireless``      what methods over the air share
``secure_sum``    a method over a secure sum
"""

from dpfl.strategy.fit import Strategy
from dpfl.strategy.secure_sum import with_secure_sum

__all__ = ["Strategy", "with_secure_sum"]
