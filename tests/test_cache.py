"""What the cache stores, how it grows and what it says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from golden_data import same_bits
from model import Cache, ModelConfig, Transformer
from quant import E2M1_E4M3, E2M1_E8M0, E4M3_E8M0, FakeQuant, Numerics, fake_quantise
from small_models import Small, feed, feed_rows, same_state

CPU = torch.device("cpu")
RELEASED = ModelConfig.from_json(Path(__file__).parent.parent / "config.json")


def fill(cache: Cache, tokens: int, seed: int = 0) -> None:
    """Append random rows for so many tokens by the cache's own methods, as a forward does."""
    g = torch.Generator().manual_seed(seed)
    chunk = cache.chunk([tokens], tokens, "encoder")
    for source in cache.main:
        ratio = cache.plans[source].ratio
        groups = chunk.ends[0] // ratio - chunk.starts[0] // ratio
        main, keys = (
            torch.randn(1, groups, codec.width, generator=g).bfloat16() for codec in (cache.main_rows, cache.key_rows)
        )
        cache.write_compressed(source, chunk, cache.main_rows.pack(main), cache.key_rows.pack(keys))
    cache.commit(chunk)


def storage(cache: Cache) -> int:
    """Bytes that the global KV's storages really have."""
    return sum(t.untyped_storage().nbytes() for store in (cache.main, cache.keys) for t in store.values())


def test_global_kv_of_the_released_model_is_890_bytes_per_token() -> None:
    """Measured on the storage after appending: 288 + 68 bytes a row, one row a token and three of half that."""
    cache = Cache(RELEASED, Numerics(), 1, 4096, CPU)
    fill(cache, 1000)
    assert cache.nbytes("global") == 890 * 1000
    fill(cache, 24)
    assert cache.lengths == [1024] and cache.nbytes("global") == storage(cache) == 890 * 1024
    rows = {source: (t.shape[1], t.shape[2], t.dtype) for source, t in cache.main.items()}
    assert rows == {
        2: (512, 288, torch.uint8),
        8: (512, 288, torch.uint8),
        14: (512, 288, torch.uint8),
        20: (1024, 288, torch.uint8),
    }
    assert {t.shape[2] for t in cache.keys.values()} == {68} and {t.dtype for t in cache.keys.values()} == {torch.uint8}


def test_rows_that_are_not_quantised_cost_what_bfloat16_costs() -> None:
    for off, per_token in ((dict(main_kv=False), 2.5 * (1024 + 68)), (dict(index_key=False), 2.5 * (288 + 256))):
        cache = Cache(RELEASED, Numerics(fake_quant=FakeQuant(**off)), 1, 4096, CPU)
        fill(cache, 512)
        assert cache.nbytes("global") == storage(cache) == per_token * 512


def test_local_state_of_the_released_model() -> None:
    """Rings of W - 1 + R rows of 528 bytes in 40 layers, W + R in the draft head; open groups of 1 + R in float32
    for the three ratio-2 sources; 3 + R token ids."""
    cache = Cache(RELEASED, Numerics(), 1, 1 << 20, CPU)
    R = RELEASED.dspark_block_size
    window, draft = 40 * (127 + R) * 528, 3 * (128 + R) * 528
    groups, ids = 3 * 2 * (1 + R) * 512 * 4, (3 + R) * 8
    assert cache.nbytes("used") == cache.nbytes("allocated") == window + draft + groups + ids
    assert sum(t.untyped_storage().nbytes() for t in cache.rings.values()) == cache.nbytes("used")
    assert cache.nbytes("global") == 0 and storage(cache) == 0  # max_length is a limit, not an allocation


def test_storage_grows_in_steps_and_keeps_what_it_holds() -> None:
    cache = Cache(RELEASED, Numerics(), 1, 100_000, CPU)
    seen, before = [], torch.empty(0, 288, dtype=torch.uint8)
    for step in range(60):
        fill(cache, 97, seed=step)
        now = cache.main[20][0, : cache.lengths[0]].clone()
        assert torch.equal(now[: len(before)], before)
        before = now
        seen.append(cache.main[20].shape[1])
        assert (
            cache.nbytes("allocated")
            >= cache.nbytes("used")
            >= cache.nbytes("global")
            == 890 * cache.lengths[0] - odd(cache)
        )
    assert len(set(seen)) < 20 and all(a <= b for a, b in zip(seen, seen[1:]))  # not at every append
    assert seen[-1] < 1.5 * cache.lengths[0]


