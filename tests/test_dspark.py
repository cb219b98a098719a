"""DSpark: the draft head against the recordings and the twin, and decoding with drafts against decoding without.

Two kinds of evidence. Drafts are compared with arrays of other programs, bit for bit. Speculation is compared with the
backbone alone: greedily, token by token, with one forward over the whole text as the judge; when sampling, by
chi-square against the exact probabilities; and the cache after a rollback, byte for byte, with one that never saw a
draft.
"""
from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import dspark
import twin
from convert import load_model, write_random
from dspark import (Draft, PlainDecoder, Sampler, SpeculativeDecoder, accept, accept_greedy, best_tokens, draw,
                    probabilities)
from golden_data import CHECKPOINT, difference, golden, same_bits
from model import Cache, Transformer
from small_models import images_of, published

BLOCK = 5  # drafts of a block

# (file, what it says, what a mistake would say, the test that must fail): one per way to get drafts or rollback wrong
MUTATIONS: list[tuple[str, str, str, str]] = [
    # draft positions off by one
    ("dspark.py", "super().__init__(list(cache.lengths), [size]",
     "super().__init__([n + 1 for n in cache.lengths], [size]",
     "test_drafts_equal_the_released_code[text-chunks]"),
    # Markov row shifted
    ("dspark.py", "markov_head.embed(ids[i])", "markov_head.embed(ids[max(i - 1, 0)])",
     "test_drafts_equal_the_released_code[text-one shot]"),
    # draft window one row short; rows that are not there are read; confidence of the normed state
    ("dspark.py", "torch.arange(-self.window, self.width", "torch.arange(1 - self.window, self.width",
     "test_drafts_equal_the_released_code[text-one shot]"),
    ("dspark.py", "masked_fill_(wanted < self.first, -torch.inf)", "masked_fill_(wanted < -9999, -torch.inf)",
     "test_the_first_tokens_of_a_text_can_be_drafted"),
    ("dspark.py", "torch.cat([hidden[:, i], markov], -1)", "torch.cat([last.norm(hidden[:, i]), markov], -1)",
     "test_drafts_equal_the_released_code[text-chunks]"),
    # main KV missing for accepted tokens
    ("dspark.py", "        for stage in self:\n            kv =",
     "        for stage in self if main_hidden.shape[1] == 1 or not max(chunk.starts) else ():\n            kv =",
     "test_rollback[draft windows]"),
    # rollback forgets: window rings, those of the draft stages, open groups, compressed rows, index keys, Engram's ids
    ("kv_cache.py", "depth = max(1, c.sliding_window - (plan.part != \"draft\") + self.rollback)",
     "depth = c.sliding_window + self.rollback if plan.part == \"draft\" else c.sliding_window - 1",
     "test_rollback[windows]"),
    ("kv_cache.py", "depth = max(1, c.sliding_window - (plan.part != \"draft\") + self.rollback)",
     "depth = max(1, c.sliding_window - 1 + self.rollback)", "test_rollback[draft windows]"),
    ("kv_cache.py", "plan.ratio - 1 + self.rollback, c.head_dim", "plan.ratio - 1, c.head_dim",
     "test_rollback[open groups]"),
    ("kv_cache.py", "                self.main[source][row, j0:j1] = main[row, : j1 - j0]",
     "                k = max(j0, self._highest[row] // ratio)\n"
     "                self.main[source][row, k:j1] = main[row, k - j0 : j1 - j0]", "test_rollback[main KV]"),
    ("kv_cache.py", "                self.keys[source][row, j0:j1] = keys[row, : j1 - j0]",
     "                k = max(j0, self._highest[row] // ratio)\n"
     "                self.keys[source][row, k:j1] = keys[row, k - j0 : j1 - j0]", "test_rollback[index keys]"),
    ("kv_cache.py", "depth = max(1, c.engram_max_ngram_size - 1 + self.rollback)",
     "depth = max(1, c.engram_max_ngram_size - 1)", "test_rollback[Engram history]"),
    # p and q swapped; the target instead of the residual; the wrong draft's distribution
    ("dspark.py", "if uniform() * q[i, token] >= p[i, token]:", "if uniform() * p[i, token] >= q[i, token]:",
     "test_accepted_tokens_have_the_target_distribution"),
    ("dspark.py", "residual = (p[i] - q[i]).clamp_min(0)", "residual = p[i]",
     "test_accepted_tokens_have_the_target_distribution"),
    ("dspark.py", "p[:0] if q is None else q[b]", "p[:0] if q is None else q[b].roll(1, 0)",
     "test_speculation_samples_from_the_backbone[1.0-1.0]"),
]


# ------------------------------------------------------------------------------------------------------------- models

