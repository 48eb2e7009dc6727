"""A small model whose costs the tests of planning count."""

LLAMA = {
    "vocab_size": 50,
    "d_model": 24,
    "n_layers": 3,
    "max_positions": 40,
    "tie": True,
    "ffn": {"kind": "swiglu", "d_ff": 37},
    "attention": {"n_heads": 6, "n_kv_heads": 2, "d_head": 10, "d_value": 7, "position": "rope"},
}
