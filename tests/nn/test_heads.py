"""Heads, pooling, token types, and what encoders refuse."""

import pytest
import torch
from wide import PRE, block, decoder, made_of, tokens

from anyformer.nn.heads import pooled, softcapped
from anyformer.spec.attention import Bidirectional, Grouped
from anyformer.spec.ffn import Dense
from anyformer.spec.norms import LayerNorm
from anyformer.spec.parts import (
    BlockSpec,
    BranchNorms,
    Embed,
    Factor,
    LanguageHead,
    ModelSpec,
    Norms,
    Pooler,
    SequenceHead,
    SpanHead,
    StackSpec,
    TokenHead,
    Transform,
)
from anyformer.spec.positions import Learned, NoPosition

EXACT = {"rtol": 0, "atol": 1e-12}


def encoder(head=None, *, pooler=None, ties=frozenset(), **embed):
    """A small BERT: post-norm, learned positions, two token types."""
    post = BranchNorms(residual=LayerNorm(eps=1e-12))
    attention = Grouped(
        n_heads=3,
        n_kv_heads=3,
        d_head=4,
        d_value=4,
        position=NoPosition(),
        mask=Bidirectional(),
        qkv_bias=True,
        out_bias=True,
    )
    layer = BlockSpec(
        attention=attention,
        ffn=Dense(activation="gelu", d_ff=17, bias=True),
        norms=Norms(attention=post, ffn=post),
    )
    given = {"position": Learned(), "types": 2, "norm": LayerNorm(eps=1e-12), **embed}
    stack = StackSpec(d_model=10, max_positions=33, embed=Embed(**given), blocks=(layer, layer))
    return ModelSpec(vocab_size=19, encoder=stack, head=head, pooler=pooler, ties=ties)


def test_the_mean_counts_real_tokens_alone():
    states = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]]])
    real = torch.tensor([[True, True, False, False]])
    assert pooled(states, real, "mean").tolist() == [[1.0, 0.0]]
    assert pooled(states, ~real, "mean").tolist() == [[0.0, 2.0]]
    assert pooled(states, None, "mean").tolist() == [[0.5, 1.0]]


@pytest.mark.parametrize("how", ["first", "last", "mean"])
def test_an_empty_row_is_finite_and_padding_may_be_anything(how):
    states = torch.full((2, 3, 2), float("nan"))
    states[0, 1] = torch.tensor([3.0, 4.0])
    real = torch.zeros(2, 3, dtype=torch.bool)
    real[0, 1] = True
    assert pooled(states, real, how)[0].tolist() == [3.0, 4.0]
    if how == "mean":
        assert pooled(states, real, how)[1].tolist() == [0.0, 0.0]


def test_first_and_last_are_those_of_real_tokens():
    states = torch.arange(8.0).reshape(2, 4, 1)
    real = torch.tensor([[False, True, True, False], [True, True, True, True]])
    assert pooled(states, real, "first").flatten().tolist() == [1.0, 4.0]
    assert pooled(states, real, "last").flatten().tolist() == [2.0, 7.0]


def test_the_pooler_reads_the_first_token():
    model = made_of(encoder(pooler=Pooler(), head=SequenceHead(n_labels=3)))
    x = tokens()
    first = model.hidden(x)[:, 0]
    expected = torch.tanh(first @ model.pooler.weight.T + model.pooler.bias)
    torch.testing.assert_close(model.pooled(x), expected, **EXACT)
    scores = expected @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), scores, **EXACT)


def test_a_text_scores_alone_as_beside_a_longer_one():
    real = torch.ones(2, 17, dtype=torch.bool)
    real[0, 9:] = False
    for pool in ("first", "mean", "last", "pooler"):
        model = made_of(encoder(pooler=Pooler(), head=SequenceHead(n_labels=3, pool=pool)))
        x = tokens()
        both = model(x, padding=real)
        torch.testing.assert_close(both[:1], model(x[:1, :9]), **EXACT)
        torch.testing.assert_close(both[1:], model(x[1:]), **EXACT)


def test_token_types_left_out_are_zeros():
    model, x = made_of(encoder(head=TokenHead(n_labels=5))), tokens()
    types = torch.zeros_like(x)
    assert model(x).shape == (2, 17, 5)
    torch.testing.assert_close(model(x, types=types), model(x), **EXACT)
    types[:, 4:] = 1
    assert (model(x, types=types) - model(x)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="token type 2 is outside the 2 types"):
        model(x, types=types * 2)
    with pytest.raises(ValueError, match=r"types is torch.int64 \[2, 17\]"):
        model(x, types=types[:, :3])


def test_masked_language_head_is_transform_norm_and_tied_table():
    head = LanguageHead(bias=True, transform=Transform(width=10, norm=LayerNorm(eps=1e-12)))
    model = made_of(encoder(head=head, ties=frozenset({"encoder.embed", "head"})))
    x = tokens()
    h = torch.nn.functional.gelu(model.hidden(x) @ model.head.transform.weight.T + model.head.transform.bias)
    h = torch.nn.functional.layer_norm(h, (10,), model.head.norm.weight, model.head.norm.bias, 1e-12)
    torch.testing.assert_close(model(x), h @ model.encoder.embed.token.weight.T + model.head.bias, **EXACT)
    assert "head.weight" not in dict(model.named_parameters())


