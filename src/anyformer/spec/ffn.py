"""Feed-forward networks: dense, gated, and mixtures of experts."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.spec.part import Activation, Experts, InnerWidth, NotNegative, Number, Part, Positive, Rate


class Dense(Part):
    """down(act(up(x))) (Vaswani et al. 2017, eq. 2). `dropout` is after the activation, `out_dropout` after `down`."""

    kind: Literal["dense"] = "dense"
    activation: Activation
    d_ff: InnerWidth
    bias: bool = False
    dropout: Rate = 0.0
    out_dropout: Rate = 0.0


class Gated(Part):
    """down(act(gate(x)) · (up(x) + up_offset)): SwiGLU with silu, GeGLU with gelu, ReGLU with relu (Shazeer 2020).

    With a `limit`, gate(x) is at most `limit` before the activation and up(x) is within [−limit, limit] (gpt-oss).
    """

    kind: Literal["gated"] = "gated"
    activation: Activation
    d_ff: InnerWidth
    bias: bool = False
    limit: Positive | None = None
    up_offset: Number = 0.0
    dropout: Rate = 0.0
    out_dropout: Rate = 0.0


SingleFeedForward = Annotated[Dense | Gated, Field(discriminator="kind")]


class Groups(Part):
    """Experts in `n_groups` equal groups, of which a token may use the best `top_groups` (DeepSeek-V2, section 2.2.2).

    A group's score is its best expert's ("max", V2), or the sum of its best two ("top2", V3).
    """

    n_groups: Experts
    top_groups: Experts
    score: Literal["max", "top2"] = "max"


class MoEFields(Part):
    """What a recipe and a specification say of a mixture of experts in the same words.

    Router scores are softmax or sigmoid of x·Wᵀ (in float32). The `top_k` experts with the highest scores (plus
    `choice_bias`, which never enters the weights; DeepSeek-V3, eq. 16) are mixed by their scores, divided by the sum of
    the chosen ones with `normalise`, times `scale`. Ties go to the lower number.

    Losses that training adds (each times its coefficient, a mean over layers is not taken): `balance_loss`,
    n_experts / top_k · Σ_e f_e·P_e with f_e the share of the choices (×top_k) that fell on e and P_e the mean of the
    scores normalised over experts, computed for each sequence and averaged, or over the whole batch (`balance_over`,
    Switch, Fedus et al. 2021, eq. 4; DeepSeek-V2, eq. 23); `z_loss`, the mean of logsumexp(logits)² (Zoph et al. 2022).
    `bias_rate` moves the choice bias of experts with less than the mean load up by that much after each step, of the
    others down (DeepSeek-V3, section 2.1.2). Padding counts nowhere.
    """

    kind: Literal["moe"] = "moe"
    n_experts: Experts
    top_k: Experts
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: Positive = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    groups: Groups | None = None
    shared_gate: bool = False
    balance_loss: NotNegative = 0.0
    balance_over: Literal["sequence", "batch"] = "sequence"
    z_loss: NotNegative = 0.0
    bias_rate: NotNegative = 0.0


class MoE(MoEFields):
    """A mixture of equal `expert`s, `top_k` for each token, and a `shared` one that every token uses.

    With `shared_gate` the shared expert is multiplied by sigmoid(x·w) (Qwen2-MoE).
    """

    expert: SingleFeedForward
    shared: SingleFeedForward | None = None


FeedForward = Annotated[Dense | Gated | MoE, Field(discriminator="kind")]
