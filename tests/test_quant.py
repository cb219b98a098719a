"""Number formats: codes, scale rules, packing, the linear layer and the norm against the slow twin."""

from __future__ import annotations

import math
from typing import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twin
from golden_data import difference, same_bits
from quant import (
    E2M1,
    E2M1_E4M3,
    E2M1_E8M0,
    E4M3_E8M0,
    BlockFormat,
    FakeQuant,
    Linear,
    Numerics,
    Ranks,
    RMSNorm,
    RowCodec,
    decode_e4m3,
    decode_e8m0,
    dequantise,
    dequantise_weight,
    encode_e2m1,
    fake_quantise,
    product,
    quantise,
    to_bf16,
)

EXACT, FAST = Numerics(torch.float64), Numerics(torch.float32)
CPU = torch.device("cpu")
FORMATS = (E4M3_E8M0, E2M1_E8M0, E2M1_E4M3)
TWINS: dict[BlockFormat, Callable] = {
    E4M3_E8M0: twin.quantise_fp8,
    E2M1_E8M0: twin.quantise_fp4,
    E2M1_E4M3: twin.quantise_fp4_main,
}
formats = pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3_e8m0", "e2m1_e8m0", "e2m1_e4m3"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def from_numpy(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(x))


# ------------------------------------------------------------------------------------------------------------- elements


def test_every_code_of_every_format_decodes_to_its_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    for times in (1, 40):  # few and many values are decoded in two ways
        values = decode_e4m3(codes.repeat(times))
        assert same_bits(values[finite.repeat(times)].double(), from_numpy(twin.E4M3)[finite].repeat(times))
    assert same_bits(decode_e8m0(codes)[:255].double(), from_numpy(twin.E8M0)[:255])
    assert decode_e8m0(codes)[255].isnan()


