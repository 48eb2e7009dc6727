"""A second model, straight from the equations, in float64: one row, one head, one query at a time.

It reads the specification and the weights by their canonical names and shares no code with the first. A row is what it
says: real tokens alone (no padding, one document), so that padding and packing are tested against rows apart.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_erf = np.vectorize(math.erf)


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


ACT = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * _sigmoid(x),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "identity": lambda x: x,
}


@dataclass
class Row:
    """What the layers of a stack know of the row they read."""

    length: int
    prefix: int = 0
    shared_table: Any = None
    memory: Any = None


def norm(spec, weights, path, x):
    """Over the last dimension; a weight for each head [H, D] meets x [T, H, D]."""
    if spec.kind == "none":
        return x
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.eps)
    if spec.weight:
        x = x * (spec.offset + weights[f"{path}.weight"])
    return x + weights[f"{path}.bias"] if spec.bias else x


def linear(weights, path, x, bias=False):
    y = x @ weights[f"{path}.weight"].T
    return y + weights[f"{path}.bias"] if bias else y


# ---- positions


def _yarn(s, plain, theta):
    """Peng et al. 2023, section 3.2: a pair between the two ends of a ramp is a mixture of both frequencies."""
    width = 2 * len(plain)

    def pair_that_turns(times):
        # theta^(−2i/d) · original = 2π · times, solved for i.
        return width * math.log(s.original / (2 * math.pi * times)) / (2 * math.log(theta))

    low, high = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if high == low else high
    out = []
    for i, w in enumerate(plain):
        slow = min(1.0, max(0.0, (i - low) / (high - low)))
        out.append(slow * w / s.factor + (1 - slow) * w)
    return out, s.attention_factor


def _llama3(s, plain):
    out = []
    for w in plain:
        turns = s.original * w / (2 * math.pi)
        if turns < s.low_freq_factor:
            out.append(w / s.factor)
        elif turns > s.high_freq_factor:
            out.append(w)
        else:
            keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            out.append((1 - keep) * w / s.factor + keep * w)
    return out, 1.0


def frequencies(rope, width, length):
    """Radians a position for each pair of `width` turning channels, in a row of `length` tokens; and cos' factor."""
    s, theta = rope.scaling, rope.theta
    if s.kind == "ntk":
        theta *= s.factor ** (width / (width - 2))
    if s.kind == "dynamic" and length > s.original:
        theta *= (s.factor * length / s.original - (s.factor - 1)) ** (width / (width - 2))
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if s.kind == "linear":
        return [w / s.factor for w in plain], 1.0
    if s.kind == "yarn":
        return _yarn(s, plain, theta)
    if s.kind == "llama3":
        return _llama3(s, plain)
    if s.kind == "longrope":
        by = s.long if length > s.original else s.short
        return [w / d for w, d in zip(plain, by, strict=True)], s.attention_factor
    return plain, 1.0