def parameter(values: Tensor, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(values.to(dtype), requires_grad=False)


def predictable(model: Transformer, quiet: float, noise: float, seed: int = 0) -> Transformer:
    """Make the next token depend mostly on the last one, and teach the Markov head how: drafts are then often right.

    `quiet` is taken from what every sublayer writes to the streams (before its sigmoid); `noise` blurs the rule.
    """
    c, g = model.config, torch.Generator().manual_seed(seed)
    for block in [*model.layers, *model.mtp]:
        for name in ("hc_attn_base", "hc_ffn_base"):
            base = getattr(block, name).clone()
            base[c.hc_mult : 2 * c.hc_mult] -= quiet
            setattr(block, name, parameter(base, torch.float32))
    narrow = torch.randn(c.vocab_size, c.dspark_markov_rank, generator=g)
    wide = torch.randn(c.dspark_markov_rank, c.hidden_size, generator=g) / c.dspark_markov_rank**0.5
    head = torch.randn(c.vocab_size, c.hidden_size, generator=g) * noise
    head[torch.randperm(c.vocab_size, generator=g)] += narrow @ wide
    model.embed.weight, model.head.weight = parameter(narrow @ wide), parameter(head)
    markov = model.mtp[-1].markov_head
    markov.embed.weight, markov.head.weight = parameter(narrow), parameter(4 * head @ wide.T)
    return model


# five layers and two draft stages, ratio 3, window 7
THREES: dict[str, Any] = dict(
    hidden_size=96, num_hidden_layers=5, num_attention_heads=4, o_groups=2, sliding_window=7,
    compress_ratios=[0, 3, 3, 1, 1, 0, 0], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 4], index_topk=20,
    candidate_source_layer_id=3, candidate_topk_blocks=5, engram_layer_ids=[2], num_nextn_predict_layers=2,
    dspark_target_layer_ids=[3, 4])
# a vocabulary small enough to count
FEW: dict[str, Any] = dict(
    vocab_size=5, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, head_dim=32,
    q_lora_rank=32, o_groups=1, sliding_window=4, compress_ratios=[0, 2, 2, 0, 0], kv_source_layer_ids=[1],
    index_source_layer_ids=[1], index_topk=2, candidate_source_layer_id=-1, engram_layer_ids=[],
    num_nextn_predict_layers=2, dspark_target_layer_ids=[1, 2], dspark_noise_token_id=4)


def random_model(changes: dict[str, Any], directory: Path, seed: int, exact: bool = True) -> Transformer:
    config = published(changes)
    if changes.get("vocab_size"):
        config["image_token_id"] = 3
    (directory / "config.json").write_text(json.dumps(config))
    write_random(directory / "config.json", directory / "checkpoint", seed, CHECKPOINT)
    return load_model(directory / "checkpoint", exact=exact, device="cpu", draft=True)


@pytest.fixture(scope="module")
def drafting() -> Transformer:
    """The golden checkpoint with its draft head, in exact mode."""
    return load_model(CHECKPOINT, exact=True, device="cpu", draft=True)


@pytest.fixture(scope="module")
def predictable_tiny() -> Transformer:
    return predictable(load_model(CHECKPOINT, exact=True, device="cpu", draft=True), quiet=1.6, noise=0.5)


