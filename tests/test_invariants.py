"""What exact mode promises: bits do not depend on chunks (I1), batches (I2) or history (I6), and going back,
copying and the three ways of prefill keep that promise. The reference of every comparison is the slow twin's run
over the whole sequence or the golden run, so that an equality here is more than self-consistency."""

from __future__ import annotations

from typing import Callable, Sequence

import pytest
import torch
from torch import Tensor

import kv_cache
import model as model_module
import twin
from convert import load_model
from golden_data import CHECKPOINT, difference, same_bits
from model import Cache, Transformer
from small_models import Small, feed, feed_rows, poison, same_state, without_fake_quant


@pytest.fixture(scope="module")
def golden_small(tiny: Transformer, golden_text: dict[str, Tensor]) -> Small:
    """The golden checkpoint and run in the same clothes as the random ones: window 16."""
    return Small(CHECKPOINT, tiny, golden_text["tokens"], golden_text)


@pytest.fixture(scope="module")
def with_drafts(golden_text: dict[str, Tensor]) -> Small:
    """The golden checkpoint with its draft head, whose windows are part of the history."""
    return Small(
        CHECKPOINT, load_model(CHECKPOINT, exact=True, device="cpu", draft=True), golden_text["tokens"], golden_text
    )


@pytest.fixture(params=["golden_small", "wide_window", "thirds"])
def small(request: pytest.FixtureRequest) -> Small:
    """Window 16, ratios 2 and 1; window 128, ratios 2 and 1; window 9, ratios 3 and 1. In all, top-k and pool prune."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["golden_small", "thirds"])
def quick(request: pytest.FixtureRequest) -> Small:
    return request.getfixturevalue(request.param)


def check(small: Small, logits: Tensor, first: int = 0) -> None:
    assert difference(logits, small.twin["logits"][first : first + len(logits)]) is None


def test_the_models_prune(small: Small) -> None:
    """Top-k drops visible rows, the pool drops blocks, the window forgets, and logits are no constant."""
    config, n = small.model.config, len(small.tokens)
    assert n > config.sliding_window and n // 2 > config.index_topk
    assert n > config.candidate_topk_blocks * config.candidate_block_size
    assert small.twin["logits"].argmax(-1).unique().numel() > n // 5


# --------------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("chunks", ["one shot", "1, 2, 3, 37", "odd", "a window and more"])
def test_i1_every_chunking_gives_the_same_bits(small: Small, chunks: str) -> None:
    n, W = len(small.tokens), small.model.config.sliding_window
    sizes = {
        "one shot": [n],
        "1, 2, 3, 37": [1, 2, 3, 37, n - 43],
        "odd": [7, 5, 31, n - 43],
        "a window and more": [W + 1, 1, W + 3],
    }[chunks]
    if chunks == "a window and more":
        sizes.append(n - sum(sizes))
    logits, cache = feed(small.model, small.tokens, sizes)
    check(small, logits)
    if chunks != "one shot":
        assert same_state(cache, feed(small.model, small.tokens, [n])[1]) == []


def test_i1_token_by_token_from_the_start(thirds: Small) -> None:
    check(thirds, feed(thirds.model, thirds.tokens, [1] * 30)[0])


def test_i1_token_by_token_across_the_window_and_the_pool(wide_window: Small) -> None:
    """A prompt that ends inside a group just before the window is full, then single tokens past it."""
    logits, _ = feed(wide_window.model, wide_window.tokens, [125] + [1] * 14)
    check(wide_window, logits)


def test_logits_of_the_last_token_are_those_of_all(quick: Small) -> None:
    model, ids = quick.model, quick.tokens[None, :50].repeat(2, 1)
    cache = model.new_cache(2)
    out = model(ids, cache, lengths=[50, 31], logits="last").logits
    assert out.shape == (2, 1, model.config.vocab_size) and out.dtype == torch.float32
    assert same_bits(out[:, 0], quick.twin["logits"][[49, 30]])
    assert model(ids[:, :1], model.new_cache(2), logits="none").logits is None


# -------------------------------------------------------------------------------------------------------------- batches


def rows_of(small: Small, lengths: Sequence[int]) -> list[Tensor]:
    return [small.tokens[:n] for n in lengths]


@pytest.mark.parametrize("name, padding", [("golden_small", -7), ("thirds", 0), ("thirds", -1), ("thirds", 10**12)])
def test_i2_case_25_rows_of_a_ragged_batch_are_as_alone(
    name: str, padding: int, request: pytest.FixtureRequest
) -> None:
    """Prompts of 3, 64 and 131 tokens and an empty row, then ragged chunks; padding of absurd ids."""
    quick = request.getfixturevalue(name)
    lengths = [3, 64, min(131, len(quick.tokens) - 20), 0]
    cache = quick.model.new_cache(4)
    for row in feed_rows(quick.model, rows_of(quick, lengths), cache, padding):
        check(quick, row)
    for step in ([1, 0, 1, 2], [5, 19, 0, 1]):
        rows = [quick.tokens[n : n + s] for n, s in zip(lengths, step)]
        for start, row in zip(lengths, feed_rows(quick.model, rows, cache, padding)):
            check(quick, row, start)
        lengths = [n + s for n, s in zip(lengths, step)]
    for b, n in enumerate(lengths):
        assert same_state(cache, feed(quick.model, quick.tokens, [n])[1], b) == []


def test_i2_case_25_permuting_the_rows_permutes_the_results(thirds: Small) -> None:
    """Rows of unrelated tokens, which must not see each other."""
    rows = [thirds.tokens[30:33], thirds.tokens[:64], thirds.tokens[5:120]]
    cache = thirds.model.new_cache(3)
    straight = feed_rows(thirds.model, rows, cache)
    for order in ([2, 0, 1], [1, 2, 0]):
        other = thirds.model.new_cache(3)
        permuted = feed_rows(thirds.model, [rows[i] for i in order], other)
        for b, i in enumerate(order):
            assert same_bits(permuted[b], straight[i]) and same_state(other, cache, b, i) == []
    check(thirds, straight[1])


def test_i2_window_128(wide_window: Small) -> None:
    lengths = [127, 1, 256, 128]
    cache = wide_window.model.new_cache(4)
    for row in feed_rows(wide_window.model, rows_of(wide_window, lengths), cache, 10**9):
        check(wide_window, row)
    rows = [wide_window.tokens[n : n + 3] for n in lengths]
    for start, row in zip(lengths, feed_rows(wide_window.model, rows, cache)):
        check(wide_window, row, start)


# -------------------------------------------------------------------------------------------------------------- history


def test_i6_a_reset_cache_is_as_a_fresh_one(small: Small) -> None:
    """A long request, then a short odd one on the same cache, whose storage is kept."""
    n = len(small.tokens)
    _, cache = feed(small.model, small.tokens.flip(0), [n])
    allocated = cache.nbytes("allocated")
    cache.reset()
    assert cache.lengths == [0] and cache.nbytes("global") == 0 and cache.nbytes("allocated") == allocated
    logits, _ = feed(small.model, small.tokens, [1, 4, 1, 17, 1], cache)
    check(small, logits)
    assert same_state(cache, feed(small.model, small.tokens, [24])[1]) == []


def test_blocks_of_queries_keys_and_experts_change_nothing(quick: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working set so small that attention takes a query at a time, keys come in sevens and experts one by one."""
    for module, name, value in ((kv_cache, "WORKING_SET", (1, 1)), (model_module, "KEY_BLOCK", (7, 7)),
                                (kv_cache, "QUERY_BLOCK", (5, 5))):
        assert isinstance(getattr(module, name), tuple)
        monkeypatch.setattr(module, name, value)
    logits, cache = feed(quick.model, quick.tokens, [61, 1, 40])
    check(quick, logits)
    monkeypatch.undo()
    assert same_state(cache, feed(quick.model, quick.tokens, [102])[1]) == []


