"""Each mechanism of model.py against the slow twin, on inputs that break symmetry. What a whole run computes is
test_goldens; the formats are test_quant; Engram and the vision tower have files of their own."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mutations
import twin
from golden_data import same_bits
from model import (
    Cache,
    Compressor,
    Experts,
    Gate,
    HyperConnection,
    Indexer,
    ModelConfig,
    SharedExperts,
    SparseAttention,
    Tables,
    Transformer,
    argmax_lowest,
    collapse,
    plan_layers,
    rotate,
    rotary_frequencies,
    rotation,
    select_top,
    swiglu,
    write_streams,
)
from quant import E4M3_E8M0, Numerics, Ranks, dequantise_weight, fake_quantise, to_bf16
from small_models import Small, randomise, small_config

EXACT, FAST = Numerics(torch.float64), Numerics(torch.float32)
CPU = torch.device("cpu")
RELEASED = ModelConfig.from_json(Path(__file__).parent.parent / "config.json")
RELEASED_TEXT = json.loads((Path(__file__).parent.parent / "config.json").read_text())["text_config"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def from_numpy(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(x))


class Fixed(nn.Module):
    """Stands in for a layer whose output a test wants to choose."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: object) -> Tensor:
        return self.value


# --------------------------------------------------------------------------------------------------------------- rotary

POSITIONS = [0, 1, 127, 65535, 65536, 1048575]


def twin_frequencies(layer: int) -> np.ndarray:
    """The twin's table of a released layer."""
    return twin.layer_frequencies(RELEASED_TEXT, layer)


def test_case_10_frequencies_of_the_released_layers() -> None:
    plain = rotary_frequencies(64, RELEASED.rope_theta)
    yarn = rotary_frequencies(64, RELEASED.compress_rope_theta, RELEASED.rope_scaling)
    assert plain.dtype == yarn.dtype == torch.float32
    assert same_bits(plain, from_numpy(twin_frequencies(0)))
    assert same_bits(yarn, from_numpy(twin_frequencies(2)))
    assert plain[0] == 1.0 and plain[1].item() == pytest.approx(10000 ** (-1 / 32), rel=1e-7)
    own = torch.tensor([160000.0 ** (-j / 32) for j in range(32)])
    assert same_bits(yarn[0], torch.tensor(1.0)) and yarn[31].item() == pytest.approx(own[31].item() / 16, rel=1e-6)
    ratio = own / yarn
    assert (ratio.diff() > -1e-4).all() and int(((ratio > 1.01) & (ratio < 15.9)).sum()) > 5  # a ramp in between


@pytest.mark.parametrize("layer", [0, 1, 2, 19, 20, 39, 40, 42])
def test_case_10_every_layer_has_one_table_for_all_it_rotates(layer: int) -> None:
    """Layers 0 and 1 and the draft layers: theta 10,000 without YaRN; all others 160,000 with YaRN. No temperature."""
    tables = Tables(
        rotary_frequencies(64, RELEASED.rope_theta),
        rotary_frequencies(64, RELEASED.compress_rope_theta, RELEASED.rope_scaling),
        torch.float64,
    )
    x = normal(1, len(POSITIONS), 3, 80).bfloat16()
    turned = rotate(x, tables.of(plan_layers(RELEASED)[layer], torch.tensor([POSITIONS]))[0])
    expected = twin.rotate(x[0].double().numpy(), POSITIONS, twin_frequencies(layer))
    assert same_bits(turned[0].double(), from_numpy(expected))
    assert turned.float().square().sum().item() == pytest.approx(x.float().square().sum().item(), rel=1e-3)
    other, _ = tables.of(plan_layers(RELEASED)[2 if layer in (0, 1, 40, 42) else 0], torch.tensor([POSITIONS]))
    assert not same_bits(rotate(x, other), turned)


def test_angles_are_float32_products() -> None:
    """At position 1,048,575 a float64 angle would be another model."""
    freqs = rotary_frequencies(64, RELEASED.rope_theta)
    x = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    x[..., 0::2] = 1
    turned = rotate(x, rotation(torch.tensor([[1048575]]), freqs, torch.float64)).flatten()
    angle = torch.tensor(1048575.0) * freqs  # one float32 product
    assert same_bits(turned[0::2], to_bf16(angle.double().cos())) and same_bits(
        turned[1::2], to_bf16(angle.double().sin())
    )
    wide = 1048575.0 * freqs.double()
    assert not same_bits(turned[0::2], to_bf16(wide.cos()))


def test_rotation_turns_adjacent_pairs_of_the_last_dims_only() -> None:
    freqs = torch.tensor([0.5, 0.25])
    x = torch.tensor([[[[7.0, -0.0, 9.0, 3.0, 1.0, 0.0, 2.0, 1.0]]]]).bfloat16()  # d = 8, the last 4 turn
    out = rotate(x, rotation(torch.tensor([[2]]), freqs, torch.float64)).flatten().tolist()
    b = lambda v: float(to_bf16(torch.tensor(v, dtype=torch.float64)))  # noqa: E731
    c, s = math.cos(0.5), math.sin(0.5)
    assert out == [7.0, -0.0, 9.0, 3.0, b(math.cos(1)), b(math.sin(1)), b(2 * c - s), b(2 * s + c)]
    assert math.copysign(1, out[1]) == -1
    wide = x.double()
    turn = rotation(torch.tensor([[2]]), freqs, torch.float64)
    assert rotate(wide, turn).flatten().tolist() == out and same_bits(wide, x.double())      # what came in stays
    pair = x.expand(1, 2, 1, 8).transpose(1, 3)
    assert rotate(pair.transpose(1, 3), turn).flatten().tolist() == out * 2


