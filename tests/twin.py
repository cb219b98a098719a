"""The slow twin: a second, independent program for the whole model, in numpy, written from the numerics contract.

It imports nothing of the product and shares no idea with it: no cache, no chunks, no batch. Every function sees the
whole sequence at once, every tensor is float64 (also those that *hold* bf16 values), visible rows are Python sets, and
formats are decoded from tables built from their definitions. What the product computes must equal what this file
computes, bit for bit; when the two differ, one of them misreads the contract.

Order: rounding and formats, matrix products and norms, rotary, compressed attention, MoE, Single-Pass mHC, Engram,
vision, checkpoint, the model, the draft head.

Letters: S tokens, D hidden size, H heads, hd head_dim, N = hc residual streams, W window, m compression ratio,
n compressed rows, E experts, V vocabulary, K inner size of a product.
"""

from __future__ import annotations

import json
import math
import os
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from tokenizers import Tokenizer

Array = np.ndarray
QUANTISERS = ("activations", "window_kv", "main_kv", "index_key", "index_query")  # what `off` may name


# ------------------------------------------------------------------------------------------------- rounding and formats


def float32(x: Array) -> Array:
    """float64 values rounded once to float32, returned as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def bf16(x: Array) -> Array:
    """float64 -> float32 -> bf16, two roundings to nearest even, returned as float64."""
    with np.errstate(over="ignore"):
        f = np.array(x, np.float64).astype(np.float32)
    bits = f.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    rounded = bits.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(f), np.float32(np.nan), rounded).astype(np.float64)


def decode_minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Sign, exponent, mantissa read off the bits; exponent 0 is subnormal; no infinities, no NaN."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def e4m3_table() -> Array:
    """256 values; S.1111.111 is NaN, the largest number is 448."""
    table = np.array([decode_minifloat(code, 4, 3, 7) for code in range(256)])
    table[[0x7F, 0xFF]] = np.nan
    return table


def e2m1_table() -> Array:
    """16 values: 0 .5 1 1.5 2 3 4 6 and their negatives (code 8 is -0.0)."""
    return np.array([decode_minifloat(code, 2, 1, 1) for code in range(16)])


def e8m0_table() -> Array:
    """256 powers of two, 2^(code - 127); code 255 is NaN."""
    return np.array([math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan])


E4M3, E2M1, E8M0 = e4m3_table(), e2m1_table(), e8m0_table()
for _table in (E4M3, E2M1, E8M0):
    _table.flags.writeable = False  # constants


def nearest_code(x: Array, magnitudes: Array, sign_bit: int) -> Array:
    """The code of the nearest of the ascending `magnitudes`, ties to the even code, the sign (also of zero) kept.

    Codes ascend with the magnitude in both formats, so rounding is a search; values beyond the last magnitude saturate.
    """
    a = np.abs(x)
    upper = np.clip(np.searchsorted(magnitudes, a), 1, len(magnitudes) - 1)
    lower = upper - 1  # magnitudes[lower] <= a <= magnitudes[upper]
    to_lower, to_upper = a - magnitudes[lower], magnitudes[upper] - a  # exact: float64 differences of short numbers
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
    return (np.where(take_upper, upper, lower) + np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def e4m3_codes(x: Array) -> Array:
    return nearest_code(x, E4M3[:127], 0x80)


def e2m1_codes(x: Array) -> Array:
    return nearest_code(x, E2M1[:8], 0x8)


def pow2_scale(amax: Array, inverse: np.float32) -> Array:
    """2^ceil(log2(float32(amax * inverse))), from the bits of the float32 product."""
    x = (np.asarray(amax, np.float32) * inverse).astype(np.float32)
    bits = x.view(np.uint32).astype(np.int64)
    return np.ldexp(1.0, (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0))


class Quantised(NamedTuple):
    codes: Array  # uint8, the shape of the input
    scales: Array  # float64, one per block of the last dimension
    values: Array  # float64 holding bf16: what the model goes on with


def blocks(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def quantise_fp8(x: Array) -> Quantised:
    """E4M3 in blocks of 32 with E8M0 scales: activations and window KV."""
    b = blocks(x, 32).astype(np.float32)
    amax = np.maximum(np.abs(b).max(-1, keepdims=True), np.float32(1e-4))
    scale = pow2_scale(amax, np.float32(1 / 448))
    codes = e4m3_codes(np.clip(b / scale.astype(np.float32), -448, 448).astype(np.float64))
    return Quantised(codes.reshape(x.shape), scale[..., 0], bf16(E4M3[codes] * scale).reshape(x.shape))


def quantise_fp4(x: Array) -> Quantised:
    """E2M1 in blocks of 32 with E8M0 scales: index keys and index queries."""
    b = blocks(x, 32).astype(np.float32)
    amax = np.maximum(np.abs(b).max(-1, keepdims=True), np.float32(6 * 2.0**-126))
    scale = pow2_scale(amax, np.float32(1 / 6))
    codes = e2m1_codes(np.clip(b / scale.astype(np.float32), -6, 6).astype(np.float64))
    return Quantised(codes.reshape(x.shape), scale[..., 0], bf16(E2M1[codes] * scale).reshape(x.shape))


def quantise_fp4_main(x: Array) -> Quantised:
    """E2M1 in blocks of 16 with E4M3 scales and no second scale: the compressed main KV."""
    b = blocks(x, 16).astype(np.float32)
    amax = np.maximum(np.abs(b).max(-1, keepdims=True), np.float32(6 * 2.0**-9))
    scale = E4M3[e4m3_codes(np.minimum((amax / np.float32(6)).astype(np.float64), 448))]
    codes = e2m1_codes(np.clip(b / scale.astype(np.float32), -6, 6).astype(np.float64))  # a true float32 division
    return Quantised(codes.reshape(x.shape), scale[..., 0], bf16(E2M1[codes] * scale).reshape(x.shape))


def dequantise_fp8_weight(codes: Array, scale_codes: Array) -> Array:
    """uint8 [N, K] and [ceil(N/32), K/32] -> float64 [N, K]."""
    scale = E8M0[scale_codes].repeat(32, axis=0)[: codes.shape[0]].repeat(32, axis=1)
    return E4M3[codes] * scale


def dequantise_fp4_weight(packed: Array, scale_codes: Array) -> Array:
    """uint8 [N, K/2], the even column in the low nibble, and [N, K/32] -> float64 [N, K]."""
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return E2M1[codes] * E8M0[scale_codes].repeat(32, axis=1)


def dequantise_rows(codes: Array, scale_codes: Array) -> Array:
    """Engram rows: uint8 [..., d] and [..., d/32] -> float64 [..., d]."""
    return E4M3[codes] * E8M0[scale_codes].repeat(32, axis=-1)


# -------------------------------------------------------------------------------------------- matrix products and norms


class Weight(NamedTuple):
    kind: str  # "bf16", "fp8" or "fp4"
    values: Array  # [N, K], dequantised, exact


def product(x: Array, weight: Weight, quantise: bool = True) -> Array:
    """x [..., K] times weight [N, K], unrounded; quantised weights take an FP8 activation."""
    if weight.kind != "bf16" and quantise:
        x = quantise_fp8(x).values
    return x @ weight.values.T


def linear(x: Array, weight: Weight, bias: Array | None = None, quantise: bool = True) -> Array:
    y = product(x, weight, quantise)
    return bf16(y if bias is None else y + bias)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return bf16(weight * (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)))


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


# --------------------------------------------------------------------------------------------------------------- rotary


def rotary_frequencies(dim: int, theta: float, yarn: dict[str, Any] | None) -> Array:
    """dim/2 frequencies: float64 throughout, rounded once to float32; `yarn` is the config's rope_scaling or None."""

    def correction(rotations: float) -> float:
        wavelengths = yarn["original_max_position_embeddings"] / (2 * math.pi * rotations)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    out = []
    for j in range(dim // 2):
        f = 1.0 / theta ** (2 * j / dim)
        if yarn is not None:
            low = max(math.floor(correction(yarn["beta_fast"])), 0)
            high = min(math.ceil(correction(yarn["beta_slow"])), dim - 1)
            ramp = min(max((j - low) / max(high - low, 1e-3), 0.0), 1.0)
            f = f / yarn["factor"] * ramp + f * (1 - ramp)
        out.append(f)
    return np.array(out).astype(np.float32)


def rotary_angles(positions: Sequence[int], frequencies: Array) -> Array:
    """The angle is one float32 product; only its cosine and sine are taken in float64."""
    return (np.array(positions, np.float32)[:, None] * frequencies[None, :]).astype(np.float64)  # [S, dim/2]


def rotate(x: Array, positions: Sequence[int], frequencies: Array, inverse: bool = False) -> Array:
    """Adjacent pairs of the last 2 * len(frequencies) dims of x [S, ..., d] as complex numbers, the rest untouched."""
    angle = rotary_angles(positions, frequencies)
    angle = angle.reshape(angle.shape[0], *[1] * (x.ndim - 2), angle.shape[1])
    cos, sin = np.cos(angle), np.sin(angle) * (-1.0 if inverse else 1.0)
    start = x.shape[-1] - 2 * len(frequencies)
    even, odd = x[..., start::2], x[..., start + 1 :: 2]
    out = x.copy()
    out[..., start::2] = bf16(even * cos - odd * sin)
    out[..., start + 1 :: 2] = bf16(even * sin + odd * cos)
    return out


# ------------------------------------------------------------------------------------------------- compressed attention


def visible_window(position: int, window: int, window_start: int = 0) -> set[int]:
    return set(range(max(window_start, position - window + 1), position + 1))


def visible_groups(position: int, ratio: int) -> int:
    """How many compressed rows a query reaches: group j is closed when its last token is not later than the query."""
    return (position + 1) // ratio


def pool(kv: Array, score: Array | None, ratio: int, norm_weight: Array, eps: float) -> Array:
    """Groups of `ratio` tokens -> normalised latents [S // ratio, hd]; a softmax per channel over a group's tokens.

    kv: bf16 at ratio 1 (no score), float32 above.
    """
    if ratio == 1:
        return rms_norm(kv, norm_weight, eps)
    groups = kv.shape[0] // ratio
    kv = kv[: groups * ratio].reshape(groups, ratio, -1)  # [n, m, hd]
    score = score[: groups * ratio].reshape(groups, ratio, -1)
    weight = np.exp(score - score.max(1, keepdims=True))
    weight = weight / weight.sum(1, keepdims=True)
    return rms_norm(bf16((kv * weight).sum(1)), norm_weight, eps)  # [n, hd]


def index_scores(q: Array, k: Array, w: Array) -> Array:
    """q [S, h, d], k [n, d], w [S, h] -> sum_h relu(q_h . k) w_h, [S, n]; without the paper's constant, hence exact."""
    out = np.zeros((q.shape[0], k.shape[0]))
    for h in range(q.shape[1]):
        out += np.maximum(q[:, h] @ k.T, 0.0) * w[:, h, None]
    return out


def candidate_blocks(scores: Sequence[float], block_size: int, topk_blocks: int) -> set[int]:
    """The blocks kept for one query from the scores of its reachable rows; the newest block is always kept."""
    n = len(scores)
    if n == 0:
        return set()
    best = [max(scores[start : start + block_size]) for start in range(0, n, block_size)]
    best[(n - 1) // block_size] = math.inf
    order = sorted(range(len(best)), key=lambda block: (-best[block], block))
    return set(order[:topk_blocks])


def select(scores: Sequence[float], k: int, block_size: int = 1, pool_blocks: set[int] | None = None) -> list[int]:
    """The k best reachable rows of one query, ascending; ties to the lowest index; rows outside the pool fill up."""

    def value(j: int) -> float:
        return scores[j] if pool_blocks is None or j // block_size in pool_blocks else -math.inf

    return sorted(sorted(range(len(scores)), key=lambda j: (-value(j), j))[:k])


def sparse_attention(q: Array, rows: Array, sink: Array, visible: Sequence[Sequence[int]]) -> Array:
    """q [S, H, hd], rows [n, hd] (keys and values at once), sink [H], per query a list of rows -> unrounded [S, H, hd].

    The sink enters the denominator only, unscaled; a query without rows gives 0.
    """
    out = np.zeros_like(q)
    for t, indices in enumerate(visible):
        if len(indices) == 0:
            continue
        kv = rows[list(indices)]
        s = (q[t] @ kv.T) * q.shape[-1] ** -0.5  # [H, rows]
        top = np.maximum(s.max(1), sink)
        p = np.exp(s - top[:, None])
        out[t] = (p @ kv) / (np.exp(sink - top) + p.sum(1))[:, None]
    return out


# ------------------------------------------------------------------------------------------------------------------ MoE


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), and the identity above 20."""
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def route(x: Array, gate: Array, bias: Array, k: int, scale: float, normalise: bool = True) -> tuple[Array, Array]:
    """x [S, D], gate [E, D], bias [S, E] -> experts and weights [S, k], in descending order of score + bias.

    The bias chooses and never weighs.
    """
    scores = np.sqrt(softplus(x @ gate.T))
    experts = np.array(
        [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in (scores + bias).tolist()]
    ).reshape(-1, k)
    weights = np.take_along_axis(scores, experts, axis=1)
    if normalise and k > 1:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    return experts, weights * scale


def expert(x: Array, w1: Weight, w2: Weight, w3: Weight, limit: float, weight: Array | None = None,
           quantise: bool = True) -> Array:
    """x [S, D] -> bf16 [S, D]; the routing weight [S] multiplies the hidden product, before w2's quantisation."""
    gate, up = linear(x, w1, quantise=quantise), linear(x, w3, quantise=quantise)
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    hidden = silu(gate) * up
    if weight is not None:
        hidden = hidden * weight[:, None]
    return linear(bf16(hidden), w2, quantise=quantise)


# ------------------------------------------------------------------------------------------------------ Single-Pass mHC


def mix_weights(x: Array, fn: Array, scale: Array, base: Array, norm_eps: float, hc_eps: float,
                iters: int) -> tuple[Array, Array, Array]:
    """Streams x [S, N, D] -> pre [S, N], post [S, N], comb [S, N, N]; none of them is ever rounded."""
    flat = x.reshape(x.shape[0], -1)
    rstd = 1.0 / np.sqrt((flat * flat).mean(-1, keepdims=True) + norm_eps)
    return sinkhorn((flat @ fn.T) * rstd, scale, base, x.shape[1], hc_eps, iters)


def sinkhorn(mixes: Array, scale: Array, base: Array, hc: int, eps: float, iters: int) -> tuple[Array, Array, Array]:
    """mixes [S, (2 + N) N] -> pre, post, comb; comb[i, j] goes from stream i to stream j."""
    pre = sigmoid(mixes[:, :hc] * scale[0] + base[:hc]) + eps
    post = 2.0 * sigmoid(mixes[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (mixes[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(-1, hc, hc)
    comb = np.exp(comb - comb.max(2, keepdims=True))
    comb = comb / comb.sum(2, keepdims=True) + eps
    comb = comb / (comb.sum(1, keepdims=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdims=True) + eps)
        comb = comb / (comb.sum(1, keepdims=True) + eps)
    return pre, post, comb


def collapse(x: Array, pre: Array) -> Array:
    """x [S, N, D], pre [S, N] -> bf16 [S, D]."""
    return bf16(sum(pre[:, i, None] * x[:, i] for i in range(x.shape[1])))


def expand(y: Array, residual: Array, post: Array, comb: Array) -> Array:
    """y [S, D], residual [S, N, D] -> bf16 streams: out[j] = post[j] y + sum_i comb[i, j] residual[i]."""
    hc = residual.shape[1]
    streams = [
        post[:, j, None] * y + sum(comb[:, i, j, None] * residual[:, i] for i in range(hc)) for j in range(hc)
    ]
    return bf16(np.stack(streams, axis=1))


# --------------------------------------------------------------------------------------------------------------- Engram

DEAD = -1  # the compressed id of a position inside an image span


def normalise_text(text: str) -> str:
    """NFKC, NFD, accents off, lower case, runs of blanks to one, stripped, but a lone blank survives."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    text = "".join(c.lower() for c in text)  # by character: no final sigma
    out = []
    for c in text:
        if c in " \t\r\n":
            if not (out and out[-1] == " "):
                out.append(" ")
        else:
            out.append(c)
    text = "".join(out)
    if text == " ":
        return text
    # Unicode White_Space; Python's own strip() would also take U+001C..U+001F.
    white = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
    return text.strip(white)


def token_map(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token id -> compressed id, numbered in order of first appearance."""
    numbers: dict[str, int] = {}
    out = []
    for i in range(vocab_size):
        text = tokenizer.decode([i], skip_special_tokens=False)
        key = tokenizer.id_to_token(i) if "\ufffd" in text else normalise_text(text) or text
        out.append(numbers.setdefault(key, len(numbers)))
    return out


def is_prime(x: int) -> bool:
    return x > 1 and all(x % d for d in range(2, math.isqrt(x) + 1))


def engram_primes(layers: Sequence[int], max_ngram: int, vocab_size: int, heads: int) -> list[list[list[int]]]:
    """[layer][n - 2][head]: one walk over all layers; the start is reset for every n, no prime is used twice."""
    used: set[int] = set()
    out = []
    for _ in layers:
        out.append([])
        for _ in range(2, max_ngram + 1):
            current, found = vocab_size - 1, []
            while len(found) < heads:
                current += 1
                if current not in used and is_prime(current):
                    used.add(current)
                    found.append(current)
            out[-1].append(found)
    return out


def engram_multipliers(layer: int, max_ngram: int, compressed_vocab: int) -> list[int]:
    bound = max(1, ((2**63 - 1) // compressed_vocab) // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [int(v) * 2 + 1 for v in drawn]


def engram_offsets(primes: list[list[int]]) -> list[int]:
    """First row of every (n, head) in the layer's table."""
    out, total = [], 0
    for p in (p for row in primes for p in row):
        out.append(total)
        total += p
    return out


def engram_rows(ids: Sequence[int], primes: list[list[int]], multipliers: Sequence[int], pad: int) -> list[list[int]]:
    """Compressed ids (DEAD inside an image) -> per position the table rows in (n, head) order."""
    heads, offsets, out = len(primes[0]), engram_offsets(primes), []
    for t in range(len(ids)):
        looked, blocked = [], False
        for back in range(len(multipliers)):
            blocked = blocked or t - back < 0 or ids[t - back] == DEAD  # once blocked, blocked for good
            looked.append(pad if blocked else ids[t - back])
        rolling, rows = looked[0] * multipliers[0], []
        for i in range(1, len(multipliers)):
            rolling ^= looked[i] * multipliers[i]
            rows += [rolling % primes[i - 1][h] + offsets[(i - 1) * heads + h] for h in range(heads)]
        out.append(rows)
    return out


def engram_gate(h: Array, key: Array, q_weight: Array, k_weight: Array, eps: float) -> Array:
    """Streams h and keys [S, N, D] -> gate [S, N], unrounded."""
    rstd = 1.0 / np.sqrt((h * h).mean(-1) + eps) * (1.0 / np.sqrt((key * key).mean(-1) + eps))
    dot = (h * (q_weight * k_weight) * key).sum(-1) * rstd * h.shape[-1] ** -0.5
    return sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))


def engram_update(h: Array, rows: Array, wkv: Weight, q_weight: Array, k_weight: Array, dead: Array, eps: float,
                  quantise: bool = True) -> Array:
    """Streams h [S, N, D], looked-up rows [S, columns * d] -> updated streams; `dead` [S] positions are unchanged."""
    hc, dim = h.shape[1:]
    kv = linear(rows, wkv, quantise=quantise)
    key, value = kv[:, : hc * dim].reshape(-1, hc, dim), kv[:, hc * dim :]
    gate = engram_gate(h, key, q_weight, k_weight, eps)
    return np.where(dead[:, None, None], h, bf16(h + gate[..., None] * value[:, None, :]))


# --------------------------------------------------------------------------------------------------------------- vision

TEXT, IMAGE_START, IMAGE, IMAGE_NEWLINE, IMAGE_END = -1, 0, 1, 2, 3


def resize_plan(width: int, height: int, vision: dict[str, Any]) -> tuple[int, int, int, int]:
    """Pixel size -> (token rows, token columns, resized height, resized width)."""
    if vision.get("max_wh_ratio") is not None:
        raise ValueError("the twin knows no max_wh_ratio")
    patch, down, budget = vision["patch_size"], vision["downsample_ratio"], vision["max_image_tokens"]
    cell = patch * down
    w, h = width, height
    if 0 < w * h < vision["min_pixels"]:
        grow = math.sqrt(vision["min_pixels"] / (w * h))
        w, h = int(w * grow), int(h * grow)
    best_w, best_h = math.ceil(w / patch) * patch, math.ceil(h / patch) * patch

    def tokens(size: int) -> int:
        return math.ceil((size // patch) / down)

    if tokens(best_h) * (tokens(best_w) + 1) + 2 > budget:
        r = h / w
        max_w = math.sqrt((budget - 2) / r + 1 / 4) - 1 / 2
        max_h = max_w * r
        if max_w < 1:
            best_h, best_w = (budget - 2) // 2 * cell, cell
        elif max_h < 1:
            best_h, best_w = cell, (budget - 3) * cell
        else:
            beta = min(math.floor(max_w) * cell / w, math.floor(max_h) * cell / h)
            best_h, best_w = math.floor(h * beta / patch) * patch, math.floor(w * beta / patch) * patch
        assert tokens(best_h) * (tokens(best_w) + 1) + 2 <= budget
    return tokens(best_h), tokens(best_w), best_h, best_w


def image_patches(image: Image.Image, resized_height: int, resized_width: int, patch: int) -> Array:
    """Resized, centred on grey, scaled to -1..1 in float32 -> bf16 [rows * columns, 3, patch, patch], reading order."""
    padded = ImageOps.pad(image.convert("RGB"), (resized_width, resized_height), color=(127, 127, 127))
    x = np.asarray(padded).astype(np.float32) / np.float32(255)
    x = bf16((x - np.float32(0.5)) / np.float32(0.5))  # [height, width, 3]
    return np.stack([
        x[top : top + patch, left : left + patch].transpose(2, 0, 1)
        for top in range(0, resized_height, patch)
        for left in range(0, resized_width, patch)
    ])


def vision_rotate(x: Array, grid_width: int, theta: float) -> Array:
    """x [patches, H, hd]: pairs (i, i + hd/2); the first quarter of the angles counts rows, the second columns."""
    hd = x.shape[-1]
    f = np.array([theta ** (-2 * j / (hd // 2)) for j in range(hd // 4)]).astype(np.float32)
    rows = [i // grid_width for i in range(x.shape[0])]
    columns = [i % grid_width for i in range(x.shape[0])]
    angle = np.concatenate([rotary_angles(rows, f), rotary_angles(columns, f)], axis=1)[:, None]  # [patches, 1, hd/2]
    a, b = x[..., : hd // 2], x[..., hd // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return bf16(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))


def vision_attention(x: Array, grid_width: int, heads: int, theta: float, wqkv: Weight, wqkv_bias: Array, wo: Weight,
                     wo_bias: Array) -> Array:
    n, dim = x.shape
    q, k, v = linear(x, wqkv, wqkv_bias).reshape(n, 3, heads, dim // heads).transpose(1, 0, 2, 3)  # each [n, H, hd]
    q, k = vision_rotate(q, grid_width, theta), vision_rotate(k, grid_width, theta)
    out = np.zeros((n, heads, dim // heads))
    for h in range(heads):
        s = (q[:, h] @ k[:, h].T) * (dim // heads) ** -0.5
        p = np.exp(s - s.max(1, keepdims=True))
        out[:, h] = (p / p.sum(1, keepdims=True)) @ v[:, h]
    return linear(bf16(out).reshape(n, dim), wo, wo_bias)


def vision_mlp(x: Array, w1: Weight, w2: Weight) -> Array:
    gate, up = np.split(linear(x, w1), 2, axis=1)
    return linear(bf16(bf16(silu(gate)) * up), w2)


def gelu(x: Array) -> Array:
    """x * Phi(x); through erfc, which keeps its digits in the lower tail."""
    return np.vectorize(lambda v: 0.5 * v * math.erfc(-v / math.sqrt(2.0)), otypes=[np.float64])(x)


def unfold(x: Array, rows: int, columns: int, size: int) -> Array:
    """[rows * columns, C] -> [cells, C * size * size]: zero-padded right and below, feature c*size^2 + dy*size + dx."""
    channels = x.shape[1]
    cell_rows, cell_columns = math.ceil(rows / size), math.ceil(columns / size)
    grid = np.zeros((cell_rows * size, cell_columns * size, channels))
    grid[:rows, :columns] = x.reshape(rows, columns, channels)
    return np.stack([
        grid[i * size : (i + 1) * size, j * size : (j + 1) * size].transpose(2, 0, 1).reshape(-1)
        for i in range(cell_rows)
        for j in range(cell_columns)
    ])


def image_span(token_rows: int, token_columns: int) -> list[int]:
    return [IMAGE_START] + ([IMAGE] * token_columns + [IMAGE_NEWLINE]) * token_rows + [IMAGE_END]


# ----------------------------------------------------------------------------------------------------------- checkpoint


@dataclass
class Checkpoint:
    """The published layout, read whole; weights are dequantised when first asked for."""

    directory: str
    config: dict[str, Any]  # the whole file
    tensors: dict[str, torch.Tensor]
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> dict[str, Any]:
        return self.config["text_config"]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def raw(self, name: str) -> Array:
        """The bytes of a quantised tensor."""
        return self.tensors[name].view(torch.uint8).numpy()

    def plain(self, name: str) -> Array:
        """An unquantised tensor as float64."""
        if name not in self.ready:
            self.ready[name] = self.tensors[name].to(torch.float64).numpy()
        return self.ready[name]

    def weight(self, name: str) -> Weight:
        """The weight of a linear layer; `name` without `.weight`."""
        if name not in self.ready:
            dtype = self.tensors[f"{name}.weight"].dtype
            if dtype == torch.float8_e4m3fn:
                w = Weight("fp8", dequantise_fp8_weight(self.raw(f"{name}.weight"), self.raw(f"{name}.scale")))
            elif dtype == torch.int8:
                w = Weight("fp4", dequantise_fp4_weight(self.raw(f"{name}.weight"), self.raw(f"{name}.scale")))
            else:
                w = Weight("bf16", self.plain(f"{name}.weight"))
            self.ready[name] = w
        return self.ready[name]


def load_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    directory = os.fspath(directory)
    with open(os.path.join(directory, "config.json")) as file:
        config = json.load(file)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(directory, name), framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})
    return Checkpoint(directory, config, tensors)


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass
class Shared:
    """What a layer hands to later layers: the rows and keys of the last KV source, the last selection, the pool."""

    rows: Array | None = None  # [n, hd] compressed main KV
    keys: Array | None = None  # [n, index_head_dim]
    chosen: list[list[int]] | None = None  # per query, ascending
    pool: list[set[int]] | None = None  # per query, kept blocks


@dataclass
class Run:
    """One sequence: where its tokens are, what is switched off, and everything recorded."""

    ckpt: Checkpoint
    off: frozenset[str]
    record: dict[str, Any] = field(default_factory=dict)

    def quantise(self, kind: str) -> bool:
        return kind not in self.off

    def linear(self, x: Array, name: str) -> Array:
        return linear(x, self.ckpt.weight(name), quantise=self.quantise("activations"))

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.ckpt.plain(f"{name}.weight"), self.ckpt.text["rms_norm_eps"])


def layer_frequencies(text: dict[str, Any], layer: int) -> Array:
    """One table per layer, for everything in it; the draft layers count on after the backbone."""
    if text["compress_ratios"][layer] == 0:
        return rotary_frequencies(text["qk_rope_head_dim"], text["rope_theta"], None)
    return rotary_frequencies(text["qk_rope_head_dim"], text["compress_rope_theta"], text["rope_scaling"])


def window_rows(run: Run, x: Array, prefix: str, positions: Sequence[int], frequencies: Array) -> Array:
    """x [S, D] -> window KV [S, hd]: normalised, rotated, then quantised with its rotated dims."""
    kv = rotate(run.norm(run.linear(x, f"{prefix}.wkv"), f"{prefix}.kv_norm"), positions, frequencies)
    return quantise_fp8(kv).values if run.quantise("window_kv") else kv


def compress(run: Run, x: Array, prefix: str, ratio: int, frequencies: Array) -> tuple[Array, Array]:
    """x [S, D] from position 0 -> main KV [n, hd] and index keys [n, index_head_dim] of the closed groups.

    The index key is made from the latent before it is rotated; both are rotated at the group's first token.
    """
    wkv = run.ckpt.weight(f"{prefix}.compressor.wkv")
    norm, eps = run.ckpt.plain(f"{prefix}.compressor.norm.weight"), run.ckpt.text["rms_norm_eps"]
    if ratio == 1:
        latent = pool(linear(x, wkv), None, 1, norm, eps)
    else:
        wgate = run.ckpt.weight(f"{prefix}.compressor.wgate")
        latent = pool(float32(product(x, wkv)), float32(product(x, wgate)), ratio, norm, eps)
    positions = [j * ratio for j in range(latent.shape[0])]
    keys = run.norm(run.linear(latent, f"{prefix}.indexer.wk"), f"{prefix}.indexer.k_norm")
    keys = rotate(keys, positions, frequencies)
    rows = rotate(latent, positions, frequencies)
    return (
        quantise_fp4_main(rows).values if run.quantise("main_kv") else rows,
        quantise_fp4(keys).values if run.quantise("index_key") else keys,
    )


def index_query(run: Run, qr: Array, prefix: str, positions: Sequence[int], frequencies: Array) -> Array:
    """qr [S, q_lora_rank] -> [S, index heads, index_head_dim]."""
    q = run.linear(qr, f"{prefix}.indexer.wq_b").reshape(len(positions), -1, run.ckpt.text["index_head_dim"])
    q = rotate(q, positions, frequencies)
    return quantise_fp4(q).values if run.quantise("index_query") else q


def attention_output(run: Run, o: Array, prefix: str, positions: Sequence[int], frequencies: Array) -> Array:
    """Unrounded o [S, H, hd] -> [S, D]: round, rotate back, grouped wo_a without activation quantisation, wo_b."""
    groups, rank = run.ckpt.text["o_groups"], run.ckpt.text["o_lora_rank"]
    o = rotate(bf16(o), positions, frequencies, inverse=True).reshape(len(positions), groups, -1)
    wo_a = run.ckpt.weight(f"{prefix}.wo_a").values.reshape(groups, rank, -1)
    low = np.concatenate([bf16(o[:, g] @ wo_a[g].T) for g in range(groups)], axis=1)  # [S, groups * rank]
    return run.linear(low, f"{prefix}.wo_b")


def attention(run: Run, x_all: Array, layer: int, start: int, window_start: int, shared: Shared) -> Array:
    """x_all [S, D] from position 0 -> [S - start, D], the outputs of the queries from `start` on.

    `start` is 0 except at the first decoder layer of a bounded prefill: its compressed rows still need every token.
    """
    text, ckpt, prefix = run.ckpt.text, run.ckpt, f"layers.{layer}.attn"
    ratio, frequencies = text["compress_ratios"][layer], layer_frequencies(text, layer)
    first = window_start  # position of the first query
    if layer in text["kv_source_layer_ids"]:
        shared.rows, shared.keys = compress(run, x_all, prefix, ratio, frequencies)
        run.record[f"layers.{layer}.main_kv"], run.record[f"layers.{layer}.index_key"] = shared.rows, shared.keys
    x = x_all[start:]
    positions = list(range(first, first + x.shape[0]))
    qr = run.norm(run.linear(x, f"{prefix}.wq_a"), f"{prefix}.q_norm")
    q = rotate(run.linear(qr, f"{prefix}.wq_b").reshape(len(positions), -1, text["head_dim"]), positions, frequencies)
    kv = window_rows(run, x, prefix, positions, frequencies)
    if layer in text["index_source_layer_ids"]:
        select_rows(run, x, qr, layer, positions, frequencies, shared)

    rows = kv if ratio == 0 else np.concatenate([kv, shared.rows])
    visible = []
    for t, position in enumerate(positions):
        seen = {p - first for p in visible_window(position, text["sliding_window"], window_start)}
        if ratio:
            seen |= {len(positions) + j for j in shared.chosen[t]}  # recent tokens are seen twice
        visible.append(sorted(seen))
    o = sparse_attention(q, rows, ckpt.plain(f"{prefix}.attn_sink"), visible)
    run.record.update({f"layers.{layer}.q": q, f"layers.{layer}.window_kv": kv, f"layers.{layer}.attention": bf16(o)})
    return attention_output(run, o, prefix, positions, frequencies)


def select_rows(run: Run, x: Array, qr: Array, layer: int, positions: Sequence[int], frequencies: Array,
                shared: Shared) -> None:
    """Score the KV source's keys, select per query, and at the candidate source choose the pool for later sources."""
    text, prefix = run.ckpt.text, f"layers.{layer}.attn"
    ratio, size = text["compress_ratios"][layer], text["candidate_block_size"]
    source = text["candidate_source_layer_id"]
    q = index_query(run, qr, prefix, positions, frequencies)
    scores = index_scores(q, shared.keys, run.linear(x, f"{prefix}.indexer.weights_proj"))
    reach = [visible_groups(position, ratio) for position in positions]
    rows = [scores[t, :n].tolist() for t, n in enumerate(reach)]
    confined = 0 <= source < layer
    shared.chosen = [
        select(row, text["index_topk"], size, shared.pool[t] if confined else None) for t, row in enumerate(rows)
    ]
    width = min(text["index_topk"], shared.keys.shape[0])
    run.record[f"layers.{layer}.topk"] = np.array(
        [chosen + [-1] * (width - len(chosen)) for chosen in shared.chosen], np.int32
    ).reshape(len(rows), width)
    run.record[f"layers.{layer}.index_query"], run.record[f"layers.{layer}.index_scores"] = q, scores
    if layer == source:
        shared.pool = [candidate_blocks(row, size, text["candidate_topk_blocks"]) for row in rows]
        run.record[f"layers.{layer}.candidates"] = np.array(
            [[j // size in kept for j in range(shared.keys.shape[0])] for kept in shared.pool], bool
        ).reshape(len(rows), -1)


def moe(run: Run, x: Array, prefix: str, topk: int, in_image: Array | None) -> Array:
    """x [S, D] -> [S, D]; tokens of an image span are routed with the vision bias."""
    text, ckpt = run.ckpt.text, run.ckpt
    bias = np.broadcast_to(ckpt.plain(f"{prefix}.gate.bias"), (x.shape[0], ckpt.plain(f"{prefix}.gate.bias").shape[0]))
    if in_image is not None and in_image.any():  # a checkpoint without vision has no bias_vl
        bias = np.where(in_image[:, None], ckpt.plain(f"{prefix}.gate.bias_vl"), bias)
    experts, weights = route(
        x, ckpt.plain(f"{prefix}.gate.weight"), bias, topk, text["routed_scaling_factor"], text["norm_topk_prob"]
    )
    run.record[f"{prefix.removesuffix('.ffn')}.route_experts"] = experts.astype(np.int32)
    run.record[f"{prefix.removesuffix('.ffn')}.route_weights"] = weights

    def run_expert(name: str, rows: Array, weight: Array | None) -> Array:
        w1, w2, w3 = (ckpt.weight(f"{prefix}.{name}.{w}") for w in ("w1", "w2", "w3"))
        return expert(rows, w1, w2, w3, text["swiglu_limit"], weight, run.quantise("activations"))

    y = np.zeros_like(x)
    for e in range(bias.shape[1]):  # ascending; each expert sees only its tokens
        token, slot = np.nonzero(experts == e)
        if len(token):
            y[token] += run_expert(f"experts.{e}", x[token], weights[token, slot])
    return bf16(y + run_expert("shared_experts", x, None))


def block(run: Run, x: Array, pre_mix: Array, prefix: str, attn: Callable[[Array], Array], topk: int,
          in_image: Array | None, start: int = 0) -> tuple[Array, Array]:
    """Streams [S, N, D] and the mix to read them with -> new streams and the mix for the next layer.

    Each sublayer is read with the `pre` that the sublayer before it computed. Tokens before `start` only feed attn.
    """
    text, ckpt = run.ckpt.text, run.ckpt

    def mixes(x: Array, name: str) -> tuple[Array, Array, Array]:
        fn, scale, base = (ckpt.plain(f"{prefix}.hc_{name}_{part}") for part in ("fn", "scale", "base"))
        return mix_weights(x, fn, scale, base, text["rms_norm_eps"], text["hc_eps"], text["hc_sinkhorn_iters"])

    record = run.record
    attn_in = run.norm(collapse(x, pre_mix), f"{prefix}.attn_norm")
    x, pre_mix = x[start:], pre_mix[start:]
    record[f"{prefix}.input"], record[f"{prefix}.pre_mix"], record[f"{prefix}.attn_in"] = x, pre_mix, attn_in[start:]
    attn_pre, attn_post, attn_comb = mixes(x, "attn")
    record[f"{prefix}.attn_out"] = attn(attn_in)
    x = expand(record[f"{prefix}.attn_out"], x, attn_post, attn_comb)

    ffn_pre, ffn_post, ffn_comb = mixes(x, "ffn")
    ffn_in = run.norm(collapse(x, attn_pre), f"{prefix}.ffn_norm")
    ffn_out = moe(run, ffn_in, f"{prefix}.ffn", topk, in_image)
    x = expand(ffn_out, x, ffn_post, ffn_comb)
    record[f"{prefix}.ffn_in"], record[f"{prefix}.ffn_out"], record[f"{prefix}.output"] = ffn_in, ffn_out, x
    return x, ffn_pre


def engram(run: Run, h: Array, layer: int, rows: list[list[int]], dead: Array) -> Array:
    """Streams [S, N, D] -> streams, with the rows of this layer's table."""
    prefix, ckpt = f"layers.{layer}.engram", run.ckpt
    index = np.array(rows, np.int64).reshape(len(rows), -1)
    table = dequantise_rows(ckpt.raw(f"{prefix}.embed.weight")[index], ckpt.raw(f"{prefix}.embed.scale")[index])
    q_weight, k_weight = ckpt.plain(f"{prefix}.q_weight"), ckpt.plain(f"{prefix}.k_weight")
    out = engram_update(h, table.reshape(len(rows), -1), ckpt.weight(f"{prefix}.wkv"), q_weight, k_weight, dead,
                        ckpt.text["rms_norm_eps"], run.quantise("activations"))
    run.record.update({f"layers.{layer}.engram_rows": index, f"layers.{layer}.engram_in": h,
                       f"layers.{layer}.engram_out": out})
    return out


def vision_features(run: Run, image: Image.Image) -> tuple[Array, list[int]]:
    """One image -> features [token rows * token columns, D] and the types of its span."""
    ckpt, vision = run.ckpt, run.ckpt.config["vision_config"]
    rows, columns, height, width = resize_plan(*image.size, vision)
    patches = image_patches(image, height, width, vision["patch_size"])
    grid_rows, grid_columns = height // vision["patch_size"], width // vision["patch_size"]

    def vlinear(x: Array, name: str) -> Array:
        return linear(x, ckpt.weight(name), ckpt.plain(f"{name}.bias") if ckpt.has(f"{name}.bias") else None)

    def vnorm(x: Array, name: str) -> Array:
        return rms_norm(x, ckpt.plain(f"{name}.weight"), 1e-6)

    x = vlinear(patches.reshape(patches.shape[0], -1), "vision.patch_embed.proj")
    for i in range(vision["num_hidden_layers"]):
        p = f"vision.blocks.{i}"
        wqkv, wo = ckpt.weight(f"{p}.attn.wqkv"), ckpt.weight(f"{p}.attn.wo")
        biases = ckpt.plain(f"{p}.attn.wqkv.bias"), ckpt.plain(f"{p}.attn.wo.bias")
        x = bf16(x + vision_attention(vnorm(x, f"{p}.norm1"), grid_columns, vision["num_attention_heads"],
                                      vision["rope_theta"], wqkv, biases[0], wo, biases[1]))
        x = bf16(x + vision_mlp(vnorm(x, f"{p}.norm2"), ckpt.weight(f"{p}.mlp.w1"), ckpt.weight(f"{p}.mlp.w2")))
    vit = vnorm(x, "vision.norm")
    cells = unfold(vit, grid_rows, grid_columns, vision["downsample_ratio"])
    features = vlinear(bf16(gelu(vlinear(cells, "aligner.w1"))), "aligner.w2")
    span = image_span(rows, columns)
    for name, value in (("patches", patches), ("vit", vit), ("features", features), ("types", np.array(span))):
        run.record.setdefault(f"image.{name}", []).append(value)
    return features, span


def embed(run: Run, tokens: Sequence[int], types: Sequence[int], images: Sequence[Image.Image]) -> Array:
    """Embedding rows [S, D]; those of image spans are replaced by features and the three delimiters."""
    ckpt = run.ckpt
    h = ckpt.plain("embed.weight")[list(tokens)].copy()
    done = [vision_features(run, image) for image in images]
    features = [row for rows, _ in done for row in rows]
    spans = [t for _, span in done for t in span]
    if [t for t in types if t != TEXT] != spans:
        raise ValueError("token types do not match the spans of the images")
    delimiters = {IMAGE_START: "image_start", IMAGE_NEWLINE: "image_newline", IMAGE_END: "image_end"}
    for position, kind in enumerate(types):
        if kind == IMAGE:
            h[position] = features.pop(0)
        elif kind != TEXT:
            h[position] = ckpt.plain(delimiters[kind])
    return h


def forward(
    checkpoint: Checkpoint | str | os.PathLike[str],
    tokens: Sequence[int],
    token_types: Sequence[int] | None = None,
    images: Sequence[Image.Image] = (),
    drafts_from: int | None = None,
    bounded_from: int | None = None,
    off: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """The whole sequence from position 0 -> everything a recording may hold, as tensors in the recordings' dtypes.

    tokens: ids, image spans expanded; token_types: as long or shorter (the rest is text). drafts_from: draft after
    every position from this one on. bounded_from: decoder layers only from this position on (SWA bounded replay).
    off: names of QUANTISERS switched off. `layers.{i}.index_scores` is in no recording.
    """
    ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else load_checkpoint(checkpoint)
    if not set(off) <= set(QUANTISERS):
        raise ValueError(f"no such quantiser: {set(off) - set(QUANTISERS)}")
    run, text, tokens = Run(ckpt, frozenset(off)), ckpt.text, [int(t) for t in tokens]
    types = [int(t) for t in (() if token_types is None else token_types)]
    types += [TEXT] * (len(tokens) - len(types))
    in_image = np.array([t != TEXT for t in types], bool)

    compressed_ids = token_map(Tokenizer.from_file(os.path.join(ckpt.directory, "tokenizer.json")), text["vocab_size"])
    ids = [DEAD if t != TEXT else compressed_ids[token] for token, t in zip(tokens, types)]
    primes = engram_primes(text["engram_layer_ids"], text["engram_max_ngram_size"], text["engram_vocab_size"],
                           text["engram_n_heads"])
    multipliers = [engram_multipliers(layer, text["engram_max_ngram_size"], text["engram_compressed_vocab_size"])
                   for layer in text["engram_layer_ids"]]
    pad = compressed_ids[text["engram_pad_token_id"]]

    h = np.repeat(embed(run, tokens, types, images)[:, None], text["hc_mult"], axis=1)  # [S, N, D]
    pre_mix = np.zeros(h.shape[:2])
    pre_mix[:, 0] = 1.0
    shared, main_hidden, window_start = Shared(), [], 0
    for layer in range(text["num_hidden_layers"]):
        start = 0
        if bounded_from is not None and layer == text["kv_source_layer_ids"][-1]:
            start = window_start = bounded_from
        if layer in text["engram_layer_ids"]:
            which = text["engram_layer_ids"].index(layer)
            rows = engram_rows(ids, primes[which], multipliers[which], pad)
            skipped = len(tokens) - h.shape[0]
            h = engram(run, h, layer, rows[skipped:], in_image[skipped:])
        if layer in text["dspark_target_layer_ids"]:
            main_hidden.append(bf16(h.mean(1)))
        h, pre_mix = block(
            run, h, pre_mix, f"layers.{layer}", lambda x: attention(run, x, layer, start, window_start, shared),
            text["num_experts_per_tok"], in_image[window_start:], start,
        )
    final = collapse(h, pre_mix)
    logits = float32(product(run.norm(final, "norm"), ckpt.weight("head")))
    run.record.update({"final_hidden": final, "logits": logits})
    if text["num_nextn_predict_layers"]:
        run.record["dspark.main_hidden"] = np.concatenate([m[-len(logits) :] for m in main_hidden], axis=1)
        if drafts_from is not None:
            draft_all(run, run.record["dspark.main_hidden"], logits, drafts_from, window_start)
    run.record.update({
        "tokens": np.array(tokens), "token_map": np.array(compressed_ids), "image.token_types": np.array(types),
        "engram.primes": np.array(primes), "engram.multipliers": np.array(multipliers),
        "engram.offsets": np.array([engram_offsets(p) for p in primes]),
    })
    return as_recorded(run.record)


# ------------------------------------------------------------------------------------------------------- the draft head


def draft_layers(text: dict[str, Any]) -> list[str]:
    return [f"mtp.{j}" for j in range(text["num_nextn_predict_layers"])]


def draft_context(run: Run, main_hidden: Array, first: int) -> list[Array]:
    """main_hidden [S, targets * D] -> per draft layer the main KV rows [S, hd] of all positions."""
    text = run.ckpt.text
    main_x = run.norm(run.linear(main_hidden, "mtp.0.main_proj"), "mtp.0.main_norm")
    positions = range(first, first + main_x.shape[0])
    return [
        window_rows(run, main_x, f"{prefix}.attn", positions, layer_frequencies(text, text["num_hidden_layers"] + j))
        for j, prefix in enumerate(draft_layers(text))
    ]


def draft_attention(run: Run, x: Array, j: int, context: Array, position: int) -> Array:
    """All drafts see the same context rows and each other, without a causal mask."""
    text, prefix = run.ckpt.text, f"mtp.{j}.attn"
    frequencies = layer_frequencies(text, text["num_hidden_layers"] + j)
    positions = [position + 1 + i for i in range(x.shape[0])]
    qr = run.norm(run.linear(x, f"{prefix}.wq_a"), f"{prefix}.q_norm")
    q = rotate(run.linear(qr, f"{prefix}.wq_b").reshape(len(positions), -1, text["head_dim"]), positions, frequencies)
    rows = np.concatenate([context, window_rows(run, x, prefix, positions, frequencies)])
    o = sparse_attention(q, rows, run.ckpt.plain(f"{prefix}.attn_sink"), [range(rows.shape[0])] * len(positions))
    return attention_output(run, o, prefix, positions, frequencies)


def draft(run: Run, context: list[Array], token: int, position: int, first: int = 0) -> tuple[list[int], Array, Array]:
    """After `position` was processed and `token` chosen there -> ids, logits [B, V], confidence [B].

    ids: the token and its B drafts. context: per draft layer the main KV rows from position `first` on.
    """
    text, ckpt = run.ckpt.text, run.ckpt
    size, layers = text["dspark_block_size"], draft_layers(text)
    block_ids = [token] + [text["dspark_noise_token_id"]] * (size - 1)
    h = np.repeat(ckpt.plain("embed.weight")[block_ids][:, None], text["hc_mult"], axis=1)
    pre_mix = np.zeros(h.shape[:2])
    pre_mix[:, 0] = 1.0
    seen = [p - first for p in sorted(visible_window(position, text["sliding_window"], first))]
    for j, prefix in enumerate(layers):
        h, pre_mix = block(run, h, pre_mix, prefix, lambda x: draft_attention(run, x, j, context[j][seen], position),
                           text["dspark_num_experts_per_tok"], None)
    h, last = collapse(h, pre_mix), layers[-1]
    logits = float32(product(run.norm(h, f"{last}.norm"), ckpt.weight("head")))
    ids, confidence = [token], []
    for i in range(size):
        markov = ckpt.plain(f"{last}.markov_head.embed.weight")[ids[i]]
        logits[i] = float32(logits[i] + float32(product(markov, ckpt.weight(f"{last}.markov_head.head"))))
        ids.append(int(np.argmax(logits[i])))  # the first of equal maxima
        features = np.concatenate([h[i], markov])
        confidence.append(float32(product(features, ckpt.weight(f"{last}.confidence_head.proj")))[0])
    return ids, logits, np.array(confidence)


def draft_all(run: Run, main_hidden: Array, logits: Array, drafts_from: int, first: int) -> None:
    """Draft after every position from `drafts_from` on, each time from the greedy token."""
    context = draft_context(run, main_hidden, first)
    rows = [
        draft(run, context, int(np.argmax(logits[position - first])), position, first)
        for position in range(drafts_from, first + main_hidden.shape[0])
    ]
    run.record["dspark.tokens"] = np.array([ids for ids, _, _ in rows])
    run.record["dspark.logits"] = np.stack([row for _, row, _ in rows])
    run.record["dspark.confidence"] = np.stack([row for _, _, row in rows])


# ------------------------------------------------------------------------------------------------------------ recording

FLOAT32_NAMES = ("logits", "dspark.logits", "dspark.confidence")
FLOAT64_NAMES = ("pre_mix", "route_weights", "index_scores")


def as_recorded(record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Arrays -> tensors in the dtypes of the recordings; several images are joined."""
    out = {}
    for name, value in record.items():
        value = np.concatenate(value) if isinstance(value, list) else value
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        if tensor.dtype == torch.float64:
            if name in FLOAT32_NAMES:
                tensor = tensor.to(torch.float32)
            elif name.split(".")[-1] not in FLOAT64_NAMES:
                tensor = tensor.to(torch.bfloat16)  # exact: the twin has rounded already
        out[name] = tensor
    return out
