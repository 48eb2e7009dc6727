"""A second model, straight from the equations, in float64: one row, one head, one query at a time.

It reads the specification and the weights by their canonical names and shares no code with the first.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf)

ACT = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def norm(spec, weights, path, x):
    """Over the last dimension; no norm is the identity."""
    if spec.kind == "none":
        return x
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.eps)
    return x * weights.get(f"{path}.weight", 1.0) + weights.get(f"{path}.bias", 0.0)


def linear(weights, path, x):
    return x @ weights[f"{path}.weight"].T + weights.get(f"{path}.bias", 0.0)


def turned(rope, x, position):
    """One head at one position: pair i turns by position · theta^(−2i/width), as a complex number."""
    width = rope.width(len(x))
    out = x.copy()
    for i in range(width // 2):
        one, two = (i, i + width // 2) if rope.layout == "half" else (2 * i, 2 * i + 1)
        z = complex(x[one], x[two]) * np.exp(1j * position * rope.theta ** (-2 * i / width))
        out[one], out[two] = z.real, z.imag
    return out


def attention(spec, weights, path, x, positions):
    n = len(x)
    q = linear(weights, f"{path}.q", x).reshape(n, spec.n_heads, spec.d_head)
    k = linear(weights, f"{path}.k", x).reshape(n, spec.n_kv_heads, spec.d_head)
    v = linear(weights, f"{path}.v", x).reshape(n, spec.n_kv_heads, spec.d_value)

    def normed(heads, name):
        where = f"{path}.{name}.norm"
        if spec.qk_norm.over == "head":
            return norm(spec.qk_norm.norm, weights, where, heads)
        return norm(spec.qk_norm.norm, weights, where, heads.reshape(n, -1)).reshape(heads.shape)

    def rotated(heads):
        if spec.position.kind == "none":
            return heads
        return np.array(
            [[turned(spec.position, h, p) for h in token] for token, p in zip(heads, positions, strict=True)]
        )

    if spec.qk_norm is not None and spec.qk_norm.order == "before":
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    q, k = rotated(q), rotated(k)
    if spec.qk_norm is not None and spec.qk_norm.order == "after":
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    z = np.zeros((n, spec.n_heads, spec.d_value))
    for h in range(spec.n_heads):
        g = h * spec.n_kv_heads // spec.n_heads
        for i in range(n):
            scores = np.array([q[i, h] @ k[j, g] for j in range(i + 1)]) / math.sqrt(spec.d_head)
            share = np.exp(scores - scores.max())
            z[i, h] = (share / share.sum()) @ v[: i + 1, g]
    return linear(weights, f"{path}.out", z.reshape(n, -1))


def feed_forward(spec, weights, path, x):
    up = linear(weights, f"{path}.up", x)
    if spec.kind == "gated":
        inner = ACT[spec.activation](linear(weights, f"{path}.gate", x)) * up
    else:
        inner = ACT[spec.activation](up)
    return linear(weights, f"{path}.down", inner)


def block(spec, weights, path, x, positions):
    def at(branch, slot, value, shared=None):
        return norm(
            getattr(getattr(spec.norms, shared or branch), slot), weights, f"{path}.{branch}_norms.{slot}", value
        )

    read = at("attention", "before", x)
    attn = at("attention", "after", attention(spec.attention, weights, f"{path}.attention", read, positions))
    if spec.wiring.kind == "parallel":
        fed = read if spec.wiring.shared_norm else at("ffn", "before", x)
        return x + attn + at("ffn", "after", feed_forward(spec.ffn, weights, f"{path}.ffn", fed))
    x = at("attention", "residual", x + attn)
    mlp = at("ffn", "after", feed_forward(spec.ffn, weights, f"{path}.ffn", at("ffn", "before", x)))
    return at("ffn", "residual", x + mlp)


def hidden(spec, weights, tokens):
    """Hidden states [T, C] of one row of tokens."""
    stack = spec.decoder
    positions = range(len(tokens))
    x = weights["decoder.embed.token.weight"][list(tokens)]
    if stack.embed.position.kind == "learned":
        x = x + weights["decoder.embed.position.weight"][list(positions)]
    if stack.embed.position.kind == "sinusoidal":
        c, theta = stack.d_model, stack.embed.position.theta
        for t in positions:
            for i in range(c // 2):
                angle = t / theta ** (2 * i / c)
                one, two = (2 * i, 2 * i + 1) if stack.embed.position.layout == "interleaved" else (i, c // 2 + i)
                x[t, one] += math.sin(angle)
                x[t, two] += math.cos(angle)
    x = norm(stack.embed.norm, weights, "decoder.embed.norm", x)
    for index, each in enumerate(stack.blocks):
        x = block(each, weights, f"decoder.blocks.{index}", x, positions)
    return norm(stack.final_norm, weights, "decoder.final_norm", x)


def logits(spec, weights, tokens):
    """Scores [T, V] of one row of tokens."""
    table = "decoder.embed.token.weight" if "head" in spec.ties else "head.weight"
    return hidden(spec, weights, tokens) @ weights[table].T + weights.get("head.bias", 0.0)


def read_weights(model):
    """The weights of a model by name, in float64."""
    return {name: value.detach().double().numpy().copy() for name, value in model.named_parameters()}
