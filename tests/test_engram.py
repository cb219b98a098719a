"""Engram: token map, hash constants, look-back, the host-resident table and the gate.

The expected values are the golden arrays, the released constants, or slow twins written here from the definitions with
Python integers and floats.
"""
from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn

from encoding import ASSISTANT, BOS, DSML, EOS, IMAGE, LATEST_REMINDER, SYSTEM, TASKS, THINK_END, THINK_START, USER
from engram import (DEAD, Engram, EngramIndex, EngramTable, NgramHash, TableRows, build_token_map, compress_ids,
                    engram_hashes, engram_multipliers, engram_primes, map_tensor, ngram_hashes, ngram_windows)
from golden_data import CHECKPOINT, golden, same_bits
from quant import Numerics, Ranks, to_bf16
from real_tokenizer import real_tokenizer_path

EXACT = Numerics(torch.float64)
RELEASED = json.loads((Path(__file__).parent / "data" / "engram.json").read_text())


def text_config(path: Path) -> SimpleNamespace:
    published = json.loads(path.read_text())
    return SimpleNamespace(**published["text_config"], image_token_id=published["image_token_id"])


def released_config() -> SimpleNamespace:
    return text_config(Path(__file__).parent.parent / "config.json")


def tiny_config() -> SimpleNamespace:
    return text_config(CHECKPOINT / "config.json")


def tiny_index() -> EngramIndex:
    config = tiny_config()
    return EngramIndex.of(config, build_token_map(CHECKPOINT / "tokenizer.json", config.engram_compressed_vocab_size))


def small_config(**changes: object) -> SimpleNamespace:
    """Sizes that differ pairwise: 3 streams, 64 channels, 2 columns of 32."""
    values = dict(hidden_size=64, hc_mult=3, rms_norm_eps=1e-20, engram_layer_ids=[1], engram_num_embeddings=[24],
                  engram_max_ngram_size=3, engram_vocab_size=10, engram_n_heads=1, engram_head_dim=32,
                  engram_pad_token_id=2, engram_compressed_vocab_size=7)
    return SimpleNamespace(**values | changes)


def random_engram(num: Numerics = EXACT, seed: int = 0, weight_gain: float = 1.0) -> Engram:
    """An Engram of `small_config` with random parameters of both signs; `weight_gain` scales q_weight."""
    g = torch.Generator().manual_seed(seed)
    config = small_config()
    module = Engram(config, 0, num)
    n, dim = config.hc_mult, config.hidden_size
    for name, shape in (("q_weight", (n, dim)), ("k_weight", (n, dim))):
        value = torch.randn(shape, generator=g) * (weight_gain if name == "q_weight" else 1.0)
        setattr(module, name, nn.Parameter(value.bfloat16(), requires_grad=False))
    wkv = torch.randn(module.wkv.weight.shape, generator=g).to(torch.float8_e4m3fn)
    module.wkv.weight = nn.Parameter(wkv, requires_grad=False)
    scale = torch.randint(120, 124, module.wkv.scale.shape, generator=g, dtype=torch.uint8)
    module.wkv.scale = nn.Parameter(scale.view(torch.float8_e8m0fnu), requires_grad=False)
    module.wkv.prepare()
    module.embed.attach(TableRows.of(*random_table(24, 32, g)))
    return module


