"""DeepSeek-V4.1-Flash, the backbone. Read top to bottom; what is unusual comes first.

    term of the paper                        here                              tensors
    layer modes, sources, candidate pool     config.py, plan_layers            (config.json)
    rotary positions, YaRN                   rotary_frequencies, rotate
    main KV, index keys, window KV           kv_cache.py, Cache                890 bytes of global KV per token
    Compressed Sparse Attention 2 (CSA2)     Attention, SparseAttention        attn.wq_a ... attn.wo_b, attn.attn_sink
      compressed latent, open groups         Compressor                        attn.compressor.*
      hierarchical sparse indexer            Indexer, select_top               attn.indexer.*
    mixture of experts                       Gate, Experts, MoE                ffn.*
    Single-Pass mHC, four residual streams   HyperConnection, Block            hc_attn_*, hc_ffn_*
    Causal Encoder-Decoder (CED)             Transformer.encode, .decode       layers.0-19 and 20-39
    Engram                                   engram.py                         engram.*
    DSpark draft head                        dspark.py                         mtp.*
    vision tower                             vision.py                         vision.*, aligner.*

One forward serves prompts, chunks, single tokens, verification of drafts and replay: it appends S >= 1 tokens at each
row's own position, and what a query may read follows from positions alone. Layers hand each other the residual
streams, pre_mix, the selection of rows and the candidate pool as arguments and results; history lives in a Cache that
the caller owns; modules hold weights and nothing else.

Letters in shapes: B rows of a batch, S new tokens, Q a block of queries, K window positions, n compressed rows, k
selected rows, N residual streams, D hidden size, H heads, d head_dim, m compression ratio, W sliding window.

Left out: training, batching of requests, kernels.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kv_cache
from config import LayerPlan, ModelConfig, RopeScaling, plan_layers
from engram import Engram, EngramIndex
from kv_cache import Cache, Chunk
from quant import (E2M1_E8M0, E4M3_E8M0, Linear, Numerics, Ranks, RMSNorm, batched_product, bind, cast, constant,
                   dequantise, e2m1_pairs, fake_quantise, inverse_rms, product, to_bf16)
from vision import IMAGE, IMAGE_END, IMAGE_NEWLINE, IMAGE_START, TEXT, Aligner, VisionTower


# ---------------------------------------------------------------------------------------------------- rotary positions

def rotary_frequencies(width: int, theta: float, yarn: RopeScaling | None = None) -> Tensor:
    """Frequencies float32 [width / 2] of the rotated dims: computed in float64, rounded once. YaRN blends each one
    between its own and its factor-th part along a ramp over the pairs."""
    j = np.arange(width // 2, dtype=np.float64)
    freqs = theta ** (-2 * j / width)
    if yarn is not None:
        def correction(rotations: float) -> float:  # the pair that makes this many turns within the original context
            return width * np.log(yarn.original_max_position_embeddings / (2 * np.pi * rotations)) / (2 * np.log(theta))
        low = max(np.floor(correction(yarn.beta_fast)), 0)
        high = min(np.ceil(correction(yarn.beta_slow)), width - 1)
        ramp = np.clip((j - low) / max(high - low, 1e-3), 0, 1)
        freqs = freqs / yarn.factor * ramp + freqs * (1 - ramp)
    return torch.from_numpy(freqs.astype(np.float32))


def rotation(positions: Tensor, freqs: Tensor, arith: torch.dtype) -> Tensor:
    """exp(i angle) at integer positions [...]: complex [..., 1, pairs]. The angle is one float32 product in both modes: a
    float64 angle would be another model (at position 10^6 one float32 ulp of the angle is 0.06 rad)."""
    angle = (positions.to(torch.float32).unsqueeze(-1) * freqs).to(arith).unsqueeze(-2)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn adjacent pairs (2i, 2i+1) of the last dims of bfloat16 x [..., heads, d] as complex numbers and round them; the
    dims before stay. The conjugate of `turn` turns back."""
    y = cast(x, torch.float32 if turn.dtype == torch.complex64 else torch.float64).contiguous()
    y = y.clone() if y is x else y
    last = y[..., -2 * turn.shape[-1]:]
    torch.view_as_complex(last.view(*last.shape[:-1], turn.shape[-1], 2)).mul_(turn)                  # [..., heads, pairs]
    return to_bf16(y)


# ----------------------------------------------------------------------------------------------------- selection of rows

