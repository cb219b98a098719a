"""A million tokens: arithmetic at the far end of the context, storage that grows, memory that does not, what a decoded
token costs there, and a needle.

Nobody waits for a million tokens to be read: the global KV is random packed rows, windows are replayed, and a slow
twin of its own, made of twin.py's parts, computes what must follow.
"""
from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import model as product
import session
import twin
from convert import load_model, write_random
from golden_data import CHECKPOINT, same_bits
from model import Cache, ModelConfig, Transformer, plan_layers
from quant import Numerics
from session import Cost, decode_cost, random_history
from small_models import Small, feed, published

FAR: dict[str, Any] = dict(
    hidden_size=64, moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=4, head_dim=32, qk_rope_head_dim=12,
    q_lora_rank=96, o_lora_rank=48, o_groups=2, max_position_embeddings=1 << 20, n_routed_experts=5, num_experts_per_tok=2,
    sliding_window=7, compress_ratios=[0, 2, 2, 1, 1, 1, 0], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 5],
    index_n_heads=3, index_head_dim=32, index_topk=10, candidate_source_layer_id=3, candidate_topk_blocks=4,
    candidate_block_size=7, hc_mult=3, hc_sinkhorn_iters=5, engram_layer_ids=[0, 4], num_nextn_predict_layers=1,
    dspark_block_size=4, dspark_target_layer_ids=[3, 5])


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("far")
    config = published(FAR)
    config["text_config"]["rope_scaling"] |= {"factor": 16, "original_max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps(config))
    write_random(folder / "config.json", folder / "checkpoint", 3, CHECKPOINT)
    return load_model(folder / "checkpoint", exact=True, device="cpu", draft=True)


# ---------------------------------------------------------------------------------------------------------- the far twin

@dataclass
class Past:
    """What the twin is told of the tokens before position n: the values of rows and keys, and of open groups."""
    tokens: list[int]
    n: int
    rows: dict[int, np.ndarray]      # {KV source: [n // m, hd]}
    keys: dict[int, np.ndarray]
    kv: dict[int, np.ndarray]        # {KV source: [n % m, hd]}
    score: dict[int, np.ndarray]

    @classmethod
    def of(cls, cache: Cache, tokens: list[int]) -> Past:
        def unpack(packed: np.ndarray, width: int, block: int, scales: np.ndarray) -> np.ndarray:
            codes = np.stack([packed[:, : width // 2] & 0xF, packed[:, : width // 2] >> 4], -1).reshape(len(packed), width)
            return twin.E2M1[codes] * scales[packed[:, width // 2 :]].repeat(block, 1)

        c, n = cache.config, cache.lengths[0]
        sources = {i: cache.plans[i].ratio for i in c.kv_source_layer_ids}
        waiting = {(what, i): [ring[0, p % ring.shape[1]].double().numpy() for p in range(n - n % sources[i], n)]
                   for (what, *rest), ring in cache.rings.items() if what in ("kv", "score") for i in rest}
        return cls(tokens, n, {i: unpack(cache.main[i][0, : n // m].numpy(), c.head_dim, 16, twin.E4M3) for i, m in sources.items()},
                   {i: unpack(cache.keys[i][0, : n // m].numpy(), c.index_head_dim, 32, twin.E8M0) for i, m in sources.items()},
                   *({i: np.array(waiting.get((what, i), [])).reshape(-1, c.head_dim) for i in sources} for what in ("kv", "score")))


def best(values: np.ndarray, k: int) -> list[int]:
    """Positions of the k largest, ties to the lowest position."""
    if len(values) <= k:
        return list(range(len(values)))
    cut = -np.partition(-values, k - 1)[k - 1]
    above = np.nonzero(values > cut)[0].tolist()
    return sorted(above + np.nonzero(values == cut)[0][: k - len(above)].tolist())


def far_twin(directory: Path, past: Past, new: list[int], first: int) -> dict[str, Any]:
    """Tokens from position `first` on, of which those from n on are new: logits [len(new), V] and what the model drafts
    after the last. The windows hold nothing from before `first`."""
    ckpt = twin.load_checkpoint(directory)
    run, text, n = twin.Run(ckpt, frozenset()), ckpt.text, past.n
    tokens = past.tokens + new
    positions = list(range(first, len(tokens)))
    ids = twin.token_map(twin.Tokenizer.from_file(str(directory / "tokenizer.json")), text["vocab_size"])
    back = text["engram_max_ngram_size"] - 1
    near = [ids[token] for token in tokens[first - back :]]
    primes = twin.engram_primes(text["engram_layer_ids"], back + 1, text["engram_vocab_size"], text["engram_n_heads"])
    rows, keys = dict(past.rows), dict(past.keys)
    state: dict[str, Any] = {"chosen": None, "pool": None, "picked": {}}

    def attention(layer: int, x: np.ndarray) -> np.ndarray:
        prefix, m, frequencies = f"layers.{layer}.attn", text["compress_ratios"][layer], twin.layer_frequencies(text, layer)
        source = max((i for i in text["kv_source_layer_ids"] if i <= layer), default=None)
        if layer == source:
            append(layer, prefix, m, frequencies, x[n - first :])
        qr = run.norm(run.linear(x, f"{prefix}.wq_a"), f"{prefix}.q_norm")
        q = twin.rotate(run.linear(qr, f"{prefix}.wq_b").reshape(len(x), -1, text["head_dim"]), positions, frequencies)
        kv = twin.window_rows(run, x, prefix, positions, frequencies)
        if layer in text["index_source_layer_ids"]:
            scores = twin.index_scores(twin.index_query(run, qr, prefix, positions, frequencies), keys[source],
                                       run.linear(x, f"{prefix}.indexer.weights_proj"))
            select(layer, m, scores)
        out = np.zeros_like(q)
        sink = ckpt.plain(f"{prefix}.attn_sink")
        for t, p in enumerate(positions):
            seen = [kv[p2 - first] for p2 in sorted(twin.visible_window(p, text["sliding_window"], first))]
            seen += [rows[source][j] for j in state["chosen"][t]] if m else []
            out[t] = twin.sparse_attention(q[t : t + 1], np.array(seen), sink, [range(len(seen))])[0]
        return twin.attention_output(run, out, prefix, positions, frequencies)

    def append(layer: int, prefix: str, m: int, frequencies: np.ndarray, x: np.ndarray) -> None:
        wkv, eps = ckpt.weight(f"{prefix}.compressor.wkv"), text["rms_norm_eps"]
        norm = ckpt.plain(f"{prefix}.compressor.norm.weight")
        if m == 1:
            latent = twin.pool(twin.linear(x, wkv), None, 1, norm, eps)
        else:
            kv = np.concatenate([past.kv[layer], twin.float32(twin.product(x, wkv))])
            wgate = ckpt.weight(f"{prefix}.compressor.wgate")
            score = np.concatenate([past.score[layer], twin.float32(twin.product(x, wgate))])
            latent = twin.pool(kv, score, m, norm, eps)
        at = [(n // m + j) * m for j in range(len(latent))]
        key = twin.rotate(run.norm(run.linear(latent, f"{prefix}.indexer.wk"), f"{prefix}.indexer.k_norm"), at, frequencies)
        keys[layer] = np.concatenate([keys[layer], twin.quantise_fp4(key).values])
        rows[layer] = np.concatenate([rows[layer], twin.quantise_fp4_main(twin.rotate(latent, at, frequencies)).values])

    def select(layer: int, m: int, scores: np.ndarray) -> None:
        size, source, k = text["candidate_block_size"], text["candidate_source_layer_id"], text["index_topk"]
        state["chosen"], pools = [], []
        for t, p in enumerate(positions):
            reach = (p + 1) // m
            if layer <= source:
                state["chosen"].append(best(scores[t, :reach], k))
            else:
                inside = np.array([j for block in sorted(state["pool"][t]) for j in range(block * size, min(block * size + size, reach))])
                state["chosen"].append(inside[best(scores[t, inside], k)].tolist())
            if layer == source:
                padded = np.full(-(-reach // size) * size, -np.inf)
                padded[:reach] = scores[t, :reach]
                top = padded.reshape(-1, size).max(1)
                top[(reach - 1) // size] = np.inf
                pools.append(best(top, text["candidate_topk_blocks"]))
        state["pool"] = pools or state["pool"]
        state["picked"][layer] = state["chosen"]

    h = np.repeat(ckpt.plain("embed.weight")[tokens[first:]][:, None], text["hc_mult"], axis=1)
    pre_mix = np.zeros(h.shape[:2])
    pre_mix[:, 0] = 1.0
    hidden = []
    for layer in range(text["num_hidden_layers"]):
        if layer in text["engram_layer_ids"]:
            which = text["engram_layer_ids"].index(layer)
            multipliers = twin.engram_multipliers(layer, back + 1, text["engram_compressed_vocab_size"])
            found = twin.engram_rows(near, primes[which], multipliers, ids[text["engram_pad_token_id"]])[back:]
            h = twin.engram(run, h, layer, found, np.zeros(len(h), bool))
        if layer in text["dspark_target_layer_ids"]:
            hidden.append(twin.bf16(h.mean(1)))
        h, pre_mix = twin.block(run, h, pre_mix, f"layers.{layer}", lambda x: attention(layer, x), text["num_experts_per_tok"], None)
    logits = twin.float32(twin.product(run.norm(twin.collapse(h, pre_mix), "norm"), ckpt.weight("head")))
    context = twin.draft_context(run, np.concatenate(hidden, 1), first)
    drafts = twin.draft(run, context, 11, positions[-1], first)
    return {"logits": torch.from_numpy(logits[n - first :]).float(), "drafts": drafts, "picked": state["picked"]}


@pytest.mark.parametrize("length, chunks", [
    ((1 << 20) - 5, [1, 4]), pytest.param((1 << 20) - 6, [5, 1], marks=pytest.mark.long)])
def test_a_short_decode_at_the_end_of_a_million_tokens_equals_the_twin(far: Transformer, length: int, chunks: list[int]) -> None:
    """Rotary angles, n-grams, rings, open groups, pool and index arithmetic up to position 1,048,575, from an even and an
    odd length. Windows are replayed first: seven tokens at their true positions."""
    cache, tokens = random_history(far, length, room=sum(chunks), seed=length)
    past = Past.of(cache, tokens.tolist())
    new = torch.randint(11, 600, (sum(chunks),), generator=torch.Generator().manual_seed(1))
    logits, _ = feed(far, new, chunks, cache)
    want = far_twin(Path(far.checkpoint), past, new.tolist(), length - 7)
    picked = want["picked"]
    for layer in (1, 3, 5):                            # rows near and far
        assert len({j >> 16 for chosen in picked[layer] for j in chosen}) > 5
    assert max(picked[5][-1]) > (1 << 20) - 20
    assert same_bits(logits, want["logits"])
    drafted = far.mtp.draft(far, torch.tensor([11]), cache)
    assert drafted.ids[0].tolist() == want["drafts"][0]
    assert same_bits(drafted.logits[0], torch.from_numpy(want["drafts"][1]).float())
