"""Launch: how a Triton kernel of paged_prefill is called, and what becomes of its results.

Owns the arguments that the kernels of all pool formats have in common, and their order: ``Common``, then what a format
adds, then the results.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.paged_prefill.pieces import plan_of
from pallas_kernels.rows import Rows
from pallas_kernels.softmax import MASKED, Partial


@runtime_checkable
class Tile(Protocol):
    """What every tiling says: (token, head) pairs of a program, and Triton's numbers."""

    @property
    def queries(self) -> int:
        """Pairs of (token, query head) of a program."""
        ...

    @property
    def warps(self) -> int:
        """Warps of a program."""
        ...

    @property
    def stages(self) -> int:
        """Stages of the compiler's software pipeline."""
        ...


class Common(NamedTuple):
    """The arguments of every kernel, as references to global memory."""

    plan: jax.Ref  # [6 tiles] int32
    layer: jax.Ref  # [] int32
    window: jax.Ref  # [] int32
    table: jax.Ref  # [rows width] int32
    begins: jax.Ref  # [rows] int32, whether the chunk itself counts
    q: jax.Ref  # [tokens*q_heads head_dim] of the operands' dtype
    k: jax.Ref  # [tokens*kv_heads head_dim] of the operands' dtype
    v: jax.Ref  # [tokens*kv_heads head_dim] of the operands' dtype


class Results(NamedTuple):
    """Where a kernel writes."""

    out: jax.Ref  # [tokens*q_heads head_dim]
    lse: jax.Ref  # [tokens*q_heads] float32, logarithms of the softmax's totals


def launch(
    body: Callable[[Common, tuple[jax.Ref, ...], Results], None],
    name: str,
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    pool: tuple[Array, ...],
    layer: Int32[Array, ""],
    rows: Rows,
    held: Int32[Array, " rows"],
    window: Int32[Array, ""],
    begins: Bool[Array, " rows"] | None,
    *,
    tile: Tile,
    products: str,
    interpret: bool,
) -> Float[Array, "tokens q_heads head_dim"] | Partial:
    """Run a kernel over a grid of tiles and key/value heads.

    Args:
        body: the kernel; takes ``Common``, what ``pool`` holds, and ``Results``.
        name: of the kernel, in the code and in profiles.
        q: as in ``op.paged_prefill``, and all that is not named here.
        k: keys of the chunks.
        v: values of the chunks.
        pool: what the format reads.
        layer: of the pool.
        rows: the launch's rows; their starts count from the first position of their tables.
        held: how many positions are in pages.
        window: positions that a query sees.
        begins: as in ``op.paged_prefill_part``; None for whole histories.
        tile: the sizes.
        products: of which dtype the operands are.
        interpret: run it on any backend, slowly.
    """
    (tokens, q_heads, head_dim), kv_heads = q.shape, k.shape[1]
    plan = plan_of(rows.starts, rows.lengths, rows.offsets, held, tokens, q_heads // kv_heads, tile.queries)
    operands = jnp.bfloat16 if products == "bf16" else q.dtype
    counts = jnp.ones_like(rows.starts) if begins is None else begins.astype(jnp.int32)

    def kernel(*refs: jax.Ref) -> None:
        common, results = len(Common._fields), len(Results._fields)
        body(Common(*refs[:common]), refs[common:-results], Results(*refs[-results:]))

    out, lse = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((tokens * q_heads, head_dim), q.dtype if begins is None else jnp.float32),
            jax.ShapeDtypeStruct((tokens * q_heads,), jnp.float32),
        ),
        grid=(plan.row.shape[0], kv_heads),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name=name,
    )(
        jnp.stack(plan),
        layer,
        window,
        rows.page_table,
        counts,
        *(part.reshape(-1, head_dim).astype(operands) for part in (q, k, v)),
        *pool,
    )
    if begins is None:
        return out.reshape(q.shape)
    peak = lse.reshape(tokens, q_heads)
    return Partial(peak, (peak > MASKED).astype(jnp.float32), out.reshape(q.shape))
