"""The chunked rule against the recurrence written out in float64, and against transformers' own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.distributed.tokens import Documents
from megapipe.models.delta.rule import convolved, gated_delta_rule, numbers_of, unit


def drawn(s: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, decay and beta of 2 sequences, 3 key heads and 2 value heads for each."""
    torch.manual_seed(s)
    q, k = (unit(torch.randn(2, 3, s, 8, dtype=dtype)) for _ in range(2))
    v = torch.randn(2, 3, 2, s, 6, dtype=dtype)
    decay = -F.softplus(torch.randn(2, 3, 2, s, dtype=dtype))
    beta = torch.rand(2, 3, 2, s, dtype=dtype)
    return [x.detach().requires_grad_() for x in (q, k, v, decay, beta)]


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, numbers: Tensor | None) -> Tensor:
    """One token after the other; a state starts at 0 in each document."""
    b, heads, s, dk = q.shape
    state = v.new_zeros(b, heads, 2, dk, v.shape[-1])
    outs = []
    for t in range(s):
        if numbers is not None and t:
            state = state * (numbers[:, t] == numbers[:, t - 1]).view(b, 1, 1, 1, 1)
        state = state * decay[..., t].exp()[..., None, None]
        key, query = k[:, :, None, t], q[:, :, None, t] * dk**-0.5
        answer = torch.einsum("bhrkv,bhrk->bhrv", state, key.expand(-1, -1, 2, -1))
        write = beta[..., t, None] * (v[..., t, :] - answer)
        state = state + torch.einsum("bhrk,bhrv->bhrkv", key.expand(-1, -1, 2, -1), write)
        outs.append(torch.einsum("bhrkv,bhrk->bhrv", state, query.expand(-1, -1, 2, -1)))
    return torch.stack(outs, 3)


DOCUMENTS = {
    "one": None,
    "many": lambda s: ((s,), (1, s // 2 - 1, 0, s - s // 2)),
    "of a chunk": lambda s: ((64, s - 64), (63, 1, s - 64)),
    "of a token": lambda s: ((1,) * s, (s - 1, 1)),
}


@pytest.mark.parametrize(
    "s, kind", [(1, "one"), (2, "one"), (63, "one"), (64, "one"), *((s, kind) for s in (65, 200) for kind in DOCUMENTS)]
)
def test_chunks_have_the_values_and_gradients_of_the_recurrence(s, kind):
    lengths = DOCUMENTS[kind]
    numbers = None
    if lengths is not None:
        numbers = numbers_of(Documents(lengths(s), True, False), torch.device("cpu"))
    ours, plain = drawn(s), drawn(s)
    got = gated_delta_rule(*ours, numbers)
    want = recurrence(*plain, numbers)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    got.backward(grad)
    want.backward(grad)
    for mine, its in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-11, atol=1e-11)


def test_strong_decays_overflow_nothing():
    q, k, v, decay, beta = drawn(200)
    decay = (decay * 400).detach().requires_grad_()
    out = gated_delta_rule(q, k, v, decay, beta)
    torch.testing.assert_close(out, recurrence(q, k, v, decay, beta, None))
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v, decay, beta))


@pytest.mark.parametrize("s", [5, 64, 200])
def test_chunks_are_those_of_transformers_in_float32(s):
    # Two seconds, of which no other test needs to know.
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, decay, beta = (x.detach() for x in drawn(s, torch.float32))
    flat = [x.flatten(1, 2).transpose(1, 2) for x in (v, decay, beta)]
    want, _ = torch_chunk_gated_delta_rule(q.transpose(1, 2), k.transpose(1, 2), flat[0], flat[1], flat[2])
    got = gated_delta_rule(q, k, v, decay, beta).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize("s", [2, 9])
def test_the_convolution_is_torchs_in_each_document(s):
    torch.manual_seed(0)
    x = torch.randn(s, 2, 3, 5, dtype=torch.float64)
    weight = torch.randn(3, 5, 4, dtype=torch.float64)

    def plain(part: Tensor) -> Tensor:
        rows = F.pad(part.flatten(2).permute(1, 2, 0), (3, 0))
        out = F.conv1d(rows, weight.flatten(0, 1)[:, None], groups=15)
        return out.permute(2, 0, 1).view(part.shape)

    torch.testing.assert_close(convolved(x, weight, None), plain(x))
    numbers = numbers_of(Documents(((1, s - 1), (s,)), True, False), x.device)
    cut = torch.cat((plain(x[:1, :1]), plain(x[1:, :1])))
    torch.testing.assert_close(convolved(x, weight, numbers), torch.cat((cut, plain(x[:, 1:])), 1))