def test_the_inverse_rotation_is_the_conjugate_at_the_same_position() -> None:
    freqs, positions = rotary_frequencies(16, 10000.0), [3, 77, 5000]
    x = normal(1, 3, 5, 24).bfloat16()
    table = rotation(torch.tensor([positions]), freqs, torch.float64)
    back = rotate(x, table.conj())
    assert same_bits(
        back[0].double(), from_numpy(twin.rotate(x[0].double().numpy(), positions, freqs.numpy(), inverse=True))
    )
    assert (rotate(rotate(x, table), table.conj()).float() - x.float()).abs().max() <= 2.0**-7 * x.abs().max()
    assert not same_bits(back, rotate(x, table))


def test_position_zero_is_the_identity() -> None:
    x = normal(2, 1, 3, 16).bfloat16()
    assert same_bits(
        rotate(x, rotation(torch.zeros(2, 1, dtype=torch.int64), rotary_frequencies(8, 1e4), torch.float64)), x
    )


# ------------------------------------------------------------------------------------------------------------ selection


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 40])
@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_case_13_ties_at_the_cut_go_to_the_lowest_position(n: int, k: int) -> None:
    """Scores of three values, so that most cuts run through ties; some positions are out of reach."""
    g = torch.Generator().manual_seed(n * 100 + k)
    scores = torch.randint(-1, 2, (4, 50, n), generator=g).double()
    scores[torch.rand(scores.shape, generator=g) < 0.3] = -torch.inf
    scores[0, 0], scores[0, 1], scores[0, 2] = -torch.inf, 0.0, -0.0
    chosen = select_top(scores, k)
    assert chosen.shape == (4, 50, min(k, n)) and chosen.dtype == torch.int64
    for row, got in zip(scores.flatten(0, 1).tolist(), chosen.flatten(0, 1).tolist()):
        reach = [j for j in range(n) if row[j] > -math.inf]
        best = sorted(sorted(reach, key=lambda j: (-row[j], j))[:k])
        assert got == best + [-1] * (min(k, n) - len(best))


def test_select_top_of_distinct_scores_of_both_signs() -> None:
    scores = normal(30, 200)
    want = [sorted(sorted(range(200), key=lambda j: -row[j])[:17]) for row in scores.tolist()]
    assert select_top(scores, 17).tolist() == want
    assert select_top(scores.float(), 17).dtype == torch.int64


def test_case_13_argmax_takes_the_lowest_of_equal_values() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, -1.0], [0.0, -0.0, 0.0, 0.0], [-2.0, -5.0, -2.0, -2.0]])
    assert argmax_lowest(x).tolist() == [1, 0, 0]
    assert argmax_lowest(normal(40, 33)).tolist() == [
        max(range(33), key=row.__getitem__) for row in normal(40, 33).tolist()
    ]


# -------------------------------------------------------------------------------------------------------------- indexer

INDEX = small_config()  # 3 heads of 32, top-k 10, a pool of 4 blocks of 7; layer 1 has ratio 3, layers 3 and 4 ratio 1


def cache_with(config: ModelConfig, layer: int, main: Tensor | None, keys: Tensor | None, tokens: int) -> Cache:
    """A cache of `tokens` tokens that holds the given compressed rows (unquantised) of a KV source."""
    cache = Cache(config, EXACT, 1, config.max_position_embeddings, CPU)
    n = tokens // plan_layers(config)[layer].ratio
    main = torch.zeros(n, config.head_dim) if main is None else main
    keys = torch.zeros(n, config.index_head_dim) if keys is None else keys
    chunk = cache.chunk([tokens], tokens, "encoder")
    cache.write_compressed(
        layer, chunk, cache.main_rows.pack(main.bfloat16()[None]), cache.key_rows.pack(keys.bfloat16()[None])
    )
    cache.commit(chunk)
    return cache


def choose(layer: int, q: Tensor, w: Tensor, keys: Tensor, positions: Sequence[int], pool: Tensor | None = None):
    """The Selection of `layer`'s indexer for queries q [S, h, e] with head weights w [S, h] at adjacent positions."""
    plan = plan_layers(INDEX)[layer]
    indexer = Indexer(INDEX, plan, EXACT, Ranks())
    indexer.wq_b, indexer.weights_proj = Fixed(q.bfloat16().flatten(1)[None]), Fixed(w.bfloat16()[None])
    cache = cache_with(INDEX, plan.kv_source, None, keys, len(keys) * plan.ratio)
    chunk = cache.chunk([len(positions)], len(positions), "encoder", starts=[positions[0]], appends=False)
    still = rotation(torch.zeros_like(chunk.positions), rotary_frequencies(INDEX.qk_rope_head_dim, 1e4), torch.float64)
    return indexer(torch.zeros(1, len(positions), INDEX.hidden_size), None, still, chunk, cache, pool)