@pytest.fixture(scope="module")
def predictable_threes(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return predictable(random_model(THREES, tmp_path_factory.mktemp("threes"), 1), quiet=2.7, noise=0.5)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    model = random_model(FEW, tmp_path_factory.mktemp("few"), 2)
    model.head.weight = parameter(model.head.weight * 2)     # distributions far from uniform
    return model


# ------------------------------------------------------------------------------------------------------------ helpers

def prompts_of(lengths: list[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random prompts, each the beginning of one text of its own row."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=g).tolist() for n in lengths]


def append(model: Transformer, rows: list[list[int]], cache: Cache, logits: str = "all") -> Tensor:
    """One forward over rows of any lengths, padded with tokens that must not matter."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [7 % model.config.vocab_size] * (width - len(row)) for row in rows])
    return model(ids, cache, [len(row) for row in rows], logits=logits).logits


def decode(decoder: PlainDecoder, prompts: list[list[int]], wanted: list[int]) -> list[list[int]]:
    """Prefill and decode until every row has gained its number of tokens; rows that are done stay in the batch."""
    cache = decoder.model.new_cache(len(prompts), 4096)
    logits = append(decoder.model, prompts, cache, "last")[:, 0]
    rows = [[token] for token in decoder.sampler.choose(logits)]
    while any(len(row) < n for row, n in zip(rows, wanted)):
        active = [len(row) < n for row, n in zip(rows, wanted)]
        new = decoder.step(cache, [row[-1] for row in rows], active, [n - len(row) for row, n in zip(rows, wanted)])
        for row, tokens, on in zip(rows, new, active):
            assert bool(tokens) == on
            row += tokens
    assert cache.lengths == [len(p) + len(row) - 1 for p, row in zip(prompts, rows)]
    return rows


def assert_greedy(model: Transformer, prompts: list[list[int]], rows: list[list[int]]) -> None:
    """Every token is the backbone's best after all before it, by one forward over the whole text."""
    logits = append(model, [p + row[:-1] for p, row in zip(prompts, rows)], model.new_cache(len(rows), 4096))
    for b, (p, row) in enumerate(zip(prompts, rows)):
        assert best_tokens(logits[b, len(p) - 1 : len(p) + len(row) - 1]) == row, f"row {b}"


class Scripted(SpeculativeDecoder):
    """Drafts are given: script[b] for row b."""
    script: list[list[int]]
    q: Tensor | None = None

    def propose(self, cache: Cache, pending: list[int], active: list[bool]) -> Draft:
        ids = torch.tensor([[token, *row] for token, row in zip(pending, self.script)])
        return Draft(ids, torch.empty(0), torch.zeros(len(pending), BLOCK), self.q)


@torch.inference_mode()
def poison(cache: Cache) -> None:
    """Overwrite everything that is not part of a row's live state with bytes that are NaN, or with absurd ids."""
    live = [cache.live_state(row) for row in range(cache.batch_size)]
    for key, ring in list(cache.rings.items()):
        garbage = {torch.uint8: 255, torch.float32: torch.nan, torch.int64: 1 << 60}[ring.dtype]
        fresh = torch.full_like(ring, garbage)
        for row, n in enumerate(cache.lengths):
            kept = live[row][".".join(map(str, key))]
            fresh[row, torch.arange(n - len(kept), n) % ring.shape[1]] = kept
        cache.rings[key] = fresh
    for name, stores in (("main", cache.main), ("index_key", cache.keys)):
        for source, store in stores.items():
            for row in range(cache.batch_size):
                store[row, len(live[row][f"{name}.{source}"]) :] = 255


KINDS: dict[str, Callable[[str], bool]] = {
    "windows": lambda name: name.startswith("window.") and int(name[7:]) < 10,
    "draft windows": lambda name: name.startswith("window.") and int(name[7:]) >= 10,
    "open groups": lambda name: name.startswith(("kv.", "score.")),
    "main KV": lambda name: name.startswith("main."),
    "index keys": lambda name: name.startswith("index_key."),
    "Engram history": lambda name: name == "ngram",
    "length": lambda name: name == "length",
}


def unequal(a: Cache, b: Cache, kind: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Entries of the live state that differ between two caches, over all rows."""
    out, seen = [], 0
    for row in range(a.batch_size):
        one, other = a.live_state(row), b.live_state(row)
        assert one.keys() == other.keys()
        names = [name for name in one if kind(name)]
        seen += len(names)
        out += [f"row {row}: {name}" for name in names if not same_bits(one[name], other[name])]
    assert seen, "no such state"
    return out


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """p-value of Pearson's test; cells that cannot occur must be empty, rare ones are merged."""
    assert not counts[expected == 0].any(), "a token of probability 0 was sampled"
    counts, expected = counts[expected > 0].double(), expected[expected > 0].double()
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    rare = max(int((expected.cumsum(0) <= 5).sum()), int((expected < 5).sum()))
    if rare > 1:
        counts = torch.cat([counts[:rare].sum(0, keepdim=True), counts[rare:]])
        expected = torch.cat([expected[:rare].sum(0, keepdim=True), expected[rare:]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


# ------------------------------------------------------------------------------------------ drafts equal other programs

@pytest.mark.parametrize("seeding", ["one shot", "chunks"])
@pytest.mark.parametrize("run", ["text", "short", "image"])
def test_drafts_equal_the_released_code(run: str, seeding: str, drafting: Transformer) -> None:
    expected = golden(run)
    tokens, prompt = expected["tokens"], int(expected["prompt_length"])
    images = None
    if run == "image":
        types = expected["token_types"].tolist() + [-1] * (len(tokens) - len(expected["token_types"]))
        images = images_of(types, expected["features"])
    cache, rows, hidden = drafting.new_cache(1, 512), [], []
    # one shot: the prompt at once, then a token at a time. chunks: the prompt in odd pieces, and decoded tokens that
    # the draft windows get several at a time, as accepted ones are
    pieces = [prompt] + [1] * (len(tokens) - prompt)
    if seeding == "chunks":
        pieces = [37] * (prompt // 37) + [prompt % 37, 3, 1, 2]
    at = 0
    for size in pieces:
        part = None if images is None else images.columns(at, at + size)
        out = drafting(tokens[None, at : at + size], cache, images=part)
        at += size
        hidden.append(out.main_hidden[0])
        if at > prompt:
            chosen = torch.tensor(best_tokens(out.logits[0, -1:]))
            rows.append((at - 1 - prompt, drafting.mtp.draft(drafting, chosen, cache)))
    assert len(rows) >= 3
    steps = [step for step, _ in rows]
    if run == "text":
        assert difference(torch.cat(hidden), expected["dspark.main_hidden"][: sum(map(len, hidden))]) is None
    for name, field in (("tokens", "ids"), ("logits", "logits"), ("confidence", "confidence")):
        have = torch.cat([getattr(draft, field) for _, draft in rows])
        if name == "tokens" or run == "text":      # of the other runs only the tokens are kept
            assert difference(have, expected[f"dspark.{name}"][steps]) is None, name


@pytest.mark.long
def test_draft_windows_are_the_same_for_any_seeding(drafting: Transformer) -> None:
    """A whole prompt, pieces, single tokens, a row of a ragged batch, exact replay: the same drafts, bit for bit."""
    ids = torch.tensor(prompts_of([120], 640))
    last = torch.tensor([5])
    cache = drafting.new_cache(1, 512)
    drafting(ids, cache)
    expected, state = drafting.mtp.draft(drafting, last, cache), cache
    for name in ("pieces", "single tokens", "ragged", "exact-replay"):
        cache, row = drafting.new_cache(2 if name == "ragged" else 1, 512), 0
        if name == "pieces":
            drafting.prefill(ids, cache, chunk_size=17)
        elif name == "single tokens":
            drafting(ids[:, :100], cache)
            for at in range(100, 120):
                drafting(ids[:, at : at + 1], cache)
        elif name == "ragged":
            row = 1
            append(drafting, [[3, 1, 4], ids[0, :70].tolist()], cache)
            append(drafting, [[1] * 61, ids[0, 70:].tolist()], cache)
        else:
            drafting.prefill(ids, cache, way="exact-replay", chunk_size=50)
        drafts = drafting.mtp.draft(drafting, last.repeat(cache.batch_size), cache)
        for have, want in zip(drafts[:3], expected[:3]):
            assert same_bits(have[row : row + 1], want), name
        if cache.batch_size == 1:
            assert unequal(cache, state, KINDS["draft windows"]) == [], name


def test_drafts_after_a_bounded_prefill_equal_the_twin(drafting: Transformer, tiny_twin: twin.Checkpoint) -> None:
    """Bounded replay: the draft windows begin at the first replayed position, and drafts see nothing before it."""
    tokens, window = prompts_of([60], 640, 3)[0], 16
    expected = twin.forward(tiny_twin, tokens, bounded_from=60 - window, drafts_from=59)
    cache = drafting.new_cache(1, 128)
    out = drafting.prefill(torch.tensor([tokens]), cache, way="bounded")
    drafts = drafting.mtp.draft(drafting, torch.tensor(best_tokens(out.logits[:, -1])), cache)
    for name, have in (("tokens", drafts.ids), ("logits", drafts.logits), ("confidence", drafts.confidence)):
        assert difference(have, expected[f"dspark.{name}"]) is None, name
    # where fewer are replayed than a window holds, the bytes before them must not matter: they are NaN here
    short = drafting.new_cache(1, 128)
    drafting.prefill(torch.tensor([tokens[:50]]), short, way="bounded")
    short.window_start["draft"] = [45]
    read = drafting.mtp.draft(drafting, torch.tensor([9]), short)
    poison(short)
    again = drafting.mtp.draft(drafting, torch.tensor([9]), short)
    assert all(same_bits(a, b) for a, b in zip(read[:3], again[:3])) and bool(again.logits.isfinite().all())


def test_the_first_tokens_of_a_text_can_be_drafted(drafting: Transformer, tiny_twin: twin.Checkpoint) -> None:
    """After 1, 2 and 3 tokens; rows of one batch that are not there yet are left out of each other's windows."""
    text = prompts_of([3], 640, 4)[0]
    cache = drafting.new_cache(3, 64)
    logits = append(drafting, [text[:1], text[:2], text[:3]], cache, "last")[:, 0]
    drafts = drafting.mtp.draft(drafting, torch.tensor(best_tokens(logits)), cache)
    expected = twin.forward(tiny_twin, text, drafts_from=0)
    assert difference(drafts.ids, expected["dspark.tokens"]) is None
    assert difference(drafts.logits, expected["dspark.logits"]) is None


def test_drafting_changes_no_cache(drafting: Transformer) -> None:
    cache = drafting.new_cache(1, 64)
    drafting(torch.tensor(prompts_of([21], 640)), cache)
    before = cache.fork()
    drafting.mtp.draft(drafting, torch.tensor([3]), cache)
    assert cache.lengths == before.lengths
    assert all(same_bits(cache.rings[key], ring) for key, ring in before.rings.items())
    assert unequal(cache, before) == []


@pytest.mark.gpu
def test_drafts_and_speculation_on_cuda_are_those_of_the_cpu() -> None:
    expected, model = golden("text"), load_model(CHECKPOINT, exact=True, device="cuda", draft=True)
    tokens, prompt = expected["tokens"], int(expected["prompt_length"])
    cache, step = model.new_cache(1, 512), 4
    last = model(tokens[None, : prompt + step + 1], cache, logits="last").logits[:, 0]
    drafts = model.mtp.draft(model, torch.tensor(best_tokens(last)), cache)
    for name, have in (("tokens", drafts.ids), ("logits", drafts.logits), ("confidence", drafts.confidence)):
        assert difference(have.cpu(), expected[f"dspark.{name}"][step : step + 1]) is None, name
    decoder = SpeculativeDecoder(model, Sampler())
    assert decode(decoder, [tokens[:prompt].tolist()], [len(tokens) - prompt]) == [tokens[prompt:].tolist()]
    rows = [decode(SpeculativeDecoder(m, Sampler(1.0, 0.9, 3)), prompts_of([9, 30], 640), [12, 12])
            for m in (model, load_model(CHECKPOINT, exact=True, device="cpu", draft=True))]
    assert rows[0] == rows[1]


# --------------------------------------------------------------------------------------------------------- rolling back

EDGES = [14, 15, 16, 17, 18]   # lengths before a step: around the window of 16, odd and even


class Forced:
    """Rows of one batch: for every length in EDGES and every number of drafts 0..5, a step that accepts so many."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        texts = prompts_of(EDGES, model.config.vocab_size, 8)
        greedy = decode(PlainDecoder(model, Sampler()), texts, [BLOCK + 2] * len(texts))
        self.forced = [(text, row, n) for text, row in zip(texts, greedy) for n in range(BLOCK + 1)]
        self.cache = model.new_cache(len(self.forced), 128)
        append(model, [text for text, _, _ in self.forced], self.cache)
        decoder = Scripted(model, Sampler())
        decoder.script = [row[1 : 1 + n] + [(t + 1) % 640 for t in row[1 + n : 1 + BLOCK]] for _, row, n in self.forced]
        rows = len(self.forced)
        self.new = decoder.step(self.cache, [row[0] for _, row, _ in self.forced], [True] * rows, [99] * rows)
        self.statistics = decoder.statistics
        # after the step, and one that never saw a draft
        self.fresh = self.holding([text + row[: n + 1] for text, row, n in self.forced])
        # the step's drafts all taken back, as at a stop inside an accepted run, and one that held only its first token
        self.back, self.first = self.cache.fork(), self.holding([text + row[:1] for text, row, _ in self.forced])
        self.back.truncate(self.first.lengths)
        # the same two after different tokens
        self.back_later, self.first_later = self.back.fork(), self.first.fork()
        other = [[3, 1, 4, 1, 5][: 1 + b % 5] for b in range(len(self.forced))]
        append(model, other, self.back_later, "none")
        append(model, other, self.first_later, "none")

    def holding(self, rows: list[list[int]]) -> Cache:
        cache = self.model.new_cache(len(rows), 128)
        append(self.model, rows, cache, "none")
        return cache


@pytest.fixture(scope="module")
def forced(drafting: Transformer) -> Forced:
    return Forced(drafting)


def test_exactly_the_right_drafts_are_accepted(forced: Forced) -> None:
    assert forced.new == [row[1 : n + 2] for _, row, n in forced.forced]
    assert forced.cache.lengths == [len(text) + 1 + n for text, _, n in forced.forced]
    assert forced.statistics.submitted == [30] * BLOCK and forced.statistics.accepted == [25, 20, 15, 10, 5]
    assert forced.statistics.tokens == 30 + 75 and forced.statistics.tokens_per_step == 3.5


@pytest.mark.parametrize("kind", KINDS)
def test_rollback(kind: str, forced: Forced) -> None:
    """The live state is that of a cache that never saw the drafts: after the step, taken back to the step's first
    token, and after a further forward with other tokens."""
    assert unequal(forced.cache, forced.fresh, KINDS[kind]) == []
    assert unequal(forced.back, forced.first, KINDS[kind]) == []
    assert unequal(forced.back_later, forced.first_later, KINDS[kind]) == []


@pytest.mark.long
def test_decoding_goes_on_after_a_rollback(forced: Forced) -> None:
    """With everything dead poisoned: the same drafts as without speculation, ten more tokens that the backbone alone
    would choose, and the state of a cache that got the text at once."""
    model, cache = forced.model, forced.cache.fork()
    poison(cache)
    pending = [row[-1] for row in forced.new]
    for have, want in zip(*(model.mtp.draft(model, torch.tensor(pending), c)[:3] for c in (cache, forced.fresh))):
        assert same_bits(have, want)
    rows, decoder = [[token] for token in pending], PlainDecoder(model, Sampler())
    for _ in range(10):
        new = decoder.step(cache, [row[-1] for row in rows], [True] * len(rows), [1] * len(rows))
        rows = [row + tokens for row, tokens in zip(rows, new)]
    prompts = [text + row[: n + 1] for text, row, n in forced.forced]
    assert_greedy(model, prompts, rows)
    assert unequal(cache, forced.holding([p + row[:-1] for p, row in zip(prompts, rows)])) == []


# ------------------------------------------------------------------------------------------------------------- greedy

RAGGED = [3, 40, 17, 64]


@pytest.mark.parametrize("name,batch", [
    ("predictable_tiny", 1), ("predictable_threes", 4), pytest.param("predictable_threes", 1, marks=pytest.mark.long),
    pytest.param("predictable_tiny", 4, marks=pytest.mark.long)])
def test_greedy_tokens_are_those_of_the_backbone(name: str, batch: int, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    prompts, decoder = prompts_of(RAGGED[-batch:], 640, 1), SpeculativeDecoder(model, Sampler())
    rows = decode(decoder, prompts, [200, 190, 90, 140][:batch])
    assert_greedy(model, prompts, rows)
    accepted = decoder.statistics.accepted
    assert accepted[0] > accepted[4] > 0 and accepted[4] < decoder.statistics.submitted[4]   # it was put to the test


@pytest.mark.long
def test_two_thousand_greedy_tokens(predictable_tiny: Transformer) -> None:
    prompts = prompts_of([40], 640, 2)
    rows = decode(SpeculativeDecoder(predictable_tiny, Sampler()), prompts, [2000])
    assert_greedy(predictable_tiny, prompts, rows)


@pytest.mark.long
def test_greedy_equals_the_recorded_continuation(drafting: Transformer) -> None:
    """The real head of the recorded checkpoint, the image run, every prefill way."""
    text, short, image = golden("text"), golden("short"), golden("image")
    for run in (short, image):
        prompt, images = int(run["prompt_length"]), None
        if "token_types" in run:
            images = images_of(run["token_types"].tolist()[:prompt], run["features"])
        tokens = run["tokens"].tolist()
        cache, decoder = drafting.new_cache(1, 512), SpeculativeDecoder(drafting, Sampler())
        out = drafting.prefill(run["tokens"][None, :prompt], cache, images=images)
        row = best_tokens(out.logits[:, -1])
        while len(row) < len(tokens) - prompt:
            row += decoder.step(cache, row[-1:], [True], [len(tokens) - prompt - len(row)])[0]
        assert row == tokens[prompt:]
    prompt = int(text["prompt_length"])
    for way in ("exact-replay", "bounded"):
        rows = {}
        for kind in (PlainDecoder, SpeculativeDecoder):
            cache, decoder = drafting.new_cache(1, 512), kind(drafting, Sampler())
            row = best_tokens(drafting.prefill(text["tokens"][None, :prompt], cache, way).logits[:, -1])
            while len(row) < 5:
                row += decoder.step(cache, row[-1:], [True], [5 - len(row)])[0]
            rows[kind] = row
        assert rows[PlainDecoder] == rows[SpeculativeDecoder]
        assert way == "bounded" or rows[PlainDecoder] == text["tokens"].tolist()[prompt : prompt + 5]


# ------------------------------------------------------------------------------------------- perfect and useless heads

@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, list[int]]:
    """A model that walks through a permutation of its vocabulary: layers write nothing to the streams, so that the head
    sees the last token's embedding. The Markov head knows the permutation."""
    model = random_model(THREES, tmp_path_factory.mktemp("permuted"), 4)
    c, g = model.config, torch.Generator().manual_seed(4)
    predictable(model, quiet=200, noise=0)
    following = torch.randperm(c.vocab_size, generator=g)
    signs, narrow = (torch.randint(0, 2, (c.vocab_size, width), generator=g) * 2.0 - 1
                     for width in (c.hidden_size, c.dspark_markov_rank))
    head, bias = torch.empty_like(signs), torch.empty_like(narrow)
    head[following], bias[following] = signs, narrow
    model.embed.weight, model.head.weight = parameter(signs), parameter(head)
    last = model.mtp[-1]
    last.markov_head.embed.weight, last.markov_head.head.weight = parameter(narrow), parameter(8 * bias)
    last.norm.weight = parameter(last.norm.weight * 0)      # nothing but the Markov head drafts
    return model, following.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_perfect_draft_head_has_everything_accepted(temperature: float,
                                                      permuted: tuple[Transformer, list[int]]) -> None:
    model, following = permuted
    decoder = SpeculativeDecoder(model, Sampler(temperature))
    rows = decode(decoder, [[11, 12, 13]], [25])
    walk = [following[13]]
    while len(walk) < 25:
        walk.append(following[walk[-1]])
    assert rows == [walk]
    assert decoder.statistics.steps == 4 and decoder.statistics.tokens_per_step == 6
    assert decoder.statistics.acceptance == [1.0] * BLOCK


def test_a_useless_draft_head_costs_only_time(permuted: tuple[Transformer, list[int]]) -> None:
    model, following = permuted
    markov = model.mtp[-1].markov_head.head
    weight, markov.weight = markov.weight, parameter(-markov.weight)
    try:
        decoder = SpeculativeDecoder(model, Sampler())
        rows = decode(decoder, [[11, 12, 13]], [12])
    finally:
        markov.weight = weight
    assert_greedy(model, [[11, 12, 13]], rows)
    assert decoder.statistics.tokens_per_step == 1 and decoder.statistics.acceptance == [0.0] * BLOCK
    assert decoder.statistics.steps == 11 and 0 < decoder.statistics.draft_share < 1


# ------------------------------------------------------------------------------------------------------------ sampling

def draws(seed: int) -> Callable[[], float]:
    g = torch.Generator().manual_seed(seed)
    numbers: Iterator[float] = iter(torch.rand(1 << 20, dtype=torch.float64, generator=g).tolist())
    return lambda: next(numbers)


def wrong_accept(kind: str) -> Callable[..., list[int]]:
    def rule(drafts: list[int], p: Tensor, q: Tensor, uniform: Callable[[], float]) -> list[int]:
        for i, token in enumerate(drafts):
            share = {"swapped": q[i, token] / p[i, token], "always": 1.0}.get(kind, p[i, token] / q[i, token])
            if uniform() >= share:
                rest = {"target instead of residual": p[i], "residual swapped": (q[i] - p[i]).clamp_min(0)}
                return drafts[:i] + [draw(rest.get(kind, (p[i] - q[i]).clamp_min(0)), uniform())]
        return drafts + [draw((q[-1] if kind == "extra from the draft" else p[len(drafts)]), uniform())]
    return rule


def sampled_pairs(rule: Callable[..., list[int]], runs: int) -> float:
    """p-value of the first two tokens after token 0 of a Markov chain over five tokens, drafted by another chain."""
    g = torch.Generator().manual_seed(1)
    target, drafter = ((torch.randn(5, 5, generator=g, dtype=torch.float64) * 1.5).softmax(-1) for _ in range(2))
    target[1, 3] = 0
    target /= target.sum(-1, keepdim=True)
    uniform, counts = draws(2), torch.zeros(5, 5)
    for run in range(runs):
        text = [0]
        while len(text) < 3:
            drafts = []
            for _ in range(1 + run % 2):
                drafts.append(draw(drafter[(text + drafts)[-1]], uniform()))
            states = [text[-1], *drafts]
            text += rule(drafts, target[states], drafter[states[:-1]], uniform)
        counts[text[1], text[2]] += 1
    return chi_square_p(counts, runs * target[0].unsqueeze(1) * target)


def test_accepted_tokens_have_the_target_distribution() -> None:
    assert sampled_pairs(accept, 4000) > 1e-3


@pytest.mark.parametrize("kind", ["swapped", "target instead of residual", "residual swapped", "extra from the draft",
                                  "always"])
def test_a_wrong_acceptance_rule_is_noticed(kind: str) -> None:
    try:
        assert sampled_pairs(wrong_accept(kind), 1500) < 1e-6
    except AssertionError as error:
        assert "probability 0" in str(error)


def test_the_copied_rule_of_this_test_is_the_right_one() -> None:
    """The wrong rules above are wrong in what their names say only."""
    assert sampled_pairs(wrong_accept("nothing"), 1000) > 1e-3


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.8)])
def test_speculation_samples_from_the_backbone(temperature: float, top_p: float, few: Transformer) -> None:
    """Draft head, verification and rollback of real models: two sampled tokens after one prompt, in 1,200 rows."""
    rows, prompt, first = 1200, [1, 4, 2, 2, 0, 3], 2
    sampler = Sampler(temperature, top_p, seed=3)
    cache, decoder = few.new_cache(rows, 64), SpeculativeDecoder(few, sampler)
    few(torch.tensor([prompt]).repeat(rows, 1), cache, logits="none")
    texts: list[list[int]] = [[] for _ in range(rows)]
    while min(map(len, texts)) < 2:
        active = [len(text) < 2 for text in texts]
        pending, room = [text[-1] if text else first for text in texts], [2 - len(text) for text in texts]
        new = decoder.step(cache, pending, active, room)
        for text, tokens in zip(texts, new):
            text += tokens
    counts = torch.zeros(5, 5)
    for a, b in texts:
        counts[a, b] += 1
    # the backbone's own probabilities, by one forward over every pair
    logits = append(few, [prompt + [first, a] for a in range(5)], few.new_cache(5, 64))
    p = probabilities(logits[:, -2:], temperature, top_p)
    assert chi_square_p(counts, rows * p[0, 0].unsqueeze(1) * p[:, 1]) > 1e-3
    assert 0.1 < decoder.statistics.acceptance[0] < 0.9


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, 30, generator=g) * 2).round()           # with ties
    logits[0] = 0
    for top_p in (0.05, 0.51, 0.9, 1.0):
        p, plain = probabilities(logits, 0.8, top_p), probabilities(logits, 0.8)
        assert p.dtype == torch.float64 and p.shape == logits.shape
        for have, row in zip(p.tolist(), plain.tolist()):
            kept, mass = set(), 0.0
            for token in sorted(range(30), key=lambda t: (-row[t], t)):
                if mass >= top_p and top_p < 1:
                    break
                kept.add(token)
                mass += row[token]
            assert {t for t in range(30) if have[t] > 0} == kept
            assert all(math.isclose(have[t], row[t] / mass, rel_tol=1e-12) for t in kept)
    assert probabilities(torch.zeros(4), 1.0, 0.5).tolist() == [0.5, 0.5, 0, 0]   # reached exactly: no token more


def test_temperature_scales_the_logits_and_zero_takes_the_lowest_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0]])
    assert probabilities(logits, 0).tolist() == [[0, 1, 0, 0]] and Sampler().choose(logits) == [1]
    p = probabilities(logits, 2.0)[0]
    assert math.isclose(float((p[1] / p[0]).log()), 1.0) and p[1] == p[2]
    assert probabilities(logits, 1e-300).isfinite().all()
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            Sampler(1.0).choose(torch.tensor([[0.0, bad]]))
    with pytest.raises(ValueError, match="not numbers"):
        best_tokens(torch.tensor([[0.0, math.nan]]))


