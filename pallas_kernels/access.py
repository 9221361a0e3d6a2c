"""Access: how a kernel reads and writes memory, as a value, so that a caller can watch what it does."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array


class Access:
    """The plain loads and stores of Triton by index; ``mask`` says which elements are touched at all."""

    def load(self, ref: jax.Ref, index: tuple[Array, ...], mask: Array | None = None) -> Array:
        """The elements at ``index``; zero, and not read, where ``mask`` is False."""
        return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))

    def store(self, ref: jax.Ref, index: tuple[Array, ...], value: Array, mask: Array | None = None) -> None:
        """Write ``value`` at ``index`` except where ``mask`` is False."""
        plgpu.store(ref.at[index], value, mask=mask)


DIRECT = Access()
"""The accesses of a kernel that nobody watches."""