def turned(rope, x, position, length=0):
    """One head at one position: pair i turns by position · frequency i, as a complex number."""
    width = rope.width(len(x))
    out = x.copy()
    turns, factor = frequencies(rope, width, length)
    for i, w in enumerate(turns):
        one, two = (i, i + width // 2) if rope.layout == "half" else (2 * i, 2 * i + 1)
        z = complex(x[one], x[two]) * np.exp(1j * position * w) * factor
        out[one], out[two] = z.real, z.imag
    return out


def rotated(position, heads, length):
    """Heads [T, H, D] of tokens at positions 0 … T−1."""
    if position.kind != "rope":
        return heads
    return np.array([[turned(position, head, t, length) for head in token] for t, token in enumerate(heads)])


def slopes(n_heads, max_bias):
    """ALiBi, Press et al. 2022, section 3 and the footnote on head counts that are no powers of two."""
    power = 2 ** int(math.log2(n_heads))
    own = [2 ** (-max_bias * i / power) for i in range(1, power + 1)]
    above = [2 ** (-max_bias * i / (2 * power)) for i in range(1, 2 * power + 1)]
    return own + above[::2][: n_heads - power]


def bucket(spec, relative):
    """The bucket of a key `relative` positions after the query (Raffel et al. 2020, section 2.1)."""
    n, first, distance = spec.n_buckets, 0, max(0, -relative)
    if spec.bidirectional:
        n, distance = n // 2, abs(relative)
        first = n if relative > 0 else 0
    exact = n // 2
    if distance < exact:
        return first + distance
    # The published tables are filled in float32, which decides where a distance falls on a boundary.
    f = np.float32
    share = f(np.log(f(distance) / f(exact))) / f(math.log(spec.max_distance / exact))
    return first + min(n - 1, exact + int(share * f(n - exact)))


def score_bias(spec, weights, path, row):
    """What is added to the score of (head, query, key)."""
    position = spec.position
    if position.kind == "alibi":
        slope = position.scale * np.array(slopes(spec.n_heads, position.max_bias))
        return lambda h, i, j: -slope[h] * (abs(i - j) if position.symmetric else i - j)
    if position.kind == "relative":
        table = row.shared_table if position.shared else weights[f"{path}.relative_bias.weight"]
        return lambda h, i, j: table[bucket(position, j - i), h]
    return lambda h, i, j: 0.0


# ---- attention


def visible(mask, row, i, n_keys):
    """The keys that query i sees."""
    seen = []
    for j in range(n_keys):
        if mask.kind == "causal" and j > i:
            continue
        if mask.kind == "prefix" and j > i and j >= row.prefix:
            continue
        if mask.window is not None and abs(i - j) >= mask.window and j >= mask.sinks:
            continue
        seen.append(j)
    return seen


def mixed(spec, q, k, v, sees, bias, sinks):
    """softmax over visible keys, joined by the sink logit, times v: [T, H, D], [S, G, D], [S, G, Dv] -> [T, H·Dv]."""
    n, n_heads, _ = q.shape
    z = np.zeros((n, n_heads, v.shape[-1]))
    for h in range(n_heads):
        g = h // (n_heads // k.shape[1])
        for i in range(n):
            keys = sees(i)
            if not keys:
                continue
            scores = np.array([spec.scale * (q[i, h] @ k[j, g]) for j in keys])
            if spec.softcap is not None:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            scores = scores + np.array([bias(h, i, j) for j in keys])
            every = scores if sinks is None else np.append(scores, sinks[h])
            share = np.exp(scores - every.max()) / np.exp(every - every.max()).sum()
            z[i, h] = share @ v[keys, g]
    return z.reshape(n, -1)


def qk_normed(spec, weights, path, heads):
    where = spec.qk_norm
    if where.over == "head":
        return norm(where.norm, weights, path, heads)
    return norm(where.norm, weights, path, heads.reshape(len(heads), -1)).reshape(heads.shape)


def grouped(spec, weights, path, x, row, memory=None):
    """Of a row over itself, or with `memory` [S, C'] over an encoder's output."""
    read = x if memory is None else memory
    h, g = spec.n_heads, spec.n_kv_heads
    q = linear(weights, f"{path}.q", x, spec.qkv_bias)
    k, v = (linear(weights, f"{path}.{name}", read, spec.qkv_bias) for name in "kv")
    if spec.clip is not None:
        q, k, v = (np.clip(y, -spec.clip, spec.clip) for y in (q, k, v))
    q, k = q.reshape(len(x), h, spec.d_head), k.reshape(len(read), g, spec.d_head)
    v = v.reshape(len(read), g, spec.d_value)
    order = None if spec.qk_norm is None else spec.qk_norm.order
    for step in ("before", "turn", "after"):
        if step == order:
            q = qk_normed(spec, weights, f"{path}.q_norm.norm", q)
            k = qk_normed(spec, weights, f"{path}.k_norm.norm", k)
        if step == "turn":
            q, k = rotated(spec.position, q, row.length), rotated(spec.position, k, row.length)
    z = mixed(
        spec,
        q,
        k,
        v,
        lambda i: visible(spec.mask, row, i, len(read)),
        score_bias(spec, weights, path, row),
        weights[f"{path}.sink"] if spec.sink_logit else None,
    )
    return linear(weights, f"{path}.out", z, spec.out_bias)


def latent(spec, weights, path, x, row):
    """DeepSeek-V2 2024, eqs. 9–19 (keys and values unfolded)."""
    n, h = len(x), spec.n_heads
    if spec.q_rank is None:
        q = linear(weights, f"{path}.q", x)
    else:
        down = norm(spec.norm, weights, f"{path}.q_norm", linear(weights, f"{path}.q_down", x, spec.bias))
        q = linear(weights, f"{path}.q_up", down)
    down = linear(weights, f"{path}.kv_down", x, spec.bias)
    c = norm(spec.norm, weights, f"{path}.kv_norm", down[:, : spec.kv_rank])
    turning = down[:, None, spec.kv_rank :]
    q = q.reshape(n, h, spec.d_nope + spec.d_rope)
    k = linear(weights, f"{path}.k_up", c).reshape(n, h, spec.d_nope)
    v = linear(weights, f"{path}.v_up", c).reshape(n, h, spec.d_value)
    if spec.d_rope:
        turned_q = rotated(spec.position, q[..., spec.d_nope :], row.length)
        turned_k = np.repeat(rotated(spec.position, turning, row.length), h, 1)
        q = np.concatenate([q[..., : spec.d_nope], turned_q], -1)
        k = np.concatenate([k, turned_k], -1)
    z = mixed(
        spec,
        q,
        k,
        v,
        lambda i: visible(spec.mask, row, i, n),
        score_bias(spec, weights, path, row),
        weights[f"{path}.sink"] if spec.sink_logit else None,
    )
    return linear(weights, f"{path}.out", z, spec.out_bias)


def attention(spec, weights, path, x, row):
    return (latent if spec.kind == "latent" else grouped)(spec, weights, path, x, row)


# ---- feed-forward


def _inner(spec, up, gate):
    if spec.kind == "dense":
        return ACT[spec.activation](up)
    if spec.limit is not None:
        gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
    return ACT[spec.activation](gate) * (up + spec.up_offset)


def feed_forward(spec, weights, path, x):
    """[T, C] -> [T, C]."""
    if spec.kind == "moe":
        return np.array([mixture(spec, weights, path, token) for token in x])
    gate = linear(weights, f"{path}.gate", x, spec.bias) if spec.kind == "gated" else None
    return linear(weights, f"{path}.down", _inner(spec, linear(weights, f"{path}.up", x, spec.bias), gate), spec.bias)


def _best(scores, n):
    """The numbers of the n highest, the lower number first among equals."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:n]


def routed(spec, weights, path, token):
    """The experts of one token [C] and the weight of each."""
    logits = linear(weights, f"{path}.router", token, spec.router_bias)
    if spec.scoring == "softmax":
        scores = np.exp(logits - logits.max())
        scores = scores / scores.sum()
    else:
        scores = _sigmoid(logits)
    ranked = scores + weights[f"{path}.router.choice_bias"] if spec.choice_bias else scores.copy()
    if spec.groups is not None:
        members = np.arange(spec.n_experts).reshape(spec.groups.n_groups, -1)
        n_best = 1 if spec.groups.score == "max" else 2
        group_scores = [np.sort(ranked[group])[-n_best:].sum() for group in members]
        allowed = {e for g in _best(group_scores, spec.groups.top_groups) for e in members[g]}
        ranked = np.array([score if e in allowed else -np.inf for e, score in enumerate(ranked)])
    chosen = _best(ranked, spec.top_k)
    shares = scores[chosen]
    return chosen, spec.scale * (shares / shares.sum() if spec.normalise else shares)


def mixture(spec, weights, path, token):
    """One token [C] through its experts and the shared one."""
    total = np.zeros_like(token)
    chosen, shares = routed(spec, weights, path, token)
    for e, share in zip(chosen, shares, strict=True):
        own = {
            name.removeprefix(f"{path}.experts."): value[e]
            for name, value in weights.items()
            if name.startswith(f"{path}.experts.")
        }
        own = {f"expert.{name}": value for name, value in own.items()}
        total += share * feed_forward(spec.expert, own, "expert", token)
    if spec.shared is not None:
        extra = feed_forward(spec.shared, weights, f"{path}.shared", token)
        total += extra * _sigmoid(linear(weights, f"{path}.shared_gate", token)) if spec.shared_gate else extra
    return total


# ---- blocks, stacks, heads


def block(spec, weights, path, x, row):
    """One layer [T, C] -> [T, C]."""

    def at(branch, slot, value):
        return norm(getattr(getattr(spec.norms, branch), slot), weights, f"{path}.{branch}_norms.{slot}", value)

    def attend(value):
        return attention(spec.attention, weights, f"{path}.attention", value, row)

    def feed(value):
        return feed_forward(spec.ffn, weights, f"{path}.ffn", value)

    if spec.wiring.kind == "parallel":
        read = at("attention", "before", x)
        fed = read if spec.wiring.shared_norm else at("ffn", "before", x)
        first = spec.norms.attention.beta * at("attention", "after", attend(read))
        second = spec.norms.ffn.beta * at("ffn", "after", feed(fed))
        return spec.norms.attention.alpha * x + first + second
    branches = {"attention": attend, "ffn": feed}
    if spec.cross is not None:
        across = spec.cross
        branches = {
            "attention": attend,
            "cross": lambda value: grouped(across, weights, f"{path}.cross", value, row, row.memory),
            "ffn": feed,
        }
    for name, f in branches.items():
        branch = getattr(spec.norms, name)
        x = at(name, "residual", branch.alpha * x + branch.beta * at(name, "after", f(at(name, "before", x))))
    return x


def table_of(spec, name):
    """The name of the parameter that a token table ("encoder.embed", "decoder.embed", "head") is."""
    for first in ("encoder.embed", "decoder.embed"):
        if name in spec.ties and first in spec.ties:
            return f"{first}.token.weight"
    return "head.weight" if name == "head" else f"{name}.token.weight"


def embedded(spec, weights, stack_name, tokens, types):
    """The input of a stack's first block [T, C]."""
    stack = spec.stacks[stack_name]
    embed, path = stack.embed, f"{stack_name}.embed"
    x = embed.scale * weights[table_of(spec, path)][list(tokens)]
    if embed.position.kind == "learned":
        x = x + weights[f"{path}.position.weight"][[t + embed.position.offset for t in range(len(tokens))]]
    if embed.position.kind == "sinusoidal":
        width = x.shape[1]
        for t in range(len(tokens)):
            for i in range(width // 2):
                angle = (t + embed.position.offset) * embed.position.theta ** (-2 * i / width)
                one, two = (2 * i, 2 * i + 1) if embed.position.layout == "interleaved" else (i, width // 2 + i)
                x[t, one] += math.sin(angle)
                x[t, two] += math.cos(angle)
    if embed.types:
        x = x + weights[f"{path}.types.weight"][[0] * len(tokens) if types is None else list(types)]
    x = norm(embed.norm, weights, f"{path}.norm", x)
    return x if embed.factor is None else linear(weights, f"{path}.factor", x, embed.factor.bias)


def stack_states(spec, weights, name, tokens, *, types=None, prefix=0, memory=None):
    """A stack's output [T, C] after its final norm."""
    stack = spec.stacks[name]
    if not len(tokens):
        return np.zeros((0, stack.d_model))
    row = Row(len(tokens), prefix, weights.get(f"{name}.relative_bias.weight"), memory)
    x = embedded(spec, weights, name, tokens, types)
    for index, each in enumerate(stack.blocks):
        x = block(each, weights, f"{name}.blocks.{stack.owner(index)}", x, row)
    return norm(stack.final_norm, weights, f"{name}.final_norm", x)


def hidden(spec, weights, tokens, *, types=None, prefix=0, source=None):
    """Hidden states [T, C] of one row of tokens; `source` is the encoder's row of an encoder–decoder."""
    if spec.decoder is None:
        return stack_states(spec, weights, "encoder", tokens, types=types)
    memory = None if spec.encoder is None else stack_states(spec, weights, "encoder", source)
    types = types if spec.encoder is None else None
    return stack_states(spec, weights, "decoder", tokens, types=types, prefix=prefix, memory=memory)


def pooled(spec, weights, states):
    """The pooler's vector [C] of one row's states."""
    return ACT[spec.pooler.activation](linear(weights, "pooler", states[0], spec.pooler.bias))


def scores(spec, weights, states):
    """What the head makes of one row's states [T, C]: [T, V], [T, n_labels], [T, 2], or [n_labels] of a sequence."""
    head = spec.head
    if head.kind == "sequence":
        row = {
            "first": lambda: states[0],
            "last": lambda: states[-1],
            "mean": lambda: states.mean(0),
            "pooler": lambda: pooled(spec, weights, states),
        }[head.pool]()
        return linear(weights, "head", row, head.bias)
    if head.kind != "language":
        return linear(weights, "head", states, head.bias)
    if head.transform is not None:
        states = ACT[head.transform.activation](linear(weights, "head.transform", states, head.transform.bias))
        states = norm(head.transform.norm, weights, "head.norm", states)
    out = states @ weights[table_of(spec, "head")].T
    out = head.scale * (out + weights["head.bias"] if head.bias else out)
    return out if head.softcap is None else head.softcap * np.tanh(out / head.softcap)


def logits(spec, weights, tokens, *, types=None, prefix=0, source=None):
    """The head's scores of one row of tokens."""
    return scores(spec, weights, hidden(spec, weights, tokens, types=types, prefix=prefix, source=source))


def read_weights(model):
    """The weights and lasting buffers of a model by name, in float64."""
    return {name: value.detach().double().numpy().copy() for name, value in model.state_dict().items()}
