"""A padded row is the row alone, a packed document the document alone, and rows do not see each other."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import anyformer.nn.attend.fused as fused
from nn.helpers import GPT, KINDS, LLAMA, ids, made, padded
from spec.strategies import normed_recipes

BACKENDS = ["auto", "reference", "fused"]


ROWS = [ids(1, n, 19, seed=n)[0] for n in (3, 7, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_a_padded_row_is_the_row_alone(kind, side, backend):
    """Learned, sinusoidal, rotary and no positions; the pad id changes nothing."""
    model = made(KINDS[kind], backend=backend)
    outs = []
    for pad in (0, 11):
        tokens, real = padded(ROWS, side, pad)
        out = model(tokens, padding=real)
        assert torch.isfinite(out).all()
        for index, row in enumerate(ROWS):
            torch.testing.assert_close(out[index][real[index]], model(row[None])[0], atol=1e-5, rtol=1e-5)
        last = model(tokens, padding=real, last_only=True)
        assert last.shape == (3, 1, 19)
        for index, row in enumerate(ROWS):
            torch.testing.assert_close(last[index], model(row[None])[0, -1:], atol=1e-5, rtol=1e-5)
        outs.append(out[real])
    assert torch.equal(*outs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_padded_rows(side):
    """The loss over real tokens has the gradients of the rows alone; pads have none."""
    model = made(LLAMA, dtype="float64")
    tokens, real = padded(ROWS, side, 4)
    embeddings = model.decoder.embed.lookup(tokens).detach().requires_grad_()
    out = model(embeddings=embeddings, padding=real)
    out[real].square().sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert (embeddings.grad[~real] == 0).all()
    model.zero_grad()
    for row in ROWS:
        model(embeddings=model.decoder.embed.lookup(row[None]).detach()).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["llama", "gpt", "sinusoidal"])
def test_an_all_pad_row_is_finite_and_leaves_the_others_alone(kind, backend, dtype):
    """Outputs and gradients finite; real rows bit for bit the same."""
    model = made(KINDS[kind], backend=backend, dtype=dtype)
    tokens, real = padded(ROWS[:2], "left", 3)
    empty = torch.cat([tokens, tokens[:1]]), torch.cat([real, torch.zeros(1, 7, dtype=torch.bool)])
    out = model(empty[0], padding=empty[1])
    assert torch.isfinite(out).all()
    with torch.no_grad():
        # A batch of three on both sides, so that the matrix products are of one shape.
        filled = model(torch.cat([tokens, tokens[1:]]), padding=torch.cat([real, real[1:]]))
    assert torch.equal(out[:2][real], filled[:2][real])
    out[empty[1]].float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


PACKED = torch.tensor([[4, 4, 4, 9, 9, 9, 9, 9, 2], [0, 1, 1, 1, 1, 1, 3, 3, 3]])


def documents(tokens, segments):
    """Every document of a packed batch: row, its columns, its tokens."""
    for row in range(len(tokens)):
        for each in segments[row].unique():
            at = (segments[row] == each).nonzero().flatten()
            yield row, at, tokens[row, at][None]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_packed_documents_are_the_documents_apart(kind, backend, large, monkeypatch):
    """Values, loss and gradients; with a mask and, where it would be large, without."""
    if large:
        monkeypatch.setattr(fused, "MASK_ELEMENTS", 2)
    model = made(KINDS[kind], dtype="float64", backend=backend)
    tokens = ids(2, 9, 19)
    packed = model(tokens, segments=PACKED)
    targets = ids(2, 9, 19, seed=4)
    loss = F.cross_entropy(packed.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for row, at, document in documents(tokens, PACKED):
        alone = model(document)
        torch.testing.assert_close(packed[row, at], alone[0])
        each = F.cross_entropy(alone[0], targets[row, at], reduction="sum")
        each.backward()
        total += each.item()
    assert loss.item() == pytest.approx(total)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_packed_and_padded_at_once(backend, large, monkeypatch):
    if large:
        monkeypatch.setattr(fused, "MASK_ELEMENTS", 2)
    model = made(GPT, backend=backend)
    tokens = ids(2, 9, 19)
    real = torch.tensor([[False, True, True, True, True, True, False, False, True], [True] * 8 + [False]])
    out = model(tokens, segments=PACKED, padding=real)
    for row, at, _ in documents(tokens, PACKED):
        kept = at[real[row, at]]
        if len(kept):
            torch.testing.assert_close(out[row, kept], model(tokens[row, kept][None])[0], atol=1e-5, rtol=1e-5)


@settings(max_examples=40)
@given(normed_recipes(), st.data())
@torch.no_grad()
def test_any_model_padded_and_packed(recipe, data):
    """In float64, over the whole space, by any backend."""
    model = made(recipe, dtype="float64", backend=data.draw(st.sampled_from(BACKENDS)))
    call = model.hidden if model.head is None else model
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    rows = [ids(1, n, model.spec.vocab_size, seed=i)[0] for i, n in enumerate(lengths)]
    alone = [call(row[None])[0] for row in rows]
    tokens, real = padded(rows, data.draw(st.sampled_from(["left", "right"])), 0)
    before = fused.MASK_ELEMENTS
    try:
        fused.MASK_ELEMENTS = data.draw(st.sampled_from([2, before]))
        together = call(tokens, padding=real)
        segments = torch.cat([torch.full((n,), 7 * i) for i, n in enumerate(lengths)])[None]
        packed = call(torch.cat(rows)[None], segments=segments)[0].split(lengths)
    finally:
        fused.MASK_ELEMENTS = before
    for index, want in enumerate(alone):
        torch.testing.assert_close(together[index][real[index]], want, atol=1e-10, rtol=1e-9)
        torch.testing.assert_close(packed[index], want, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("segments", [[[1, 1, 2, 1, 1]], [[1, 2, 3, 4, 3]]])
def test_a_document_that_goes_on_after_another_is_refused(segments):
    model = made(LLAMA)
    with pytest.raises(ValueError, match="in row 0 a document goes on after another one"):
        model(ids(1, 5, 19), segments=torch.tensor(segments))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "padding",
            torch.ones(2, 4, dtype=torch.bool),
            r"padding is torch.bool \[2, 5\] like the input; got .*\[2, 4\]",
        ),
        ("padding", torch.ones(2, 5), "padding is torch.bool.*got torch.float32"),
        ("padding", torch.ones(5, dtype=torch.bool), r"got torch.bool \[5\]"),
        ("segments", torch.zeros(2, 5, dtype=torch.int32), r"segments is torch.int64 \[2, 5\] .*; got torch.int32"),
        ("segments", torch.zeros(2, 6, dtype=torch.int64), r"got torch.int64 \[2, 6\]"),
        (
            "positions",
            torch.zeros(4, dtype=torch.int64),
            r"positions are int64 \[5\] or \[2, 5\]; got torch.int64 \[4\]",
        ),
        ("positions", torch.zeros(2, 5), "got torch.float32"),
    ],
)
def test_what_does_not_fit_the_input_is_refused(name, value, said):
    model = made(LLAMA)
    with pytest.raises(ValueError, match=said):
        model(ids(2, 5, 19), **{name: value})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_past_does_not_see_the_future(kind, backend):
    """Changing token j changes no logit before j, and the gradient of an earlier logit by a later embedding is 0."""
    model = made(KINDS[kind], backend=backend)
    tokens = ids(2, 8, 19)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 19
    with torch.no_grad():
        one, two = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :5], two[:, :5], atol=1e-6, rtol=1e-6)
    assert (one[:, 5:] - two[:, 5:]).abs().amax(-1).min() > 1e-4
    embeddings = model.decoder.embed.lookup(tokens).detach().requires_grad_()
    model(embeddings=embeddings)[:, :5].square().sum().backward()
    assert (embeddings.grad[:, 5:] == 0).all()
    assert (embeddings.grad[:, :5].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("kind", list(KINDS))
@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours(kind):
    model = made(KINDS[kind])
    tokens = ids(4, 7, 19)
    whole = model(tokens)
    for row in range(4):
        torch.testing.assert_close(model(tokens[row : row + 1])[0], whole[row], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(tokens.flip(0)), whole.flip(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "parallel", "nope"])
@torch.no_grad()
def test_relative_positions_ignore_a_shift(kind):
    recipe = dict(KINDS[kind])
    # A norm after the rotation weighs channels by where they have turned to, and is relative no more.
    recipe["attention"] = {**recipe["attention"], "qk_norm": {"order": "before"}}
    model = made(recipe, dtype="float64")
    tokens = ids(2, 7, 19)
    shifted = model(tokens, positions=torch.arange(7) + 37)
    torch.testing.assert_close(shifted, model(tokens))
    torch.testing.assert_close(model(tokens, positions=torch.arange(7)[None]), model(tokens))


@torch.no_grad()
def test_explicit_positions_are_per_row():
    model = made(GPT)
    tokens = ids(2, 4, 19)
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 39]])
    out = model(tokens, positions=positions)
    torch.testing.assert_close(out[0], model(tokens)[0], atol=1e-5, rtol=1e-5)
    table = model.decoder.embed.position.weight
    given = model.decoder.embed.lookup(tokens[1:]) + table[positions[1:]] - table[:4]
    torch.testing.assert_close(out[1:], model(embeddings=given), atol=1e-5, rtol=1e-5)
    assert (out[1] - model(tokens)[1]).abs().max() > 1e-2
