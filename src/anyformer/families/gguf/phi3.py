"""Phi-3, Phi-3.5 and Phi-4: LLaMA with its projections in two tables, LongRoPE, and a part of each head that turns.

llama.cpp turns Phi-3's window off whatever a file says of it, and so do files read here; a specification with a window
is not written. It takes LongRoPE's long table for a whole session whose context is past the original one; here, as in
the published code, a row does when it is that long.
"""

from anyformer.families import phi3
from anyformer.families.family import Joined, Rule
from anyformer.families.gguf.common import (
    BLOCK,
    DOWN,
    ENDS,
    FUSED_QKV,
    OURS,
    OUT,
    PRE_NORMS,
    QKV,
    RMS_EPS,
    THETA,
    UNTIED,
    TurningShare,
    sizes,
)
from anyformer.families.gguf.dialect import Dialect, Implied, Whole
from anyformer.families.gguf.rope import LONG, SHORT, RopeScaling

FUSED: tuple[Rule, ...] = (
    FUSED_QKV,
    (f"{BLOCK}.ffn_up.weight", tuple(f"{OURS}.ffn.{x}.weight" for x in ("gate", "up")), Joined()),
)

PHI3 = Dialect(
    architecture="phi3",
    family=phi3.FAMILY,
    model="Phi3ForCausalLM",
    keys=(
        *sizes(length=False),
        TurningShare("partial_rotary_factor"),
        Whole("feed_forward_length", "intermediate_size"),
        RMS_EPS,
        THETA,
        RopeScaling(outer=True, tables=(SHORT, LONG)),
        Implied("hidden_act", "silu"),
        UNTIED,
    ),
    tensors=(*ENDS, *FUSED, *QKV, OUT, DOWN, *PRE_NORMS),
    ignored=("attention.sliding_window",),
)
