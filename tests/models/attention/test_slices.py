"""Attention of a slice: what is kept of it for others, and that nothing else is looked at."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megapipe.distributed.axis import CPU, at_waits
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Documents
from megapipe.models.attention.blocks import MaskSpec
from megapipe.models.attention.context import context_attention
from megapipe.pipeline_parallel.families.offload.activations import Activations
from megapipe.pipeline_parallel.families.offload.host import Host, Sizes
from megapipe.pipeline_parallel.shapes.slices import Lengths, Slices
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.rng import MicrobatchContext

S, HEADS, D, SLICES = 64, 2, 8, 8
QUARTERS = Documents(((S // 4,) * 4,), isolate=True, restart=False)


def kept_bytes(prefix):
    parts = [part for of_layer in prefix.values() for part in of_layer.values()]
    own = sum(part.kv.nbytes for part in parts if is_here(part))
    return own, sum(part.grad.nbytes for part in parts if part.grad is not None)


def is_here(part):
    with suppress(AssertionError):
        return part.kv is not None
    return False


def sights(documents=None, window=None, keep=None):
    prefix, slices = {}, Slices(Lengths((S // SLICES,) * SLICES))
    for number, begin in enumerate(range(0, S, S // SLICES)):
        stream = MicrobatchContext(0, 0, piece=range(begin, begin + S // SLICES), length=S, prefix=prefix)
        stream = stream if keep is None else slices.keeping(stream, number, keep)
        yield MaskSpec(S, stream, window, documents, site=(0, "attention"))


def most_kept(documents, *, again=False, window=None, copied=False):
    """Most bytes of keys and values, and of their gradients, that forwards and backwards of all slices keep.

    again: forwards keep no graph and run a second time before their backward, as full recomputation has them.
    copied: what they leave goes to the host until their backward.
    """
    q, k, v = (torch.randn(1, HEADS, S, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    moves = Activations(nn.Identity(), Host(CPU), [Sizes()] * SLICES, 1.0, out=range(SLICES), again=())
    all_sights, most, outs = list(sights(documents, window, moves.keep if copied else None)), [0, 0], []

    def attend(mask):
        cut = [x[:, :, mask.stream.piece.start : mask.stream.piece.stop] for x in (q, k, v)]
        return context_attention(*cut, mask)

    def look():
        found = kept_bytes(all_sights[0].stream.prefix)
        most[:] = max(most[0], found[0]), max(most[1], found[1])

    for number, mask in enumerate(all_sights):
        with torch.set_grad_enabled(not again), moves.saving(None, number):
            outs.append(attend(mask))
        look()
        moves.saved(number, outs[-1], None)
        if copied:
            moves.offload(number)
    for number, (mask, out) in reversed([*enumerate(zip(all_sights, outs, strict=True))]):
        if copied:
            moves.load(number)()
        # Gradients of keys are there until the backward of their own slice has taken them.
        (attend(mask) if again else out).sum().backward()
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


def test_keys_of_a_document_are_away_until_its_backward_comes():
    one = kept_of(None) // (2 * SLICES - 1)
    # Two slices of the document that runs, and the gradient of one; of one document all, whether copied or not.
    assert kept_of(QUARTERS, copied=True) == 3 * one
    assert kept_of(None, copied=True) == kept_of(None)
    # A window of one slice: two are seen, and of those before one has a gradient.
    assert kept_of(None, copied=True, window=S // SLICES) == 3 * one


def kept_of(documents, **more):
    most, _, _ = most_kept(documents, **more)
    return sum(most)


def test_a_window_adds_gradients_to_the_slices_that_it_reaches_alone():
    (_, whole), _, _ = most_kept(None, again=False)
    (_, gradients), _, _ = most_kept(None, again=False, window=S // SLICES)
    assert (whole, gradients) == (whole, whole * 1 // (SLICES - 1))


def test_sequences_of_a_microbatch_end_where_all_of_them_do():
    two = Documents(((16, 48), (32, 16, 16)), isolate=True, restart=False)
    assert two.borders == ()
    assert replace(two, lengths=((16, 32, 16), (16, 16, 16, 16))).borders == (16, 48)


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_another_pass_has_as_many_turns_whatever_a_slice_sees_of_those_before(way):
    """Experts are shared with ranks that have other documents. With a turn at each wait for an earlier slice, passes
    that run together exchanged rows in different orders on them."""

    def turns_of(mesh: ProcessMesh) -> list[int]:
        turns, found, outs = [], [], []
        all_sights = [replace(mask, stream=replace(mask.stream, cp=mesh.cp)) for mask in sights(QUARTERS)]
        with at_waits.do(lambda: turns.append(0), None):
            for mask in all_sights:
                q, k, v = (torch.randn(1, HEADS, S // SLICES // 2, D, requires_grad=True) for _ in range(3))
                outs.append(context_attention(q, k, v, mask, way))
                found.append(len(turns))
            for out in reversed(outs):
                out.sum().backward()
                found.append(len(turns))
        return found

    # Of its own tokens each slice waits once in its forward and twice in its backward, on two ranks.
    wanted = [*range(1, SLICES + 1), *range(SLICES + 2, 3 * SLICES + 1, 2)]
    assert run_threads(turns_of, cp=2) == [wanted] * 2
