"""Numbers of eight bits: values against a table of all of them, scales against the recipes' formulas."""

import math

import pytest
import torch

from megapipe.tensor_parallel.fp8.quantise import _in_blocks, _of_whole, amax_of, in_blocks, of_whole

FORMATS = {torch.float8_e4m3fn: (4, 3, 7, 448.0), torch.float8_e5m2: (5, 2, 15, 57344.0)}  # bits of each, bias, largest


def every(dtype):
    """All finite numbers of a format, decoded by hand: sign, exponent, mantissa (Micikevicius et al. 2022, table 1)."""
    exponents, mantissas, bias, largest = FORMATS[dtype]
    found = []
    for exponent in range(2**exponents):
        for mantissa in range(2**mantissas):
            part = mantissa / 2**mantissas
            value = 2.0 ** (1 - bias) * part if exponent == 0 else 2.0 ** (exponent - bias) * (1 + part)
            if value <= largest:
                found += [(value, mantissa), (-value, mantissa)]
    return found


def nearest(x, dtype):
    """The number of the format that is nearest, of two the one with an even mantissa."""
    table = every(dtype)
    return [min(table, key=lambda entry: (abs(entry[0] - value), entry[1] % 2))[0] for value in x]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_tensor_is_scaled_to_the_largest_number_and_rounded_to_the_nearest(dtype):
    x = random(3, 20)
    x[0, 0] = -5.0
    for margin in (0, 2):
        found = of_whole(x, dtype, amax_of(x), margin)
        scale = FORMATS[dtype][3] / 5.0 / 2**margin
        assert found.factors.item() == pytest.approx(1 / scale, rel=1e-6)
        assert found.values.float().flatten().tolist() == nearest((x * torch.tensor(scale)).flatten().tolist(), dtype)


def test_what_is_above_the_expected_largest_value_is_cut_off():
    found = of_whole(torch.tensor([[1.0, -8.0, 2.0]]), torch.float8_e4m3fn, torch.tensor(2.0))
    assert found.plain().tolist() == [[1.0, -2.0, 2.0]]


@pytest.mark.parametrize("block", [(1, 32), (1, 128), (128, 128)], ids=["mx", "row", "square"])
def test_a_block_is_scaled_by_the_largest_power_of_two_that_fits(block):
    rows, columns = block
    x = random(rows + 2, columns + 8) * torch.logspace(-30, 5, rows + 2)[:, None]
    x[1, :] = 0
    found = in_blocks(x, torch.float8_e4m3fn, block)
    for i in range(0, len(x), rows):
        for j in range(0, x.shape[1], columns):
            part = x[i : i + rows, j : j + columns]
            amax = part.abs().max().item()
            scale = 2.0 ** math.floor(math.log2(448 / amax)) if amax else 1.0
            assert found.factors[i // rows, j // columns].item() == 1 / scale
            values = found.values[i : i + len(part), j : j + part.shape[1]]
            assert values[:1].float().flatten().tolist() == nearest(
                (part[:1] * scale).flatten().tolist(), found.values.dtype
            )
            assert values.float().abs().max() <= 448
    assert torch.equal(found.plain()[:, : x.shape[1]], found.plain(torch.bfloat16)[:, : x.shape[1]].float())


def test_zeros_and_the_smallest_numbers_have_a_scale():
    for x in (torch.zeros(1, 32), torch.full((1, 32), 1e-45)):
        for found in (of_whole(x, torch.float8_e4m3fn, amax_of(x)), in_blocks(x, torch.float8_e4m3fn, (1, 32))):
            assert found.factors.isfinite().all()
            assert found.plain().isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_none_is_not_hidden(bad):
    """The cast takes infinity for the largest number, and a run would not see that it has failed."""
    x = random(2, 64)
    x[0, 40] = bad
    assert of_whole(x, torch.float8_e4m3fn, amax_of(x)).plain().isnan().all()
    blocks = in_blocks(x, torch.float8_e4m3fn, (1, 32)).plain().isnan()
    assert blocks[0, 32:].all()
    assert not blocks[0, :32].any()
    assert not blocks[1].any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_gpus_regions_have_the_same_bits(dtype):
    """Operations of torch's list, and what a compiler makes of their functions."""
    x = random(128, 64).bfloat16()
    whole, blocks = (x, dtype, amax_of(x), 1), (x, dtype, 1, 32)
    for name, function, given in (("quantised", _of_whole, whole), ("quantised_blocks", _in_blocks, blocks)):
        wanted = function(*given)
        for way in (getattr(torch.ops.megapipe, name), torch.compile(function.__wrapped__, backend="aot_eager")):
            for found, expected in zip(way(*given), wanted, strict=True):
                assert torch.equal(found.float(), expected.float())
