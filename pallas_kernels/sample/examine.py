"""sample without a card: the code of a case for a card, and the bytes that its addresses add up to.

Reads cases; used by the kernel bench and by tests, never by an op.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.card import Card
from pallas_kernels.compiled import KernelCode, compile_kernel
from pallas_kernels.sample.cases import SampleCase
from pallas_kernels.sample.op import SampleRows
from pallas_kernels.sample.pallas import sample
from pallas_kernels.traffic import Traffic

NUM_TOP = 20
"""Alternatives of a row with log-probabilities, as an engine asks for."""
NUM_SUPPRESSED = 8
"""Ids that a row can forbid, as an engine does."""


def code(case: SampleCase, card: Card) -> KernelCode:
    """The kernel of a case, compiled for a card.

    Raises:
        CompileError: it cannot be compiled here, or not at all.
    """
    return compile_kernel(card, "sample", functools.partial(sample, num_top=NUM_TOP), *shapes(case))


def shapes(case: SampleCase) -> tuple:
    """The arguments of the op for a case with a slot for every row."""
    int32 = jax.ShapeDtypeStruct((case.rows,), jnp.int32)
    float32 = jax.ShapeDtypeStruct((case.rows,), jnp.float32)
    fields = dict.fromkeys(SampleRows._fields, int32)
    fields |= dict.fromkeys(("temperature", "top_p", "min_p", "repetition", "presence", "frequency"), float32)
    fields["suppressed"] = jax.ShapeDtypeStruct((case.rows, NUM_SUPPRESSED), jnp.int32)
    each = (case.rows, case.vocab)
    return (
        jax.ShapeDtypeStruct(each, jnp.float32),
        SampleRows(**fields),
        jax.ShapeDtypeStruct(each, jnp.int32),
        jax.ShapeDtypeStruct(each, jnp.float32),
    )


def traffic(case: SampleCase, *each: Mapping[str, float]) -> tuple[int, ...]:
    """Bytes that one row of a case moves, of random logits, for each of some ways to sample.

    ``each`` gives fields of ``SampleRows``; what it does not name leaves a row that draws from all ids. The launch
    keeps the sizes of the whole case; the other rows do the like at other addresses.
    """
    watch, moved = Traffic(), list[int]()
    run = jax.jit(functools.partial(sample, num_top=NUM_TOP, interpret=True, access=watch))
    logits, rows, counts, bias = (
        jax.tree.map(lambda part: jnp.zeros((1, *part.shape[1:]), part.dtype), part) for part in shapes(case)
    )
    rows = rows._replace(suppressed=rows.suppressed - 1)
    logits += jax.random.normal(jax.random.key(0), logits.shape)
    for fields in each:
        given = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "top_logprobs": -1, **fields}
        row = SampleRows(*(part + given.get(name, 0) for name, part in rows._asdict().items()))
        before = watch.read_bytes + watch.written_bytes
        jax.block_until_ready(run(logits, row, counts, bias))
        jax.effects_barrier()
        moved.append(watch.read_bytes + watch.written_bytes - before)
    return tuple(moved)