def test_spans_score_both_ends_of_every_token():
    model, x = made_of(encoder(head=SpanHead())), tokens()
    expected = model.hidden(x) @ model.head.weight.T + model.head.bias
    assert expected.shape == (2, 17, 2)
    torch.testing.assert_close(model(x), expected, **EXACT)


def test_softcap_of_thirty():
    assert softcapped(torch.tensor(30.0, dtype=torch.float64), 30.0).item() == pytest.approx(22.84782, abs=1e-5)
    model = decoder(block())
    capped = model.model_copy(update={"head": LanguageHead(scale=0.5, softcap=2.0)})
    plain, other, x = made_of(model), made_of(capped), tokens()
    torch.testing.assert_close(other(x), 2.0 * torch.tanh(plain(x) * 0.5 / 2.0), **EXACT)


def test_a_factorised_embedding_is_projected_after_its_norm():
    spec = encoder(factor=Factor(width=6, bias=True))
    model, x = made_of(spec), tokens()
    embed = model.encoder.embed
    small = embed.token.weight[x] + embed.position.weight[:17] + embed.types.weight[0]
    small = torch.nn.functional.layer_norm(small, (6,), embed.norm.weight, embed.norm.bias, 1e-12)
    first = embed(embed.token.weight[x], torch.arange(17)[None])
    torch.testing.assert_close(first, small @ embed.factor.weight.T + embed.factor.bias, **EXACT)


def test_offset_positions_read_later_rows():
    spec = encoder(position=Learned(offset=2))
    model, x = made_of(spec), tokens()
    embed = model.encoder.embed
    assert embed.position.weight.shape == (35, 10)
    moved = model.hidden(x, positions=torch.arange(16, -1, -1))
    with torch.no_grad():
        embed.position.weight[2:19] = embed.position.weight[2:19].flip(0).clone()
    torch.testing.assert_close(model.hidden(x), moved, **EXACT)
    for places, words in (
        (torch.arange(17) - 1, "position -1 is before"),
        (torch.arange(17) + 17, "position 33 is past"),
    ):
        with pytest.raises(ValueError, match=f"{words} the 33 learned positions"):
            model.hidden(x, positions=places)


def test_what_an_encoder_refuses():
    model, x = made_of(encoder()), tokens()
    with pytest.raises(ValueError, match="keeps no cache"):
        model.new_cache(1, 5)
    with pytest.raises(ValueError, match="this model has no head"):
        model(x)
    with pytest.raises(ValueError, match="this model has no pooler"):
        model.pooled(x)
    with pytest.raises(ValueError, match="source is for a model with an encoder and a decoder"):
        model.hidden(x, source=x)
    with pytest.raises(ValueError, match='prefix is for layers with mask = "prefix"'):
        model.hidden(x, prefix=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="last_only is for a language head"):
        made_of(encoder(head=SpanHead()))(x, last_only=True)
    with pytest.raises(ValueError, match="this model has no encoder"):
        made_of(decoder(block())).encode(x)


def test_layers_may_share_their_parameters():
    layers = (block("rope"), block("rope"), block("rope"), block("rope"))
    spec = decoder(*layers, owners=(0, 1, 0, 1))
    model, x = made_of(spec), tokens()
    names = {name.split(".")[2] for name in model.state_dict() if ".blocks." in name}
    assert names == {"0", "1"}
    apart = made_of(decoder(*layers))
    state = {
        name.replace(".blocks.0.", f".blocks.{a}.").replace(".blocks.1.", f".blocks.{b}."): value
        for a, b in ((0, 1), (2, 3))
        for name, value in model.state_dict().items()
    }
    apart.load_state_dict(state)
    torch.testing.assert_close(model(x), apart(x), **EXACT)
    cache = model.new_cache(2, 20)
    parts = torch.cat([model(x[:, :5], cache=cache), model(x[:, 5:], cache=cache)], 1)
    torch.testing.assert_close(parts, apart(x), rtol=0, atol=1e-10)


def test_branch_multipliers():
    scaled = PRE.model_copy(update={"alpha": 0.5, "beta": 2.0})
    base = block("rope")
    one = base.model_copy(update={"norms": base.norms.model_copy(update={"attention": scaled})})
    model, x = made_of(decoder(one)), torch.randn(2, 7, 10, dtype=torch.float64)
    layer = model.decoder.blocks[0]
    from anyformer.nn.frame import Frame

    attention = layer.attention(layer.attention_norms.before(x), Frame.of(x))
    middle = 0.5 * x + 2.0 * attention
    expected = middle + layer.ffn(layer.ffn_norms.before(middle))
    torch.testing.assert_close(layer(x), expected, **EXACT)