def expect(
    layer: int, q: Tensor, w: Tensor, keys: Tensor, positions: Sequence[int], pool: list[set[int]] | None = None
) -> tuple[list[list[int]], list[set[int]]]:
    """What the twin selects, and the pool it would make."""
    quantised = twin.quantise_fp4(q.bfloat16().double().numpy()).values
    keys = twin.quantise_fp4(keys.bfloat16().double().numpy()).values
    scores = twin.index_scores(quantised, keys, w.bfloat16().double().numpy())
    ratio, size = plan_layers(INDEX)[layer].ratio, INDEX.candidate_block_size
    reach = [scores[t, : twin.visible_groups(p, ratio)].tolist() for t, p in enumerate(positions)]
    chosen = [
        twin.select(row, INDEX.index_topk, size, None if pool is None else pool[t]) for t, row in enumerate(reach)
    ]
    return chosen, [twin.candidate_blocks(row, size, INDEX.candidate_topk_blocks) for row in reach]


def listed(rows: Tensor) -> list[list[int]]:
    """Rows without their -1 padding, which must stand at the end."""
    out = []
    for row in rows.tolist():
        n = sum(j >= 0 for j in row)
        assert row[n:] == [-1] * (len(row) - n) and row[:n] == sorted(set(row[:n]))
        out.append(row[:n])
    return out