def test_i6_two_models_and_two_caches_take_turns(thirds: Small, wide_window: Small) -> None:
    caches = [(small, small.model.new_cache()) for small in (thirds, wide_window, thirds)]
    starts, sizes = [0, 0, 0], ([40, 11, 1], [3, 150, 2], [1, 1, 60], [13, 2, 1])
    for step in sizes:
        for i, (small, cache) in enumerate(caches):
            part = small.tokens[starts[i] : starts[i] + step[i]]
            check(small, feed(small.model, part, [step[i]], cache)[0], starts[i])
            starts[i] += step[i]


@pytest.mark.parametrize(
    "name, lengths",
    [("with_drafts", [5, 16, 17]), ("golden_small", [0, 33, 75]), ("thirds", [0, 1, 2]), ("thirds", [9, 10, 63])],
)
@pytest.mark.parametrize("rows", ["packed", "bfloat16"])
def test_i6_case_6_poison_in_every_dead_slot_changes_nothing(
    name: str, rows: str, lengths: list[int], request: pytest.FixtureRequest
) -> None:
    """Ring slots that nothing reads, rows beyond the length, other rows' tails, open groups, n-gram ids: NaN or
    absurd."""
    quick = request.getfixturevalue(name)
    model = quick.model if rows == "packed" else without_fake_quant(quick.directory, quick.model.mtp is not None)
    cache = model.new_cache(3)
    feed_rows(model, rows_of(quick, lengths), cache)
    clean = cache.fork()
    assert poison(cache) > 1000
    for step in ([1, 1, 1], [19, 0, 2], [1, 3, 1]):
        new = [quick.tokens[n : n + s] for n, s in zip(lengths, step)]
        for start, a, b in zip(lengths, feed_rows(model, new, cache), feed_rows(model, new, clean)):
            assert same_bits(a, b) and a.isfinite().all()
            if rows == "packed":
                check(quick, a, start)
        lengths = [n + s for n, s in zip(lengths, step)]
        poison(cache)
    for b in range(3):
        assert same_state(cache, clean, b, b) == []


