"""Bytes that ranks send for one layer, and FLOPs of scores inside a window, by counting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import LLAMA

from megapipe.plan import pieces
from megapipe.plan.context import tensor_bytes
from megapipe.plan.layers import RankLoad


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_gathers_and_scatters_its_tokens_twice_and_gathers_them_twice_more_in_backward(ranks):
    """Of each a rank sends and receives all tokens but its own share (Korthikanti et al. 2022, section 4.2.2)."""
    tokens, element = 24, 2
    once = (tokens - tokens // ranks) * LLAMA.hidden * element
    forward, backward = tensor_bytes(LLAMA, tokens, ranks=ranks, element_bytes=element)
    assert (forward, backward) == pytest.approx((4 * once, 6 * once))


@pytest.mark.parametrize("window", [1, 3, 15])
def test_scores_inside_a_window_are_of_the_token_and_those_before_it(window):
    seq, channels = 64, 8
    seen = sum(min(token + 1, window + 1) for token in range(seq))
    load = RankLoad(seq, seq, tp=1, shared=1, element=2, meets=False)
    model = replace(LLAMA, window_size=f"{window},0")
    assert load.scores(channels, model) == pytest.approx(2 * channels * seen, rel=0.02)


def test_what_is_sent_between_stages_is_the_hidden_states_of_a_microbatch():
    model = replace(LLAMA, num_layers=2)
    _, sent = pieces(model, 12, micro_batch_size=3, element_bytes=2).hidden
    assert sent == 2 * 3 * 12 * model.hidden