@pytest.mark.parametrize("layer", [1, 3])
def test_case_14_index_scores_are_sums_of_weighted_rectified_products(layer: int) -> None:
    """Random queries, keys and weights of both signs, queries from the first token on."""
    ratio = plan_layers(INDEX)[layer].ratio
    q, w, keys = normal(90, 3, 32, seed=1), normal(90, 3, seed=2), normal(90 // ratio, 32, seed=3)
    chosen, pool = expect(layer, q, w, keys, range(90))
    got = choose(layer, q, w, keys, range(90))
    assert listed(got.rows[0]) == chosen
    if layer == 3:
        assert [set(row) for row in listed(got.pool[0])] == pool


def test_case_14_opposite_products_do_not_cancel() -> None:
    """q.k = +a in one head and -a in the other: with weights (1, 1) the score is a, not 0; with (1, -3) still a."""
    keys = torch.zeros(40, 32)
    keys[:, 2] = 0.5
    keys[30, 0], keys[31, 0] = 6.0, -6.0  # +-a for heads that look along axis 0 with both signs
    q = torch.zeros(1, 3, 32)
    q[0, 0, 0], q[0, 1, 0] = 1.0, -1.0
    for weights, first in (((1.0, 1.0, 0.0), {30, 31}), ((1.0, -3.0, 0.0), {30}), ((-1.0, 2.0, 0.0), {31})):
        rows = listed(choose(3, q, torch.tensor([weights]), keys, [39]).rows[0])[0]
        assert first <= set(rows) and sum(j < 10 for j in rows) == 10 - len(first)  # the rest are ties at 0
    low = listed(choose(3, q, torch.tensor([[-1.0, -1.0, 0.0]]), keys, [39]).rows[0])[0]
    assert low == list(range(10))
    below = keys[[30, 31, *range(30)]]  # rows 0 and 1 have scores below those that are 0
    assert listed(choose(3, q, torch.tensor([[-1.0, -1.0, 0.0]]), below, [31]).rows[0])[0] == list(range(2, 12))


def test_case_13_products_that_are_all_negative_tie_at_zero() -> None:
    keys, q, w = normal(60, 32).abs(), -normal(1, 3, 32, seed=1).abs(), normal(1, 3, seed=2)
    assert listed(choose(3, q, w, keys, [59]).rows[0]) == [list(range(10))]
    assert listed(choose(1, q, w, keys, [59]).rows[0]) == [list(range(10))]


def test_case_13_duplicate_keys_and_keys_out_of_reach() -> None:
    keys = normal(6, 32).repeat(10, 1)  # 60 rows, ten of each kind
    q, w = normal(60, 3, 32, seed=4), normal(60, 3, seed=5)
    assert listed(choose(3, q, w, keys, range(60)).rows[0]) == expect(3, q, w, keys, range(60))[0]
    early = listed(choose(1, q[:5], w[:5], keys, range(5)).rows[0])
    assert early == [[], [], [0], [0], [0]]  # ratio 3: closed groups only


def test_case_12_the_newest_block_stays_in_the_pool_and_confines_later_sources() -> None:
    """The newest block is partly filled and has the worst score; there are 12 blocks and the pool takes 4."""
    keys, q, w = normal(78, 32), normal(2, 3, 32, seed=6), normal(2, 3, seed=7).abs() + 0.1
    keys[77] = -100 * q.sum((0, 1))  # row 77, alone in block 11: every product is negative
    positions = [76, 77]
    chosen, pool = expect(3, q, w, keys, positions)
    got = choose(3, q, w, keys, positions)
    assert [set(row) for row in listed(got.pool[0])] == pool and 11 in pool[1] and 11 not in pool[0] and 10 in pool[0]
    assert listed(got.rows[0]) == chosen  # the source itself looks everywhere
    assert any(j // 7 not in pool[1] for j in chosen[1])
    later = normal(2, 3, 32, seed=8)
    confined, _ = expect(4, later, w, keys, positions, pool)
    rows = listed(choose(4, later, w, keys, positions, got.pool).rows[0])
    assert rows == confined and all(j // 7 in pool[t] for t, row in enumerate(rows) for j in row)
    assert rows != expect(4, later, w, keys, positions)[0]


def test_case_12_few_queries_and_many_are_confined_alike() -> None:
    """One query gathers the keys of its pool, many share all keys and a mask; with pools that are not full."""
    keys, q, w = normal(78, 32, seed=9), normal(78, 3, 32, seed=10), normal(78, 3, seed=11)
    source = choose(3, q, w, keys, range(78))
    _, pool = expect(3, q, w, keys, range(78))
    later, heads = normal(78, 3, 32, seed=12), normal(78, 3, seed=13)
    want, _ = expect(4, later, heads, keys, range(78), pool)
    assert listed(choose(4, later, heads, keys, range(78), source.pool).rows[0]) == want
    for t in (3, 40, 41, 77):
        one = choose(4, later[t : t + 1], heads[t : t + 1], keys, [t], source.pool[:, t : t + 1])
        assert listed(one.rows[0]) == [want[t]]


def test_the_pool_confines_nobody_while_it_holds_every_block() -> None:
    keys, q, w = normal(28, 32), normal(28, 3, 32, seed=6), normal(28, 3, seed=7)
    pool = choose(3, q, w, keys, range(28)).pool
    assert listed(choose(4, q, w, keys, range(28), pool).rows[0]) == expect(4, q, w, keys, range(28))[0]


def test_a_source_before_the_pool_hands_none_up_and_a_later_one_hands_on_the_same() -> None:
    keys, q, w = normal(20, 32), normal(4, 3, 32), normal(4, 3)
    assert choose(1, q, w, keys, range(56, 60)).pool is None
    pool = torch.arange(3).expand(1, 4, 3)
    assert choose(4, q, w, keys, range(16, 20), pool).pool is pool


# ----------------------------------------------------------------------------------------------------- sparse attention


def attend(
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    sink: Tensor,
    selection: list[list[int]],
    config: ModelConfig = INDEX,
    num: Numerics = EXACT,
    split: int = 0,
) -> Tensor:
    """SparseAttention of q [S, H, d] over its own window rows kv [S, d] and compressed rows [n, d] of layer 3. The
    first `split` tokens come in an earlier chunk."""
    cache = cache_with(config, 3, rows, None, len(rows))
    cache.num = num
    core, out, ring = SparseAttention(config, num), [], cache.rings["window", 3]
    for start, end in ((0, split), (split, len(q))):
        if end > start:
            chunk = cache.chunk([end - start], end - start, "encoder", starts=[start], appends=False)
            packed = cache.window_rows.pack(kv[None, start:end].bfloat16())
            window = chunk.join(ring, packed, ("window", 3))
            width = max(map(len, selection))
            padded = torch.tensor([row + [-1] * (width - len(row)) for row in selection[start:end]])[None]
            out.append(core(q[None, start:end].bfloat16(), window, ring.shape[1], sink, chunk, cache, 3, padded)[0])
            ring = chunk.updates["window", 3]
    return torch.cat(out)


def expected_attention(q: Tensor, kv: Tensor, rows: Tensor, sink: Tensor, selection: list[list[int]]) -> Tensor:
    values = lambda x: x.bfloat16().double().numpy()  # noqa: E731
    near, far = twin.quantise_fp8(values(kv)).values, twin.quantise_fp4_main(values(rows)).values
    visible = [
        sorted(twin.visible_window(t, INDEX.sliding_window)) + [len(kv) + j for j in selection[t]]
        for t in range(len(q))
    ]
    out = twin.sparse_attention(values(q), np.concatenate([near, far]), sink.double().numpy(), visible)
    return from_numpy(twin.bf16(out))


def some_selection(n: int, k: int, seed: int = 0) -> list[list[int]]:
    """Any rows of those before each query: k of them as soon as there are k, as an indexer selects, and fewer or none
    before."""
    g = np.random.default_rng(seed)
    size = lambda t: k if t + 1 >= k else int(g.integers(0, t + 1))  # noqa: E731
    return [sorted(g.choice(t + 1, size=size(t), replace=False).tolist()) for t in range(n)]


@pytest.mark.parametrize("sinks", ["ordinary", "extreme"])
@pytest.mark.parametrize("split", [0, 5, 9, 21])
def test_sparse_attention_equals_the_twin(split: int, sinks: str) -> None:
    """35 queries, window 9, selections from none to 10 rows, 6 heads; sinks of both signs, or of +-80."""
    q, kv, rows = 3 * normal(35, 6, 32, seed=1), normal(35, 32, seed=2), normal(35, 32, seed=3)
    sink = torch.tensor([80.0, -80.0, 0.0, 80.0, -80.0, 3.0]) if sinks == "extreme" else normal(6, seed=4).float()
    selection = some_selection(35, 10)
    got = attend(q, kv, rows, sink, selection, split=split)
    assert got.dtype == torch.bfloat16 and same_bits(got.double(), expected_attention(q, kv, rows, sink, selection))


def test_case_8_empty_selections_and_extreme_sinks_stay_finite() -> None:
    q, kv, rows = normal(13, 6, 32, seed=1), normal(13, 32, seed=2), normal(13, 32, seed=3)
    sink = torch.tensor([80.0, -80.0, 80.0, -80.0, 1e4, -1e4])
    selection = [[] for _ in range(12)] + [list(range(13))]  # as wide as a selection of 13 rows
    for num in (EXACT, FAST):
        out = attend(q, kv, rows, sink, selection, num=num)
        assert out.isfinite().all() and out[:, [0, 2]].abs().max() < 1e-25 and out[:, 4].eq(0).all()
    expected = expected_attention(q, kv, rows, sink, selection)
    assert same_bits(attend(q, kv, rows, sink, selection).double(), expected)
    values = twin.quantise_fp8(kv.bfloat16().double().numpy()).values
    alone = attend(q, kv, rows, sink, selection)[0, [1, 3, 5]]  # one row, no weight on the sink: its value itself
    assert same_bits(alone.double(), from_numpy(values[0]).expand(3, -1).contiguous())


def test_the_sink_is_in_the_denominator_only_and_not_scaled() -> None:
    """One visible row with score s: the output is its value times e^s / (e^sink + e^s)."""
    kv, q = torch.zeros(1, 32), torch.zeros(1, 6, 32)
    kv[0, 0], q[0, :, 0] = 4.0, 2.0
    sink = torch.tensor([0.0, 1.0, -1.0, 2.0, 5.0, -5.0])
    s = 8.0 * 32**-0.5
    want = torch.tensor([4.0 * math.exp(s) / (math.exp(v) + math.exp(s)) for v in sink.tolist()], dtype=torch.float64)
    got = attend(q, kv, torch.zeros(1, 32), sink, [[]])
    assert same_bits(got[0, :, 0], to_bf16(want)) and got[..., 1:].eq(0).all()


def test_scores_are_scaled_in_the_arithmetic_of_the_mode() -> None:
    config = dataclasses.replace(small_config(), head_dim=512)
    assert float(SparseAttention(config, EXACT).scale) == 512**-0.5 != float(SparseAttention(config, FAST).scale)


def test_rows_seen_twice_count_twice() -> None:
    """Recent tokens are in the window and may be selected too; a softmax over both copies."""
    q, kv = normal(3, 6, 32, seed=1), normal(3, 32, seed=2)
    selection = [[], [0, 1], [0, 1, 2]]
    got = attend(q, kv, kv, torch.full((6,), -80.0), selection)
    assert same_bits(got.double(), expected_attention(q, kv, kv, torch.full((6,), -80.0), selection))
    assert not same_bits(got, attend(q, kv, kv, torch.full((6,), -80.0), [[], [0], [0, 1, 2]]))


# ----------------------------------------------------------------------------------------------------------- compressor


def compressor_of(ratio: int, seed: int = 0) -> tuple[ModelConfig, Compressor]:
    config = small_config(compress_ratios=[0, ratio, ratio, 1, 1])
    layer = Compressor(config, plan_layers(config)[1], EXACT)
    randomise(layer, seed)
    return config, layer


def latents(config: ModelConfig, layer: Compressor, x: Tensor, chunks: Sequence[int]) -> tuple[Tensor, list[int]]:
    cache = Cache(config, EXACT, 1, 256, CPU)
    out, first, at = [], [], 0
    for n in chunks:
        chunk = cache.chunk([n], n, "encoder")
        latent, positions = layer(x[None, at : at + n], chunk, cache)
        cache.commit(chunk)
        out.append(latent[0])
        first += positions[0].tolist()
        at += n
    return torch.cat(out), first


@pytest.mark.parametrize("chunks", [[29], [1] * 29, [2, 1, 5, 3, 1, 4, 13], [7, 22]])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_case_3_latents_of_every_chunking_equal_the_twin(ratio: int, chunks: list[int]) -> None:
    config, layer = compressor_of(ratio)
    x = (normal(29, config.hidden_size) * torch.exp2(normal(29, 1, seed=1))).bfloat16()
    wide = x.double().numpy()
    project = lambda w: wide @ w.weight.double().numpy().T  # noqa: E731
    norm = layer.norm.weight.double().numpy()
    if ratio == 1:
        want = twin.pool(twin.bf16(project(layer.wkv)), None, 1, norm, config.rms_norm_eps)
    else:
        want = twin.pool(
            twin.float32(project(layer.wkv)), twin.float32(project(layer.wgate)), ratio, norm, config.rms_norm_eps
        )
    got, first = latents(config, layer, x, chunks)
    assert same_bits(got.double(), from_numpy(want))
    assert first == [j * ratio for j in range(29 // ratio)]  # rotated where the group begins


@pytest.mark.parametrize("split", [False, True])
def test_open_groups_are_rounded_to_float32(split: bool) -> None:
    """kv = 1 + 2^-30 and -1 with equal scores cancel after rounding to float32 and leave 2^-31 without it; scores
    1000 and 1000 + 2^-20 are equal in float32 and tilt kv = +-1 without it. In bfloat16 the 1 + 2^-10 of the last
    would be lost."""
    config, layer = compressor_of(2)
    layer.norm = nn.Identity()
    x = torch.zeros(6, config.hidden_size, dtype=torch.bfloat16)
    wkv, wgate = torch.zeros_like(layer.wkv.weight), torch.zeros_like(layer.wgate.weight)
    wkv[0, :3] = torch.tensor([1.0, 2.0**-30, 2.0**-10])
    wgate[0, 3:5] = torch.tensor([1000.0, 2.0**-20])
    x[0, 0], x[0, 1], x[1, 0] = 1, 1, -1
    x[2, 0], x[2, 3], x[2, 4], x[3, 0], x[3, 3] = 1, 1, 1, -1, 1
    x[4, 0], x[4, 2], x[5, 0] = 1, 1, -1
    layer.wkv.weight, layer.wgate.weight = (nn.Parameter(w, requires_grad=False) for w in (wkv, wgate))
    got, _ = latents(config, layer, x, [1, 2, 2, 1] if split else [6])
    assert got[:, 0].tolist() == [0.0, 0.0, 2.0**-11]
    cache = Cache(config, EXACT, 1, 256, CPU)
    assert cache.rings["kv", 1].dtype == cache.rings["score", 1].dtype == torch.float32


def test_case_3_compressed_rows_and_keys_of_ratio_3(thirds: Small) -> None:
    """Rows in the cache, unpacked: keys come from the latent before its rotation, both turned at the group's first
    token."""
    cache = thirds.model.new_cache()
    thirds.model(thirds.tokens[None], cache, logits="none")
    for layer in (1, 3):
        for store, codec, name in ((cache.main, cache.main_rows, "main_kv"), (cache.keys, cache.key_rows, "index_key")):
            want = thirds.twin[f"layers.{layer}.{name}"]
            assert same_bits(codec.unpack(store[layer][0, : len(want)]).bfloat16(), want), (layer, name)


# ------------------------------------------------------------------------------------------------------------------ MoE


def gate_of(logits: list[float], bias: list[float], active: int, **changes: object) -> tuple[Tensor, Tensor]:
    """Weights and experts of one token whose router logits are given."""
    config = dataclasses.replace(small_config(), hidden_size=32, routed_scaling_factor=1.5, **changes)
    gate = Gate(config, len(logits), active, EXACT)
    weight = torch.zeros(len(logits), 32)
    weight[:, 0] = torch.tensor(logits)
    gate.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    gate.bias = nn.Parameter(torch.tensor(bias), requires_grad=False)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1
    weights, experts = gate(x, None)
    return weights[0], experts[0]


def softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def test_case_20_router_logits_from_minus_200_to_200() -> None:
    logits = [-200.0, 200.0, -80.0, 3.0, 20.0, 20.125, 19.875, -3.0]
    weights, experts = gate_of(logits, [0.0] * 8, 8)
    assert experts.tolist() == sorted(range(8), key=lambda e: -logits[e])
    scores = [math.sqrt(softplus(logits[e])) for e in experts.tolist()]
    want = [1.5 * s / (sum(scores) + 1e-20) for s in scores]
    assert weights.isfinite().all() and weights.sum().item() == pytest.approx(1.5, rel=1e-15)
    assert weights.tolist() == pytest.approx(want, rel=1e-14, abs=0)
    assert 0 < weights[-1] < 1e-40  # sqrt(log(1 + e^-200)), not 0


def test_case_20_the_bias_selects_and_never_weighs() -> None:
    """Biases of 35 on experts whose scores are near 1e-3: (s + b) - b would have lost them."""
    logits, bias = [-13.8, 2.0, -14.0, 1.0, -13.0], [35.0, 0.0, 35.0, 0.0, 34.0]
    weights, experts = gate_of(logits, bias, 2)
    assert experts.tolist() == [0, 2]
    scores = [math.sqrt(softplus(float(torch.tensor(logits[e]).bfloat16()))) for e in (0, 2)]
    assert weights.tolist() == pytest.approx([1.5 * s / sum(scores) for s in scores], rel=1e-13, abs=0)


def test_routing_ties_go_to_the_lowest_expert_and_one_expert_is_not_normalised() -> None:
    assert gate_of([1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, 4)[1].tolist() == [1, 2, 4, 0]
    weights, _ = gate_of([1.0, 2.0], [0.0, 0.0], 1)
    assert weights.item() == pytest.approx(1.5 * math.sqrt(softplus(2.0)), rel=1e-14)
    weights, _ = gate_of([1.0, 2.0], [0.0, 0.0], 2, norm_topk_prob=False)
    assert weights.tolist() == pytest.approx([1.5 * math.sqrt(softplus(v)) for v in (2.0, 1.0)], rel=1e-14)


def test_tokens_of_an_image_are_routed_with_their_own_bias(tiny: Transformer) -> None:
    gate = Gate(tiny.config, 6, 3, EXACT)
    randomise(gate, 1)
    x, in_image = normal(40, tiny.config.hidden_size).bfloat16() / 10, torch.arange(40) % 3 == 0
    bias = np.where(in_image[:, None], gate.bias_vl.double().numpy(), gate.bias.double().numpy())
    experts, weights = twin.route(x.double().numpy(), gate.weight.double().numpy(), bias, 3, 1.5)
    got_weights, got_experts = gate(x, in_image)
    assert got_experts.tolist() == experts.tolist()
    assert torch.allclose(got_weights, from_numpy(weights), rtol=1e-14, atol=0)
    assert gate(x, None)[1].tolist() != experts.tolist()


def twin_expert(experts: Experts, e: int) -> list[twin.Weight]:
    return [
        twin.Weight(
            "fp4",
            twin.dequantise_fp4_weight(w.weight[e].view(torch.uint8).numpy(), w.scale[e].view(torch.uint8).numpy()),
        )
        for w in (experts.w1, experts.w2, experts.w3)
    ]


@pytest.mark.parametrize("tokens", [1, 2, 5, 60])
def test_case_21_experts_equal_the_twin(tokens: int) -> None:
    """Pre-activations of +-50 and a clamp of 2.5; few tokens gather their experts, many go through them one by one."""
    config = small_config()
    experts = Experts(config, 5, EXACT, Ranks())
    randomise(experts, 2)
    x, weights = 100 * normal(tokens, config.hidden_size).bfloat16(), normal(tokens, 2, seed=1).abs()
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:2] for t in range(tokens)])
    first = x.double().numpy() @ twin_expert(experts, 0)[0].values.T
    assert np.abs(first).max() > 40 and (first > 0).any() and (first < 0).any()
    got = experts(fake_quantise(x, E4M3_E8M0, torch.float64), weights, chosen)
    want = np.zeros((tokens, config.hidden_size))
    for e in range(5):  # ascending, each expert its own tokens
        token, slot = np.nonzero(chosen.numpy() == e)
        if len(token):
            w1, w2, w3 = twin_expert(experts, e)
            want[token] += twin.expert(
                x[token].double().numpy(), w1, w2, w3, config.swiglu_limit, weights.numpy()[token, slot]
            )
    assert got.dtype == torch.float64 and same_bits(to_bf16(got), from_numpy(twin.bf16(want)).bfloat16())
    loose = twin.expert(x.double().numpy(), *[twin_expert(experts, 0)[i] for i in (0, 1, 2)], 0.0, None)
    tight = twin.expert(x.double().numpy(), *[twin_expert(experts, 0)[i] for i in (0, 1, 2)], config.swiglu_limit, None)
    assert not np.array_equal(loose, tight)  # the clamp bites here


def test_experts_side_by_side_are_the_parameters_wherever_they_go() -> None:
    """Moving, copying and writing into a parameter: what is multiplied is always the parameters, held once."""
    experts = Experts(small_config(), 5, FAST, Ranks())
    randomise(experts, 2)
    chosen = torch.tensor([3, 0, 3])
    apart = experts.dense(chosen)
    w1, w3, w2 = (dequantise_weight(w.weight[e], w.scale[e], torch.float32)
                  for w, e in ((experts.w1, 3), (experts.w3, 3), (experts.w2, 0)))
    assert torch.equal(apart[0][0], torch.cat([w1, w3])) and torch.equal(apart[1][1], w2)
    experts.prepare()
    held = {t.untyped_storage().data_ptr() for t in experts.rows}
    assert {p.untyped_storage().data_ptr() for p in experts.parameters()} == held and len(held) == 2
    copied, moved = copy.deepcopy(experts), copy.deepcopy(experts)
    moved.prepare()
    moved._apply(lambda t: t.clone())                        # what .to(device) does
    assert moved.rows is not None and {p.untyped_storage().data_ptr() for p in moved.parameters()} == {
        t.untyped_storage().data_ptr() for t in moved.rows}
    for same in (experts, copied, moved):
        assert all(torch.equal(a, b) for a, b in zip(same.dense(chosen), apart))
        same.w2.weight.zero_()                               # codes of 0
        w13, w2 = same.dense(chosen)
        assert torch.equal(w13, apart[0]) and w2.eq(0).all()
        same.w3.weight = torch.nn.Parameter(torch.zeros_like(same.w3.weight), requires_grad=False)
        w13, _ = same.dense(chosen)
        half = w13.shape[1] // 2
        assert torch.equal(w13[:, :half], apart[0][:, :half]) and w13[:, half:].eq(0).all()


def test_case_21_the_shared_expert_is_clamped_too() -> None:
    config = small_config()
    shared = SharedExperts(config, EXACT)
    randomise(shared, 3)
    x = 100 * normal(9, config.hidden_size).bfloat16()
    weights = [
        twin.Weight(
            "fp8", twin.dequantise_fp8_weight(w.weight.view(torch.uint8).numpy(), w.scale.view(torch.uint8).numpy())
        )
        for w in (shared.w1, shared.w2, shared.w3)
    ]
    want = twin.expert(x.double().numpy(), *weights, config.swiglu_limit)
    assert same_bits(shared(shared.w1.quantise_input(x)).double(), from_numpy(want))
    assert not np.array_equal(want, twin.expert(x.double().numpy(), *weights, 0.0))


def test_case_21_clamps_up_on_both_sides_and_gate_from_above() -> None:
    gate = torch.tensor([50.0, -50.0, 1.0, 1.0, -2.0], dtype=torch.float64)
    up = torch.tensor([1.0, 1.0, 50.0, -50.0, 2.0], dtype=torch.float64)
    silu = lambda v: v / (1 + math.exp(-v))  # noqa: E731
    want = [silu(2.5), silu(-50.0), silu(1.0) * 2.5, silu(1.0) * -2.5, silu(-2.0) * 2.0]
    assert same_bits(swiglu(gate, up, 2.5), to_bf16(torch.tensor(want, dtype=torch.float64)))
    weight = torch.tensor([3.0, 0.5, 2.0, 1.0, 0.1], dtype=torch.float64)
    assert same_bits(swiglu(gate, up, 2.5, weight), to_bf16(torch.tensor(want, dtype=torch.float64) * weight))
    free = [silu(50.0), silu(-50.0), silu(1.0) * 50, silu(1.0) * -50, silu(-2.0) * 2]
    assert same_bits(swiglu(gate, up, 0.0), to_bf16(torch.tensor(free, dtype=torch.float64)))


# ------------------------------------------------------------------------------------------------------ Single-Pass mHC


def test_case_19_streams_are_mixed_by_columns_of_a_matrix_that_is_not_symmetric() -> None:
    """out[j] = post[j] y + sum_i comb[i, j] x[i], by hand on small integers."""
    comb = torch.tensor([[[1.0, 2.0, 0.0], [0.0, 3.0, 5.0], [7.0, 0.0, 1.0]]], dtype=torch.float64)
    post = torch.tensor([[1.0, 10.0, 100.0]], dtype=torch.float64)
    x = torch.tensor([[[1.0], [2.0], [4.0]]], dtype=torch.float64)
    y = torch.tensor([[[3.0]]]).bfloat16()
    # stream 0: 3 + 1*1 + 0*2 + 7*4; stream 1: 30 + 2*1 + 3*2 + 0*4; stream 2: 300 + 0*1 + 5*2 + 1*4
    assert write_streams(y, x, post, comb).flatten().tolist() == [32.0, 38.0, 314.0]
    pre = torch.tensor([[2.0, 0.5, -1.0]], dtype=torch.float64)
    assert collapse(x, pre).flatten().tolist() == [2 * 1 + 0.5 * 2 - 4]


@pytest.mark.parametrize("streams", [3, 4])
def test_case_19_hyper_connections_equal_the_twin(streams: int) -> None:
    config = dataclasses.replace(small_config(), hc_mult=streams)
    D, iters = config.hidden_size, config.hc_sinkhorn_iters
    x = (normal(25, streams, D) * torch.exp2(3 * normal(25, 1, 1, seed=1))).bfloat16().double()
    fn = normal((2 + streams) * streams, streams * D, seed=2).float() / 10
    scale, base = torch.tensor([0.7, -1.3, 2.1]), normal((2 + streams) * streams, seed=3).float()
    got = HyperConnection(config, EXACT)(x, fn, scale, base)
    wide = [t.double().numpy() for t in (fn, scale, base)]
    want = twin.mix_weights(x.numpy(), *wide, config.rms_norm_eps, config.hc_eps, iters)
    for name, a, b in zip(("pre", "post", "comb"), got, want):
        assert a.dtype == torch.float64 and torch.allclose(a, from_numpy(b), rtol=1e-13, atol=0), name
    pre, post, comb = got
    assert (comb - comb.transpose(-1, -2)).abs().max() > 0.1  # it would pass transposed otherwise
    assert pre.min() > config.hc_eps and (post > 1).any() and post.max() < 2
    assert (comb.sum(-2) - 1).abs().max() < 1e-5
    y = normal(25, D, seed=4).bfloat16()
    written = twin.expand(y.double().numpy(), x.numpy(), *want[1:])
    assert same_bits(write_streams(y, x, post, comb).double(), from_numpy(written))
    assert same_bits(collapse(x, pre).squeeze(1).double(), from_numpy(twin.collapse(x.numpy(), want[0])))


def test_sinkhorn_counts_its_iterations_and_adds_eps_where_the_paper_does() -> None:
    """One, two and seven steps, with an eps large enough to see every place it enters."""
    logits = 3 * normal(6, 3, 3)
    for iters in (1, 2, 7):
        config = dataclasses.replace(small_config(), hc_sinkhorn_iters=iters, hc_eps=0.01)
        mixes = torch.cat([torch.zeros(6, 6, dtype=torch.float64), logits.flatten(1)], 1).numpy()
        _, _, want = twin.sinkhorn(mixes, np.ones(3), np.zeros(15), 3, 0.01, iters)
        assert torch.allclose(HyperConnection(config, EXACT).sinkhorn(logits), from_numpy(want), rtol=1e-13, atol=0)


def test_case_19_a_model_keeps_its_dtypes() -> None:
    with torch.device("meta"):
        model = Transformer(small_config(), EXACT)
    before = {name: p.dtype for name, p in model.named_parameters()}
    for change in (
        lambda: model.to(torch.bfloat16),
        model.half,
        model.double,
        model.float,
        lambda: model.to(dtype=torch.float32),
    ):
        with pytest.raises(ValueError, match="not change dtype"):
            change()
    assert {name: p.dtype for name, p in model.named_parameters()} == before
    assert model.to("meta") is model
    bound = [m for m in model.modules() if m is not model and m._parameters]     # where forward looks parameters up
    assert bound and all(m.__dict__[name] is p for m in bound for name, p in m._parameters.items())
    mhc = [name for name in before if ".hc_" in name or name.endswith(("attn_sink", "gate.bias"))]
    assert len(mhc) == 5 * 8 and {before[name] for name in mhc} == {torch.float32}


# ------------------------------------------------------------------------------------------------------------ mutations


def test_every_mutation_still_applies() -> None:
    """The list of mistakes in mutations.py is about lines that exist; whether each is caught is the long test's."""
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names) >= 30
    assert {
        mutation.name: mutations.stale(mutation) for mutation in mutations.MUTATIONS if mutations.stale(mutation)
    } == {}


@pytest.mark.manual
def test_every_mutation_is_caught() -> None:
    assert mutations.main([]) == 0
