"""The Causal Encoder-Decoder at work: prefill ways over text and images, with Engram on both sides of the border and a
draft head on top, their cost, and continuations of one prompt. Plain text prompts are in test_invariants.py.

The reference is the slow twin (`bounded_from` is its word for a bounded prefill); ragged batches are compared with rows
alone, which the twin has confirmed.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import session
import twin
from convert import load_model, write_random
from golden_data import CHECKPOINT, IMAGE, same_bits
from model import Cache, ImageTokens, ModelConfig, Output, Transformer
from quant import Numerics
from small_models import Small, feed, images_of, poison, published, same_state
from vision import ImageInput, load_image

# Window 8, encoder layers 0-2, decoder layers 3-6; Engram in the encoder, at the border and above; drafts read 4 and 6.
CED: dict[str, Any] = dict(
    hidden_size=64, moe_intermediate_size=32, num_hidden_layers=7, num_attention_heads=4, head_dim=32,
    qk_rope_head_dim=12, q_lora_rank=96, o_lora_rank=48, o_groups=2, max_position_embeddings=512, n_routed_experts=5,
    num_experts_per_tok=2, sliding_window=8, compress_ratios=[0, 2, 2, 1, 1, 1, 1, 0, 0], kv_source_layer_ids=[1, 3],
    index_source_layer_ids=[1, 3, 5], index_n_heads=3, index_head_dim=32, index_topk=10, candidate_source_layer_id=3,
    candidate_topk_blocks=4, candidate_block_size=7, hc_mult=3, hc_sinkhorn_iters=5, engram_layer_ids=[0, 3, 5],
    num_nextn_predict_layers=2, dspark_block_size=4, dspark_target_layer_ids=[4, 6])
W, REPLAY = 8, 4 * 7 + 1
FIRST, SECOND = 14, 60      # where the two image spans of 17 tokens begin


@dataclass
class Ced:
    """A checkpoint with every mechanism, and a sequence of 100 tokens: text, image, text, image, text."""
    directory: Path
    model: Transformer
    image: ImageInput
    ids: Tensor                # [100]
    types: list[int]
    images: ImageTokens
    twins: dict[int | None, dict[str, Tensor]] = field(default_factory=dict)

    def twin(self, first: int | None = None) -> dict[str, Tensor]:
        """The whole sequence, decoder layers from position `first` on; logits begin there, drafts at 80 or later."""
        if first not in self.twins:
            picture = Image.open(IMAGE)
            self.twins[first] = twin.forward(str(self.directory), self.ids.tolist(), self.types, [picture, picture],
                                             drafts_from=max(80, first or 0), bounded_from=first)
        return self.twins[first]

    def prefill(self, start: int, end: int, cache: Cache, way: str, **options: Any) -> Output:
        images = self.images.columns(start, end)
        return self.model.prefill(self.ids[None, start:end], cache, way, images=images, **options)

    def full(self, end: int) -> Cache:
        cache = self.model.new_cache()
        self.prefill(0, end, cache, "full")
        return cache

    def check(self, logits: Tensor, position: int, first: int | None = None) -> None:
        assert same_bits(logits, self.twin(first)["logits"][position - (first or 0)])

    def check_drafts(self, cache: Cache, first: int | None = None) -> None:
        """Drafts after the cache's last token, from the greedy one, equal the twin's."""
        position, record = cache.lengths[0] - 1, self.twin(first)
        at = position - max(80, first or 0)
        drafted = self.model.mtp.draft(self.model, record["dspark.tokens"][at, :1], cache)
        assert same_bits(drafted.ids[0], record["dspark.tokens"][at])
        assert same_bits(drafted.logits[0], record["dspark.logits"][at])
        assert same_bits(drafted.confidence[0], record["dspark.confidence"][at])


@pytest.fixture(scope="session")
def ced(tmp_path_factory: pytest.TempPathFactory) -> Ced:
    folder = tmp_path_factory.mktemp("ced")
    (folder / "config.json").write_text(json.dumps(published(CED, vision=True)))
    write_random(folder / "config.json", folder / "checkpoint", 3, CHECKPOINT)
    model = load_model(folder / "checkpoint", exact=True, device="cpu", draft=True)
    image = load_image(str(IMAGE), model.config.vision_config)
    ids = torch.randint(11, model.config.vocab_size, (100,), generator=torch.Generator().manual_seed(0))
    types = [-1] * 100
    for place in (FIRST, SECOND):
        types[place : place + 17] = image.span.tolist()
        ids[place : place + 17] = model.config.image_token_id
    features = model.encode_image(image.patches, image.grid)
    return Ced(folder / "checkpoint", model, image, ids, types, images_of(types, torch.cat([features, features])))


# ------------------------------------------------------------------------------------------------------- the three ways

def test_the_case_is_what_the_tests_below_take_it_for(ced: Ced) -> None:
    config = ced.model.config
    assert config.decoder_start == 3 and config.sliding_window == W and len(ced.image.span) == 17 > 2 * W
    assert [p.part for p in ced.model.plans] == ["encoder"] * 3 + ["decoder"] * 4 + ["draft"] * 2
    assert ced.twin()["logits"].argmax(-1).unique().numel() > 50


@pytest.mark.parametrize("chunk_size", [4096, 13, 5])
@pytest.mark.parametrize("way", ["bounded", "exact-replay"])
def test_global_kv_open_groups_and_ngrams_are_the_same_bits_in_all_ways(ced: Ced, way: str, chunk_size: int) -> None:
    """Chunks longer and shorter than the window, borders inside spans, an open group at the end."""
    cache = ced.model.new_cache()
    ced.prefill(0, 95, cache, way, chunk_size=chunk_size)
    differing = same_state(cache, ced.full(95))
    assert all(name.startswith("window.") for name in differing)
    assert (way == "exact-replay") == (differing == [])
    if way == "bounded":        # the border layer's rows are made of exact streams, those above it and the drafts' not
        assert differing == [f"window.{i}" for i in (4, 5, 6, 7, 8)]


@pytest.mark.parametrize("prompt, chunk_size", [(88, 4096), (88, 20), (70, 4096), (62, 9), (30, 4096)])
def test_exact_replay_equals_full_with_images_engram_and_drafts(ced: Ced, prompt: int, chunk_size: int) -> None:
    """Prompts that end in text, inside a span and just after its start; replays begin inside a span or before it."""
    cache = ced.model.new_cache()
    ced.check(ced.prefill(0, prompt, cache, "exact-replay", chunk_size=chunk_size).logits[0, 0], prompt - 1)
    assert same_state(cache, ced.full(prompt)) == []
    assert cache.window_start == {"encoder": [0], "decoder": [prompt - REPLAY], "draft": [prompt - REPLAY]}
    if prompt == 88:
        ced.check_drafts(cache)
    poison(cache)
    for row, logits in enumerate(feed(ced.model, ced.ids[prompt:], [1, 11], cache, ced.images.columns(prompt, 100))[0]):
        ced.check(logits, prompt + row)


def test_a_replay_of_one_token_less_would_not_be_exact(ced: Ced) -> None:
    """That (decoder layers) (W - 1) + 1 is the least: from one position later, the last logits are others."""
    assert same_bits(ced.twin(99 - REPLAY + 1)["logits"][-1], ced.twin()["logits"][-1])
    assert not same_bits(ced.twin(99 - REPLAY + 2)["logits"][-1], ced.twin()["logits"][-1])


@pytest.mark.parametrize("prompt, chunk_size", [(88, 4096), (88, 3), (70, 4096)])
def test_bounded_equals_the_twin_with_images_engram_and_drafts(ced: Ced, prompt: int, chunk_size: int) -> None:
    """The last window in text, and wholly inside a span."""
    cache, first = ced.model.new_cache(), prompt - W
    ced.check(ced.prefill(0, prompt, cache, "bounded", chunk_size=chunk_size).logits[0, 0], prompt - 1, first)
    assert not same_bits(ced.twin(first)["logits"][W - 1], ced.twin()["logits"][prompt - 1])
    assert cache.window_start == {"encoder": [0], "decoder": [first], "draft": [first]}
    poison(cache)
    if prompt == 88:
        ced.check_drafts(cache, first)
    for row, logits in enumerate(feed(ced.model, ced.ids[prompt:], [1, 11], cache, ced.images.columns(prompt, 100))[0]):
        ced.check(logits, prompt + row, first)
    ced.check_drafts(cache, first)


@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9])
def test_prompts_of_at_most_a_window_are_equal_in_all_ways(ced: Ced, prompt: int) -> None:
    full = ced.full(prompt)
    for way in ("bounded", "exact-replay"):
        cache = ced.model.new_cache()
        logits = ced.prefill(0, prompt, cache, way, chunk_size=3).logits[0, 0]
        equal = same_bits(logits, ced.twin()["logits"][prompt - 1]) and same_state(cache, full) == []
        assert equal == (prompt <= W or way == "exact-replay")


@pytest.mark.parametrize("turns, first", [((35, 3), 27), ((35, 8), 27), ((35, 9), 36), ((33, 55), 80), ((5, 3), 0)])
def test_second_turns_keep_valid_window_rows_and_never_read_across_a_gap(ced: Ced, turns: tuple[int, int],
                                                                         first: int) -> None:
    """A turn of at most W tokens goes on with the rows before it; a longer one leaves a gap, and begins anew."""
    cache, total = ced.model.new_cache(), sum(turns)
    ced.prefill(0, turns[0], cache, "bounded")
    poison(cache)
    logits = ced.prefill(turns[0], total, cache, "bounded", chunk_size=6).logits[0, 0]
    assert cache.window_start["decoder"] == cache.window_start["draft"] == [first]
    ced.check(logits, total - 1, first)
    poison(cache)
    later = feed(ced.model, ced.ids[total:], [5], cache, ced.images.columns(total, total + 5))[0]
    ced.check(later[-1], total + 4, first)


def test_many_short_turns_are_one_long_one(ced: Ced) -> None:
    """Turn by turn the window rows stay valid, so this equals full although every turn is bounded."""
    cache, at = ced.model.new_cache(), 0
    for n in (3, 8, 1, 8, 7, 2, 8, 8, 5):
        ced.check(ced.prefill(at, at + n, cache, "bounded").logits[0, 0], at + n - 1)
        at += n
    assert same_state(cache, ced.full(at)) == []


@pytest.mark.parametrize("way", ["full", "bounded", "exact-replay"])
def test_rows_of_a_ragged_prefill_are_as_alone(ced: Ced, way: str) -> None:
    """Two turns in which rows have images, no tokens, fewer than the window or more than the replay."""
    turns = [[88, 0, 20, 35], [4, 40, 0, 9]]
    batch, alone = ced.model.new_cache(4), [ced.model.new_cache() for _ in range(4)]
    at = [0, 0, 0, 0]
    for counts in turns:
        width = max(counts)
        ids, types = torch.full((4, width), -5), torch.full((4, width), -1, dtype=torch.int8)
        for b, n in enumerate(counts):
            ids[b, :n], types[b, :n] = ced.ids[at[b] : at[b] + n], ced.images.types[0, at[b] : at[b] + n]
        features = torch.cat([ced.images.columns(a, a + n).features for a, n in zip(at, counts)])
        logits = ced.model.prefill(ids, batch, way, counts, ImageTokens(types, features), chunk_size=30).logits
        for b, n in enumerate(counts):
            if n:
                assert same_bits(logits[b], ced.prefill(at[b], at[b] + n, alone[b], way).logits[0]), b
            at[b] += n
            assert same_state(batch, alone[b], b) == [], b
            assert [w[b] for w in batch.window_start.values()] == [w[0] for w in alone[b].window_start.values()]
        poison(batch)


# --------------------------------------------------------------------------------------------------------- interruption

class Interrupt(Exception):
    pass


def interrupted_at(module: nn.Module, call: int) -> Any:
    """The `call`-th use of a module raises."""
    calls = [0]

    def hook(*_: object) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise Interrupt

    return module.register_forward_pre_hook(hook)


@pytest.mark.parametrize("way, layer, call", [
    ("full", 1, 3), ("full", 5, 2), ("bounded", 1, 3), ("bounded", 5, 1), ("exact-replay", 2, 4),
    ("exact-replay", 6, 1)])
def test_an_interrupted_prefill_leaves_a_usable_cache(ced: Ced, way: str, layer: int, call: int) -> None:
    """Encoder or decoder layers fail at some chunk of a second turn. Full keeps the chunks that were done, the others
    keep nothing of the turn; going on from there is as if nothing had happened."""
    cache = ced.full(33)
    handle = interrupted_at(ced.model.layers[layer].ffn, call)
    try:
        with pytest.raises(Interrupt):
            ced.prefill(33, 88, cache, way, chunk_size=16)
    finally:
        handle.remove()
    done = 33 + (16 * (call - 1) if way == "full" else 0)
    assert cache.lengths == [done] and same_state(cache, ced.full(done)) == []
    poison(cache)
    ced.check(ced.prefill(done, 88, cache, way).logits[0, 0], 87, 80 if way == "bounded" else None)
    assert way == "bounded" or same_state(cache, ced.full(88)) == []


@pytest.mark.parametrize("way", ["bounded", "exact-replay"])
def test_a_prefill_stopped_by_its_progress_can_begin_again(ced: Ced, way: str) -> None:
    cache = ced.model.new_cache()

    def stop(done: int) -> None:
        raise Interrupt

    with pytest.raises(Interrupt):
        ced.prefill(0, 88, cache, way, chunk_size=50, progress=stop)
    assert cache.lengths == [0] and cache.window_start == {"encoder": [0], "decoder": [0], "draft": [0]}
    ced.check(ced.prefill(0, 88, cache, way).logits[0, 0], 87, 80 if way == "bounded" else None)


@pytest.mark.parametrize("changes", [
    dict(compress_ratios=[0, 2, 2, 2, 2, 2, 2, 0, 0]),                              # the last source compresses
    dict(kv_source_layer_ids=[1], compress_ratios=[0, 2, 2, 2, 2, 2, 2, 0, 0]),
    dict(dspark_target_layer_ids=[2, 6])])                                          # a target in the encoder
def test_configurations_without_a_decoder_take_full_only(changes: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(published(CED | changes)), Numerics())
    for way in ("bounded", "exact-replay"):
        with pytest.raises(ValueError, match=f"prefill way '{way}' needs a decoder that starts at the last KV source"):
            model.prefill(torch.zeros(1, 20, dtype=torch.int64), model.new_cache(), way)


# ----------------------------------------------------------------------------------------------------------------- cost

def twelve_layers(directory: Path, **larger: int) -> Transformer:
    """Six encoder layers of twelve, in fast mode."""
    changes = dict(
        hidden_size=64, moe_intermediate_size=32, num_hidden_layers=12, num_attention_heads=4, head_dim=32,
        qk_rope_head_dim=8, q_lora_rank=64, o_lora_rank=32, o_groups=2, max_position_embeddings=8192,
        n_routed_experts=4, num_experts_per_tok=2, sliding_window=16,
        compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], kv_source_layer_ids=[2, 6],
        index_source_layer_ids=[2, 6, 8, 10], index_n_heads=2, index_head_dim=32, index_topk=16,
        candidate_source_layer_id=6, candidate_topk_blocks=8, candidate_block_size=8, engram_layer_ids=[],
        num_nextn_predict_layers=0, dspark_target_layer_ids=[]) | larger
    (directory / "config.json").write_text(json.dumps(published(changes)))
    write_random(directory / "config.json", directory / "checkpoint", 1, CHECKPOINT)
    return load_model(directory / "checkpoint", device="cpu")


def test_bounded_prefill_costs_at_most_056_of_full_in_counted_flops(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """As the command counts them; and how many tokens the last encoder layer and the first decoder layer see."""
    model = twelve_layers(tmp_path)
    assert model.config.decoder_start == 6 and len(model.layers) == 12
    ids = torch.randint(11, 600, (1, 200), generator=torch.Generator().manual_seed(0))
    for way, decoded in (("full", 200), ("bounded", 16), ("exact-replay", 6 * 15 + 1)):
        def prefill() -> None:
            model.prefill(ids, model.new_cache(), way, chunk_size=150)

        assert [tokens_of(model, prefill, layer) for layer in (5, 6)] == [200, decoded]
    arguments = ["--ckpt-path", str(tmp_path / "checkpoint"), "--prompt-tokens", "200", "--device", "cpu"]
    assert session.main(["prefill", *arguments]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == ["prefill", "full", "bounded", "exact-replay", "memory"]
    assert float(lines["full"][1]) == 1 and float(lines["bounded"][1]) <= 0.56 < float(lines["exact-replay"][1]) < 0.85
    assert all(float(seconds) > 0 for _, _, seconds, _ in list(lines.values())[1:4])


@pytest.mark.manual
def test_bounded_prefill_of_8192_tokens_takes_at_most_062_of_the_time(tmp_path: Path) -> None:
    """CPU time of one thread, at four times the size. Half a minute."""
    model = twelve_layers(
        tmp_path, hidden_size=256, moe_intermediate_size=128, num_attention_heads=8, head_dim=64, qk_rope_head_dim=16,
        q_lora_rank=128, o_lora_rank=64, o_groups=4, n_routed_experts=8, sliding_window=128, index_n_heads=4,
        index_head_dim=64, index_topk=32, candidate_topk_blocks=16)
    table = session.prefill_table(model, 8192, 0).splitlines()
    share = {line.split()[0]: (float(line.split()[2]), float(line.split()[4])) for line in table[1:4]}
    assert share["bounded"][0] <= 0.56 and share["bounded"][1] <= 0.62


# ------------------------------------------------------------------------------------------------------------------ gap

def test_the_gap_command_reports_where_bounded_replay_differs(ced: Ced, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ckpt-path", str(ced.directory), "--prompt-tokens", "71", "--decode", "5", "--device", "cpu"]
    assert session.main(["gap", "--exact", *arguments]) == 0
    head, _, *columns = capsys.readouterr().out.splitlines()
    assert "71 random tokens, window 8" in head and max(map(len, columns)) <= 80
    above, below, *lines = columns
    assert above.split() == ["exact-", "resumed,", "with"] and below.split()[:3] == ["bounded", "replay", "resumed"]
    cells = {line[:30].strip(): line[30:].replace(" *", "").split() for line in lines}
    assert cells["global KV of the prompt"] == ["equal"] * 5
    assert all(cells[f"window rows of layer {i}"][0] == "0" for i in range(4))
    assert all(float(cells[f"window rows of layer {i}"][0]) > 0 for i in range(4, 7))
    bounded, exact = cells["last logits of the prompt"]
    assert float(bounded) > 0 and exact == "0"
    for k in (1, 2, 4, 5):
        bounded, exact, resumed, _, kept = cells[f"logits after {k} tokens"]
        assert float(bounded) > 0 and float(resumed) > 0 and exact == kept == "0"
    # new global rows: exact after a bounded prefill, whose encoder windows are; not after a resume
    assert cells["main KV appended by layer 3"][:2] == ["0", "0"] and float(cells["main KV appended by layer 3"][2]) > 0
    assert sum("best token agrees" in line for line in lines) == 1 and "6 of 6" in lines[-3]


# ------------------------------------------------------------------------------------------------ many from one prompt

def tokens_of(model: Transformer, run: Callable[[], object], layer: int = 0) -> int:
    """How many tokens, of all rows, go through a layer meanwhile."""
    seen: list[int] = []
    handle = model.layers[layer].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2].numel()))
    try:
        run()
    finally:
        handle.remove()
    return sum(seen)


def test_many_continuations_of_one_prompt_cost_one_prefill(ced: Ced) -> None:
    """Forked one by one, and as the rows of a batch: each as if it had been read alone."""
    model, tails = ced.model, [ced.ids[k : k + 6] for k in (31, 37, 43, 80)]
    results: list[list[Tensor]] = [[], []]

    def run() -> None:
        cache = ced.full(79)
        for tail in tails:
            results[0].append(feed(model, tail, [2, 4], cache.fork())[0])
        batch = cache.fork(rows=[0] * 4)
        results[1].extend(model(torch.stack(tails), batch).logits)

    assert tokens_of(model, run) == 79 + 2 * 4 * 6
    for tail, one, row in zip(tails, *results):
        fresh = ced.full(79)
        assert same_bits(one, row) and same_bits(one, feed(model, tail, [6], fresh)[0])


@pytest.mark.parametrize("back", [0, 1, 4])
def test_a_fork_of_an_earlier_length(thirds: Small, back: int) -> None:
    _, cache = feed(thirds.model, thirds.tokens, [41])
    fork = cache.fork(41 - back)
    assert fork.lengths == [41 - back] and cache.lengths == [41]
    assert same_state(fork, feed(thirds.model, thirds.tokens, [41 - back])[1]) == []
    logits = feed(thirds.model, thirds.tokens[41 - back :], [3, 7], fork)[0]
    assert same_bits(logits, thirds.twin["logits"][41 - back : 51 - back])
    assert same_bits(feed(thirds.model, thirds.tokens[41:], [5], cache)[0], thirds.twin["logits"][41:46])


def test_a_fork_of_a_snapshot_goes_back_any_way(thirds: Small) -> None:
    _, cache = feed(thirds.model, thirds.tokens, [23])
    kept = cache.snapshot()
    feed(thirds.model, thirds.tokens[23:], [60], cache)
    for tail in (thirds.tokens[23:40], thirds.tokens.flip(0)[:17]):
        fork = cache.fork(kept)
        logits = feed(thirds.model, tail, [17], fork)[0]
        want = feed(thirds.model, torch.cat([thirds.tokens[:23], tail]), [40])[0][23:]
        assert same_bits(logits, want) and fork.nbytes("global") < cache.nbytes("global")
    assert same_bits(feed(thirds.model, thirds.tokens[83:], [9], cache)[0], thirds.twin["logits"][83:92])


def test_forks_of_rows_keep_each_rows_own_past(ced: Ced) -> None:
    """Rows of different lengths and window starts, repeated and reordered, taken back on the way."""
    cache = ced.model.new_cache(3)
    lengths = [40, 9, 25]
    ids = torch.stack([ced.ids[31:71].clone() for _ in range(3)])
    ced.model.prefill(ids, cache, "bounded", lengths)
    fork = cache.fork([38, 9, 24], rows=[2, 0, 2])
    assert fork.lengths == [24, 38, 24] and fork.batch_size == 3 and cache.lengths == lengths
    for b, source in enumerate([2, 0, 2]):
        alone = ced.model.new_cache()
        ced.model.prefill(ids[:1, : lengths[source]], alone, "bounded")
        alone.truncate(fork.lengths[b])
        assert same_state(fork, alone, b) == []
    fork.truncate([22, 36, 24])                     # as far as the origin could
    with pytest.raises(ValueError, match="row 1 cannot go back to 35 tokens: only the last 4 of 40"):
        fork.truncate([22, 35, 24])


@pytest.mark.parametrize("call, sentence", [
    (lambda cache: cache.fork(2), "row 0 cannot go back to 2 tokens"),
    (lambda cache: cache.fork(31), "holds 30 tokens and cannot"),
    (lambda cache: cache.fork(rows=[0, 1]), r"fork got rows \[0, 1\] of a cache of 1"),
    (lambda cache: cache.fork(rows=[]), "fork got rows"),
    (lambda cache: cache.fork(cache.fork(rows=[0, 0]).snapshot()), "this snapshot belongs to another cache")])
def test_forks_that_cannot_be_are_refused(thirds: Small, call: Callable[[Cache], object], sentence: str) -> None:
    _, cache = feed(thirds.model, thirds.tokens, [30])
    with pytest.raises(ValueError, match=sentence):
        call(cache)
    assert cache.lengths == [30]