def test_i6_poison_after_taking_tokens_back(quick: Small) -> None:
    """Slots of tokens that were taken back are dead too."""
    _, cache = feed(quick.model, torch.cat([quick.tokens[:40], quick.tokens[:4]]), [40, 4])
    cache.truncate(40)
    poison(cache)
    check(quick, feed(quick.model, quick.tokens[40:], [1, 20, 1], cache)[0], 40)


def test_i6_window_128_with_poison(wide_window: Small) -> None:
    _, cache = feed(wide_window.model, wide_window.tokens, [140])
    poison(cache)
    check(wide_window, feed(wide_window.model, wide_window.tokens[140:], [1, 2, 130], cache)[0], 140)


def test_a_forward_that_fails_leaves_the_cache_as_it_was(thirds: Small) -> None:
    _, cache = feed(thirds.model, thirds.tokens, [31])
    before = cache.live_state(0)

    def fail(*_: object) -> None:
        raise RuntimeError("interrupted")

    handle = thirds.model.layers[4].ffn.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="interrupted"):
            thirds.model(thirds.tokens[None, 31:40], cache)
    finally:
        handle.remove()
    assert all(same_bits(value, before[name]) for name, value in cache.live_state(0).items())
    check(thirds, feed(thirds.model, thirds.tokens[31:], [5], cache)[0], 31)


# ------------------------------------------------------------------------------------------------- going back, copying