def random_table(rows: int, head_dim: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    weight = (3 * torch.randn(rows, head_dim, generator=g)).to(torch.float8_e4m3fn)
    scale = torch.randint(121, 131, (rows, head_dim // 32), generator=g, dtype=torch.uint8)
    return weight, scale.view(torch.float8_e8m0fnu)


def table_values(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float() * scale.float().repeat_interleave(32, -1)).bfloat16()


# ---------------------------------------------------------------------------------------------------------- token map

def write_tokenizer(path: Path, tokens: list[str], byte_level: bool = False) -> Path:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    if byte_level:
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return path


def test_token_map_of_byte_level_tokens(tmp_path: Path) -> None:
    # spelled in the byte alphabet; "Ã" and "THÃ" end inside a character, "ï¬ģ" is the ligature fi, "Ìģ" a lone accent
    tokens = ["the", "The", "Ġthe", "Ġ", "ĠĠ", "Ċ", "Ã", "Ä", "THÃ", "thÃ", "ï¬ģ", "fi", "Ìģ", "AĊĠb", "aĠb"]
    keys = ["the", "the", "the", " ", " ", " ", "Ã", "Ä", "THÃ", "thÃ", "fi", "fi", "\u0301", "a b", "a b"]
    path = write_tokenizer(tmp_path / "tokenizer.json", tokens, byte_level=True)
    classes = list(dict.fromkeys(keys))  # in order of first appearance
    assert build_token_map(path, len(classes)).tolist() == [classes.index(key) for key in keys]


def test_token_map_folds_accents_and_case(tmp_path: Path) -> None:
    tokens = ["x", "É", "é", "e", "E\u0301", "Ｅ", "e e", " e\t", "e\r\n e", "\u0301", "\u0302", "", "  "]
    path = write_tokenizer(tmp_path / "tokenizer.json", tokens)
    #        x  the same letter     "e e" e  "e e" two lone accents, nothing, a space
    expected = [0, 1, 1, 1, 1, 1, 2, 1, 2, 3, 4, 5, 6]
    assert build_token_map(path, 7).tolist() == expected


def test_token_map_of_another_tokenizer_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["a", "A", "b"])
    assert build_token_map(path, 2).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match=r"has 2 Engram classes.* is 99092"):
        build_token_map(path, 99092)


@pytest.mark.parametrize("content", [None, "", "{}", "not JSON"])
def test_token_map_of_an_unreadable_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json is not a readable"):
        build_token_map(path, 2)


def test_token_map_of_the_golden_tokenizer() -> None:
    assert same_bits(tiny_index().token_map, golden("engram")["token_map"])


def test_real_tokenizer_has_99092_classes_and_the_released_rows(tmp_path: Path) -> None:
    token_map = build_token_map(real_tokenizer_path(tmp_path), 99092)
    assert len(token_map) == 129280
    digest = hashlib.sha256(token_map.numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == RELEASED["token_map_sha256_int32_le"]
    assert all(int(token_map[int(i)]) == c for i, c in RELEASED["token_map_samples"].items())
    index = EngramIndex.of(released_config(), token_map)
    example = RELEASED["example_real_tokenizer"]
    windows = ngram_windows(index.compress(torch.tensor([example["ids"]])), 4)
    assert index.rows(windows, 0)[0].tolist() == example["rows_layer_1"]
    assert index.rows(windows, 1)[0].tolist() == example["rows_layer_14"]


def test_shipped_tokenizer_has_the_special_tokens_and_loses_nothing() -> None:
    path = Path(__file__).parent.parent / "tiny" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    assert len(build_token_map(path, 1592)) == tokenizer.get_vocab_size() == 2048
    named = [BOS, EOS, SYSTEM, USER, ASSISTANT, LATEST_REMINDER, IMAGE, DSML, THINK_START, THINK_END]
    named += [f"<｜{task}｜>" for task in TASKS]
    assert all(len(tokenizer.encode(token).ids) == 1 for token in named)
    assert tokenizer.encode(BOS + EOS + "<｜▁pad▁｜>").ids == [0, 1, 2]
    odd = "  a\r\n\tb  ", "<｜User|> 你好 🙂 \0 1234567 \u0301", BOS + USER + "hi", "".join(map(chr, range(0x20, 0x3000)))
    for text in odd:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    token_map = torch.tensor([0, 1, 1, 2])
    assert compress_ids(torch.tensor([[0, 3, 2]]), token_map).tolist() == [[0, 2, 1]]
    for wrong in (-1, 4, 129280):
        with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary 0..3"):
            compress_ids(torch.tensor([[0, wrong, 1]]), token_map)


def test_image_positions_are_dead_whatever_their_id() -> None:
    dead = torch.tensor([[False, True, True, False]])
    assert compress_ids(torch.tensor([[3, 3, 0, 1]]), torch.tensor([5, 6, 7, 8]), dead).tolist() == [[8, DEAD, DEAD, 6]]


# ---------------------------------------------------------------------------------------------------------- constants

def test_primes_multipliers_and_table_sizes_are_the_released_ones() -> None:
    config = released_config()
    assert engram_primes(2, 4, 8, 16_000_000) == RELEASED["primes"]
    for layer, expected in zip(RELEASED["layer_ids"], RELEASED["multipliers"]):
        assert engram_multipliers(layer, 4, 99092) == expected
    hashes = engram_hashes(config)
    assert [h.rows for h in hashes] == RELEASED["num_embeddings"] == config.engram_num_embeddings
    assert [h.primes.tolist() for h in hashes] == RELEASED["primes"]
    assert [h.multipliers.tolist() for h in hashes] == RELEASED["multipliers"]


def test_constants_of_the_golden_checkpoint() -> None:
    expected = golden("engram")
    for i, h in enumerate(tiny_index().hashes):
        assert same_bits(h.primes, expected["primes"][i])
        assert same_bits(h.multipliers, expected["multipliers"][i])
        assert same_bits(h.offsets, expected["offsets"][i])


def test_primes_follow_the_walk_that_restarts_for_every_n() -> None:
    def is_prime(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))

    for layers, max_ngram, heads, size in ((2, 4, 3, 300), (3, 3, 2, 7), (1, 2, 1, 2)):  # 7 and 2 are primes themselves
        used, expected = set(), []
        for _ in range(layers):
            expected.append([])
            for _ in range(2, max_ngram + 1):
                current, sizes = size - 1, []
                while len(sizes) < heads:
                    current += 1
                    if is_prime(current) and current not in used:
                        used.add(current)
                        sizes.append(current)
                expected[-1].append(sizes)
        assert engram_primes(layers, max_ngram, heads, size) == expected


def test_a_table_size_that_is_not_the_sum_of_its_primes_is_refused() -> None:
    config = tiny_config()
    config.engram_num_embeddings = [1916, 2149]
    with pytest.raises(ValueError, match=r"layer 4 is 2149, but .* 2148"):
        engram_hashes(config)


def test_an_index_refuses_a_map_of_another_vocabulary() -> None:
    config = tiny_config()
    good = torch.arange(572)
    assert EngramIndex.of(config, good).pad == 2
    with pytest.raises(ValueError, match="0 to 572.* = 572"):
        EngramIndex.of(config, torch.arange(573))
    with pytest.raises(ValueError, match="-1 to 570"):
        EngramIndex.of(config, good - 1)
    with pytest.raises(ValueError, match="engram_pad_token_id = 2 .* 2 tokens"):
        EngramIndex.of(config, good[:2])


# ------------------------------------------------------------------------------------------------------------- hashes

def slow_rows(ids: list[int], position: int, multipliers: list[int], primes: list[list[int]], pad: int) -> list[int]:
    tokens, stopped = [], False
    for back in range(len(multipliers)):
        at = position - back
        stopped = stopped or at < 0 or ids[at] == DEAD
        tokens.append(pad if stopped else ids[at])
    rows, first = [], 0
    for n in range(2, len(multipliers) + 1):
        mixed = 0
        for token, multiplier in zip(tokens[:n], multipliers):
            mixed ^= token * multiplier
        for prime in primes[n - 2]:
            rows.append(mixed % prime + first)
            first += prime
    return rows


def released_hash() -> NgramHash:
    return NgramHash.of(RELEASED["multipliers"][0], RELEASED["primes"][0])


def test_hash_of_the_worked_example() -> None:
    example = RELEASED["example_compressed_ids"]
    ids, t = example["compressed_ids"], example["position"]
    rows = ngram_hashes(ngram_windows(torch.tensor([ids]), 4), released_hash(), 2)[0, t].tolist()
    assert rows[:3] + rows[-1:] == example["first_three_rows_and_last"]
    primes = sum(RELEASED["primes"][0], [])
    for column, gram in ((0, "hash_2gram"), (8, "hash_3gram"), (16, "hash_4gram")):
        assert rows[column] == example[gram] % primes[column] + sum(primes[:column])


def test_hashes_of_random_ids_with_dead_positions() -> None:
    rng = random.Random(1)
    ids = [[rng.choice([DEAD, rng.randrange(99092), rng.randrange(99092), 99091]) for _ in range(60)] for _ in range(3)]
    pad = 31337
    rows = ngram_hashes(ngram_windows(torch.tensor(ids), 4), released_hash(), pad)
    assert rows.shape == (3, 60, 24) and rows.dtype == torch.int64
    multipliers, primes = RELEASED["multipliers"][0], RELEASED["primes"][0]
    expected = [[slow_rows(row, t, multipliers, primes, pad) for t in range(60)] for row in ids]
    assert rows.tolist() == expected


def test_the_largest_compressed_id_does_not_overflow() -> None:
    for layer in range(40):
        multipliers = engram_multipliers(layer, 4, 99092)
        assert all(m % 2 == 1 and 0 < m * 99091 < 2**63 for m in multipliers)


def test_hashes_of_a_longer_and_a_shorter_ngram() -> None:
    for multipliers, primes in (([5, 3], [[7, 11]]), ([9, 7, 5, 3, 11], [[13], [17], [19], [23]])):
        ids = [4, DEAD, 8, 15, 16, 23, 42, 1]
        rows = ngram_hashes(ngram_windows(torch.tensor([ids]), len(multipliers)), NgramHash.of(multipliers, primes), 6)
        assert rows[0].tolist() == [slow_rows(ids, t, multipliers, primes, 6) for t in range(len(ids))]


def test_golden_rows() -> None:
    config, index = tiny_config(), tiny_index()
    for run in ("text", "short", "image"):
        arrays = golden(run)
        tokens = arrays["tokens"][None]
        windows = ngram_windows(index.compress(tokens, tokens == config.image_token_id), 4)
        for i, layer in enumerate(config.engram_layer_ids):
            assert same_bits(index.rows(windows, i)[0], arrays[f"layers.{layer}.engram_rows"]), (run, layer)


def test_chunks_of_3_1_3_and_single_tokens_look_back_across_their_borders() -> None:
    index = tiny_index()
    ids = torch.tensor([[5, 9, DEAD, 17, 40, 7, 501], [571, 0, 3, 2, 2, DEAD, 8]])
    whole = index.rows(ngram_windows(ids, 4), 0)
    for sizes in ((3, 1, 3), (1,) * 7, (2, 5)):
        history, parts = None, []
        for chunk in ids.split(sizes, 1):
            parts.append(index.rows(ngram_windows(chunk, 4, history), 0))
            before = torch.full((2, 3), DEAD) if history is None else history
            history = torch.cat([before, chunk], 1)[:, -3:]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_look_back_stops_at_an_image_span_and_stays_stopped() -> None:
    index = tiny_index()
    dead = torch.tensor([[False] * 4 + [True] * 2 + [False] * 6])
    one = index.compress(torch.tensor([[20, 21, 22, 23, 9, 9, 30, 31, 32, 33, 34, 35]]), dead)
    two = index.compress(torch.tensor([[50, 51, 52, 53, 9, 9, 30, 31, 32, 33, 34, 35]]), dead)  # other text before it
    a, b = (index.rows(ngram_windows(ids, 4), 0)[0] for ids in (one, two))
    assert torch.equal(a[4:], b[4:]) and not torch.equal(a[:4], b[:4])
    # after the span the sequence starts anew
    fresh = index.rows(ngram_windows(one[:, 6:], 4), 0)[0]
    assert torch.equal(a[6:], fresh)
    # a dead position is all pad; a live one right after the span keeps its own id
    all_pad = index.rows(torch.full((1, 4), index.pad), 0)[0]
    assert torch.equal(a[4], all_pad) and torch.equal(a[5], all_pad) and not torch.equal(a[6], all_pad)
    # one dead token blocks what lies beyond it although that is alive, and nothing nearer
    near, blocked = [7, 8, DEAD, 9], [7, 8, index.pad, index.pad]
    assert torch.equal(index.rows(torch.tensor(near), 0), index.rows(torch.tensor(blocked), 0))


def test_pad_is_the_class_of_the_pad_token() -> None:
    config = small_config(engram_compressed_vocab_size=3)
    index = EngramIndex.of(config, torch.tensor([0, 1, 1, 2]))  # token 2 is of class 1
    start = index.rows(ngram_windows(index.compress(torch.tensor([[3]])), 3), 0)
    pads = index.rows(ngram_windows(index.compress(torch.tensor([[1, 1, 3]])), 3), 0)[:, 2:]
    raw = index.rows(torch.tensor([[[2, 2, 2]]]), 0)
    assert index.pad == 1 and torch.equal(start, pads) and not torch.equal(start, raw)


# -------------------------------------------------------------------------------------------------------------- table

def test_gather_returns_the_values_of_each_row() -> None:
    weight, scale = random_table(50, 96, torch.Generator().manual_seed(3))
    table = EngramTable(50, 96)
    table.attach(TableRows.of(weight, scale))
    ids = torch.tensor([[[7, 49], [0, 7], [7, 7]], [[12, 11], [49, 3], [1, 0]]])
    values = table.gather(ids)
    assert values.shape == (2, 3, 2, 96)
    assert same_bits(values, table_values(weight, scale)[ids])
    assert table.gather(ids[:, :0]).shape == (2, 0, 2, 96)


class Spy:
    """An array that notes which rows were read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.ndim, self.read = array, array.shape, array.ndim, []

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        self.read.append(rows.tolist())
        return self.array[rows]


def test_gather_reads_each_row_once_and_in_file_order() -> None:
    rows = TableRows.of(*random_table(50, 32, torch.Generator().manual_seed(4)))
    spies = Spy(rows.weight), Spy(rows.scale)
    table = EngramTable(50, 32)
    table.attach(TableRows(*spies))
    table.gather(torch.tensor([[9, 3, 9], [41, 3, 0]]))
    assert [spy.read for spy in spies] == [[[0, 3, 9, 41]], [[0, 3, 9, 41]]]


@pytest.mark.parametrize("sharded", [False, True], ids=["published", "shards"])
def test_parts_of_the_ranks_sum_to_the_table(sharded: bool) -> None:
    g = torch.Generator().manual_seed(5)
    weight, scale = random_table(10, 32, g)
    padding = torch.zeros(2, 32).to(torch.float8_e4m3fn), torch.full((2, 1), 127, dtype=torch.uint8).view(scale.dtype)
    ids = torch.randint(10, (4, 5), generator=g)
    total, seen = torch.zeros(4, 5, 32), 0
    for rank in range(3):  # parts of 4, 4 and 2 + 2 of padding
        table = EngramTable(10, 32, Ranks(rank, 3))
        assert table.weight.shape == (4, 32) and table.scale.shape == (4, 1)
        if sharded:
            parts = [torch.cat([x.view(torch.uint8), p.view(torch.uint8)])[4 * rank: 4 * rank + 4].view(x.dtype)
                     for x, p in zip((weight, scale), padding)]
            table.attach(TableRows.of(*parts, first_row=4 * rank))
        else:
            table.attach(TableRows.of(weight, scale))
        part = table.gather(ids)
        here = (ids >= 4 * rank) & (ids < 4 * rank + 4)
        assert not part[~here].any()
        total, seen = total + part.float(), seen + here.int()
    assert (seen == 1).all()
    assert torch.equal(total.bfloat16(), table_values(weight, scale)[ids])


def test_rows_outside_the_table_are_refused() -> None:
    table = EngramTable(10, 32, Ranks(2, 3))
    with pytest.raises(ValueError, match="before its rows were attached"):
        table.gather(torch.tensor([0]))
    table.attach(TableRows.of(*random_table(10, 32, torch.Generator())))
    for wrong in (-1, 10):
        with pytest.raises(ValueError, match=f"{wrong}.* table of 10"):
            table.gather(torch.tensor([3, wrong]))


def test_attach_refuses_rows_that_do_not_fit() -> None:
    rows = TableRows.of(*random_table(10, 64, torch.Generator()))
    table = EngramTable(10, 64)
    with pytest.raises(ValueError, match=r"rows 0 to 10 .* are needed, but rows 1 to 11"):
        table.attach(TableRows(rows.weight, rows.scale, first_row=1))
    with pytest.raises(ValueError, match=r"but rows 0 to 9"):
        table.attach(TableRows(rows.weight[:9], rows.scale[:9]))
    with pytest.raises(ValueError, match=r"scale should be \[10, 2\], not \[9, 2\]"):
        table.attach(TableRows(rows.weight, rows.scale[:9]))
    with pytest.raises(ValueError, match=r"weight should be \[10, 64\], not \[10, 32\]"):
        table.attach(TableRows(rows.weight[:, :32], rows.scale))
    with pytest.raises(ValueError, match="engram_head_dim = 48"):
        EngramTable(10, 48)


def test_moving_and_casting_leave_the_table_where_it_is() -> None:
    module = random_engram()
    source = module.embed.source
    for moved in (module.to(torch.float64), module.to_empty(device="cpu"), module.half(), copy.deepcopy(module)):
        assert moved.embed.weight.is_meta and moved.embed.weight.dtype == torch.float8_e4m3fn
        assert moved.embed.scale.is_meta and moved.embed.scale.dtype == torch.float8_e8m0fnu
        assert moved.embed.source is source


def sparse_tensor_file(path: Path, name: str, dtype: str, rows: int, width: int, written: dict[int, bytes]) -> None:
    table = {"dtype": dtype, "shape": [rows, width], "data_offsets": [3, 3 + rows * width]}
    header = json.dumps({"other": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, name: table}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for row, content in written.items():
            file.seek(8 + len(header) + 3 + row * width)
            file.write(content)
        file.truncate(8 + len(header) + 3 + rows * width)


def test_the_last_row_of_a_98_gb_table_is_read_from_its_right_place(tmp_path: Path) -> None:
    rows = 384_006_168
    g = torch.Generator().manual_seed(6)
    weight, scale = random_table(3, 256, g)
    at = (0, 16_777_216, rows - 1)  # the second lies beyond 2**32 bytes
    codes = {row: bytes(weight[i].view(torch.uint8).tolist()) for i, row in enumerate(at)}
    scales = {row: bytes(scale[i].view(torch.uint8).tolist()) for i, row in enumerate(at)}
    sparse_tensor_file(tmp_path / "a.safetensors", "embed.weight", "F8_E4M3", rows, 256, codes)
    sparse_tensor_file(tmp_path / "b.safetensors", "embed.scale", "F8_E8M0", rows, 8, scales)  # in another file: legal
    assert (tmp_path / "a.safetensors").stat().st_size > 98e9  # on paper: a sparse file
    table = EngramTable(rows, 256)
    files = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    table.attach(TableRows.mapped(files[0], "embed.weight", files[1], "embed.scale"))
    values = table.gather(torch.tensor([rows - 1, 5, 0, 16_777_216, rows - 2]))
    assert same_bits(values[[2, 3, 0]], table_values(weight, scale))
    assert not values[[1, 4]].any()


def test_mapped_rows_equal_what_safetensors_reads() -> None:
    name = "layers.4.engram.embed."
    files = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    for part, dtype in (("weight", "F8_E4M3"), ("scale", "F8_E8M0")):
        path = CHECKPOINT / files[name + part]
        with safe_open(path, "pt") as file:
            expected = file.get_tensor(name + part).view(torch.uint8)
        assert np.array_equal(map_tensor(path, name + part, dtype), expected.numpy())


def test_map_tensor_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    save_file({"t": torch.zeros(4, 32).to(torch.float8_e4m3fn)}, str(path))
    with pytest.raises(ValueError, match="table.safetensors has no tensor u"):
        map_tensor(path, "u", "F8_E4M3")
    with pytest.raises(ValueError, match="t in .*table.safetensors is F8_E4M3, not F8_E8M0"):
        map_tensor(path, "t", "F8_E8M0")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="table.safetensors is cut short"):
        map_tensor(path, "t", "F8_E4M3")
    for junk in (b"", b"abc", b"plain text, not tensors", content[:20], b"\x02\0\0\0\0\0\0\0[]"):
        path.write_bytes(junk)
        with pytest.raises(ValueError, match="table.safetensors is not a readable safetensors file"):
            map_tensor(path, "t", "F8_E4M3")
    with pytest.raises(ValueError, match="missing.safetensors is not a readable"):
        map_tensor(tmp_path / "missing.safetensors", "t", "F8_E4M3")


# --------------------------------------------------------------------------------------------------------------- gate

def tiny_engram(layer: int, num: Numerics = EXACT) -> Engram:
    config = tiny_config()
    with torch.device("meta"):
        module = Engram(config, config.engram_layer_ids.index(layer), num)
    files = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]

    def stored(name: str) -> nn.Parameter:
        name = f"layers.{layer}.engram.{name}"
        with safe_open(CHECKPOINT / files[name], "pt") as file:
            return nn.Parameter(file.get_tensor(name), requires_grad=False)

    module.q_weight, module.k_weight = stored("q_weight"), stored("k_weight")
    module.wkv.weight, module.wkv.scale = stored("wkv.weight"), stored("wkv.scale")
    module.wkv.prepare()
    weight, scale = (f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale"))
    module.embed.attach(TableRows.mapped(CHECKPOINT / files[weight], weight, CHECKPOINT / files[scale], scale))
    return module


def test_golden_streams_are_reproduced_bit_for_bit() -> None:
    arrays = golden("text")
    module, seen = tiny_engram(4), {}
    module.register_forward_hook(lambda _, args, out: seen.update(zip(("in", "rows", "out"), (*args, out))))
    h, rows = arrays["layers.4.engram_in"][None], arrays["layers.4.engram_rows"][None]
    before = h.clone()
    module(h, rows)
    assert same_bits(seen["out"][0], arrays["layers.4.engram_out"])
    assert same_bits(seen["in"], before) and torch.equal(seen["rows"], rows)  # nothing changed in place


def test_a_zeroed_table_leaves_the_streams_alone_and_so_misses_the_golden() -> None:
    arrays = golden("text")
    module = tiny_engram(4)
    rows = module.embed.source
    module.embed.attach(TableRows(np.zeros_like(rows.weight), np.array(rows.scale)))
    h = arrays["layers.4.engram_in"][None]
    out = module(h, arrays["layers.4.engram_rows"][None])
    assert torch.equal(out, h)
    changed = (out[0] != arrays["layers.4.engram_out"]).float().mean()
    assert changed > 0.9


def slow_gated(h: Tensor, keys: Tensor, value: Tensor, q: Tensor, k: Tensor, eps: float) -> Tensor:
    """One token: h [N, D], keys [N, D], value [D], all in Python floats."""
    out = []
    for stream in range(len(h)):
        x, y, dim = h[stream].tolist(), keys[stream].tolist(), h.shape[1]
        dot = sum(a * qi * ki * b for a, qi, ki, b in zip(x, q[stream].tolist(), k[stream].tolist(), y))
        dot /= math.sqrt(sum(a * a for a in x) / dim + eps) * math.sqrt(sum(b * b for b in y) / dim + eps)
        dot /= math.sqrt(dim)
        root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
        gate = 1 / (1 + math.exp(-root))
        out.append([a + gate * v for a, v in zip(x, value.tolist())])
    return to_bf16(torch.tensor(out, dtype=torch.float64))


@pytest.mark.parametrize("gain", [1.0, 30.0, 2.0**-30], ids=["usual", "saturated", "below the floor"])
def test_gate_equals_its_definition(gain: float) -> None:
    module = random_engram(weight_gain=gain)
    g = torch.Generator().manual_seed(7)
    rows = torch.randint(24, (2, 5, 2), generator=g)
    projected = module.wkv(module.embed.gather(rows).flatten(-2))                 # [B, S, (N + 1) * D]
    keys, value = projected[..., :192].unflatten(-1, (3, 64)), projected[..., 192:]
    h = (2 * torch.randn(2, 5, 3, 64, generator=g)).bfloat16()
    h[1, 4] = 0  # a stream of zeros has a norm: eps
    if gain < 1:
        # against half the value the gate's distance from 1/2 is what is left over: 2.5e-4 at the floor, 0 without it
        h = (-0.5 * value).unsqueeze(-2).expand(2, 5, 3, 64).contiguous()
    out = module(h, rows)
    for b in range(2):
        for s in range(5):
            expected = slow_gated(h[b, s], keys[b, s], value[b, s], module.q_weight, module.k_weight, 1e-20)
            assert same_bits(out[b, s], expected)
    if gain < 1:
        left = out.double() / value.double().unsqueeze(-2)
        assert ((left.abs() - 2.5e-4).abs() < 1e-6)[value.unsqueeze(-2).expand_as(left) != 0].all()
        assert (left > 0).any() and (left < 0).any()


def test_shut_tokens_keep_their_streams_bit_for_bit() -> None:
    module = random_engram()
    g = torch.Generator().manual_seed(8)
    h = torch.randn(2, 4, 3, 64, generator=g).bfloat16()
    h[0, 1, :, :5] = -0.0
    h[1, 2, 0, 0] = float("nan")
    rows = torch.randint(24, (2, 4, 2), generator=g)
    shut = torch.tensor([[False, True, True, False], [False, False, True, True]])
    out, open_ = module(h, rows, shut), module(h, rows)
    assert same_bits(out[shut], h[shut])
    assert same_bits(out[~shut], open_[~shut]) and not torch.equal(open_[~shut], h[~shut])


def test_streams_of_two_ranks_equal_those_of_one() -> None:
    g = torch.Generator().manual_seed(9)
    h, rows = torch.randn(2, 4, 3, 64, generator=g).bfloat16(), torch.randint(24, (2, 4, 2), generator=g)
    whole, parts = random_engram(), [random_engram(), random_engram()]
    for rank, module in enumerate(parts):
        source = module.embed.source
        module.embed = EngramTable(24, 32, Ranks(rank, 2))
        module.embed.attach(source)

    class Adding(Ranks):  # stands for the all-reduce: adds what the other rank would send
        def sum(self, x: Tensor) -> Tensor:
            return x + parts[1 - self.rank].embed.gather(rows).flatten(-2).view(x.dtype)

    for module in (whole, *parts):
        module.embed.source.weight[::3, :9] = 0x80   # -0: a sum with another rank's 0 would lose the sign
    for rank, module in enumerate(parts):
        module.ranks = Adding(rank, 2)
        assert same_bits(module.look_up(rows, h.device), whole.look_up(rows, h.device))
        assert same_bits(module(h, rows), whole(h, rows))
    assert whole.look_up(rows, h.device).view(torch.int16).eq(-32768).any()


def test_exact_streams_do_not_depend_on_chunks_or_batch() -> None:
    arrays = golden("text")
    module = tiny_engram(4)
    h, rows = arrays["layers.4.engram_in"][None, :24], arrays["layers.4.engram_rows"][None, :24]
    whole = module(h, rows)
    one_by_one = torch.cat([module(h[:, t: t + 1], rows[:, t: t + 1]) for t in range(24)], 1)
    batch = module(torch.cat([h.flip(1), h]), torch.cat([rows.flip(1), rows]))
    assert same_bits(one_by_one, whole) and same_bits(batch[1:], whole)


def test_fast_streams_stay_within_a_rounding_of_exact() -> None:
    arrays = golden("text")
    h, rows = arrays["layers.4.engram_in"][None], arrays["layers.4.engram_rows"][None]
    exact, fast = tiny_engram(4)(h, rows), tiny_engram(4, Numerics(torch.float32))(h, rows)
    assert (exact == fast).float().mean() > 0.999
    assert torch.allclose(exact.float(), fast.float(), rtol=2**-7, atol=1e-6)
