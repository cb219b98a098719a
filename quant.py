"""Number formats of DeepSeek-V4.1-Flash: what is stored, how it is rounded, and the linear layer built on it.

Three block formats hold everything that is narrower than bfloat16 (the paper's FP8 and FP4):

    E4M3_E8M0   E4M3 in blocks of 32 with power-of-two scales    activations, window KV, dense weights (there 32 x 32)
    E2M1_E8M0   E2M1 in blocks of 32 with power-of-two scales    index keys and queries, expert weights     (MXFP4)
    E2M1_E4M3   E2M1 in blocks of 16 with E4M3 scales            compressed main KV        (NVFP4, no global scale)

The model is a set of rounding points. Between two of them the mathematics is real-number mathematics, evaluated in
one of two arithmetic dtypes, which every module carries explicitly as ``Numerics.arith``:

    exact   float64: 29 spare bits, so no result depends on the order of a sum, the chunking, the batch or the device
    fast    float32, with matrix products of bfloat16 operands accumulated in float32

The rounding points themselves are the calls ``to_bf16``, ``quantise`` and ``fake_quantise``, and the float32 results of
``Linear(out_dtype=torch.float32)``; nothing else rounds.
The quantisers are literal float32 in both.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the eight magnitudes; bit 3 of a code is the sign


# ----------------------------------------------------------------------------------------------------------- numerics

@dataclass(frozen=True)
class FakeQuant:
    """Which fake quantisations are on. The model was trained with all of them; switching one off asks what it costs.
    A cached kind that is off is stored in bfloat16, and the cache's size says so."""
    activations: bool = True
    window_kv: bool = True
    main_kv: bool = True
    index_key: bool = True
    index_query: bool = True


@dataclass(frozen=True)
class Numerics:
    """The arithmetic between rounding points (float64: exact, float32: fast) and the fake-quantisation switches."""
    arith: torch.dtype = torch.float32
    fake_quant: FakeQuant = field(default_factory=FakeQuant)

    @property
    def exact(self) -> bool:
        return self.arith == torch.float64

    def operand(self, device: torch.device) -> torch.dtype:
        """Dtype in which bfloat16-valued operands enter a product: the CPU multiplies them faster in float32."""
        return torch.bfloat16 if device.type == "cuda" and self.arith == torch.float32 else self.arith


@dataclass(frozen=True)
class Ranks:
    """One rank of a tensor-parallel group; the default is the whole model on one rank."""
    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed process group

    def slice(self, n: int, what: str) -> int:
        """Size of this rank's contiguous part of an axis of n; ValueError when it does not divide."""
        if n % self.size:
            raise ValueError(f"{what} = {n} does not divide over {self.size} tensor-parallel ranks")
        return n // self.size

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, unrounded: partial sums travel in the arithmetic dtype."""
        if self.size == 1:
            return x
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' parts along the last axis."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)


_CASTS = {torch.float64: Tensor.double, torch.float32: Tensor.float, torch.bfloat16: Tensor.bfloat16}


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype) at half its cost, which counts when a token is thousands of small operations."""
    return x if x.dtype == dtype else _CASTS[dtype](x)


def constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a 0-dim tensor on the host, which any device takes as an operand. An operation makes one out of a Python
    number at every call, and for a token that takes longer than the operation."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def to_bf16(x: Tensor) -> Tensor:
    """Round to bfloat16. A float64 result goes through float32: rounding it directly changes most arrays."""
    return (x if x.dtype == torch.float32 else x.float()).bfloat16()


# ------------------------------------------------------------------------------------------------------ block formats

@dataclass(frozen=True)
class BlockFormat:
    """A row of `element` codes with one scale per `block` of them; a value is element * scale, exact in bfloat16."""
    name: str
    element: str      # "e4m3": one byte a code; "e2m1": two codes a byte, the even column in the low nibble
    block: int
    scale: str        # "e8m0": powers of two; "e4m3"
    largest: float    # largest magnitude of an element
    floor: float      # least amax that a scale is made for, so that a zero block has a scale

    def code_bytes(self, width: int) -> int:
        return width if self.element == "e4m3" else width // 2

    def row_bytes(self, width: int) -> int:
        """Bytes of one packed row of `width` values: codes, then scales."""
        return self.code_bytes(width) + width // self.block