@pytest.mark.parametrize(
    "name, lengths, one_by_one",
    [
        ("golden_small", [15, 17, 64], False),
        ("golden_small", [16], True),
        ("thirds", [8, 9, 33], False),
        ("thirds", [10, 26], True),
    ],
)
def test_truncated_and_continued_is_as_never_fed(
    name: str, lengths: list[int], one_by_one: bool, request: pytest.FixtureRequest
) -> None:
    """Row b takes b tokens back, 0 to R of them, at odd and even lengths around the window's edge."""
    quick = request.getfixturevalue(name)
    R, wrong = quick.model.config.dspark_block_size, quick.tokens.flip(0)
    for length in lengths:
        cache = quick.model.new_cache(R + 1)
        feed_rows(quick.model, rows_of(quick, [length] * (R + 1)), cache)
        for step in range(R) if one_by_one else [0]:
            more = [wrong[step : min(step + 1, b)] if one_by_one else wrong[:b] for b in range(R + 1)]
            feed_rows(quick.model, more, cache)
        assert cache.lengths == [length + b for b in range(R + 1)]
        cache.truncate(length)
        fresh = feed(quick.model, quick.tokens, [length])[1]
        for b in range(R + 1):
            assert cache.lengths[b] == length and same_state(cache, fresh, b) == [], b
        for row in feed_rows(quick.model, [quick.tokens[length : length + 3]] * (R + 1), cache):
            check(quick, row, length)


def test_rows_are_truncated_each_to_its_own_length(thirds: Small) -> None:
    cache = thirds.model.new_cache(3)
    feed_rows(thirds.model, rows_of(thirds, [20, 33, 5]), cache)
    cache.truncate([17, 33, 4])
    assert cache.lengths == [17, 33, 4]
    rows = [thirds.tokens[n : n + 6] for n in cache.lengths]
    for start, row in zip([17, 33, 4], feed_rows(thirds.model, rows, cache)):
        check(thirds, row, start)


def test_a_cache_without_rollback_holds_the_window_only(thirds: Small) -> None:
    cache = thirds.model.new_cache(rollback=0)
    check(thirds, feed(thirds.model, thirds.tokens, [20] + [1] * 11, cache)[0])
    with pytest.raises(ValueError, match="row 0 cannot go back to 30 tokens: only the last 0 of 31"):
        cache.truncate(30)
    far = thirds.model.new_cache(rollback=50)
    feed(thirds.model, thirds.tokens, [70], far)
    far.truncate(21)
    check(thirds, feed(thirds.model, thirds.tokens[21:], [30], far)[0], 21)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda cache: cache.truncate(35), "row 0 cannot go back to 35 tokens: only the last 4 of 40"),
        (lambda cache: cache.truncate(41), "row 0 holds 40 tokens and cannot be truncated to 41"),
        (lambda cache: cache.truncate(-1), "row 0 holds 40 tokens and cannot be truncated to -1"),
        (lambda cache: cache.truncate([40, 3]), "truncate got 2 lengths for 1 rows"),
    ],
)
def test_truncations_that_cannot_be_exact_are_refused(
    thirds: Small, call: Callable[[Cache], None], sentence: str
) -> None:
    _, cache = feed(thirds.model, thirds.tokens, [40])
    with pytest.raises(ValueError, match=sentence):
        call(cache)
    assert cache.lengths == [40]


def test_rollbacks_do_not_add_up(thirds: Small) -> None:
    """4 back, and 4 back again without new tokens, would read overwritten slots."""
    _, cache = feed(thirds.model, thirds.tokens, [40])
    cache.truncate(37)
    with pytest.raises(ValueError, match="row 0 cannot go back to 35 tokens"):
        cache.truncate(35)
    cache.truncate(36)
    check(thirds, feed(thirds.model, thirds.tokens[36:], [5], cache)[0], 36)
    cache.truncate(0)  # to nothing is always possible
    check(thirds, feed(thirds.model, thirds.tokens, [5], cache)[0])


def test_snapshot_and_restore_go_back_any_way(quick: Small) -> None:
    _, cache = feed(quick.model, quick.tokens, [23])
    kept = cache.snapshot()
    feed(quick.model, quick.tokens.flip(0), [70, 1], cache)
    cache.restore(kept)
    assert cache.lengths == [23] and same_state(cache, feed(quick.model, quick.tokens, [23])[1]) == []
    check(quick, feed(quick.model, quick.tokens[23:], [2, 30], cache)[0], 23)
    cache.restore(kept)  # and again
    cache.truncate(20)
    check(quick, feed(quick.model, quick.tokens[20:], [9], cache)[0], 20)


