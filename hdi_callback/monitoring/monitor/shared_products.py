"""`SharedProducts`: products of heads that two sources of one reading share, within a memory budget."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hdi_callback.attention import Role
from hdi_callback.core.products import HeadProducts


class SharedProducts:
    """Products of heads, kept from the source that forms them to the source that reuses them, within one reading.

    Args:
        budget: bytes of products that are kept at a time; further ones are formed twice.
        roles: roles of the weights whose products are reused.

    Attributes:
        budget: the same.
        roles: the same.
    """

    def __init__(self, budget: int, roles: frozenset[Role]) -> None:
        self.budget, self.roles = budget, roles
        self._kept: dict[tuple[str, Role], HeadProducts] = {}
        self._bytes = 0
        self._unused: dict[Role, Collection[str]] = {}

    def begin(self, unused: Mapping[Role, Collection[str]]) -> None:
        """Begin a reading without products.

        Args:
            unused: role -> layers whose products this reading does not reuse.
        """
        self.clear()
        self._unused = dict(unused)

    def is_used(self, layer: str, role: Role) -> bool:
        """Return whether the products of a layer's heads are reused.

        Args:
            layer: its name.
            role: of the weight.

        Returns:
            True if they are.
        """
        return role in self.roles and layer not in self._unused.get(role, ())

    def keep(self, layer: str, role: Role, products: HeadProducts | None) -> None:
        """Keep the products of a layer's heads.

        Args:
            layer: its name.
            role: of the weight.
            products: of its heads; `None` if there are none.
        """
        if products is None or not self.is_used(layer, role) or self._bytes + products.nbytes > self.budget:
            return
        self._kept[layer, role] = products
        self._bytes += products.nbytes

    def take(self, layer: str, role: Role) -> HeadProducts | None:
        """Take the products of a layer's heads out.

        Args:
            layer: its name.
            role: of the weight.

        Returns:
            The products; `None` if none are kept.
        """
        products = self._kept.pop((layer, role), None)
        self._bytes -= 0 if products is None else products.nbytes
        return products

    def clear(self) -> None:
        """Discard what was not taken."""
        self._kept.clear()
        self._bytes = 0
