"""Attention of a slice: what is kept of it for others, and that nothing else is looked at."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megapipe.distributed.tokens import Documents
from megapipe.models.attention.blocks import Sight
from megapipe.models.attention.context import context_attention
from megapipe.tensor_parallel.rng import Stream

S, HEADS, D, SLICES = 64, 2, 8, 8
QUARTERS = Documents(((S // 4,) * 4,), isolate=True, restart=False)


def kept_bytes(prefix):
    parts = [part for of_layer in prefix.values() for part in of_layer.values()]
    own = sum(part.kv.nbytes for part in parts)
    return own, sum(part.grad.nbytes for part in parts if part.grad is not None)


def sights(documents=None, window=None):
    prefix = {}
    for begin in range(0, S, S // SLICES):
        stream = Stream(0, 0, piece=range(begin, begin + S // SLICES), length=S, prefix=prefix)
        yield Sight(S, stream, window, documents, site=(0, "attention"))


def most_kept(documents, *, again, window=None):
    """Most bytes of keys and values, and of their gradients, that forwards and backwards of all slices keep.

    again: forwards keep no graph and run a second time before their backward, as full recomputation has them.
    """
    q, k, v = (torch.randn(1, HEADS, S, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    all_sights, most, outs = list(sights(documents, window)), [0, 0], []

    def attend(sight):
        cut = [x[:, :, sight.stream.piece.start : sight.stream.piece.stop] for x in (q, k, v)]
        return context_attention(*cut, sight)

    def look():
        found = kept_bytes(all_sights[0].stream.prefix)
        most[:] = max(most[0], found[0]), max(most[1], found[1])

    for sight in all_sights:
        with torch.set_grad_enabled(not again):
            outs.append(attend(sight))
        look()
    for sight, out in reversed([*zip(all_sights, outs, strict=True)]):
        # Gradients of keys are there until the backward of their own slice has taken them.
        (attend(sight) if again else out).sum().backward()
        look()
    assert kept_bytes(all_sights[0].stream.prefix) == (0, 0)
    return most, torch.cat([out.detach() for out in outs], 2), (q, k, v)


@pytest.mark.parametrize("again", [False, True])
def test_documents_of_a_quarter_keep_less(again):
    (whole, whole_gradients), _, _ = most_kept(None, again=again)
    (keys, gradients), out, (q, k, v) = most_kept(QUARTERS, again=again)
    one = whole // (SLICES - again)  # the last slice is kept for nobody
    assert whole_gradients == one * (SLICES - 1)
    # Of the two slices of a document one is kept for the other; a graph keeps a slice for its own backward too.
    assert keys == (one * SLICES // 2 if again else one * SLICES)
    assert gradients == one
    assert keys + gradients <= (0.4 if again else 0.6) * (whole + whole_gradients)
    number = torch.arange(S) // (S // 4)
    mask = (number[:, None] == number) & torch.ones(S, S, dtype=torch.bool).tril()
    wanted = F.scaled_dot_product_attention(*(x.detach().requires_grad_() for x in (q, k, v)), attn_mask=mask)
    torch.testing.assert_close(out, wanted.detach(), rtol=1e-12, atol=1e-14)


def test_a_window_adds_gradients_to_the_slices_that_it_reaches_alone():
    (_, whole), _, _ = most_kept(None, again=False)
    (_, gradients), _, _ = most_kept(None, again=False, window=S // SLICES)
    assert (whole, gradients) == (whole, whole * 1 // (SLICES - 1))


def test_sequences_of_a_microbatch_end_where_all_of_them_do():
    two = Documents(((16, 48), (32, 16, 16)), isolate=True, restart=False)
    assert two.borders == ()
    assert replace(two, lengths=((16, 32, 16), (16, 16, 16, 16))).borders == (16, 48)