def test_a_snapshot_of_rows_that_were_overwritten_is_refused(thirds: Small) -> None:
    _, cache = feed(thirds.model, thirds.tokens, [23])
    kept = cache.snapshot()
    cache.truncate(21)
    feed(thirds.model, thirds.tokens.flip(0), [9], cache)
    with pytest.raises(ValueError, match="snapshot no longer holds: the cache has been truncated below it"):
        cache.restore(kept)
    cache.reset()
    with pytest.raises(ValueError, match="snapshot no longer holds"):
        cache.restore(kept)


def test_a_fork_and_its_origin_go_different_ways(quick: Small) -> None:
    _, cache = feed(quick.model, quick.tokens, [27])
    fork = cache.fork()
    feed(quick.model, quick.tokens.flip(0), [40], cache)
    assert fork.lengths == [27]
    check(quick, feed(quick.model, quick.tokens[27:], [1, 40], fork)[0], 27)
    again = feed(quick.model, quick.tokens, [27])[1]
    feed(quick.model, quick.tokens.flip(0), [40], again)
    assert same_state(cache, again) == []


def test_a_fork_within_a_growing_store(thirds: Small) -> None:
    """Both write compressed rows at the same positions afterwards: storage is not shared."""
    _, cache = feed(thirds.model, thirds.tokens, [30])
    fork = cache.fork()
    for one, other in zip(cache.main.values(), fork.main.values()):
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    feed(thirds.model, thirds.tokens.flip(0), [9], fork)
    check(thirds, feed(thirds.model, thirds.tokens[30:], [9], cache)[0], 30)


# ------------------------------------------------------------------------------------------------ three ways to prefill


@pytest.fixture(scope="module")
def bounded_twin(golden_text: dict[str, Tensor], tiny_twin: twin.Checkpoint) -> Callable[[int], Tensor]:
    """The twin's logits of the golden tokens when decoder layers run from position `first` on, where the result
    begins."""
    made: dict[int, Tensor] = {}

    def logits(first: int) -> Tensor:
        if first not in made:
            made[first] = twin.forward(tiny_twin, golden_text["tokens"].tolist(), bounded_from=first)["logits"]
        return made[first]

    return logits


def replay_length(model: Transformer) -> int:
    c = model.config
    return (c.num_hidden_layers - c.decoder_start) * (c.sliding_window - 1) + 1


@pytest.mark.parametrize("chunk_size", [4096, 40])
def test_exact_replay_equals_full(golden_small: Small, chunk_size: int) -> None:
    """150 prompt tokens of which the last 76 are replayed: same logits, same live state, same continuation."""
    model, ids = golden_small.model, golden_small.tokens
    assert replay_length(model) == 76
    caches = {way: model.new_cache() for way in ("full", "exact-replay")}
    seen: list[int] = []
    for way, cache in caches.items():
        out = model.prefill(ids[None, :150], cache, way, chunk_size=chunk_size, progress=seen.append)
        assert out.logits.shape == (1, 1, 640)
        check(golden_small, out.logits[0], 149)
    assert sum(seen) == 300 and same_state(*caches.values()) == []
    assert caches["exact-replay"].window_start == {"encoder": [0], "decoder": [74], "draft": [150]}  # no draft head
    check(golden_small, feed(model, ids[150:], [1, 24], caches["exact-replay"])[0], 150)


def test_a_shorter_replay_is_not_exact(golden_small: Small, bounded_twin: Callable[[int], Tensor]) -> None:
    """What the equality above is worth: 76 tokens of 175 give the last logits of full, 30 do not."""
    exact, short = (bounded_twin(len(golden_small.tokens) - n) for n in (76, 30))
    last = golden_small.twin["logits"][-1]
    assert same_bits(exact[-1], last) and not same_bits(short[-1], last)