def odd(cache: Cache) -> int:
    """Bytes that the open groups of an odd length have not come to: half a row of three sources."""
    return 3 * 356 // 2 if cache.lengths[0] % 2 else 0


def test_capacity_stops_at_the_limit() -> None:
    cache = Cache(RELEASED, Numerics(), 1, 300, CPU)
    fill(cache, 257)
    assert cache.main[20].shape[1] == 300 and cache.main[2].shape[1] == 150
    with pytest.raises(ValueError, match="row 0 would hold 301 tokens, but this cache was made for max_length = 300"):
        cache.chunk([44], 44, "encoder")


def test_bytes_of_a_batch_count_each_row(thirds: Small) -> None:
    cache = thirds.model.new_cache(3)
    feed_rows(thirds.model, [thirds.tokens[:n] for n in (7, 60, 0)], cache)
    main, key = cache.main_rows.bytes, cache.key_rows.bytes
    assert (main, key) == (16 + 2, 16 + 1)
    assert cache.nbytes("global") == (main + key) * (7 // 3 + 7 + 60 // 3 + 60)
    cache.truncate([7, 57, 0])
    assert cache.nbytes("global") == (main + key) * (7 // 3 + 7 + 57 // 3 + 57)


def test_stored_rows_are_quantised_once(thirds: Small) -> None:
    """Window rows, main KV and index keys unpack to values that their quantiser does not change any more (the main KV
    where its scale is a normal number), and to what the twin computed."""
    _, cache = feed(thirds.model, thirds.tokens, [60])
    state = cache.live_state(0)
    for name, codec, fmt in (("window.4", cache.window_rows, E4M3_E8M0), ("index_key.3", cache.key_rows, E2M1_E8M0)):
        rows = codec.unpack(state[name]).bfloat16()
        assert same_bits(fake_quantise(rows, fmt), rows)
    want = thirds.twin["layers.4.window_kv"][60 - 8 : 60]
    assert same_bits(cache.window_rows.unpack(state["window.4"]).bfloat16(), want)
    main = cache.main_rows.unpack(state["main.1"]).bfloat16()
    assert same_bits(main, thirds.twin["layers.1.main_kv"][:20]) and cache.main_rows.fmt is E2M1_E4M3


def test_live_state_is_all_that_later_tokens_read(thirds: Small, tiny: Transformer) -> None:
    """Its entries and their lengths, position by position in order."""
    _, cache = feed(thirds.model, thirds.tokens, [4, 28])
    state = {name: tuple(value.shape) for name, value in cache.live_state(0).items()}
    ring = {f"window.{i}": (8, 33) for i in range(5)}
    groups = {"kv.1": (32 % 3, 32), "score.1": (32 % 3, 32)}
    assert state == {
        "length": (),
        **ring,
        **groups,
        "main.1": (10, 18),
        "main.3": (32, 18),
        "index_key.1": (10, 17),
        "index_key.3": (32, 17),
    }
    assert int(cache.live_state(0)["length"]) == 32
    _, cache = feed(tiny, torch.arange(20, 40), [20])
    assert torch.equal(cache.live_state(0)["ngram"], tiny.engram_index.compress(torch.arange(37, 40)))
    _, cache = feed(tiny, torch.arange(20, 40), [2])
    assert cache.live_state(0)["ngram"].shape == (2,) and cache.live_state(0)["window.0"].shape[0] == 2


def test_live_state_differs_when_any_token_does(thirds: Small) -> None:
    other = thirds.tokens.clone()
    other[35] += 1
    a, b = feed(thirds.model, thirds.tokens, [40])[1], feed(thirds.model, other, [40])[1]
    assert {"window.0", "main.1", "index_key.1", "main.3"} <= set(same_state(a, b))


def test_rings_are_replaced_and_never_written_in_place(thirds: Small) -> None:
    """What snapshots and forks rely on."""
    _, cache = feed(thirds.model, thirds.tokens, [20])
    kept = dict(cache.rings)
    bits: dict[tuple, Tensor] = {key: ring.clone() for key, ring in kept.items()}
    feed(thirds.model, thirds.tokens[20:], [1, 7], cache)
    for key, ring in kept.items():
        assert same_bits(ring, bits[key])
        assert cache.rings[key] is not ring or cache.plans[key[1]].part == "draft"