E4M3_E8M0 = BlockFormat("E4M3 in blocks of 32 with E8M0 scales", "e4m3", 32, "e8m0", 448.0, 1e-4)
E2M1_E8M0 = BlockFormat("E2M1 in blocks of 32 with E8M0 scales", "e2m1", 32, "e8m0", 6.0, 6 * 2.0**-126)
E2M1_E4M3 = BlockFormat("E2M1 in blocks of 16 with E4M3 scales", "e2m1", 16, "e4m3", 6.0, 6 * 2.0**-9)

# The scale 2^ceil(log2(amax / largest)) of a bfloat16 amax is the exponent of amax times this: `largest` is 1.75 * 2^8 or
# 1.5 * 2^2, the next bfloat16 mantissas are 1.7578 and 1.5078, and only these become 2 or more when 1.14 or 1.33 takes them.
_STRETCH = {448.0: constant(1.14 * 2.0**-8, torch.float32), 6.0: constant(1.33 * 2.0**-2, torch.float32)}
_SIX, _BIAS, _E2M1_MAGIC = (constant(v, torch.float32) for v in (6, 2.0**120, 1.5 * 2.0**23 / 2))
_EXPONENT, _E4M3_BITS, _BYTE, _E4M3_SHIFT = (constant(v, torch.int32) for v in (0x7F800000, -0x78100000, 8, 20))
_MAGNITUDES = torch.tensor(E2M1)


def round_e2m1(v: Tensor) -> Tensor:
    """The nearest E2M1 values of float32 values in [-6, 6], ties to the even code, sign of zero kept."""
    # Values are multiples of half the power of two that is not above them, of 0.5 below 1. Added to 1.5 * 2^23 such
    # multiples, a value is rounded to one, ties to an even one: the E2M1 codes are even and odd alike.
    power = v.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32).clamp_min_(1)
    magic = power.mul_(_E2M1_MAGIC)
    return (v + magic).sub_(magic).copysign_(v)


def encode_e2m1(v: Tensor) -> Tensor:
    """Nearest E2M1 codes of float32 values in [-6, 6], ties to the even code, sign of zero kept. uint8, one code each."""
    codes = torch.bucketize(round_e2m1(v).abs_(), _MAGNITUDES.to(v.device, non_blocking=True), out_int32=True)
    return codes.to(torch.uint8) | (v.signbit().to(torch.uint8) << 3)


_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64, torch.float64: torch.complex128}   # as wide as two of it