def test_bounded_prefill_equals_the_twin(golden_small: Small, bounded_twin: Callable[[int], Tensor]) -> None:
    """Decoder layers over the last 16 tokens only, then more tokens whose windows begin where the replay began."""
    model, ids = golden_small.model, golden_small.tokens
    prompt = 160
    want, cache = bounded_twin(prompt - 16), model.new_cache()
    out = model.prefill(ids[None, :prompt], cache, "bounded", chunk_size=64)
    assert same_bits(out.logits[0, 0], want[15])
    assert not same_bits(out.logits[0, 0], golden_small.twin["logits"][prompt - 1])
    assert cache.window_start == {"encoder": [0], "decoder": [prompt - 16], "draft": [prompt]}  # no draft head
    assert same_bits(feed(model, ids[prompt:], [1, 14], cache)[0], want[16:])


@pytest.mark.parametrize("turns", [(100, 16), (100, 60), (8, 100)])
def test_second_turns_of_a_bounded_prefill(
    golden_small: Small, turns: tuple[int, int], bounded_twin: Callable[[int], Tensor]
) -> None:
    """Shorter than the window the second turn continues the first one's windows; longer, it begins anew."""
    model, ids, cache = golden_small.model, golden_small.tokens, golden_small.model.new_cache()
    model.prefill(ids[None, : turns[0]], cache, "bounded")
    total = sum(turns)
    out = model.prefill(ids[None, turns[0] : total], cache, "bounded")
    first = total - 16 if turns[1] > 16 else turns[0] - 16
    assert cache.window_start["decoder"] == [first]
    want = bounded_twin(first)
    assert same_bits(out.logits[0, 0], want[total - 1 - first])
    assert same_bits(feed(model, ids[total:], [1, 4], cache)[0], want[total - first : total + 5 - first])


@pytest.mark.parametrize("turns", [(20, 130), (85, 80)])
def test_second_turns_of_an_exact_replay(golden_small: Small, turns: tuple[int, int]) -> None:
    model, ids, cache = golden_small.model, golden_small.tokens, golden_small.model.new_cache()
    total = sum(turns)
    model.prefill(ids[None, : turns[0]], cache, "exact-replay")
    check(golden_small, model.prefill(ids[None, turns[0] : total], cache, "exact-replay").logits[0], total - 1)
    assert same_state(cache, feed(model, ids, [total])[1]) == []
    check(golden_small, feed(model, ids[total:], [1, 8], cache)[0], total)


@pytest.mark.parametrize("way", ["bounded", "exact-replay"])
def test_ragged_prefill_rows_are_as_alone(golden_small: Small, way: str) -> None:
    """Rows longer and shorter than the window and than the replay, and an empty one; a chunk border in some of them."""
    model, ids = golden_small.model, golden_small.tokens
    lengths = [140, 9, 40, 77]
    width = max(lengths)
    cache = model.new_cache(4)
    batch = torch.full((4, width), -3)
    for b, n in enumerate(lengths):
        batch[b, :n] = ids[:n]
    out = model.prefill(batch, cache, way, lengths=lengths, chunk_size=50)
    for b, n in enumerate(lengths):
        alone = model.new_cache()
        logits = model.prefill(ids[None, :n], alone, way).logits
        assert same_bits(out.logits[b], logits[0]) and same_state(cache, alone, b) == [], b
        assert [w[b] for w in cache.window_start.values()] == [w[0] for w in alone.window_start.values()]
    new = [ids[n : n + 3] for n in lengths]
    for b, row in enumerate(feed_rows(model, new, cache)):
        if way != "bounded" or lengths[b] <= 16:
            check(golden_small, row, lengths[b])


def test_global_kv_of_a_bounded_prefill_is_exact_and_dead_windows_are_never_read(
    golden_small: Small, bounded_twin: Callable[[int], Tensor]
) -> None:
    model, ids = golden_small.model, golden_small.tokens
    full, bounded = model.new_cache(), model.new_cache()
    model.prefill(ids[None, :150], full)
    model.prefill(ids[None, :150], bounded, "bounded")
    differing = same_state(bounded, full)
    assert differing == [f"window.{i}" for i in range(6, 10)]  # layer 5 reads the encoder's exact streams
    poison(bounded)
    assert same_bits(feed(model, ids[150:], [3, 22], bounded)[0], bounded_twin(134)[16:])