def select_top(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest scores along the last axis, ascending, int64 [..., min(k, n)]; -inf is never taken and
    leaves -1, at the end. Equal scores at the cut: the lowest position is taken, on every device."""
    n = scores.shape[-1]
    place = torch.arange(n, device=scores.device)
    if n <= k:
        chosen = torch.where(scores > -torch.inf, place, n)
    else:
        values, chosen = scores.topk(k + 1, dim=-1)
        cut, chosen = values[..., k - 1 : k], chosen[..., :k]
        # topk breaks ties as it likes. Where the cut runs through equal scores, take all above it and fill up in order.
        tied = (values[..., k] == cut.squeeze(-1)) & (cut.squeeze(-1) > -torch.inf)
        if not scores.is_cuda:
            rows = tied.nonzero(as_tuple=True)
            if rows[0].numel():
                chosen[rows] = _lowest_first(scores[rows], cut[rows], k)
        else:  # every row, since asking which would wait for the device
            chosen = torch.where(tied.unsqueeze(-1), _lowest_first(scores, cut, k), chosen)
        chosen = torch.where(scores.gather(-1, chosen) > -torch.inf, chosen, n)
    chosen = chosen.sort(-1).values
    return torch.where(chosen < n, chosen, -1)


def _lowest_first(scores: Tensor, cut: Tensor, k: int) -> Tensor:
    above, equal = scores > cut, scores == cut
    missing = k - above.sum(-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(-1) <= missing))                                       # k of every row
    ranks = torch.arange(1, k + 1, device=scores.device).expand(*scores.shape[:-1], k).contiguous()
    return torch.searchsorted(keep.cumsum(-1), ranks).clamp_max(scores.shape[-1] - 1)


def fill_up(chosen: Tensor, k: int) -> Tensor:
    """A selection [..., up to k] with empty places at its end: [..., k]."""
    return chosen if chosen.shape[-1] == k else F.pad(chosen, (0, k - chosen.shape[-1]), value=-1)


def argmax_lowest(x: Tensor) -> Tensor:
    """Position of the maximum along the last axis, the lowest of equal ones: int64 [...]."""
    place = torch.arange(x.shape[-1], device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), place, x.shape[-1]).amin(-1)


# ------------------------------------------------------------------------------------- Compressed Sparse Attention 2

class SparseAttention(nn.Module):
    """Softmax over the window rows, the selected compressed rows and a sink that has no value: rows are K and V at once."""

    def __init__(self, config: ModelConfig, num: Numerics) -> None:
        super().__init__()
        self.num, self.scale = num, constant(config.head_dim ** -0.5, num.arith)

    def forward(self, q: Tensor, window: Tensor, depth: int, sink: Tensor, chunk: Chunk, cache: Cache,
                source: int | None, selection: Tensor | None) -> Tensor:
        """q [B, S, H, d]; window: packed rows, history and chunk joined; selection [B, S, k]. -> bf16 [B, S, H, d]"""
        B, S, H, d = q.shape
        q = cast(q, self.num.operand(q.device))
        k = 0 if selection is None else selection.shape[-1]
        sink = cast(sink, self.num.arith)
        out = []
        for q0, q1 in chunk.blocks((H * (chunk.window + chunk.block + k) * 3 + k * d * 2) * self.num.arith.itemsize):
            Q, far = q1 - q0, None
            asked = q if Q == S else q[:, q0:q1]
            place, hidden = chunk.window_block(q0, q1, depth)
            near = cache.window_rows.unpack(window.index_select(0, place)).view(B, -1, d)                  # [B, K, d]
            if k:
                far, empty = self.gather(cache, chunk, source, selection, q0, q1)                         # [B, Q, k, d]
                if Q == 1 and hidden is None and empty is None:
                    near, far = torch.cat([near, far.squeeze(1)], 1), None    # one query: one product over all its rows
            scores = batched_product(asked.reshape(B, Q * H, d), near.transpose(1, 2), self.num).mul_(self.scale)
            if hidden is not None:
                scores.view(B, Q, H, -1).add_(hidden)
            parts = [scores]                                                                               # [B, Q H, K]
            if far is not None:
                scores = batched_product(asked.reshape(B * Q, H, d), far.view(B * Q, k, d).transpose(1, 2), self.num)
                scores = scores.mul_(self.scale).view(B, Q, H, k)
                if empty is not None:
                    scores.masked_fill_(empty.unsqueeze(2), -torch.inf)
                parts.append(scores.view(B, Q * H, k))
            # one column more for the sink, which has no value
            p = torch.cat([*parts, sink.expand(B, Q, H).reshape(B, Q * H, 1)], -1).softmax(-1)
            o = torch.bmm(p[..., : near.shape[1]], cast(near, p.dtype)).view(B, Q, H, d)
            if far is not None:
                p = p[..., near.shape[1] : -1].reshape(B * Q, H, k)
                o = o + torch.bmm(p, cast(far, p.dtype).view(B * Q, k, d)).view(o.shape)
            out.append(to_bf16(o))
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def gather(self, cache: Cache, chunk: Chunk, source: int, selection: Tensor, q0: int,
               q1: int) -> tuple[Tensor, Tensor | None]:
        """The selected rows of queries q0..q1-1, unpacked: [B, Q, k, d], and where the selection is empty (None: nowhere).
        Layers that reuse a selection reuse its rows too, as long as a chunk is one block."""
        if chunk.rows is not None and chunk.rows[0] is selection and q1 - q0 == chunk.width:
            return chunk.rows[1:]
        chosen, store = selection[:, q0:q1], cache.main[source]
        B, Q, k = chosen.shape
        n = max(chunk.ends) // cache.plans[source].ratio
        whole = n <= Q * k                         # then unpacking all rows once is less work than each selected one
        place = chosen.clamp_min(0)
        if B > 1:
            place = place + torch.arange(B, device=store.device).view(-1, 1, 1) * (n if whole else store.shape[1])
        if whole:
            if source not in chunk.unpacked:
                chunk.unpacked[source] = cache.main_rows.unpack(store[:, :n]).flatten(0, 1)                # [B n, d]
            far = chunk.unpacked[source].index_select(0, place.flatten())
        else:
            far = cache.main_rows.unpack(store.flatten(0, 1).index_select(0, place.flatten()))
        far, empty = far.view(B, Q, k, -1), None
        if min(chunk.starts) + q0 + 1 < k * cache.plans[source].ratio:
            empty = chosen < 0
            far = far.masked_fill(empty.unsqueeze(-1), 0)    # row 0 stands in for an empty pick: 0 * NaN would be NaN
        if Q == chunk.width:
            chunk.rows = selection, far, empty
        return far, empty


class Compressor(nn.Module):
    """Latents of the groups of m tokens that a chunk completes. At m > 1 a softmax over the group's tokens, per channel,
    pools them; the tokens of an open group wait in float32."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, num: Numerics) -> None:
        super().__init__()
        self.ratio, self.layer, self.num = plan.ratio, plan.layer, num
        out = torch.bfloat16 if plan.ratio == 1 else torch.float32
        self.wkv = Linear(config.hidden_size, config.head_dim, "bf16", num, out_dtype=out)
        if plan.ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, "bf16", num, out_dtype=out)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, num)

    def forward(self, x: Tensor, chunk: Chunk, cache: Cache) -> tuple[Tensor, Tensor]:
        """x [B, S, D] -> un-rotated latents [B, G, d] of groups start // m onwards, and the position [B, G] of the first
        token of each; a row that completes fewer than G groups has meaningless ones at its end."""
        m = self.ratio
        groups = max(end // m - start // m for start, end in zip(chunk.starts, chunk.ends))
        first = (chunk.start // m + torch.arange(groups, device=x.device)) * m                       # [B, G]
        if m == 1:
            return self.norm(self.wkv(x))[:, :groups], first
        members = (first.unsqueeze(-1) + torch.arange(m, device=x.device)).flatten(1)                # [B, G m]
        pooled = []
        for what, new in (("kv", self.wkv(x)), ("score", self.wgate(x))):
            ring = cache.rings[what, self.layer]
            joined = chunk.join(ring, new, (what, self.layer))
            place = chunk.locate(members, ring.shape[1])
            pooled.append(joined.index_select(0, place).view(x.shape[0], groups, m, joined.shape[-1]).to(self.num.arith))
        kv, score = pooled
        return self.norm(to_bf16((kv * score.softmax(2)).sum(2))), first


class Selection(NamedTuple):
    """What an index source hands to the layers above it."""
    rows: Tensor           # [B, S, k] compressed rows, ascending, -1 empty
    pool: Tensor | None    # [B, S, blocks] candidate pool: block ids, ascending, -1 empty


class Indexer(nn.Module):
    """Hierarchical sparse indexer: scores compressed rows with a few low-precision heads and selects index_topk of them;
    the candidate source also keeps the best blocks, and the index sources after it look nowhere else."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, num: Numerics, ranks: Ranks) -> None:
        super().__init__()
        c = self.config = config
        self.plan, self.num, self.ranks = plan, num, ranks
        self.heads = ranks.slice(c.index_n_heads, "index_n_heads")
        self.wq_b = Linear(c.q_lora_rank, self.heads * c.index_head_dim, "fp8", num)
        self.weights_proj = Linear(c.hidden_size, self.heads, "bf16", num)
        if plan.mode == "full":
            self.wk = Linear(c.head_dim, c.index_head_dim, "bf16", num)
            self.k_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps, num)

    def key(self, latent: Tensor, turn: Tensor, cache: Cache) -> Tensor:
        """Packed index keys [B, G, bytes] of un-rotated latents [B, G, d]."""
        return cache.key_rows.pack(rotate(self.k_norm(self.wk(latent)).unsqueeze(2), turn).squeeze(2))

    def query(self, x: Tensor, qr: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D], qr [B, S, q_lora] (quantised) -> index queries [B, S, h, e], their heads' weights [B, S, 1, h]."""
        q = rotate(self.wq_b(qr, True).unflatten(-1, (self.heads, self.config.index_head_dim)), turn)
        operand = self.num.operand(x.device)
        q = fake_quantise(q, E2M1_E8M0, operand) if self.num.fake_quant.index_query else q.to(operand)
        return q, self.weights_proj(x).to(self.num.arith).unsqueeze(2)

    def forward(self, x: Tensor, qr: Tensor, turn: Tensor, chunk: Chunk, cache: Cache, pool: Tensor | None) -> Selection:
        """x [B, S, D], qr [B, S, q_lora] (quantised) -> the selection for every query."""
        c, plan, arith = self.config, self.plan, self.num.arith
        q, w = self.query(x, qr, turn)
        n = max(end // plan.ratio for end in chunk.ends)
        n_blocks = -(-n // c.candidate_block_size)
        confined = plan.uses_pool and n_blocks > c.candidate_topk_blocks
        width = c.candidate_topk_blocks * c.candidate_block_size
        gathered = confined and width * min(chunk.block, chunk.width) < n   # else the queries of a block share all keys
        per_query = (width * (2 * self.heads + c.index_head_dim) if gathered else
                     2 * self.heads * min(n, KEY_BLOCK[x.is_cuda]) + n)
        rows, pools = [], []
        for q0, q1 in chunk.blocks(per_query * arith.itemsize):
            visible = ((chunk.positions[:, q0:q1] + 1) // plan.ratio).clamp_max(n).unsqueeze(-1)  # [B, Q, 1]; padding sees n
            # rows that the last of these queries sees; on CUDA all, since buffers of one size are used again, growing ones not
            seen = n if x.is_cuda else min(n, max(start + q1 for start in chunk.starts) // plan.ratio)
            block = pool[:, q0:q1] if confined else None                                             # [B, Q, blocks]
            if gathered:
                inside = torch.arange(c.candidate_block_size, device=x.device)
                place = torch.where(block >= 0, block * c.candidate_block_size, n).unsqueeze(-1) + inside
                place = place.flatten(2)                                                             # [B, Q, P]
                scores = self.score_gathered(q[:, q0:q1], w[:, q0:q1], place, cache, n)
                chosen = select_top(scores.masked_fill(place >= visible, -torch.inf), c.index_topk)
                rows.append(torch.where(chosen < 0, -1, place.gather(-1, chosen.clamp_min(0))))
                continue
            scores = self.score_all(q[:, q0:q1], w[:, q0:q1], cache, seen)                           # [B, Q, seen]
            scores.masked_fill_(torch.arange(seen, device=x.device) >= visible, -torch.inf)
            if confined:
                outside = torch.ones(*block.shape[:2], n_blocks + 1, dtype=torch.bool, device=x.device)
                outside.scatter_(-1, torch.where(block < 0, n_blocks, block), False)
                outside = outside[..., :n_blocks].repeat_interleave(c.candidate_block_size, -1)[..., :seen]
                scores = scores.masked_fill(outside, -torch.inf)
            rows.append(fill_up(select_top(scores, c.index_topk), min(c.index_topk, n)))
            if plan.makes_pool:
                blocks = F.pad(scores, (0, -seen % c.candidate_block_size), value=-torch.inf)
                blocks = blocks.unflatten(-1, (-1, c.candidate_block_size)).amax(-1)                 # [B, Q, blocks seen]
                newest = (visible - 1).div(c.candidate_block_size, rounding_mode="floor")   # -1 when nothing is visible
                pinned = torch.arange(blocks.shape[-1], device=x.device) == newest
                best = select_top(blocks.masked_fill(pinned, torch.inf), c.candidate_topk_blocks)
                pools.append(fill_up(best, min(c.candidate_topk_blocks, n_blocks)))
        return Selection(torch.cat(rows, 1), torch.cat(pools, 1) if pools else pool)

    def score_all(self, q: Tensor, w: Tensor, cache: Cache, n: int) -> Tensor:
        """sum_h w_h relu(q_h . k_j) for all n rows, [B, Q, n]; keys are unpacked a block at a time. The paper's positive
        constant is left out: it cannot change the order, and without it exact ties stay ties."""
        B, Q, h, e = q.shape
        parts, step = [], KEY_BLOCK[q.is_cuda]
        for j in range(0, n, step):
            keys = cache.key_rows.unpack(cache.keys[self.plan.kv_source][:, j : min(j + step, n)])
            dots = batched_product(q.reshape(B, Q * h, e), keys.transpose(1, 2), self.num).view(B * Q, h, -1)
            parts.append(torch.bmm(w.reshape(B * Q, 1, h), dots.relu_()).view(B, Q, -1))
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1) if parts else w.new_empty(B, Q, 0)
        return self.ranks.sum(scores)

    def score_gathered(self, q: Tensor, w: Tensor, place: Tensor, cache: Cache, n: int) -> Tensor:
        """The same for the rows place [B, Q, P] of each query's candidate pool only (n stands for an empty place)."""
        B, Q, h, e = q.shape
        store = cache.keys[self.plan.kv_source]
        row = torch.arange(B, device=q.device).view(-1, 1, 1) * store.shape[1]
        keys = cache.key_rows.unpack(store.flatten(0, 1).index_select(0, (place.clamp_max(n - 1) + row).flatten()))
        dots = batched_product(q.reshape(B * Q, h, e), keys.view(B * Q, -1, e).transpose(1, 2), self.num)
        return self.ranks.sum(torch.bmm(w.reshape(B * Q, 1, h), dots.relu_()).view(B, Q, -1))


KEY_BLOCK = (16384, 65536)   # index keys unpacked at a time, on (CPU, CUDA)


class Attention(nn.Module):
    """Sliding window, and on layers with m > 0 the compressed rows that the index source selected."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, num: Numerics, ranks: Ranks) -> None:
        super().__init__()
        c = self.config = config
        self.plan, self.num = plan, num
        self.heads = ranks.slice(c.num_attention_heads, "num_attention_heads")
        self.groups = ranks.slice(c.o_groups, "o_groups")
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, "fp8", num)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps, num)
        self.wq_b = Linear(c.q_lora_rank, self.heads * c.head_dim, "fp8", num)
        self.wkv = Linear(c.hidden_size, c.head_dim, "fp8", num)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps, num)
        self.attn_sink = nn.Parameter(torch.empty(self.heads, dtype=torch.float32), requires_grad=False)
        self.wo_a = Linear(self.heads * c.head_dim // self.groups, self.groups * c.o_lora_rank, "fp8", num,
                           quantise_input=False)
        self.wo_b = Linear(self.groups * c.o_lora_rank, c.hidden_size, "fp8", num, reduce=ranks)
        self.core = SparseAttention(c, num)
        if plan.mode == "full":
            self.compressor = Compressor(c, plan, num)
        if plan.mode in ("full", "reindex"):
            self.indexer = Indexer(c, plan, num, ranks)

    def forward(self, x: Tensor, given: Selection | None, tables: Tables, chunk: Chunk,
                cache: Cache) -> tuple[Tensor, Selection | None]:
        """x [B, S, D], the selection of the layers below -> ([B, S, D], the selection for the layers above)."""
        plan, (turn, back) = self.plan, tables.of(self.plan, chunk.positions)
        quantised = self.wq_a.quantise_input(x)
        qr = self.wq_b.quantise_input(self.q_norm(self.wq_a(quantised, True)))                       # [B, S, q_lora]
        q = self.wq_b(qr, True)                                                      # [B, S, H d]; no norm per head
        kv = self.kv_norm(self.wkv(quantised, True))                                                 # [B, S, d]
        turned = rotate(torch.cat([q, kv], 2).view(*x.shape[:2], self.heads + 1, -1), turn)
        q, kv = turned[:, :, :-1], turned[:, :, -1]
        ring = cache.rings["window", plan.layer]
        window = chunk.join(ring, cache.window_rows.pack(kv), ("window", plan.layer))
        if plan.mode == "full":
            self.publish(x, tables, chunk, cache)                                               # the same step reads it
        if plan.mode in ("full", "reindex"):
            given = self.indexer(x, qr, turn, chunk, cache, None if given is None else given.pool)
        o = self.core(q, window, ring.shape[1], self.attn_sink, chunk, cache, plan.kv_source,
                      given.rows if plan.ratio else None)
        return self.project(rotate(o, back)), given

    def publish(self, x: Tensor, tables: Tables, chunk: Chunk, cache: Cache) -> None:
        """Write the main KV rows and index keys of the groups that x [B, S, D] completes to the cache."""
        if not chunk.appends:
            return
        latent, first = self.compressor(x, chunk, cache)                                             # [B, G, d]
        if latent.shape[1]:
            turn, _ = tables.of(self.plan, first)    # a group stands at its first token
            main = cache.main_rows.pack(rotate(latent.unsqueeze(2), turn).squeeze(2))
            cache.write_compressed(self.plan.layer, chunk, main, self.indexer.key(latent, turn, cache))

    def project(self, o: Tensor) -> Tensor:
        """Grouped output projection of heads [B, S, H, d] -> [B, S, D]."""
        B, S = o.shape[:2]
        operand = self.num.operand(o.device)
        o = cast(o, operand).view(B * S, self.groups, -1).transpose(0, 1)                            # [G, B S, H/G d]
        weight = cast(self.wo_a.dense_weight(operand), operand).view(self.groups, -1, o.shape[-1])   # [G, r, H/G d]
        o = to_bf16(batched_product(o, weight.transpose(1, 2), self.num))                            # [G, B S, r]
        return self.wo_b(o.transpose(0, 1).reshape(B, S, -1))


# --------------------------------------------------------------------------------------------------- mixture of experts

class Gate(nn.Module):
    """Routing: affinities sqrt(softplus(x w)), never rounded. The bias chooses the experts and is no part of a weight;
    tokens of an image span have a bias of their own."""

    def __init__(self, config: ModelConfig, experts: int, active: int, num: Numerics) -> None:
        super().__init__()
        self.config, self.active, self.num = config, active, num
        self.tiny, self.factor = constant(1e-20, num.arith), constant(config.routed_scaling_factor, num.arith)
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)
        if config.vision_config is not None:
            self.bias_vl = nn.Parameter(torch.empty(experts, dtype=torch.float32), requires_grad=False)

    def affinities(self, x: Tensor, in_image: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, D], in_image bool [T] -> the affinity of every expert [T, E], and affinity + bias, which chooses."""
        scores = F.softplus(product(x, self.weight, self.num.arith)).sqrt()
        bias = cast(self.bias, scores.dtype)
        if in_image is not None:
            bias = torch.where(in_image.unsqueeze(-1), self.bias_vl.to(scores.dtype), bias)
        return scores, scores + bias

    def forward(self, x: Tensor, in_image: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, D], in_image bool [T] -> (weights [T, k], experts [T, k]) in descending order of affinity + bias."""
        scores, biased = self.affinities(x, in_image)
        experts = biased.sort(dim=-1, descending=True, stable=True).indices[:, : self.active]
        weights = scores.gather(-1, experts)
        if self.config.norm_topk_prob and self.active > 1:
            weights = weights / weights.sum(-1, keepdim=True).add_(self.tiny)
        return weights * self.factor, experts


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """silu(gate) * up [* routing weight] of unrounded values, rounded once; limit clamps up on both sides, gate above."""
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    y = gate.sigmoid().mul_(gate).mul_(up)
    return to_bf16(y if weight is None else y.mul_(weight))


class ExpertWeight(nn.Module):
    """One matrix of all experts of this rank, stacked and packed: slice e is the checkpoint's experts.{e}.wX."""

    def __init__(self, experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        weight = torch.empty(experts, out_features, in_features // 2, dtype=torch.int8)
        scale = torch.empty(experts, out_features, in_features // 32, dtype=torch.float8_e8m0fnu)
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), nn.Parameter(scale, requires_grad=False)
        self.store: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # reads packed experts from a file (--offload)
        self.in_rows = False                                                 # whether they are views of Experts.rows

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "scale"):
            self.in_rows = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertWeight:
        self.in_rows = False
        return self if self.store is not None else super()._apply(fn, recurse)   # what is on disk stays there

    def packed(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 [n, out * in / 2] and scales uint8 [n, out * in / 32] of experts [n]."""
        if self.store is not None:
            both = (t.to(experts.device) for t in self.store(experts))
        else:  # selected as bytes: not every operation knows the narrow types
            both = (t.view(torch.uint8).index_select(0, experts) for t in (self.weight, self.scale))
        codes, scales = (t.view(torch.uint8).flatten(1) for t in both)
        return codes, scales


class Experts(nn.Module):
    """The routed experts of this rank, packed FP4, dequantised when used: few at a time and each once in a forward."""

    def __init__(self, config: ModelConfig, experts: int, num: Numerics, ranks: Ranks) -> None:
        super().__init__()
        self.num, self.ranks, self.limit = num, ranks, config.swiglu_limit
        self.local = ranks.slice(experts, "the number of experts")
        D, I = self.shape = config.hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = (ExpertWeight(self.local, *shape) for shape in ((I, D), (D, I), (I, D)))
        self.rows: tuple[Tensor, Tensor] | None = None       # see `allocate`
        self.pairs: Tensor | None = None                     # e2m1_pairs on the device of use: a constant, made when first needed

    def allocate(self, device: torch.device) -> None:
        """Storage in which the packed matrices of an expert lie side by side, so that one look-up finds an expert and one
        dequantisation serves it: codes uint8 [E, 3 I D / 2] and scales uint8 [E, 3 I D / 32], w1, w3, w2. The parameters become
        views of it, still to be filled (who saves them with safetensors makes them contiguous first)."""
        rows, matrices = [], (self.w1, self.w3, self.w2)
        for leaf in ("weight", "scale"):
            parts = [getattr(w, leaf) for w in matrices]
            sizes = [part[0].numel() for part in parts]
            rows.append(torch.empty(self.local, sum(sizes), dtype=torch.uint8, device=device))
            for w, part, view in zip(matrices, parts, rows[-1].split(sizes, 1)):
                setattr(w, leaf, nn.Parameter(view.view(part.dtype).view(part.shape), requires_grad=False))
        self.rows = tuple(rows)
        for w in matrices:
            w.in_rows = True

    def prepare(self) -> None:
        """Bring parameters that were assigned or moved one by one into such storage."""
        filled = {name: value for name, value in self.named_parameters()}
        if any(value.is_meta for value in filled.values()):          # to be read from disk when used
            return
        self.allocate(self.w1.weight.device)
        for name, view in self.named_parameters():
            view.view(torch.uint8).copy_(filled[name].view(torch.uint8))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        prepared, self.rows = self.rows is not None, None            # parameters move one by one, the views end there
        super()._apply(fn, recurse)
        if prepared:
            self.prepare()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": None}                       # a copy's parameters are no views; `prepare` makes them so

    def dense(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of experts [n], dequantised on use, exact in bfloat16: w1 above w3 [n, 2 I, D] and w2 [n, D, I]."""
        dtype, (D, I) = self.num.operand(experts.device), self.shape
        if self.rows is not None and self.w1.in_rows and self.w2.in_rows and self.w3.in_rows:
            codes, scales = self.rows[0].index_select(0, experts), self.rows[1].index_select(0, experts)
        else:
            codes, scales = (torch.cat(parts, 1) for parts in zip(*(w.packed(experts) for w in (self.w1, self.w3, self.w2))))
        if self.pairs is None or self.pairs.device != experts.device:
            self.pairs = e2m1_pairs(E2M1_E8M0, dtype, experts.device)
        values = dequantise(codes, scales, E2M1_E8M0, dtype, self.pairs)
        return values[:, : 2 * I * D].view(-1, 2 * I, D), values[:, 2 * I * D:].view(-1, D, I)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, D] (quantised), routes [T, k] -> the unrounded sum over each token's experts of this rank, [T, D]."""
        T, k = experts.shape
        local = experts
        if self.ranks.size > 1:                    # experts of other ranks: weight 0, and a place after the last
            local = experts - self.ranks.rank * self.local
            mine = (local >= 0) & (local < self.local)
            weights, local = torch.where(mine, weights, 0), torch.where(mine, local, self.local)
        local, weights = local.flatten(), weights.reshape(-1, 1, 1)
        if T * k <= max(16, self.local) and self.fits(T * k, 1, x):  # few: one expert for each route, no synchronisation
            x = x.expand(k, 1, -1) if T == 1 else x.unsqueeze(1).expand(-1, k, -1).reshape(T * k, 1, -1)
            y = self.run(x, weights, local.clamp_max(self.local - 1) if self.ranks.size > 1 else local)
            return cast(y.view(T, k, -1), self.num.arith).sum(1)
        # Many: sort the routes by expert. A group of experts is one product over as many routes as the busiest has; a place
        # without a route reads a row of zeros and writes where nothing is read.
        order = F.pad(local.argsort(stable=True), (0, 1), value=T * k)
        x, weights = F.pad(x, (0, 0, 0, 1)), F.pad(weights, (0, 0, 0, 0, 0, 1))
        y = torch.zeros(T * k + 1, x.shape[-1], dtype=torch.bfloat16, device=x.device)
        counts = local.bincount(minlength=self.local).tolist()[: self.local]
        busy = sorted((e for e in range(self.local) if counts[e]), key=lambda e: -counts[e])
        starts = np.cumsum([0, *counts])
        while busy:
            most, size = counts[busy[0]], 1  # experts with fewer routes share a product as long as little of it is empty
            while size < len(busy) and 3 * counts[busy[size]] >= 2 * most and self.fits(size + 1, most, x):
                size += 1
            group, busy = busy[:size], busy[size:]
            first_count = [[starts[e] for e in group], [counts[e] for e in group]]
            first, count = torch.tensor(first_count).to(x.device, non_blocking=True).unsqueeze(-1)   # [group, 1] each
            place = torch.arange(most, device=x.device)
            routes = order[torch.where(place < count, first + place, T * k)]                      # [group, most routes]
            routed = weights[routes.flatten()].view(*routes.shape, 1)
            routed_x = x.index_select(0, (routes // k).flatten()).view(*routes.shape, -1)
            y[routes] = self.run(routed_x, routed, torch.tensor(group, device=x.device))
        return y[: T * k].view(T, k, -1).to(self.num.arith).sum(1)

    def fits(self, experts: int, routes: int, x: Tensor) -> bool:
        """Whether so many experts, dequantised, with so many routes each stay within the working set."""
        D, I = self.shape
        return experts * (3 * D * I + routes * (2 * D + 3 * I)) * self.num.arith.itemsize <= kv_cache.WORKING_SET[x.is_cuda]

    def run(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [n, t, D] through experts [n] with routing weights [n, t, 1], applied before w2 and its quantisation."""
        operand, (w13, w2) = self.num.operand(x.device), self.dense(experts)
        gate_up = to_bf16(batched_product(cast(x, operand), w13.transpose(1, 2), self.num))          # [n, t, 2 I]
        gate, up = cast(gate_up, self.num.arith).chunk(2, -1)
        hidden = swiglu(gate, up, self.limit, weights)                                               # [n, t, I]
        if self.num.fake_quant.activations:
            hidden = fake_quantise(hidden, E4M3_E8M0, operand)
        return to_bf16(batched_product(cast(hidden, operand), w2.transpose(1, 2), self.num))


class SharedExperts(nn.Module):
    def __init__(self, config: ModelConfig, num: Numerics) -> None:
        super().__init__()
        D, I, self.num, self.limit = config.hidden_size, config.moe_intermediate_size, num, config.swiglu_limit
        self.w1, self.w2, self.w3 = (Linear(i, o, "fp8", num) for i, o in ((D, I), (I, D), (D, I)))

    def forward(self, x: Tensor) -> Tensor:                                                   # quantised [T, D] -> bf16
        arith = self.num.arith
        return self.w2(swiglu(cast(self.w1(x, True), arith), cast(self.w3(x, True), arith), self.limit))


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, experts: int, active: int, num: Numerics, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate = Gate(config, experts, active, num)
        self.experts = Experts(config, experts, num, ranks)
        self.shared_experts = SharedExperts(config, num)

    def forward(self, x: Tensor, in_image: Tensor | None) -> Tensor:                            # bf16 [B, S, D] -> bf16
        flat = x.flatten(0, 1)
        weights, experts = self.gate(flat, None if in_image is None else in_image.flatten())
        quantised = self.shared_experts.w1.quantise_input(flat)      # routed and shared experts read the same codes
        y = self.ranks.sum(self.experts(quantised, weights, experts))
        return to_bf16(y + self.shared_experts(quantised)).view(x.shape)


# ----------------------------------------------------------------------------------------------------- Single-Pass mHC

class HyperConnection(nn.Module):
    """Manifold-constrained hyper-connection of N residual streams: how the next sublayer reads them (pre), where this one
    writes (post) and how they mix (comb, nearly doubly stochastic). Nothing here is rounded."""

    def __init__(self, config: ModelConfig, num: Numerics) -> None:
        super().__init__()
        N, self.iters, eps = config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps
        self.num, self.streams = num, N
        # Row and column sums of a flattened matrix are products with 0/1 matrices; a constant 1 beside the matrix adds eps.
        # That makes a step two operations, and there are 39 steps twice a layer.
        ones, eye = np.ones((N, N)), np.eye(N)
        rows, columns, same = (np.pad(sums, (0, 1)) for sums in (np.kron(eye, ones), np.kron(ones, eye), np.eye(N * N)))
        rows[-1], columns[-1], same[-1] = eps, eps, eps
        rows[-1, -1] = columns[-1, -1] = same[-1, -1] = 1
        part = np.repeat([0, 1, 2], [N, N, N * N])     # which of the three scales belongs to each column of the mixes
        for name, values in (("rows", rows), ("columns", columns), ("widen", same[:-1]), ("eps_1", same[-1]),
                             ("factor", np.array([1, 2, 0])[part]), ("shift", np.array([eps, 0, 0])[part]),
                             ("rms_eps", np.array(config.rms_norm_eps))):
            self.register_buffer(name, torch.from_numpy(values).to(num.arith), persistent=False)
        self.register_buffer("part", torch.from_numpy(part), persistent=False)

    def forward(self, x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams x [T, N, D] in the arithmetic dtype -> pre [T, N], post [T, N] and comb [T, N, N], comb[i, j] from stream i
        to stream j."""
        if self.num.exact:
            fn, scale, base = fn.double(), scale.double(), base.double()
        N, x, own = self.streams, x.flatten(1), self._buffers          # nn.Module finds a buffer only after a failed look-up
        mix = F.linear(x, fn).mul_(inverse_rms(x, own["rms_eps"]))                                   # [T, (2 + N) N]
        mix = torch.addcmul(base, mix, scale.index_select(0, own["part"]))
        gates = torch.addcmul(own["shift"], mix.sigmoid(), own["factor"])                            # sigmoid + eps, 2 sigmoid
        return gates[:, :N], gates[:, N : 2 * N], self.sinkhorn(mix[:, 2 * N :].view(-1, N, N))

    def sinkhorn(self, logits: Tensor) -> Tensor:
        """Sinkhorn iterations: a softmax of logits [T, N, N] over rows, then columns and rows divided by their sums in turn."""
        own = self._buffers
        rows, columns = own["rows"], own["columns"]
        soft = logits.permute(1, 2, 0).softmax(1).flatten(0, 1).t()      # tokens innermost: rows of N numbers are slow
        comb = torch.addmm(own["eps_1"], soft, own["widen"])                                         # + eps; [T, N N + 1]
        sums, divide = torch.empty_like(comb), comb.div_
        divide(torch.mm(comb, columns, out=sums))
        for _ in range(self.iters - 1):
            divide(torch.mm(comb, rows, out=sums))
            divide(torch.mm(comb, columns, out=sums))
        return comb[:, :-1].view(logits.shape)


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """Read the streams: sum_i pre_i x_i, rounded once. [..., N, D], [..., N] in the arithmetic dtype -> bf16 [..., 1, D]."""
    return to_bf16(pre.unsqueeze(-2) @ x)


def write_streams(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's y [..., D]: stream j of x [T, N, D], in the arithmetic dtype, becomes post_j y + sum_i comb[i, j] x_i,
    rounded once."""
    y = post.unsqueeze(-1) * cast(y, x.dtype).view(-1, 1, x.shape[-1])                               # [T, N, D]
    return to_bf16(torch.baddbmm(y, comb.transpose(-1, -2), x, out=y))


class Block(nn.Module):
    """One layer: attention, then experts. Each sublayer reads the streams with the `pre` that the sublayer before it
    computed, so one pass over the streams yields all that is needed (Single-Pass mHC)."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, num: Numerics, ranks: Ranks) -> None:
        super().__init__()
        c, N = config, config.hc_mult
        self.plan, self.num = plan, num
        draft = plan.part == "draft"
        self.attn_norm, self.ffn_norm = (RMSNorm(c.hidden_size, c.rms_norm_eps, num) for _ in range(2))
        self.attn = Attention(c, plan, num, ranks)
        self.ffn = MoE(c, c.dspark_n_routed_experts if draft else c.n_routed_experts,
                       c.dspark_num_experts_per_tok if draft else c.num_experts_per_tok, num, ranks)
        for sublayer in ("attn", "ffn"):
            for name, shape in (("fn", ((2 + N) * N, N * c.hidden_size)), ("base", ((2 + N) * N,)), ("scale", (3,))):
                parameter = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
                self.register_parameter(f"hc_{sublayer}_{name}", parameter)
        self.mix = HyperConnection(c, num)
        self.engram = Engram(c, plan.engram, num, ranks) if plan.engram is not None else None

    def forward(self, x: Tensor, pre_mix: Tensor, given: Selection | None, tables: Tables, chunk: Chunk, cache: Cache,
                in_image: Tensor | None) -> tuple[Tensor, Tensor, Selection | None]:
        """Streams x [B, S, N, D] bf16, pre_mix [B, S, N] -> the same after the layer, and the selection handed up."""
        (B, S, N, D), arith = x.shape, self.num.arith
        x, pre = cast(x, arith).flatten(0, 1), pre_mix.flatten(0, 1)                                 # [T, N, D], [T, N]
        attn_pre, post, comb = self.mix(x, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        a, given = self.attn(self.attn_norm(collapse(x, pre).view(B, S, D)), given, tables, chunk, cache)
        x = cast(write_streams(a, x, post, comb), arith)
        ffn_pre, post, comb = self.mix(x, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        f = self.ffn(self.ffn_norm(collapse(x, attn_pre).view(B, S, D)), in_image)
        return write_streams(f, x, post, comb).view(B, S, N, D), ffn_pre.view(B, S, N), given

    def publish(self, x: Tensor, pre_mix: Tensor, tables: Tables, chunk: Chunk, cache: Cache) -> None:
        """Only the global KV of streams x, for tokens that this layer and those after it will not process."""
        self.attn.publish(self.attn_norm(collapse(cast(x, pre_mix.dtype), pre_mix).squeeze(-2)), tables, chunk, cache)


# ---------------------------------------------------------------------------------------------------------- transformer

class Tables:
    """Rotary tables of one forward, made on first use and shared by its layers."""

    def __init__(self, plain: Tensor, yarn: Tensor, arith: torch.dtype) -> None:
        self.freqs, self.arith = (plain, yarn), arith
        self._made: dict[tuple[bool, int], tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def of(self, plan: LayerPlan, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation and its inverse. Window-only layers: rope_theta. Layers with m > 0: compress_rope_theta with YaRN for
        everything in the layer."""
        key = plan.ratio > 0, id(positions)   # the entry holds the positions, so the id stays theirs
        if key not in self._made:
            turn = rotation(positions, self.freqs[key[0]], self.arith)
            self._made[key] = positions, (turn, turn.conj().resolve_conj())
        return self._made[key][1]


class ImageTokens(NamedTuple):
    """The image spans among the tokens of a forward."""
    types: Tensor      # int8 [B, S]: -1 text, 0 start, 1 image, 2 newline, 3 end of a span
    features: Tensor   # bf16 [n, D]: the rows of all type-1 tokens, in order of (row, position)

    def columns(self, c0: int, c1: int) -> ImageTokens:
        order = (self.types == IMAGE).flatten().cumsum(0).view(self.types.shape) - 1
        return ImageTokens(self.types[:, c0:c1], self.features[order[:, c0:c1][self.types[:, c0:c1] == IMAGE]])


class Tokens(NamedTuple):
    """What the layers need of the new tokens besides their streams."""
    ngrams: Tensor | None  # int64 [B, S, max_ngram] compressed ids looking back, newest first; -1 unknown or in an image
    in_image: Tensor | None   # bool [B, S]


class State(NamedTuple):
    """What one layer hands to the next."""
    x: Tensor                 # bf16 [B, S, N, D] residual streams
    pre_mix: Tensor           # [B, S, N] how the next sublayer reads them
    given: Selection | None   # the index source's selection and pool


class Output(NamedTuple):
    logits: Tensor | None        # float32 [B, S, V], [B, 1, V] for "last"
    main_hidden: Tensor | None   # bf16 [B, S, targets * D]: the draft head's input


class Embedding(nn.Module):
    """Token rows; a rank holds a contiguous part of the vocabulary."""

    def __init__(self, rows: int, width: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.ranks.rank * self.weight.shape[0]
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), self.weight).masked_fill(~mine.unsqueeze(-1), 0)
        return self.ranks.sum(rows.view(torch.int32)).view(torch.bfloat16)     # bits: -0 + 0 would lose a sign


class Transformer(nn.Module):
    """The causal encoder-decoder: the encoder's layers, and the decoder's, which share one global KV made from the
    encoder's result (released: layers 0-19 and 20-39). `draft` is a DSpark head that reads along."""

    def __init__(self, config: ModelConfig, num: Numerics, ranks: Ranks = Ranks(), draft: nn.Module | None = None) -> None:
        super().__init__()
        c = self.config = config
        self.num, self.ranks, self.plans = num, ranks, plan_layers(c)
        vocabulary = ranks.slice(c.vocab_size, "vocab_size")
        self.embed = Embedding(vocabulary, c.hidden_size, ranks)
        self.layers = nn.ModuleList(Block(c, plan, num, ranks) for plan in self.plans[: c.num_hidden_layers])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, num)
        self.head = Linear(c.hidden_size, vocabulary, "bf16", num, out_dtype=torch.float32)
        if c.vision_config is not None:
            self.vision = VisionTower(c.vision_config, num)
            self.aligner = Aligner(c.vision_config, c.hidden_size, num)
            for name in ("image_start", "image_end", "image_newline"):
                row = torch.empty(c.hidden_size, dtype=torch.bfloat16)
                self.register_parameter(name, nn.Parameter(row, requires_grad=False))
        self.mtp = draft
        self.engram_index: EngramIndex | None = None                       # made from the tokenizer when loaded
        self.checkpoint: Path | None = None                                # where the weights were loaded from
        self.register_buffer("plain_freqs", rotary_frequencies(c.qk_rope_head_dim, c.rope_theta), persistent=False)
        yarn = rotary_frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_scaling)
        self.register_buffer("yarn_freqs", yarn, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        if any(fn(torch.zeros(1, dtype=kept)).dtype != kept for kept in (torch.float32, torch.bfloat16)):
            raise ValueError("the dtypes of this model are part of what it computes (float32 mHC parameters, packed FP8 and "
                             "FP4): it can move between devices but not change dtype")
        super()._apply(fn, recurse)
        bind(self)
        return self

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def new_cache(self, batch_size: int = 1, max_length: int | None = None, rollback: int | None = None) -> Cache:
        """An empty history for batch_size sequences of at most max_length tokens (default: max_position_embeddings).
        `rollback`: how many tokens can be taken back, dspark_block_size unless asked otherwise."""
        length = self.config.max_position_embeddings if max_length is None else max_length
        return Cache(self.config, self.num, batch_size, length, self.device, rollback)

    # ------------------------------------------------------------------------------------------------------- one forward

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, cache: Cache, lengths: list[int] | None = None, images: ImageTokens | None = None,
                logits: str = "all") -> Output:
        """Append input_ids [B, S] to the cache and compute their logits.

        Rows are right padded: lengths[b] <= S tokens of row b count (0 allowed); results at padding are meaningless and it
        never reaches the cache. logits: "all", "last" (of each row) or "none". ValueError for ids outside the vocabulary, a
        batch that is not the cache's, or more tokens than its max_length.
        """
        ids, counts = self._checked(input_ids, cache, lengths)
        return self._through(ids, cache.chunk(counts, ids.shape[1], "encoder"), cache, images, logits)

    @torch.inference_mode()
    def replay(self, input_ids: Tensor, cache: Cache, lengths: list[int] | None = None, images: ImageTokens | None = None,
               before: Tensor | None = None) -> Output:
        """Rebuild the windows of a cache by running its last tokens [B, S] again, at their true positions: the paper's
        SWA bounded replay, for caches whose windows were not kept. -> the logits of the last ones, [B, 1, V].

        Query i sees window positions from the first replayed one on, and global KV, which is read and never written; the
        open groups stay as they are too. `before` int64 [B, k]: the compressed ids before these tokens, newest last, that
        Engram looks back to (k >= max_ngram - 1, or all there are; -1: none). ValueError when a row holds fewer tokens.
        """
        ids, counts = self._checked(input_ids, cache, lengths)
        starts = [held - n for held, n in zip(cache.lengths, counts)]
        if min(starts) < 0:
            raise ValueError(f"replay got {counts} tokens of rows that hold {cache.lengths}")
        kept, ring = cache.snapshot(), cache.rings.get(("ngram",))
        if ring is not None:
            known = 0 if before is None else before.shape[1]
            if any(known < min(start, self.config.engram_max_ngram_size - 1) for start in starts):
                raise ValueError("replay needs `before`: Engram looks back beyond the tokens that are replayed")
            cache.rings["ngram",] = ring = ring.clone()
            for row, start in enumerate(starts):
                for back in range(1, min(known, start, ring.shape[1]) + 1):
                    ring[row, (start - back) % ring.shape[1]] = before[row, known - back]
        cache.window_start = {part: list(cache.lengths) for part in cache.PARTS}  # none: the windows begin with this chunk
        try:
            chunk = cache.chunk(counts, ids.shape[1], "encoder", starts=starts, appends=False)
            out = self._through(ids, chunk, cache, images, "last")
        except BaseException:
            cache.restore(kept)
            raise
        for part, before_it in kept.window_start.items():
            # a part that did not run has none; rows without tokens keep theirs
            begin = cache.window_start[part]
            cache.window_start[part] = [w if n == 0 else b if self.mtp is None and part == "draft" else s
                                        for w, b, s, n in zip(before_it, begin, starts, counts)]
        return out

    def _through(self, ids: Tensor, chunk: Chunk, cache: Cache, images: ImageTokens | None, logits: str) -> Output:
        """All layers over a chunk."""
        tables, means = self._tables(), []
        state, tokens = self._begin(ids, chunk, cache, images)
        start = len(self.layers) if self.config.decoder_start is None else self.config.decoder_start
        state = self._run(range(start), state, tokens, tables, chunk, cache, means)
        upper = self._part(chunk, cache, "decoder")
        state = self._run(range(start, len(self.layers)), state, tokens, tables, upper, cache, means)
        return self._finish(state, means, tables, chunk, cache, logits)

    def _finish(self, state: State, means: list[Tensor], tables: Tables, chunk: Chunk, cache: Cache, logits: str) -> Output:
        """The draft head reads along; logits; the cache takes the chunk over."""
        hidden = torch.cat(means, -1) if means else None
        if self.mtp is not None:
            self.mtp.observe(hidden, tables, self._part(chunk, cache, "draft"), cache)
        out = self._logits(state, chunk, logits)
        cache.commit(chunk, cache.PARTS if self.mtp is not None else ("encoder", "decoder"))
        return Output(out, hidden)

    def _checked(self, input_ids: Tensor, cache: Cache, lengths: list[int] | None) -> tuple[Tensor, list[int]]:
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64) or not input_ids.numel():
            raise ValueError(f"input_ids must be integers [B, S] with S >= 1, not {input_ids.dtype} {list(input_ids.shape)}")
        if input_ids.shape[0] != cache.batch_size:
            raise ValueError(f"input_ids has {input_ids.shape[0]} rows, but the cache was made for {cache.batch_size}")
        known = cache.config is self.config or cache.config == self.config
        if not known or cache.num != self.num or cache.device != self.device:
            raise ValueError("this cache was made for a model of another configuration, numerics or device")
        width = input_ids.shape[1]
        counts = [width] * input_ids.shape[0] if lengths is None else [int(n) for n in lengths]
        if len(counts) != input_ids.shape[0] or not all(0 <= n <= width for n in counts):
            raise ValueError(f"lengths = {counts} does not fit input_ids {list(input_ids.shape)}")
        if min(counts) < width:
            padding = torch.arange(width) >= torch.tensor(counts).unsqueeze(-1)
            input_ids = input_ids.masked_fill(padding.to(input_ids.device), 0)
        low, high = (int(v) for v in input_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.config.vocab_size}")
        return input_ids.to(torch.int64), counts                      # where the caller has them: on the host, mostly

    def _tables(self) -> Tables:
        return Tables(self.plain_freqs, self.yarn_freqs, self.num.arith)

    def _part(self, chunk: Chunk, cache: Cache, part: str) -> Chunk:
        """The same tokens for a part of the model whose windows begin elsewhere; updates go to the same commit."""
        other = cache.chunk(chunk.counts, chunk.width, part, starts=chunk.starts, appends=chunk.appends)
        if other.first_seen == chunk.first_seen:
            return chunk
        other.updates, other.positions = chunk.updates, chunk.positions
        return other

    def _begin(self, ids: Tensor, chunk: Chunk, cache: Cache, images: ImageTokens | None) -> tuple[State, Tokens]:
        x = self.embed(ids.to(self.device, non_blocking=True))                                                 # [B, S, D]
        in_image = None
        if images is not None and (images.types.shape != ids.shape or
                                   int((images.types == IMAGE).sum()) != len(images.features)):
            raise ValueError(f"image tokens {list(images.types.shape)} with {len(images.features)} feature rows do not fit "
                             f"input_ids {list(ids.shape)}")
        if images is not None and bool((images.types > TEXT).any()):
            types = images.types.to(self.device)
            if self.config.vision_config is None:
                raise ValueError("this model has no vision tower: its config.json has no vision_config")
            in_image, x = types > TEXT, x.clone()                     # the embedding's own result stays as it was
            for kind, rows in ((IMAGE_START, self.image_start), (IMAGE, images.features), (IMAGE_NEWLINE, self.image_newline),
                               (IMAGE_END, self.image_end)):
                x[types == kind] = rows.to(self.device)
        ngrams = None
        if self.config.engram_layer_ids:     # integers only, and the tables are there too: on the host
            if self.engram_index is None:
                raise ValueError("this model has Engram layers but no engram_index: load_model makes it from the tokenizer")
            host, ring = chunk.on(torch.device("cpu")), cache.rings["ngram",]
            new = self.engram_index.compress(ids, in_image)
            wanted = host.positions.unsqueeze(-1) - torch.arange(self.config.engram_max_ngram_size)  # [B, S, max_ngram]
            place = host.locate(wanted.flatten(1), ring.shape[1])
            ngrams = host.join(ring, new, ("ngram",)).index_select(0, place).view(wanted.shape).masked_fill(wanted < 0, -1)
        streams = x.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1)                             # [B, S, N, D]
        pre_mix = torch.zeros(*ids.shape, self.config.hc_mult, dtype=self.num.arith, device=x.device)
        pre_mix[..., 0] = 1
        return State(streams, pre_mix, None), Tokens(ngrams, in_image)

    def _run(self, layers: range, state: State, tokens: Tokens, tables: Tables, chunk: Chunk, cache: Cache,
             means: list[Tensor]) -> State:
        x, pre_mix, given = state
        for i in layers:
            x = self._enter(i, x, tokens)
            if i in self.config.dspark_target_layer_ids:
                means.append(to_bf16(x.to(self.num.arith).mean(2)))
            x, pre_mix, given = self.layers[i](x, pre_mix, given, tables, chunk, cache, tokens.in_image)
        return State(x, pre_mix, given)

    def _enter(self, layer: int, x: Tensor, tokens: Tokens) -> Tensor:
        engram = self.layers[layer].engram
        if engram is None:
            return x
        return engram(x, self.engram_index.rows(tokens.ngrams, self.plans[layer].engram), tokens.in_image)

    def _logits(self, state: State, chunk: Chunk, which: str) -> Tensor | None:
        if which not in ("all", "last", "none"):
            raise ValueError(f"logits = {which!r} is not one of all, last, none")
        if which == "none":
            return None
        x, pre_mix = state.x, state.pre_mix
        if which == "last":
            row = torch.arange(x.shape[0], device=x.device)
            last = (chunk.end - chunk.start - 1).squeeze(-1).clamp_min(0)
            x, pre_mix = x[row, last].unsqueeze(1), pre_mix[row, last].unsqueeze(1)
        return self.ranks.gather(self.head(self.norm(collapse(cast(x, pre_mix.dtype), pre_mix).squeeze(-2))))

    # ----------------------------------------------------------------------------------------------------------- prefill

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, cache: Cache, way: str = "full", lengths: list[int] | None = None,
                images: ImageTokens | None = None, chunk_size: int = 4096,
                progress: Callable[[int], None] | None = None) -> Output:
        """Append a prompt [B, S] and compute the logits of its last tokens, [B, 1, V].

        way "full": all layers for every token, the oracle. "bounded": the paper's sliding-window bounded replay; decoder
        layers run over the last W tokens only, and read window rows of those alone. "exact-replay": over the last
        (decoder layers) (W - 1) + 1 tokens, after which the last logits and all windows are exactly those of "full" (taking
        more than one token of the prompt back afterwards, without a snapshot, reaches rows that are approximate). The
        global KV is the same in all three. `progress` is called with the tokens done. Interrupted, "full" leaves the chunks
        that are done, the other two leave the cache as it was. ValueError for other ways, and for configurations whose
        decoder does not start at a Full layer of ratio 1.
        """
        c, start = self.config, self.config.decoder_start
        if way not in ("full", "bounded", "exact-replay"):
            raise ValueError(f"prefill way {way!r} is not one of full, bounded, exact-replay")
        if way != "full" and (start is None or any(i < start for i in c.dspark_target_layer_ids)):
            raise ValueError(f"prefill way {way!r} needs a decoder that starts at the last KV source with compress_ratios 1, "
                             f"and draft targets inside it; this configuration has none: use full")
        ids, counts = self._checked(input_ids, cache, lengths)
        cache.chunk(counts, ids.shape[1], "encoder")   # refuses now, not half way, a prompt that does not fit
        begun, known = list(cache.lengths), {part: list(w) for part, w in cache.window_start.items()}
        replayed = {"full": ids.shape[1], "bounded": c.sliding_window}.get(way) or (
            (len(self.layers) - start) * (c.sliding_window - 1) + 1)
        whole = way == "full" or max(counts) <= replayed
        tail: list[Tensor] = []
        last, before = None, cache.snapshot()
        try:
            for c0 in range(0, ids.shape[1], chunk_size):
                part_ids = ids[:, c0 : c0 + chunk_size]
                part_images = None if images is None else images.columns(c0, c0 + chunk_size)
                part_counts = [min(max(n - c0, 0), part_ids.shape[1]) for n in counts]
                if whole:
                    out = self.forward(part_ids, cache, part_counts, part_images, "last").logits
                    ended = torch.tensor([n > 0 for n in part_counts], device=self.device).view(-1, 1, 1)
                    last = out if last is None else torch.where(ended, out, last)
                else:
                    tail = self._encode(part_ids, cache, part_counts, part_images, replayed, tail)
                if progress is not None:
                    progress(sum(part_counts))
            return Output(last, None) if whole else self._decode(begun, known, counts, replayed, tail, cache)
        except BaseException:
            if way != "full":       # the encoder is ahead of the decoder, whose windows are not there yet
                cache.restore(before)
            raise

    def _encode(self, ids: Tensor, cache: Cache, counts: list[int], images: ImageTokens | None, keep: int,
                tail: list[Tensor]) -> list[Tensor]:
        """Encoder layers and the decoder's global KV for a chunk; -> the last `keep` tokens' state at the decoder's entry."""
        start = self.config.decoder_start
        chunk, tables = cache.chunk(counts, ids.shape[1], "encoder"), self._tables()
        state, tokens = self._begin(ids, chunk, cache, images)
        state = self._run(range(start), state, tokens, tables, chunk, cache, [])
        entered = self._enter(start, state.x, tokens)
        self.layers[start].publish(entered, state.pre_mix, tables, chunk, cache)
        in_image = tokens.in_image
        if in_image is None:
            in_image = torch.zeros(ids.shape, dtype=torch.bool, device=self.device)
        ngrams = ids if tokens.ngrams is None else tokens.ngrams
        new = [state.x, state.pre_mix, in_image, ngrams]
        tail = tail or [t.new_zeros(t.shape[0], keep, *t.shape[2:]) for t in new]
        tail = [chunk.on(t.device).next_ring(chunk.join(ring, t), keep) for ring, t in zip(tail, new)]
        cache.commit(chunk, parts=("encoder",))
        return tail

    def _decode(self, begun: list[int], known: dict[str, list[int]], counts: list[int], keep: int, tail: list[Tensor],
                cache: Cache) -> Output:
        """Decoder layers over the kept tokens, at their true positions, reading the global KV and writing none."""
        start, counts = self.config.decoder_start, [min(n, keep) for n in counts]
        starts = [end - n for end, n in zip(cache.lengths, counts)]
        for part in ("decoder", "draft"):   # after a gap, what the windows held before it is out of reach
            cache.window_start[part] = [w if s <= b else s for w, s, b in zip(known[part], starts, begun)]
        chunk, tables, means = cache.chunk(counts, max(counts), "decoder", starts=starts, appends=False), self._tables(), []
        row = torch.arange(len(starts), device=self.device).unsqueeze(-1) * keep
        x, pre_mix, in_image, ngrams = (t.flatten(0, 1)[(chunk.positions % keep + row).to(t.device)] for t in tail)
        tokens = Tokens(ngrams, None if self.config.vision_config is None else in_image)
        state = self._run(range(start, len(self.layers)), State(x, pre_mix, None), tokens, tables, chunk, cache, means)
        return self._finish(state, means, tables, chunk, cache, "last")

    def encode_image(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Vision tower and aligner: patches bf16 [n, 3, p, p] of a grid (rows, columns) -> features bf16 [tokens, D]."""
        return self.aligner(self.vision(patches.to(self.device), grid), grid)


if __name__ == "__main__":
    from accounts import main
    sys.exit(main(sys.argv[1:]))