@pytest.mark.parametrize("fmt", [E2M1_E8M0, E2M1_E4M3], ids=["e2m1_e8m0", "e2m1_e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_pair_of_e2m1_codes_at_every_scale_is_their_product(fmt: BlockFormat, dtype: torch.dtype) -> None:
    bytes_, scales = torch.arange(256, dtype=torch.uint8), torch.arange(253, dtype=torch.uint8)    # 6 * 2^126 is below infinity
    of_scales = from_numpy(twin.E8M0)[:253]
    if fmt.scale == "e4m3":
        scales = scales[(scales & 0x7F) != 0x7F]
        of_scales = from_numpy(twin.E4M3)[scales.long()]
    values = dequantise(bytes_.expand(len(scales), 256), scales.unsqueeze(1).expand(-1, 512 // fmt.block), fmt, dtype)
    assert values.dtype == dtype and values.shape == (len(scales), 512)
    elements = from_numpy(twin.E2M1)[torch.stack([bytes_ & 15, bytes_ >> 4], 1).flatten().long()]  # the low nibble first
    assert same_bits(values.double(), of_scales.unsqueeze(1) * elements)


def test_e2m1_midpoints_and_their_neighbours() -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    mid = torch.tensor(list(ties))
    assert [E2M1[c] for c in encode_e2m1(mid).tolist()] == list(ties.values())
    for towards in (0.0, 9.0):
        beside = mid.nextafter(torch.tensor(towards))
        assert [E2M1[c] for c in encode_e2m1(beside).tolist()] == [
            min(E2M1, key=lambda v: abs(v - b)) for b in beside.tolist()
        ]
    assert encode_e2m1(torch.tensor([-0.0, -0.1, 0.0, 6.0, -6.0, -5.0])).tolist() == [8, 8, 0, 7, 15, 14]


def test_e2m1_codes_of_every_bf16_value_in_range_equal_the_twin() -> None:
    x = every_bf16()
    x = x[x.abs() <= 6]
    assert encode_e2m1(x.float()).numpy().tolist() == twin.e2m1_codes(x.double().numpy()).tolist()


@pytest.mark.parametrize("fmt", [E4M3_E8M0, E2M1_E8M0], ids=["e4m3_e8m0", "e2m1_e8m0"])
def test_scales_of_every_amax_are_those_of_the_literal_rule(fmt: BlockFormat) -> None:
    """The rule as it is published: the float32 product of amax with the float32 reciprocal of the largest element, and the
    least power of two that is not below it."""
    amax = every_bf16()[every_bf16() >= 0]
    x = torch.zeros(len(amax), fmt.block, dtype=torch.bfloat16)
    x[:, 3] = -amax
    quotient = amax.float().clamp_min(fmt.floor) * torch.tensor(1 / fmt.largest)
    mantissa, exponent = torch.frexp(quotient.double())
    want = torch.exp2((exponent - (mantissa == 0.5).int()).double())
    assert torch.equal(decode_e8m0(quantise(x, fmt)[1]).flatten().double(), want)


def test_to_bf16_goes_through_float32() -> None:
    """1 + 2^-8 + 2^-40 lies above a bf16 tie; float32 puts it on the tie, which goes down to even."""
    x = torch.tensor([1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40], dtype=torch.float64)
    assert to_bf16(x).tolist() == [1.0, 1 + 2**-6]
    x = torch.cat([x, normal(5000, seed=1) * 7, torch.tensor([-0.0, 1e300, math.inf], dtype=torch.float64)])
    assert same_bits(to_bf16(x).double(), from_numpy(twin.bf16(x.numpy())))


# ----------------------------------------------------------------------------------------------------------- quantisers


def every_bf16() -> Tensor:
    """All finite bf16 values in the order of their codes, so that neighbours share a block."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


def nasty_rows() -> dict[str, Tensor]:
    """Rows of 32 for each kind of block that quantisers get wrong."""
    row = lambda *head: torch.tensor([*head, *[0.0] * (32 - len(head))])  # noqa: E731
    ramp = torch.linspace(-1, 1, 32)
    powers = [2.0**k for k in (-100, -30, -9, -3, 0, 5, 40, 100)]
    return {
        "zeros of both signs": torch.stack([torch.zeros(32), -torch.zeros(32), torch.tensor([0.0, -0.0] * 16)]),
        "amax exactly 448 * 2^k": torch.stack([ramp * 448 * p for p in powers]),
        "amax exactly 6 * 2^k": torch.stack([ramp * 6 * p for p in powers]),
        "amax one step above": torch.stack([row(v * (1 + 2.0**-7), v / 3, -v / 7) for v in (448.0, 6.0, 224.0, 3.0)]),
        "midpoints of E2M1": torch.stack(
            [
                row(6.0, *(s * m for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5) for s in (1, -1))) * p
                for p in (1.0, 4.0, 2.0**-9, 2.0**60)
            ]
        ),
        "midpoints of E4M3": torch.stack(
            [
                row(
                    448.0,
                    *(2.0**e * (1 + (2 * i + 1) / 16) for e in (-5, 0, 7) for i in range(7)),
                    *(k * 2.0**-10 for k in range(1, 10)),
                )
                * p
                for p in (1.0, 2.0**-11, 2.0**20)
            ]
        ),
        "subnormals": torch.stack(
            [ramp * 2.0**-130, ramp * 1e-4, ramp * 6 * 2.0**-126, ramp * 7.5 * 2.0**-9, ramp * 2.0**-12]
        ),
        "amax / 6 above 448": torch.stack([ramp * 2689, ramp * 2816, ramp * 1e6, ramp * 1e37]),
        "one outlier": torch.stack(
            [row(1000.0, *[0.01] * 31), row(-1e37, *[1.0] * 31), torch.cat([torch.full((31,), 1e-6), row(9.0)[:1]])]
        ),
        "quotient above 6": torch.stack([row(7.0, -6.9, 6.5), row(7.5 * 2.0**-9, -7 * 2.0**-9), row(10.0, -2.0, 0.5)]),
    }


def check_against_twin(x: Tensor, fmt: BlockFormat) -> None:
    expected = TWINS[fmt](x.double().numpy())
    codes, scales = quantise(x, fmt)
    assert codes.dtype == scales.dtype == torch.uint8
    unpacked = codes if fmt.element == "e4m3" else torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    assert torch.equal(unpacked, from_numpy(expected.codes))
    table = twin.E8M0 if fmt.scale == "e8m0" else twin.E4M3
    assert np.array_equal(table[scales.numpy()], expected.scales)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = dequantise(codes, scales, fmt, dtype)
        assert values.dtype == dtype and same_bits(values.double(), from_numpy(expected.values))
        assert same_bits(fake_quantise(x, fmt, dtype), values)


@pytest.mark.parametrize("kind", list(nasty_rows()))
@formats
def test_case_22_nasty_blocks_equal_the_twin(fmt: BlockFormat, kind: str) -> None:
    check_against_twin(nasty_rows()[kind].bfloat16(), fmt)


@formats
def test_case_22_every_bf16_value_and_random_blocks_equal_the_twin(fmt: BlockFormat) -> None:
    x = every_bf16()
    x = x[x.abs() < 2.0**125]  # above, a value rounded up may leave bfloat16
    check_against_twin(x.view(-1, 64), fmt)  # blocks of neighbours: all exponents, all scales
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    check_against_twin(x[shuffled].view(-1, 64), fmt)  # blocks of outliers
    check_against_twin((normal(500, 96) * torch.exp2(4 * normal(500, 1, seed=1))).bfloat16(), fmt)


@formats
def test_case_22_quantising_twice_changes_nothing(fmt: BlockFormat) -> None:
    """FP4 with E4M3 scales only while the scale is a normal number: a subnormal scale cannot be found from the
    values."""
    rows = [*(r for kind, r in nasty_rows().items()), normal(400, 32) * torch.exp2(5 * normal(400, 1, seed=2))]
    x = torch.cat([r.double() for r in rows]).bfloat16()
    once = fake_quantise(x, fmt)
    twice = fake_quantise(once, fmt)
    if fmt is E2M1_E4M3:
        normal_scale = (decode_e4m3(quantise(x, fmt)[1]) >= 2.0**-6).repeat_interleave(16, -1)
        assert normal_scale.any() and same_bits(once[normal_scale], twice[normal_scale])
    else:
        assert same_bits(once, twice)


@formats
def test_a_block_is_quantised_alone_and_the_sign_of_zero_survives(fmt: BlockFormat) -> None:
    x = normal(3, 4, fmt.block * 3).bfloat16()
    blocks = x.unflatten(-1, (3, fmt.block))
    assert same_bits(fake_quantise(x, fmt), fake_quantise(blocks, fmt).flatten(-2))
    tiny = torch.tensor([100.0, -1e-7, 1e-7, -0.0] + [0.0] * (fmt.block - 4)).bfloat16()
    assert fake_quantise(tiny, fmt).signbit().tolist()[:5] == [False, True, False, True, False]


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantisers_leave_their_input_alone(fmt: BlockFormat, dtype: torch.dtype) -> None:
    """Also where nothing had to be converted, and for rows that lie apart in memory."""
    x = normal(8, 64).bfloat16().to(dtype)
    apart = torch.stack([x, x + 1], 1)[:, 0]
    kept = x.clone()
    codes, scales = quantise(x, fmt)
    before = codes.clone(), scales.clone()
    for value in (
        fake_quantise(x, fmt),
        fake_quantise(apart, fmt),
        dequantise(*quantise(apart, fmt), fmt, torch.bfloat16),
    ):
        assert same_bits(value, dequantise(codes, scales, fmt, torch.bfloat16))
    assert same_bits(x, kept) and same_bits(apart, kept)
    assert same_bits(codes, before[0]) and same_bits(scales, before[1])


def test_floors_give_zero_blocks_a_scale() -> None:
    for fmt, floor in ((E4M3_E8M0, 2.0**-22), (E2M1_E8M0, 2.0**-126), (E2M1_E4M3, 2.0**-9)):
        _, scales = quantise(torch.zeros(fmt.block * 2, dtype=torch.bfloat16), fmt)
        decode = decode_e8m0 if fmt.scale == "e8m0" else decode_e4m3
        assert decode(scales).tolist() == [floor] * 2


@formats
def test_a_row_that_blocks_do_not_divide_is_refused(fmt: BlockFormat) -> None:
    width = fmt.block * 3 // 2
    with pytest.raises(ValueError, match=f"{width} values cannot be stored as"):
        quantise(torch.zeros(2, width, dtype=torch.bfloat16), fmt)
    with pytest.raises(ValueError, match=f"{width} values cannot be stored as"):
        RowCodec(width, fmt, torch.float32, CPU)


# -------------------------------------------------------------------------------------------------------------- packing


def test_released_rows_have_528_288_and_68_bytes() -> None:
    widths = (E4M3_E8M0, 512, 528), (E2M1_E4M3, 512, 288), (E2M1_E8M0, 128, 68)
    for fmt, width, size in widths:
        codec = RowCodec(width, fmt, torch.float64, CPU)
        packed = codec.pack(normal(2, 5, width).bfloat16())
        assert codec.bytes == size and packed.shape == (2, 5, size) and packed.dtype == torch.uint8


@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float32, torch.float64])
@formats
def test_unpacking_gives_exactly_what_the_quantiser_made(fmt: BlockFormat, operand: torch.dtype) -> None:
    x = torch.cat([*(r for r in nasty_rows().values())]).bfloat16()
    codec = RowCodec(32, fmt, operand, CPU)
    rows = codec.unpack(codec.pack(x))
    assert rows.dtype == operand and same_bits(rows.double(), from_numpy(TWINS[fmt](x.double().numpy()).values))
    assert same_bits(codec.pack(x), torch.cat(quantise(x, fmt), -1))


def test_rows_that_are_not_quantised_are_bfloat16_bytes() -> None:
    codec, x = RowCodec(48, None, torch.float32, CPU), normal(3, 48).bfloat16()
    assert codec.bytes == 96 and same_bits(codec.unpack(codec.pack(x)).bfloat16(), x)
    assert codec.unpack(codec.pack(x.T.contiguous().T)).dtype == torch.float32


# -------------------------------------------------------------------------------------------------- products and layers


def random_fp8(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    weight = (normal(n, k, seed=seed) * 100).float().to(torch.float8_e4m3fn)
    scale = torch.randint(
        116, 125, (-(-n // 32), k // 32), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return weight, scale.view(torch.float8_e8m0fnu)


def random_fp4(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (n, k // 2), generator=g, dtype=torch.int8)
    return weight, torch.randint(118, 125, (n, k // 32), generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def twin_weight(weight: Tensor, scale: Tensor | None) -> twin.Weight:
    raw = lambda t: t.view(torch.uint8).numpy()  # noqa: E731
    if scale is None:
        return twin.Weight("bf16", weight.double().numpy())
    if weight.dtype == torch.int8:
        return twin.Weight("fp4", twin.dequantise_fp4_weight(raw(weight), raw(scale)))
    return twin.Weight("fp8", twin.dequantise_fp8_weight(raw(weight), raw(scale)))


@pytest.mark.parametrize("shape", [(96, 64), (80, 160), (33, 32)])
def test_dequantised_weights_equal_the_twin_and_are_exact_in_bf16(shape: tuple[int, int]) -> None:
    for weight, scale in (random_fp8(*shape), random_fp4(*shape)):
        expected = from_numpy(twin_weight(weight, scale).values)
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert same_bits(dequantise_weight(weight, scale, dtype).double(), expected)


def linear_of(weight: Tensor, scale: Tensor | None, num: Numerics, **options: object) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], "bf16" if scale is None else "fp8", num, **options)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if scale is not None:
        layer.scale = nn.Parameter(scale, requires_grad=False)
    return layer


def test_linear_rounds_once_after_the_whole_sum() -> None:
    """Three blocks of K whose partial sums cancel: rounding any of them would show."""
    weight = torch.zeros(2, 96)
    weight[0, [0, 40, 80]] = torch.tensor([256.0, 1.0, -256.0])
    weight[1, [0, 40, 80]] = torch.tensor([1.0, 2.0**-9, 2.0**-10])
    x = torch.ones(1, 96, dtype=torch.bfloat16)
    for num in (EXACT, FAST):
        y = linear_of(weight.bfloat16(), None, num)(x)
        assert y.dtype == torch.bfloat16 and y.tolist() == [[1.0, 1.0]]
        exact = linear_of(weight.bfloat16(), None, num, out_dtype=torch.float32)(x)
        assert exact.dtype == torch.float32 and exact.tolist() == [[1.0, 1 + 2**-9 + 2**-10]]
        assert linear_of(weight.bfloat16(), None, num, out_dtype=None)(x).dtype == num.arith


@pytest.mark.parametrize("prepared", [False, True])
def test_linear_equals_the_twin(prepared: bool) -> None:
    x = (normal(7, 3, 160) * torch.exp2(2 * normal(7, 3, 1, seed=5))).bfloat16()
    for weight, scale in ((normal(80, 160).bfloat16(), None), random_fp8(80, 160)):
        w = twin_weight(weight, scale)
        for options, quantised in (({}, True), (dict(quantise_input=False), False)):
            layer = linear_of(weight, scale, EXACT, **options)
            if prepared:
                layer.prepare()
            expected = from_numpy(twin.linear(x.double().numpy(), w, quantise=quantised))
            assert same_bits(layer(x).double(), expected)
            assert same_bits(layer(layer.quantise_input(x), True).double(), expected)  # quantised once by the caller
        off = linear_of(weight, scale, Numerics(torch.float64, FakeQuant(activations=False)))
        assert same_bits(off(x).double(), from_numpy(twin.linear(x.double().numpy(), w, quantise=False)))


def test_linear_bias_is_inside_the_rounding() -> None:
    layer = Linear(32, 1, "bf16", EXACT, bias=True)
    layer.weight = nn.Parameter(
        torch.zeros(1, 32, dtype=torch.bfloat16).index_fill_(1, torch.tensor([0]), 1), requires_grad=False
    )
    layer.bias = nn.Parameter(torch.tensor([2.0**-9], dtype=torch.bfloat16), requires_grad=False)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1 + 2.0**-7
    assert layer(x).item() == 1 + 2.0**-7  # 1.0078 + 0.00195: a quarter step, rounded away once
    layer.bias.data[0] = 2.0**-8 + 2.0**-10
    assert layer(x).item() == 1 + 2.0**-6


def test_fast_linear_has_the_same_rounding_points() -> None:
    """float32 sums of at most 160 products: results differ by at most one bf16 step, and rarely."""
    x = normal(50, 160).bfloat16()
    weight, scale = random_fp8(80, 160)
    exact, fast = (linear_of(weight, scale, num)(x).double() for num in (EXACT, FAST))
    assert (exact != fast).float().mean() < 0.01
    assert ((exact - fast).abs() <= 2.0**-7 * exact.abs().clamp_min(1e-3)).all()


def test_partial_sums_travel_unrounded() -> None:
    """A weight sliced along K: the two ranks' partial products add up to the whole product, rounded once."""

    class Both(Ranks):  # stands in for a group: what the other rank would add
        def sum(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float64
            return x + other

    weight, scale = random_fp8(64, 96)
    x = normal(5, 96).bfloat16()
    whole = linear_of(weight, scale, EXACT)(x)
    other = linear_of(weight[:, 64:].contiguous(), scale[:, 2:].contiguous(), EXACT, out_dtype=None)(x[:, 64:])
    part = linear_of(weight[:, :64].contiguous(), scale[:, :2].contiguous(), EXACT, reduce=Both(0, 2))
    assert same_bits(part(x[:, :64]), whole)


def test_an_fp8_layer_needs_whole_blocks() -> None:
    with pytest.raises(ValueError, match="32 divides, not 48"):
        Linear(48, 8, "fp8", EXACT)


@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_rms_norm_equals_the_twin(eps: float) -> None:
    norm = RMSNorm(160, eps, EXACT)
    norm.weight = nn.Parameter((1 + 0.3 * normal(160)).bfloat16(), requires_grad=False)
    x = (normal(40, 160, seed=3) * torch.exp2(8 * normal(40, 1, seed=4))).bfloat16()
    expected = from_numpy(twin.rms_norm(x.double().numpy(), norm.weight.double().numpy(), eps))
    assert same_bits(norm(x).double(), expected)
    assert (
        norm(torch.full((1, 160), 1e-4).bfloat16()).abs().max() < 2 and norm(torch.zeros(1, 160).bfloat16()).eq(0).all()
    )


def test_exact_products_do_not_depend_on_the_shape() -> None:
    """29 spare bits: a row's rounded product is the same alone and among others."""
    x, w = normal(37, 512).bfloat16(), normal(64, 512, seed=1).bfloat16()
    together = to_bf16(product(x, w, torch.float64))
    assert all(same_bits(to_bf16(product(x[i : i + 1], w, torch.float64)), together[i : i + 1]) for i in range(37))
    assert difference(together, to_bf16(product(x, w, torch.float64).flip(0)).flip(0)) is None


def test_ranks_slice_names_what_does_not_divide() -> None:
    assert Ranks(1, 4).slice(12, "heads") == 3
    with pytest.raises(ValueError, match="index_n_heads = 10 does not divide over 4"):
        Ranks(0, 4).slice(10, "index_n_heads")


@pytest.mark.parametrize("fmt", [E4M3_E8M0, E2M1_E8M0, E2M1_E4M3], ids=lambda fmt: f"{fmt.element}_{fmt.scale}")
@pytest.mark.parametrize("rows", [1, 400])
def test_a_nan_stays_visible_whatever_the_size(fmt: BlockFormat, rows: int) -> None:
    """A broken value must not turn into a zero, not even in the path for many elements."""
    x = torch.ones(rows, 64, dtype=torch.bfloat16)
    x[0, 5] = math.nan
    for y in (dequantise(*quantise(x, fmt), fmt, torch.float32), fake_quantise(x, fmt, torch.float32)):
        assert not y[0, : fmt.block].isfinite().all()
        assert y[0, fmt.block :].isfinite().all() and y[1:].isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=["e4m3_e8m0", "e2m1_e8m0", "e2m1_e4m3"])
def test_no_rows_are_rows_too(fmt: BlockFormat) -> None:
    codec = RowCodec(64, fmt, torch.float32, CPU)
    for shape in ((0,), (1, 0), (0, 3)):
        packed = codec.pack(torch.zeros(*shape, 64, dtype=torch.bfloat16))
        assert packed.shape == (*shape, codec.bytes) and codec.unpack(packed).shape == (*shape, 64)


def test_scales_of_the_main_kv_saturate() -> None:
    x = torch.full((1, 16), 6000.0, dtype=torch.bfloat16)
    assert dequantise(*quantise(x, E2M1_E4M3), E2M1_E4M3, torch.float32).unique().tolist() == [6 * 448.0]


def test_a_prepared_weight_follows_its_parameter() -> None:
    """Assigned, or moved: what was made of the weight before is not used any more."""
    weight, scale = random_fp8(64, 96)
    other, _ = random_fp8(64, 96, seed=5)
    x = normal(5, 96).bfloat16()
    layer, want = linear_of(weight, scale, FAST), linear_of(other, scale, FAST)(x)
    layer.prepare()
    assert layer.ready and not same_bits(layer(x), want)
    layer.weight = nn.Parameter(other, requires_grad=False)
    assert not layer.ready and same_bits(layer(x), want)
    layer.prepare()
    layer._apply(lambda t: torch.zeros_like(t) if t.dtype == torch.float8_e4m3fn else t)
    assert layer(x).eq(0).all()