def test_tokens_of_a_bounded_prefill_can_be_taken_back(
    golden_small: Small, bounded_twin: Callable[[int], Tensor]
) -> None:
    model, ids, cache = golden_small.model, golden_small.tokens, golden_small.model.new_cache()
    model.prefill(ids[None, :150], cache, "bounded")
    feed(model, ids.flip(0), [3], cache)
    cache.truncate(150)
    assert same_bits(feed(model, ids[150:], [5], cache)[0], bounded_twin(134)[16:21])
    cache.reset()
    assert cache.window_start == {"encoder": [0], "decoder": [0], "draft": [0]}
    check(golden_small, feed(model, ids, [40], cache)[0])


def test_prefill_ways_that_cannot_be_are_refused(golden_small: Small, thirds: Small) -> None:
    with pytest.raises(ValueError, match="prefill way 'half' is not one of full, bounded, exact-replay"):
        golden_small.model.prefill(golden_small.tokens[None], golden_small.model.new_cache(), "half")
    assert thirds.model.config.decoder_start == 3
    out = thirds.model.prefill(thirds.tokens[None], thirds.model.new_cache(), "exact-replay")
    check(thirds, out.logits[0], len(thirds.tokens) - 1)


# ---------------------------------------------------------------------------------------------------- near the edges


def test_a_padded_query_near_the_end_of_storage_stays_inside_it(thirds: Small) -> None:
    """The longest row has fewer new tokens than the chunk is wide: its padding sees no row that is not stored."""
    for last in range(100, min(125, len(thirds.tokens) - 1)):
        cache = thirds.model.new_cache(2, last + 1)
        thirds.model(torch.stack([thirds.tokens[:last]] * 2), cache, lengths=[3, last], logits="none")
        new = torch.stack([thirds.tokens[3:6], thirds.tokens[[last, 20, 21]]])
        logits = thirds.model(new, cache, lengths=[3, 1]).logits
        check(thirds, logits[0], 3)
        check(thirds, logits[1, :1], last)


def test_a_snapshot_of_another_cache_is_refused(thirds: Small) -> None:
    cache = thirds.model.new_cache(2, 50)
    thirds.model(thirds.tokens[:20].repeat(2, 1), cache)
    kept = cache.snapshot()
    for other in (cache.fork(), cache.fork(rows=[1, 0]), thirds.model.new_cache(2, 50)):
        with pytest.raises(ValueError, match="another cache"):
            other.restore(kept)
    cache.restore(kept)


def test_a_replay_leaves_rows_without_tokens_alone(thirds: Small) -> None:
    tokens, W = thirds.tokens, thirds.model.config.sliding_window
    cache = thirds.model.new_cache(2, 60)
    thirds.model(tokens[:50].repeat(2, 1), cache, lengths=[50, 40])
    thirds.model.replay(tokens[50 - W : 50].repeat(2, 1), cache, lengths=[W, 0])
    assert cache.window_start["decoder"][1] == 0
    logits = thirds.model(torch.stack([tokens[50:51], tokens[40:41]]), cache).logits
    check(thirds, logits[1], 40)


def test_a_cache_filled_without_a_draft_head_has_no_draft_windows(thirds: Small) -> None:
    assert thirds.model.mtp is None
    _, cache = feed(thirds.model, thirds.tokens, [20, 10])
    assert cache.window_start["draft"] == [30] and cache.window_start["decoder"] == [0]


def test_arguments_that_make_no_sense_are_refused(thirds: Small) -> None:
    with pytest.raises(ValueError, match="rollback = -1"):
        thirds.model.new_cache(1, 50, rollback=-1)
    with pytest.raises(ValueError, match="lsat"):
        thirds.model(thirds.tokens[None, :3], thirds.model.new_cache(1, 50), logits="lsat")
