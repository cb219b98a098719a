"""A million tokens: arithmetic at the far end of the context, storage that grows, memory that does not, what a decoded
token costs there, and a needle.

Nobody waits for a million tokens to be read: the global KV is random packed rows, windows are replayed, and a slow
twin of its own, made of twin.py's parts, computes what must follow.
"""
from __future__ import annotations

import json
import math
import subprocess
import sys
import weakref
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

import kv_cache
import model as product
import session
import twin
from convert import load_model, write_random
from golden_data import CHECKPOINT, same_bits
from model import Cache, Chunk, ModelConfig, Transformer, plan_layers
from quant import Numerics
from session import Cost, decode_cost, random_history
from small_models import feed, published

FAR: dict[str, Any] = dict(
    hidden_size=64, moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=4, head_dim=32,
    qk_rope_head_dim=12, q_lora_rank=96, o_lora_rank=48, o_groups=2, max_position_embeddings=1 << 20,
    n_routed_experts=5, num_experts_per_tok=2, sliding_window=7, compress_ratios=[0, 2, 2, 1, 1, 1, 0],
    kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 5], index_n_heads=3, index_head_dim=32, index_topk=10,
    candidate_source_layer_id=3, candidate_topk_blocks=4, candidate_block_size=7, hc_mult=3, hc_sinkhorn_iters=5,
    engram_layer_ids=[0, 4], num_nextn_predict_layers=1, dspark_block_size=4, dspark_target_layer_ids=[3, 5])


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("far")
    config = published(FAR)
    config["text_config"]["rope_scaling"] |= {"factor": 16, "original_max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps(config))
    write_random(folder / "config.json", folder / "checkpoint", 3, CHECKPOINT)
    return load_model(folder / "checkpoint", exact=True, device="cpu", draft=True)


# --------------------------------------------------------------------------------------------------------- the far twin

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
            pairs = packed[:, : width // 2]
            codes = np.stack([pairs & 0xF, pairs >> 4], -1).reshape(len(packed), width)
            return twin.E2M1[codes] * scales[packed[:, width // 2 :]].repeat(block, 1)

        c, n = cache.config, cache.lengths[0]
        sources = {i: cache.plans[i].ratio for i in c.kv_source_layer_ids}
        rows, keys, kv, score = {}, {}, {}, {}
        for i, m in sources.items():
            rows[i] = unpack(cache.main[i][0, : n // m].numpy(), c.head_dim, 16, twin.E4M3)
            keys[i] = unpack(cache.keys[i][0, : n // m].numpy(), c.index_head_dim, 32, twin.E8M0)
            for what, waiting in (("kv", kv), ("score", score)):
                if m > 1:
                    ring = cache.rings[what, i][0].double().numpy()
                    waiting[i] = ring[[p % len(ring) for p in range(n - n % m, n)]]
        return cls(tokens, n, rows, keys, kv, score)


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
        prefix, m = f"layers.{layer}.attn", text["compress_ratios"][layer]
        frequencies = twin.layer_frequencies(text, layer)
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
        key = run.norm(run.linear(latent, f"{prefix}.indexer.wk"), f"{prefix}.indexer.k_norm")
        keys[layer] = np.concatenate([keys[layer], twin.quantise_fp4(twin.rotate(key, at, frequencies)).values])
        rows[layer] = np.concatenate([rows[layer], twin.quantise_fp4_main(twin.rotate(latent, at, frequencies)).values])

    def select(layer: int, m: int, scores: np.ndarray) -> None:
        size, source, k = text["candidate_block_size"], text["candidate_source_layer_id"], text["index_topk"]
        state["chosen"], pools = [], []
        for t, p in enumerate(positions):
            reach = (p + 1) // m
            if layer <= source:
                state["chosen"].append(best(scores[t, :reach], k))
            else:
                blocks = [range(block * size, min(block * size + size, reach)) for block in sorted(state["pool"][t])]
                inside = np.array([j for block in blocks for j in block])
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
        h, pre_mix = twin.block(run, h, pre_mix, f"layers.{layer}", lambda x: attention(layer, x),
                                text["num_experts_per_tok"], None)
    logits = twin.float32(twin.product(run.norm(twin.collapse(h, pre_mix), "norm"), ckpt.weight("head")))
    context = twin.draft_context(run, np.concatenate(hidden, 1), first)
    drafts = twin.draft(run, context, 11, positions[-1], first)
    return {"logits": torch.from_numpy(logits[n - first :]).float(), "drafts": drafts, "picked": state["picked"]}


@pytest.mark.parametrize("length, chunks", [
    ((1 << 20) - 5, [1, 4]), pytest.param((1 << 20) - 6, [5, 1], marks=pytest.mark.long)])
def test_a_short_decode_at_the_end_of_a_million_tokens_equals_the_twin(far: Transformer, length: int,
                                                                       chunks: list[int]) -> None:
    """Rotary angles, n-grams, rings, open groups, pool and index arithmetic up to position 1,048,575, from an even and
    an odd length. Windows are replayed first: seven tokens at their true positions."""
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


# -------------------------------------------------------------------------------------------------------------- storage

def write(cache: Cache, source: int, chunk: Chunk, value: int) -> None:
    """The rows of a chunk's groups, all bytes alike."""
    shape = cache.batch_size, chunk.width // cache.plans[source].ratio
    rows = [torch.full((*shape, codec.bytes), value, dtype=torch.uint8) for codec in (cache.main_rows, cache.key_rows)]
    cache.write_compressed(source, chunk, *rows)


def test_storage_grows_in_steps_and_never_far_ahead() -> None:
    """A limit of 2^20 tokens allocates nothing; 40,000 tokens in chunks of 100 move the storage some twenty times."""
    config = ModelConfig.from_dict(published(FAR))
    cache = Cache(config, Numerics(), 2, 1 << 20, torch.device("cpu"))
    local = cache.nbytes("allocated")
    assert local == cache.nbytes() == sum(ring.nbytes for ring in cache.rings.values()) < 40_000
    moves: Counter[int] = Counter()
    for start in range(0, 40_000, 100):
        chunk = cache.chunk([100, 40], 100, "encoder")
        for source in cache.main:
            before = cache.main[source]
            write(cache, source, chunk, start // 100 % 256)
            moves[source] += cache.main[source] is not before
            used, rows = chunk.ends[0] // cache.plans[source].ratio, cache.main[source].shape[1]
            assert used <= rows <= max(used * 5 // 4 + 1, used + 255) and cache.keys[source].shape[1] == rows
        cache.commit(chunk)
    assert cache.lengths == [40_000, 16_000] and all(10 < n < 30 for n in moves.values())
    assert torch.equal(cache.main[3][0, :40_000, 0], (torch.arange(40_000) // 100 % 256).byte())
    assert cache.nbytes("global") == int(56_000 * 1.5 * (cache.main_rows.bytes + cache.key_rows.bytes))


def test_storage_stops_at_the_limit() -> None:
    cache = Cache(ModelConfig.from_dict(published(FAR)), Numerics(), 1, 1001, torch.device("cpu"))
    for n in (900, 101):
        chunk = cache.chunk([n], n, "encoder")
        write(cache, 3, chunk, 0)
        cache.commit(chunk)
    assert cache.main[3].shape[1] == 1001
    with pytest.raises(ValueError, match="row 0 would hold 1002 tokens, but this cache was made for max_length = 1001"):
        cache.chunk([1], 1, "encoder")


# --------------------------------------------------------------------------------------------------------------- memory

class Live(TorchDispatchMode):
    """The most bytes of tensors that were made inside and alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("context, chunk, working_set", [
    (0, 200, 1 << 20), (9000, 200, 1 << 20), (9000, 100, 4 << 20), (70_000, 20, 1 << 20)])
def test_prefill_memory_stays_below_the_stated_bound(far: Transformer, monkeypatch: pytest.MonkeyPatch, context: int,
                                                     chunk: int, working_set: int) -> None:
    """Besides weights and cache; the bound is no more than some times too large, and it does not follow the context
    until one query needs more than the working set."""
    monkeypatch.setattr(kv_cache, "WORKING_SET", (working_set, working_set))
    cache = random_history(far, context, room=2 * chunk)[0] if context else far.new_cache()
    bound = session.prefill_memory(far.config, chunk, context, torch.float64, working_set)
    with Live() as live:
        far.prefill(torch.full((1, chunk), 11), cache, chunk_size=chunk)
    stores = sum(store.nbytes for store in (*cache.main.values(), *cache.keys.values()))      # they have moved
    used = live.peak - stores if context else live.peak
    assert bound / 6 < used <= bound
    if working_set == 4 << 20:
        assert bound == session.prefill_memory(far.config, chunk, 0, torch.float64, working_set)


@pytest.mark.manual
def test_a_prompt_of_65536_tokens_needs_less_than_3_gib(tmp_path: Path) -> None:
    """The small checkpoint, all of the process counted. Some minutes."""
    program = """import resource, sys, torch
from convert import load_model
model = load_model(sys.argv[1], device="cpu")
cache = model.new_cache(1, 65536)
model.prefill(torch.randint(11, 2048, (1, 65536)), cache, "bounded")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, cache.lengths[0])"""
    root = Path(product.__file__).parent
    command = [sys.executable, "-c", program, str(root / "tiny")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    kib, length = map(int, done.stdout.split())
    assert length == 65536 and kib * 1024 < 3 << 30


# ---------------------------------------------------------------------------------------------- cost of a decoded token

@pytest.mark.parametrize("context", [6, 24, 90, 700])
def test_decode_cost_equals_a_count_of_the_products_that_are_run(far: Transformer, context: int) -> None:
    """Two decoded tokens, so that each group is paid once; a full window, fewer and more rows than top-k and pool."""
    model, c = load_model(far.checkpoint, exact=True, device="cpu"), far.config       # without its draft head
    _, cache = feed(model, torch.full((context,), 11), [context])
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):
            model(torch.full((1, 1), 12), cache)
    # Sinkhorn's sums are products with constants here, work of N^4 that decode_cost does not count
    with FlopCounterMode(display=False) as mixing:
        far.layers[0].mix.sinkhorn(torch.zeros(1, c.hc_mult, c.hc_mult, dtype=torch.float64))
    stated = sum(cost.flops for n in (context + 1, context + 2) for cost in decode_cost(c, n))
    # and a sublayer's result enters the streams by an elementwise product, which the counter does not count
    uncounted = 2 * c.hc_mult * c.hidden_size
    writes = 2 * 2 * c.num_hidden_layers
    assert counter.get_total_flops() == round(stated) + writes * (mixing.get_total_flops() - uncounted)


def slow_cost(text: dict[str, Any], context: int) -> dict[str, float]:
    """Attention and index of one token, counted row by row from the published keys: {part: FLOPs}."""
    out: Counter[str] = Counter()
    source = 0
    for layer, m in enumerate(text["compress_ratios"][: text["num_hidden_layers"]]):
        source = layer if layer in text["kv_source_layer_ids"] else source
        rows = len(range(max(0, context - text["sliding_window"]), context))
        rows += min(text["index_topk"], context // m) if m else 0
        for _ in range(text["num_attention_heads"]):
            out["attention core"] += 4 * text["head_dim"] * rows                 # q . k, then p times v
        if layer in text["index_source_layer_ids"]:
            scored = context // m
            if layer > text["candidate_source_layer_id"]:
                scored = min(scored, text["candidate_topk_blocks"] * text["candidate_block_size"])
            part = "index scan" if layer == source else "index of the pool"
            for _ in range(text["index_n_heads"]):
                out[part] += (2 * text["index_head_dim"] + 2) * scored           # the product, and its weight
    return out


def test_decode_cost_of_the_released_model() -> None:
    """The full index scans are some 21 GFLOP at 1 M. Counted plainly a token costs 61 % more than at 4 K; weighted by
    the throughput of the formats, FP4 : FP8 : bf16 = 1/2 : 1 : 2, it is the paper's quarter."""
    path = Path(product.__file__).parent / "config.json"
    config, text = ModelConfig.from_json(path), json.loads(path.read_text())["text_config"]
    at = {context: decode_cost(config, context) for context in (4096, 1 << 20)}
    for context, costs in at.items():
        for part, flops in slow_cost(text, context).items():
            assert math.isclose(sum(cost.flops for cost in costs if cost.part == part), flops, rel_tol=1e-12), part
    scans = sum(cost.flops for cost in at[1 << 20] if cost.part == "index scan" and cost.format == "FP4")
    assert scans == 2 * 32 * 128 * (3 * (1 << 19) + (1 << 20)) and 21e9 < scans < 22e9
    near, far_off = at.values()
    growth = {name: session.weighted(far_off, weights) / session.weighted(near, weights) - 1
              for name, weights in session.WEIGHTINGS.items()}
    assert abs(growth["FP8-equivalent"] - 0.25) < 0.01 and 0.6 < growth["plain"] < 0.63
    # only the index depends on the context: everything else is the same work
    rest = [[cost for cost in costs if not cost.part.startswith("index ")] for costs in at.values()]
    assert rest[0] == rest[1]


def test_weightings_are_sums_over_formats() -> None:
    costs = [Cost(0, "a", "FP4", 8.0), Cost(None, "b", "bf16", 2.0), Cost(1, "c", "FP8 x FP4", 4.0)]
    assert session.weighted(costs, session.WEIGHTINGS["plain"]) == 14
    assert session.weighted(costs, session.WEIGHTINGS["FP8-equivalent"]) == 4 + 4 + 4


def test_the_cost_and_time_commands(far: Transformer, capsys: pytest.CaptureFixture[str]) -> None:
    assert session.main(["cost"]) == 0
    out = capsys.readouterr().out
    assert " 1048576" in out and "+25.6%" in out and "+61.5%" in out and "21.643" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["1048576", "+61.5%", "+25.6%", "+26.5%", "+32.9%", "+15.5%"] == lines[-1] and max(map(len, out.splitlines())) <= 80
    assert ["FP8", "x", "FP4", "1", "1", "1", "0.5", "0.5"] in lines
    assert session.main(["cost", "--config", str(CHECKPOINT / "config.json")]) == 0     # a context of 512: that alone
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["512"]] == ["512"] * 2
    arguments = ["--ckpt-path", str(far.checkpoint), "--device", "cpu", "--contexts", "40,4000", "--decode", "2"]
    assert session.main(["time", *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[0] for line in lines] == ["40", "4000"]
    assert all(float(line[1]) > 0 and 0 < float(line[2].rstrip("%")) < 100 for line in lines)


def test_reindex_layers_gather_the_pools_rows_in_decode(far: Transformer) -> None:
    """Index keys unpacked for one token, by layer: all in Full layers, 4 blocks of 7 in the Reindex layer."""
    counts: dict[int, dict[int, int]] = {}
    for context in (100, 3001):
        cache, _ = random_history(far, context)
        seen: Counter[int] = Counter()
        layer, unpack = [-1], cache.key_rows.unpack

        def counted(rows: Tensor) -> Tensor:
            seen[layer[0]] += rows.numel() // rows.shape[-1]
            return unpack(rows)

        cache.key_rows.unpack = counted
        hooks = [block.register_forward_pre_hook(lambda *_, i=i: layer.__setitem__(0, i))
                 for i, block in enumerate(far.layers)]
        try:
            far(torch.full((1, 1), 11), cache)
        finally:
            for hook in hooks:
                hook.remove()
        counts[context] = dict(seen)
    assert counts == {100: {1: 50, 3: 101, 5: 28}, 3001: {1: 1501, 3: 3002, 5: 28}}


# --------------------------------------------------------------------------------------------------------------- needle

NEEDLE, DECOY, QUESTION = 11, 12, 13


def hand_made(directory: Path) -> Transformer:
    """Layers that pass the embeddings on and index them by hand: a row's key is its tokens' content (dims 0-19, which
    are not rotated), a query is the content of its token. The question looks for dim 0, which the needle alone has;
    layer 5's query also looks for dim 3, which the decoy has."""
    model = load_model(directory, device="cpu")
    c, g = model.config, torch.Generator().manual_seed(0)

    def put(linear: nn.Module, matrix: Tensor) -> None:
        linear.weight = nn.Parameter(matrix.to(linear.weight.dtype), requires_grad=False)
        if hasattr(linear, "scale"):
            linear.scale = nn.Parameter(torch.ones(linear.scale.shape).to(linear.scale.dtype), requires_grad=False)
        linear.dense = None
        linear.prepare()

    def select(outputs: int, inputs: int, pairs: list[tuple[int, int]]) -> Tensor:
        matrix = torch.zeros(outputs, inputs)
        for out, inp in pairs:
            matrix[out, inp] = 1
        return matrix

    embedding = torch.zeros(c.vocab_size, c.hidden_size)
    embedding[:, 1:20] = torch.randn(c.vocab_size, 19, generator=g) * 0.3
    embedding[:, 0], embedding[:, 2:4] = -1, 0      # not what is looked for
    embedding[:, 63] = 1                            # makes the weights of the index heads positive
    embedding[[NEEDLE, DECOY, QUESTION], :20] = 0
    embedding[NEEDLE, 0], embedding[DECOY, 3], embedding[QUESTION, [0, 2]] = 2, 4, 2
    embedding[DECOY, 0] = -1
    model.embed.weight = nn.Parameter(embedding.to(torch.bfloat16), requires_grad=False)
    for i, block in enumerate(model.layers):
        block.attn_norm.weight.fill_(1)
        for silent in [block.attn.wo_b, block.ffn.shared_experts.w2] + ([block.engram.wkv] if block.engram else []):
            put(silent, torch.zeros(silent.weight.shape))
        block.ffn.experts.w2.weight.zero_()
        put(block.attn.wq_a, select(96, 64, [(d, d) for d in range(20)]))
        block.attn.q_norm.weight.fill_(1)
        if hasattr(block.attn, "indexer"):
            pairs = [(h * 32 + d, d) for h in range(3) for d in range(20)]
            if block.plan.mode == "reindex":
                pairs = [(h * 32 + d, asked) for h in range(3) for d, asked in ((0, 0), (3, 2))]
            put(block.attn.indexer.wq_b, select(96, 96, pairs))
            put(block.attn.indexer.weights_proj, select(3, 64, [(h, 63) for h in range(3)]))
        if block.plan.mode == "full":
            put(block.attn.compressor.wkv, select(32, 64, [(d, d) for d in range(20)]))
            if block.plan.ratio > 1:
                put(block.attn.compressor.wgate, torch.zeros(32, 64))
            put(block.attn.indexer.wk, select(32, 32, [(d, d) for d in range(20)]))
            for norm in (block.attn.compressor.norm, block.attn.indexer.k_norm):
                norm.weight.fill_(1)
    return model


@pytest.mark.parametrize("question", ["in the prompt", "decoded"])
@pytest.mark.parametrize("present", [True, False])
def test_a_needle_far_back_is_selected_and_survives_the_pool(far: Transformer, present: bool, question: str) -> None:
    """Of 2,000 rows 10 are selected, and 4 blocks of 7 kept for the layers after. The decoy, which only layer 5 would
    look for, lies outside of that pool, so layer 5 does not see it; its own scores of all rows would put it first."""
    model = hand_made(Path(far.checkpoint))
    ids = torch.randint(14, 600, (2001,), generator=torch.Generator().manual_seed(2))
    ids[1300], ids[2000] = DECOY, QUESTION
    if present:
        ids[700] = NEEDLE
    picked: dict[int, product.Selection] = {}
    hooks = [model.layers[i].attn.indexer.register_forward_hook(lambda _, __, out, i=i: picked.__setitem__(i, out))
             for i in (1, 3, 5)]
    cache = model.new_cache(1, 2100)
    if question == "decoded":
        feed(model, ids, [2000, 1], cache)
    else:
        feed(model, ids, [1990, 11], cache)
    rows = {i: picked[i].rows[0, -1].tolist() for i in picked}
    pool = picked[3].pool[0, -1].tolist()
    assert (350 in rows[1], 700 in rows[3], 700 in rows[5], 700 // 7 in pool) == (present,) * 4
    assert 1300 // 7 not in pool and 1300 not in rows[5] and 2000 // 7 in pool
    assert all(j // 7 in pool for j in rows[5] if j >= 0)
    # unconfined, layer 5 would take the decoy: the pool is what keeps it out
    with monkeypatched_pool(model):
        cache.truncate(2000)
        model(ids[None, 2000:], cache)
    assert 1300 in picked[5].rows[0, -1].tolist()
    for hook in hooks:
        hook.remove()


class monkeypatched_pool:
    """Within, the Reindex layer is not confined."""

    def __init__(self, model: Transformer) -> None:
        self.indexer = model.layers[5].attn.indexer

    def __enter__(self) -> None:
        self.plan, self.indexer.plan = self.indexer.plan, plan_layers(self.indexer.config)[3]

    def __exit__(self, *_: object) -> None:
        self.indexer.plan = self.plan