def test_a_draw_is_the_token_under_its_share() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    assert [draw(weights, u) for u in (0.0, 0.2499999, 0.25, 0.999999999, 1 - 2**-53)] == [1, 1, 3, 3, 3]


def test_acceptance_follows_its_definition() -> None:
    """p/q decides, the residual replaces, everything accepted brings one more; draws in the documented order."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [0.1, 0.9, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.4, 0.2]], dtype=torch.float64)
    for numbers, expected in (([0.49, 0.49, 0.05], [0, 0, 0]), ([0.49, 0.49, 0.5], [0, 0, 1]), ([0.51, 0.0], [1]),
                              ([0.49, 0.51, 0.0], [0, 2])):
        numbers = iter(numbers)
        assert accept([0, 0], p, q, lambda: next(numbers)) == expected
        assert next(numbers, None) is None
    assert accept([1], p[:1].repeat(2, 1), p[:1], iter([0.999, 0.0]).__next__) == [1, 0]      # q = p never rejects
    assert accept_greedy([4, 5, 6], [4, 5, 7, 8]) == [4, 5, 7] and accept_greedy([4, 5], [4, 5, 9]) == [4, 5, 9]
    assert accept_greedy([], [3]) == [3]


def test_a_seed_repeats_and_the_stream_has_its_order(predictable_threes: Transformer) -> None:
    """The same seed gives the same tokens. Greedy decoding draws nothing; a plain step takes one number per active row;
    a speculative step as many as documented."""
    model, prompts = predictable_threes, prompts_of([5, 9], 640, 5)
    runs = [decode(SpeculativeDecoder(model, Sampler(1.0, 0.9, seed)), prompts, [6, 4]) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    taken: list[float] = []

    class Counting(Sampler):
        def uniform(self) -> float:
            taken.append(super().uniform())
            return taken[-1]

    greedy = SpeculativeDecoder(model, Counting())
    decode(greedy, prompts, [3, 3])
    assert taken == []
    cache = model.new_cache(2, 64)
    append(model, prompts, cache)
    PlainDecoder(model, Counting(1.0)).step(cache, [1, 2], [False, True], [9, 9])
    assert len(taken) == 1
    taken.clear()
    new = SpeculativeDecoder(model, Counting(1.0)).step(cache, [1, 2], [False, True], [9, 9])
    assert new[0] == [] and len(taken) == BLOCK + min(len(new[1]), BLOCK) + 1
    stream = torch.rand(len(taken), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    assert taken == stream


# ------------------------------------------------------------------------------------------------------------ decoders

def test_confidence_decides_how_many_drafts_are_submitted(drafting: Transformer) -> None:
    """Survival is the product of the sigmoids: 1/2, 1/4, 1/8 with a silent confidence head."""
    prompts = prompts_of([9, 14], 640, 6)
    held = drafting.new_cache(2, 64)
    append(drafting, prompts, held, "none")
    head = drafting.mtp[-1].confidence_head.proj
    weight, head.weight = head.weight, parameter(head.weight * 0)
    try:
        for threshold, submitted in ((0.0, 5), (0.03125, 5), (0.2, 2), (0.51, 0)):
            decoder, cache = SpeculativeDecoder(drafting, Sampler(), threshold), held.fork()
            decoder.step(cache, [1, 2], [True, True], [9, 9])
            assert decoder.statistics.submitted == [2] * submitted + [0] * (BLOCK - submitted)
    finally:
        head.weight = weight
    # a real head judges each row for itself, and the first draft that falls below ends it
    confidence = torch.tensor([[2.0, -9.0, 9.0, 9.0, 9.0], [9.0, 9.0, 0.0, 9.0, 9.0]])
    decoder = SpeculativeDecoder(drafting, Sampler(), 0.4)
    assert decoder.worthwhile(Draft(torch.empty(0), torch.empty(0), confidence, None)) == [1, 5]


def test_room_and_max_length_bound_a_step(permuted: tuple[Transformer, list[int]]) -> None:
    """Every draft is right here, so a step brings as many tokens as it may."""
    model, _ = permuted
    decoder = SpeculativeDecoder(model, Sampler())
    cache = model.new_cache(3, 12)
    append(model, [[5, 6], [7], [8, 9, 10]], cache)
    new = decoder.step(cache, [1, 2, 3], [True, True, False], [1, 3, 9])
    assert [len(row) for row in new] == [1, 3, 0] and cache.lengths == [3, 4, 3]
    new = decoder.step(cache, [row[-1] if row else 0 for row in new], [True, True, False], [9, 9, 9])
    assert [len(row) for row in new] == [6, 6, 0] and cache.lengths == [9, 10, 3]
    new = decoder.step(cache, [row[-1] if row else 0 for row in new], [True, True, False], [99, 99, 99])
    assert [len(row) for row in new] == [3, 2, 0] and cache.lengths == [12, 12, 3]
    with pytest.raises(ValueError, match="max_length = 12"):
        decoder.step(cache, [1, 2, 3], [True, False, False], [9, 9, 9])
    assert cache.lengths == [12, 12, 3]


def test_rows_that_are_not_active_stay_as_they_are(drafting: Transformer) -> None:
    prompts = prompts_of([11, 30], 640, 7)
    cache = drafting.new_cache(2, 128)
    append(drafting, prompts, cache)
    before = cache.live_state(0)
    for kind in (PlainDecoder, SpeculativeDecoder):
        kind(drafting, Sampler()).step(cache, [-5, 2], [False, True], [0, 9])   # what is pending there does not matter
        after = cache.live_state(0)
        assert all(same_bits(after[name], value) for name, value in before.items())


def test_an_interrupted_step_leaves_no_draft_behind(drafting: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of([20], 640, 9)
    cache, fresh = drafting.new_cache(1, 64), drafting.new_cache(1, 64)
    append(drafting, prompts, cache)
    decoder = SpeculativeDecoder(drafting, Sampler())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.step(cache, [3], [True], [9])
    append(drafting, [prompts[0] + [3]], fresh)
    assert unequal(cache, fresh) == []


def test_mistakes_get_a_sentence(tiny: Transformer, drafting: Transformer) -> None:
    with pytest.raises(ValueError, match="draft=True"):
        SpeculativeDecoder(tiny, Sampler())
    with pytest.raises(ValueError, match="rollback = 5"):
        SpeculativeDecoder(drafting, Sampler()).step(drafting.new_cache(1, 64, rollback=4), [1], [True], [9])
    with pytest.raises(ValueError, match="threshold 1.5"):
        SpeculativeDecoder(drafting, Sampler(), 1.5)
    for temperature, top_p in ((-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, 1.01), (1.0, math.nan)):
        with pytest.raises(ValueError, match="temperature|top_p"):
            Sampler(temperature, top_p)


def test_statistics_say_what_happened() -> None:
    s = dspark.Statistics(4, 8, 20, seconds=2.0, draft_seconds=0.5, submitted=[8, 8, 4], accepted=[6, 2, 0])
    assert s.tokens_per_step == 2.5 and s.acceptance == [0.75, 0.25, 0.0] and s.draft_share == 0.25
    assert str(s) == ("20 tokens in 4 backbone steps, 2.50 tokens per step; drafts accepted by position: 75% 25% 0%; "
                      "drafting took 25% of the time")
    empty = dspark.Statistics(submitted=[0], accepted=[0])
    assert empty.tokens_per_step == 0 and empty.acceptance == [0] and empty.draft_share == 0


# ------------------------------------------------------------------------------------------------------------ on demand

@pytest.mark.manual
def test_fast_mode_reports_its_first_divergence() -> None:
    """In fast mode a six-row product may round otherwise than a one-row product: nothing is promised, and -s shows
    where the tokens part and how close the two logits were."""
    model = predictable(load_model(CHECKPOINT, device="cpu", draft=True), quiet=1.6, noise=0.5)
    for seed in range(4):
        prompts = prompts_of([40], 640, seed)
        plain = decode(PlainDecoder(model, Sampler()), prompts, [100])[0]
        drafted = decode(SpeculativeDecoder(model, Sampler()), prompts, [100])[0]
        at = next((i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b), None)
        if at is None:
            print(f"prompt {seed}: 100 tokens equal")
            continue
        logits = append(model, [prompts[0] + plain[:at]], model.new_cache(1, 512), "last")[0, 0]
        margin = abs(float(logits[plain[at]] - logits[drafted[at]]))
        print(f"prompt {seed}: token {at} differs, its logits are {margin:.3g} apart; all: +-{float(logits.std()):.3g}")


@pytest.mark.manual
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{i}-{m[3]}" for i, m in enumerate(MUTATIONS)])
def test_mutations_are_caught(mutation: tuple[str, str, str, str], tmp_path: Path) -> None:
    file, old, new, test = mutation
    root = Path(dspark.__file__).parent
    for path in root.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(root / "tests", tmp_path / "tests")
    source = (tmp_path / file).read_text()
    assert source.count(old) == 1
    (tmp_path / file).write_text(source.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_dspark.py::{test}"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 1 and "1 failed" in run.stdout, run.stdout[-2000:]


def test_mutations_fit_the_source() -> None:
    root = Path(dspark.__file__).parent
    for file, old, new, test in MUTATIONS:
        assert (root / file).read_text().count(old) == 1 and old != new, old
        assert test.split("[")[0] in globals(), test