def e2m1_pairs(fmt: BlockFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The table that `dequantise` looks E2M1 bytes up in: the two values of every byte, low nibble first [256]; on CUDA times
    every scale [256 * 256], scale code by scale code, since a product with one factor per block is slow there. Each pair of
    `dtype` is seen as one wide number, looked up four times faster than a row of two."""
    values = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float64, device="cpu")
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)                     # [256, 2]
    if device.type == "cuda":
        codes = torch.arange(256, device="cpu").to(torch.uint8)
        scales = decode_e8m0(codes) if fmt.scale == "e8m0" else codes.view(torch.float8_e4m3fn).float()
        pairs = scales.double().view(-1, 1, 1) * pairs                                             # [256, 256, 2]
    return pairs.to(dtype).view(_PAIR[dtype]).flatten().to(device, non_blocking=True)


def decode_e4m3(codes: Tensor) -> Tensor:
    """float32 values of E4M3 codes (uint8 or float8_e4m3fn, finite), shape kept."""
    if codes.is_cuda or codes.numel() < 4096:
        return (codes if codes.dtype == torch.float8_e4m3fn else codes.view(torch.float8_e4m3fn)).float()
    # The library's cast is slow on CPUs. Sign, four exponent bits and three mantissa bits shifted into float32's places;
    # 2**120 mends the bias, also for subnormals.
    bits = codes.view(torch.int8).int().bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_BITS)   # 0x87F00000
    return bits.view(torch.float32).mul_(_BIAS)


def decode_e8m0(codes: Tensor) -> Tensor:
    """float32 powers of two of E8M0 codes (uint8 or float8_e8m0fnu), shape kept."""
    return codes.view(torch.float8_e8m0fnu).float()


def _in_blocks(x: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """x / scale [..., n/block, block] of bfloat16 values, within the elements' range, and scale [..., n/block, 1]: float32."""
    blocks = (x if x.dtype == torch.float32 else x.float()).reshape(*x.shape[:-1], x.shape[-1] // fmt.block, fmt.block)
    amax = blocks.abs().amax(-1, True).clamp_min_(fmt.floor)
    if fmt.scale == "e8m0":  # never less than amax / largest, and infinite for an amax that is not finite
        amax.mul_(_STRETCH[fmt.largest]).view(torch.int32).bitwise_and_(_EXPONENT)     # in place: amax is the scale now
        return blocks / amax, amax
    scale = (amax / _SIX).clamp_max(448).to(torch.float8_e4m3fn).float()               # a division; not a power of two
    return (blocks / scale).clamp_(-fmt.largest, fmt.largest), scale


def quantise(x: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Quantise bfloat16 values [..., n] in blocks along the last axis.

    Returns (codes uint8 [..., n] for E4M3 or [..., n/2] for E2M1, scales uint8 [..., n/block]). A ValueError when
    blocks do not fit. Literal float32, whatever the arithmetic of the mode. (Numerics contract, quantisers.)
    """
    if x.shape[-1] % fmt.block:
        raise ValueError(f"a row of {x.shape[-1]} values cannot be stored as {fmt.name}: {fmt.block} does not divide it")
    v, scale = _in_blocks(x, fmt)
    scale_codes = scale.to(torch.float8_e8m0fnu if fmt.scale == "e8m0" else torch.float8_e4m3fn).view(torch.uint8).squeeze(-1)
    v = v.flatten(-2)                                                                  # [..., n]
    if fmt.element == "e4m3":
        return v.to(torch.float8_e4m3fn).view(torch.uint8), scale_codes
    codes = encode_e2m1(v)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale_codes


def dequantise(codes: Tensor, scales: Tensor, fmt: BlockFormat, dtype: torch.dtype, pairs: Tensor | None = None) -> Tensor:
    """Values [..., n] of `quantise`'s codes and scales: exact in bfloat16, so exact in every `dtype` offered.

    `pairs` is `e2m1_pairs(fmt, dtype, device)`, for callers that keep it; it is made when absent.
    """
    if fmt.element == "e2m1" and pairs is None:
        pairs = e2m1_pairs(fmt, dtype, codes.device)
    if fmt.element == "e2m1" and codes.is_cuda:                          # code and scale are looked up together
        blocks = codes.view(*scales.shape, fmt.block // 2)
        places = torch.add(scales.int().bitwise_left_shift_(_BYTE).unsqueeze(-1), blocks)            # scale code * 256 + byte
        return pairs.index_select(0, places.flatten()).view(dtype).view(*codes.shape[:-1], 2 * codes.shape[-1])
    scale = decode_e8m0(scales) if fmt.scale == "e8m0" else scales.view(torch.float8_e4m3fn).float()   # a NaN stays one
    scale = cast(scale, dtype).unsqueeze(-1)
    if fmt.element == "e4m3":
        values = cast(decode_e4m3(codes), dtype)
    else:
        values = pairs.index_select(0, codes.flatten().int()).view(dtype).view(*codes.shape[:-1], 2 * codes.shape[-1])
    values.view(*scale.shape[:-1], fmt.block).mul_(scale)                # in place: the values are new
    return values


def fake_quantise(x: Tensor, fmt: BlockFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """dequantise(quantise(x)) of bfloat16 values [..., n], without the detour through packed bytes; the values are exact in
    bfloat16 whatever `dtype` holds them."""
    v, scale = _in_blocks(x, fmt)
    v = decode_e4m3(v.to(torch.float8_e4m3fn)) if fmt.element == "e4m3" else round_e2m1(v)
    v = v.mul_(scale).flatten(-2)
    return v if dtype == torch.float32 else v.to(dtype)


class RowCodec:
    """How rows of `width` bfloat16 values are stored: packed in a block format, or bfloat16 bytes when `fmt` is None."""

    def __init__(self, width: int, fmt: BlockFormat | None, operand: torch.dtype, device: torch.device) -> None:
        if fmt is not None and width % fmt.block:
            raise ValueError(f"a row of {width} values cannot be stored as {fmt.name}: {fmt.block} does not divide it")
        self.width, self.fmt, self.operand = width, fmt, operand
        self.bytes = 2 * width if fmt is None else fmt.row_bytes(width)
        self.pairs = e2m1_pairs(fmt, operand, device) if fmt is not None and fmt.element == "e2m1" else None

    def pack(self, x: Tensor) -> Tensor:
        """bfloat16 [..., width] -> uint8 [..., bytes]: a rounding point when packed, lossless when not."""
        return x.contiguous().view(torch.uint8) if self.fmt is None else torch.cat(quantise(x, self.fmt), -1)

    def unpack(self, rows: Tensor) -> Tensor:
        """uint8 [..., bytes] -> [..., width] in the operand dtype, exactly what was stored."""
        if self.fmt is None:
            return cast(rows.contiguous().view(torch.bfloat16), self.operand)
        n = self.fmt.code_bytes(self.width)
        return dequantise(rows[..., :n], rows[..., n:], self.fmt, self.operand, self.pairs)


# ------------------------------------------------------------------------------------------------- products and norms

def product(x: Tensor, weight: Tensor, arith: torch.dtype) -> Tensor:
    """x [..., K] @ weight [N, K]^T of bfloat16-valued operands, accumulated and returned in the arithmetic dtype."""
    if x.dtype == weight.dtype == arith:
        return F.linear(x, weight)
    if arith == torch.float32 and x.is_cuda and weight.dtype == torch.bfloat16:
        y = torch.mm(x.flatten(0, -2).to(torch.bfloat16), weight.T, out_dtype=torch.float32)
        return y.view(*x.shape[:-1], -1)
    return F.linear(cast(x, arith), cast(weight, arith))


def batched_product(a: Tensor, b: Tensor, num: Numerics) -> Tensor:
    """a [n, m, K] @ b [n, K, p] of bfloat16-valued operands, accumulated and returned in the arithmetic dtype."""
    if a.is_cuda and not num.exact:
        return torch.bmm(cast(a, torch.bfloat16), cast(b, torch.bfloat16), out_dtype=torch.float32)
    return torch.bmm(a, b) if a.dtype == b.dtype == num.arith else torch.bmm(cast(a, num.arith), cast(b, num.arith))


def dequantise_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A stored FP8 or FP4 weight as a dense [N, K] of `dtype`, exact in bfloat16.

    FP8: E4M3 [N, K] with E8M0 scale [ceil(N/32), K/32], one for 32 x 32. FP4: packed E2M1 [N, K/2] (int8) with E8M0
    scale [N, K/32], one for each row and 32 columns. The scale is a multiplier.
    """
    if weight.dtype == torch.float8_e4m3fn:
        rows = decode_e8m0(scale).repeat_interleave(32, 0)[: weight.shape[0], :, None]          # [N, K/32, 1]
        return (decode_e4m3(weight).unflatten(-1, (-1, 32)) * rows).flatten(-2).to(dtype)
    return dequantise(weight.view(torch.uint8), scale.view(torch.uint8), E2M1_E8M0, dtype)


WEIGHT_BLOCK = 1 << 24  # elements of a weight that are converted for a product at a time: the head alone has 662 million


def bind(root: nn.Module) -> None:
    """Put parameters and children where Python looks first. nn.Module finds them only after a failed look-up, a microsecond
    each time and thousands of times a token. Assigning another undoes this for it; assigning None would not, and so the root,
    whose optional parts are taken off like that, is left as it is."""
    for module in root.modules():
        if module is not root:
            module.__dict__.update({**module._parameters, **module._modules})


class Linear(nn.Module):
    """y = x W^T, rounded once after the whole sum over K (also across ranks).

    weight_format "bf16": W bfloat16, x enters as it is. "fp8": W E4M3 with a scale for 32 x 32, and x is fake-quantised
    first, per token and 32 channels. `out_dtype` bfloat16, float32, or None for an unrounded result. `reduce` sums the
    partial products of the ranks, for a weight that is sliced along K.
    """

    def __init__(self, in_features: int, out_features: int, weight_format: str, num: Numerics, *, bias: bool = False,
                 out_dtype: torch.dtype | None = torch.bfloat16, reduce: Ranks | None = None,
                 quantise_input: bool = True) -> None:
        super().__init__()
        self.num, self.out_dtype, self.reduce = num, out_dtype, None if reduce is None or reduce.size == 1 else reduce
        self.quantised = weight_format == "fp8" and quantise_input and num.fake_quant.activations
        dtype = torch.float8_e4m3fn if weight_format == "fp8" else torch.bfloat16
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        if weight_format == "fp8":
            if in_features % 32:
                raise ValueError(f"an FP8 weight needs an input that 32 divides, not {in_features}")
            scale = torch.empty(-(-out_features // 32), in_features // 32, dtype=torch.float8_e8m0fnu)
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=torch.bfloat16), requires_grad=False) if bias else None
        self.biased = bias
        # A plain attribute: no part of the state, and quicker to reach than a parameter.
        self.dense: Tensor | None = None
        self.ready = False                                   # whether `dense` is in the dtype that enters the product
        self.release: Callable[[], None] | None = None       # lets go of a mapped weight's pages (--offload)

    def prepare(self) -> None:
        """Dequantise once, after loading: every value is exact in bfloat16, so this changes nothing but the time."""
        if not self.weight.is_meta:
            dtype = torch.bfloat16 if self.num.exact else self.num.operand(self.weight.device)
            self.dense = None
            self.dense = self.weight.detach() if self.weight.dtype == dtype else self.dense_weight(dtype)
            self.ready = not self.num.exact

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        prepared = self.dense is not None
        super()._apply(fn, recurse)
        self.dense, self.ready = None, False
        if prepared and self.weight.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            self.prepare()                                   # moved to a device of another operand dtype, perhaps
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "scale"):
            self.__dict__.update(dense=None, ready=False)    # of the weight that was

    def dense_weight(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """The weight, or some rows of it from a multiple of 32 on, dense: in the dtype of `prepare` or else in this one."""
        if self.dense is not None:
            return self.dense if rows == slice(None) else self.dense[rows]
        if self.weight.dtype == torch.bfloat16:
            return self.weight[rows].to(dtype)
        scale = self.scale[rows] if rows == slice(None) else self.scale[rows.start // 32 : -(-rows.stop // 32)]
        return dequantise_weight(self.weight[rows], scale, dtype)

    def quantise_input(self, x: Tensor) -> Tensor:
        """The activation this layer multiplies: callers that feed one x to several layers quantise it once."""
        return fake_quantise(x, E4M3_E8M0, self.num.operand(x.device)) if self.quantised else x

    def forward(self, x: Tensor, quantised: bool = False) -> Tensor:                              # [..., K] -> [..., N]
        if self.quantised and not quantised:
            x = fake_quantise(x, E4M3_E8M0, self.num.operand(x.device))
        if self.ready:
            y = product(x, self.dense, self.num.arith)
        else:                                                # some rows at a time: a float64 copy of the head is 5 GB
            (n, k), dtype = self.weight.shape, self.num.operand(x.device)
            step = max(1, WEIGHT_BLOCK // (32 * k)) * 32
            parts = []
            for i in range(0, n, step):
                parts.append(product(x, self.dense_weight(dtype, slice(i, min(i + step, n))), self.num.arith))
                if self.release is not None:
                    self.release()
            y = torch.cat(parts, -1)
        if self.biased:
            y = y + self.bias.to(y.dtype)
        if self.reduce is not None:
            y = self.reduce.sum(y)
        return to_bf16(y) if self.out_dtype == torch.bfloat16 else y if self.out_dtype is None else cast(y, self.out_dtype)


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, unrounded: [..., width] -> [..., 1]. eps: 0-dim, on x's device."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


class RMSNorm(nn.Module):
    """to_bf16(weight * x / sqrt(mean(x^2) + eps)) over the last axis; the weight is bfloat16, the sum unrounded."""

    def __init__(self, width: int, eps: float, num: Numerics) -> None:
        super().__init__()
        self.arith, self.eps = num.arith, constant(eps, num.arith)
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:                                                       # [..., width], bf16
        x = cast(x, self.arith)
        if x.is_cuda:                      # one launch; on CPUs the library's takes three times as long for a token
            return to_bf16(F.rms_norm(x, x.shape[-1:], cast(self.weight, self.arith), float(self.eps)))
        return to_bf16((x * inverse_rms(x, self.eps)).mul_(self.weight))
