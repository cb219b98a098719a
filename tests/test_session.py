"""Sessions on disk: what a file holds, what comes back, how exactly, and which files are refused."""
from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import convert
import session
from convert import load_model, write_random
from golden_data import CHECKPOINT, IMAGE, same_bits
from model import Cache, Transformer
from quant import FakeQuant, Ranks
from small_models import Small, feed, poison, same_state
from test_ced import FIRST, SECOND, W, Ced, Interrupt, ced, interrupted_at  # noqa: F401  (a fixture)
from test_generate import Cli, Result, cli, models  # noqa: F401

# (layers) (W - 1) + 1 replayed tokens leave all windows exact
EXACT = 7 * (W - 1) + 1


def images_before(ced: Ced, end: int) -> list[tuple[int, Any]]:
    return [(place, ced.image) for place in (FIRST, SECOND) if place + 17 <= end]


def saved(ced: Ced, end: int, file: Path, **options: Any) -> Cache:
    """A cache of the first `end` tokens, and its session file."""
    cache = ced.full(end)
    session.save(file, ced.model, cache, ced.ids[:end].tolist(), images_before(ced, end), **options)
    return cache


def stored(cache: Cache) -> dict[str, Tensor]:
    """The live state that no replay may touch."""
    return {name: rows for name, rows in cache.live_state(0).items() if not name.startswith("window")}


# ------------------------------------------------------------------------------------------------------------ resuming

@pytest.mark.parametrize("end", [88, 95, 79])
def test_with_windows_a_session_goes_on_bit_for_bit(ced: Ced, tmp_path: Path, end: int) -> None:
    """Even and odd lengths, and right after an image; drafts and rollback included. Global KV is a file's business, not
    the cache's: both go on from here independently."""
    cache = saved(ced, end, tmp_path / "s", with_windows=True, chat={"messages": ["é", None, 1.5]})
    back = Cache.load(tmp_path / "s", ced.model)
    assert back.tokens == ced.ids[:end].tolist() and back.chat == {"messages": ["é", None, 1.5]}
    assert [place for place, _ in back.images] == [FIRST, SECOND]
    assert all(image.digest == ced.image.digest for _, image in back.images)
    assert all(torch.equal(image.span, ced.image.span) for _, image in back.images)
    assert same_state(back.cache, cache) == [] and back.cache.window_start == cache.window_start
    poison(back.cache)
    if end >= 81:
        ced.check_drafts(back.cache)
    for row, logits in enumerate(feed(ced.model, ced.ids[end:], [1, 4], back.cache)[0]):
        ced.check(logits, end + row)
    feed(ced.model, ced.ids[end:], [1, 4], cache)
    assert same_state(back.cache, cache) == []


@pytest.mark.parametrize("end", [1, 2, 7, 8])
def test_sessions_of_at_most_a_window_are_exact_without_windows(ced: Ced, tmp_path: Path, end: int) -> None:
    cache = saved(ced, end, tmp_path / "s")
    back = session.load(ced.model, tmp_path / "s")
    assert same_state(back.cache, cache) == [] and back.cache.window_start["encoder"] == [0]
    for row, logits in enumerate(feed(ced.model, ced.ids[end:], [3], back.cache)[0]):
        ced.check(logits, end + row)


@pytest.mark.parametrize("length", [120, 97])
def test_a_replay_long_enough_makes_the_windows_exact(ced: Ced, tmp_path: Path, length: int) -> None:
    """The replay runs at true positions, through encoder and decoder, with the global KV as it was: then layer by layer
    W - 1 more rows are right. One token less is not enough."""
    ids = torch.randint(11, 600, (length + 9,), generator=torch.Generator().manual_seed(length))
    _, cache = feed(ced.model, ids, [length])
    cache.save(tmp_path / "s", ced.model, ids[:length].tolist())
    back = session.load(ced.model, tmp_path / "s", replay=EXACT).cache
    assert same_state(back, cache) == [] and back.window_start["encoder"] == [length - EXACT]
    short = session.load(ced.model, tmp_path / "s", replay=EXACT - 1).cache
    assert same_state(short, cache) and set(same_state(short, cache)) <= {"window.6", "window.7", "window.8"}
    want = feed(ced.model, ids[length:], [9], cache)[0]
    assert same_bits(feed(ced.model, ids[length:], [9], back)[0], want)


def test_a_resumed_session_is_approximate_and_what_it_was_given_is_exact(ced: Ced, tmp_path: Path) -> None:
    cache = saved(ced, 95, tmp_path / "s")
    back = session.load(ced.model, tmp_path / "s").cache
    assert back.window_start == {"encoder": [95 - W], "decoder": [95 - W], "draft": [95 - W]}
    differing = same_state(back, cache)
    assert differing == [f"window.{i}" for i in range(1, 9)]        # layer 0 reads embeddings: its rows are exact
    for name, rows in stored(cache).items():
        assert same_bits(stored(back)[name], rows), name
    logits = feed(ced.model, ced.ids[95:], [1, 3], back)[0]
    want = ced.twin()["logits"][95:99]
    assert logits.isfinite().all() and not same_bits(logits[0], want[0])


def test_the_replay_reads_global_kv_and_writes_none(ced: Ced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(ced, 95, tmp_path / "s")

    def refuse(*_: object) -> None:
        raise AssertionError("written")

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "write_compressed", refuse)
        plain = session.load(ced.model, tmp_path / "s").cache
    replay = Transformer.replay

    def tamper(model: Transformer, *args: Any, **options: Any) -> Any:
        out = replay(model, *args, **options)
        args[1].keys[3][0, 40, 0] ^= 1
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "replay", tamper)
        with pytest.raises(RuntimeError, match="the replay has changed the global KV"):
            session.load(ced.model, tmp_path / "s")
    # and it does read it: other main KV far behind the window gives other window rows
    tensors = contents(tmp_path / "s")
    tensors["main.3"][:40, :16] ^= 0x88          # the signs of 32 values
    write(tmp_path / "t", tensors, **facts_of(tmp_path / "s"))
    assert "window.4" in same_state(session.load(ced.model, tmp_path / "t").cache, plain)


def test_a_replay_that_fails_leaves_the_cache_as_it_was(ced: Ced) -> None:
    cache = ced.full(57)
    before = cache.fork()
    handle = interrupted_at(ced.model.layers[5].ffn, 1)
    ngrams = ced.model.engram_index.compress(ced.ids[None, :49])
    try:
        with pytest.raises(Interrupt):
            ced.model.replay(ced.ids[None, 49:57], cache, before=ngrams)
    finally:
        handle.remove()
    assert same_state(cache, before) == [] and cache.window_start == before.window_start


@pytest.mark.parametrize("count, before, sentence", [
    (31, None, r"replay got \[31\] tokens of rows that hold \[30\]"), (8, None, "replay needs `before`"),
    (8, torch.zeros(1, 2, dtype=torch.int64), "replay needs `before`")])
def test_replays_that_cannot_be_right_are_refused(ced: Ced, count: int, before: Tensor | None, sentence: str) -> None:
    cache = ced.full(13)
    feed(ced.model, ced.ids[31:48], [17], cache)
    with pytest.raises(ValueError, match=sentence):
        ced.model.replay(ced.ids[None, :count], cache, before=before)


# -------------------------------------------------------------------------------------------------------------- images

@pytest.mark.parametrize("end", [77, 79, 84])
def test_images_among_the_last_tokens_are_replayed_from_their_rows(ced: Ced, tmp_path: Path, end: int,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Right behind the image, two tokens later, and where only its last tokens are replayed. The pixels are not needed,
    nor are they in the file; saved again, it has the same bytes."""
    cache = saved(ced, end, tmp_path / "s")
    want = cache.fork()
    ngrams = ced.model.engram_index.compress(ced.ids[None, : end - W], torch.tensor([ced.types[: end - W]]) >= 0)
    ced.model.replay(ced.ids[None, end - W : end], want, images=ced.images.columns(end - W, end), before=ngrams)
    rows = contents(tmp_path / "s")["image_rows"]
    assert len(rows) == sum(kind == 1 for kind in ced.types[end - W : end]) and (end == 84 or len(rows) > 0)
    monkeypatch.setattr(Transformer, "encode_image", lambda *_: pytest.fail("an image was encoded"))
    back = session.load(ced.model, tmp_path / "s")
    assert same_state(back.cache, want) == []
    session.save(tmp_path / "t", ced.model, back.cache, back.tokens, back.images)
    assert contents(tmp_path / "t").keys() == contents(tmp_path / "s").keys()
    assert all(same_bits(rows, contents(tmp_path / "s")[name]) for name, rows in contents(tmp_path / "t").items())


def test_image_tokens_beyond_the_last_window_have_no_rows_to_replay(ced: Ced, tmp_path: Path) -> None:
    saved(ced, 84, tmp_path / "s")
    with pytest.raises(ValueError, match="the last 20 tokens have 9 image tokens, the file has the rows of 0 only"):
        session.load(ced.model, tmp_path / "s", replay=20)
    back = session.load(ced.model, tmp_path / "s")
    with pytest.raises(ValueError, match="needed again, but its pixels were not saved: send it again"):
        session.image_rows(ced.model, back.images[1][1], SECOND, SECOND)


# ------------------------------------------------------------------------------------------------------------ rollback

@pytest.mark.parametrize("rollback, reaches", [(None, 4), (2, 2), (20, 4)])
@pytest.mark.parametrize("taken", [0, 3])
def test_tokens_can_be_taken_back_as_far_as_before(ced: Ced, tmp_path: Path, taken: int, rollback: int | None,
                                                   reaches: int) -> None:
    """A cache from which `taken` tokens were taken back before it was saved, loaded with the same, a shorter and a
    longer rollback, at an odd length."""
    cache, tokens = ced.full(98), ced.ids[: 98 - taken].tolist()
    cache.truncate(98 - taken)
    session.save(tmp_path / "s", ced.model, cache, tokens, images_before(ced, 98), with_windows=True)
    limit = max(98 - 4, 98 - taken - reaches)
    for length in (98 - taken, limit):
        back = session.load(ced.model, tmp_path / "s", rollback=rollback).cache
        back.truncate(length)
        poison(back)
        assert same_state(back, ced.full(length)) == []
        for row, logits in enumerate(feed(ced.model, ced.ids[length:], [2], back)[0]):
            ced.check(logits, length + row)
    back = session.load(ced.model, tmp_path / "s", rollback=rollback).cache
    with pytest.raises(ValueError, match=f"cannot go back to {limit - 1} tokens"):
        back.truncate(limit - 1)


def test_a_longer_rollback_comes_with_new_tokens(ced: Ced, tmp_path: Path) -> None:
    saved(ced, 80, tmp_path / "s", with_windows=True)
    back = session.load(ced.model, tmp_path / "s", rollback=20).cache
    feed(ced.model, ced.ids[80:], [20], back)
    back.truncate(81)
    poison(back)
    assert same_state(back, ced.full(81)) == []


# ------------------------------------------------------------------------------------------------- other ways to load

def test_a_row_of_a_batch_after_a_bounded_prefill(ced: Ced, tmp_path: Path) -> None:
    """Its windows begin where the replay began, and so they do after loading."""
    cache = ced.model.new_cache(2)
    ids = torch.stack([ced.ids[31:60], ced.ids[31:60].flip(0)])
    ced.model.prefill(ids, cache, "bounded", [29, 24])
    session.save(tmp_path / "s", ced.model, cache, ids[1, :24].tolist(), row=1, with_windows=True)
    back = session.load(ced.model, tmp_path / "s").cache
    assert same_state(back, cache, 0, 1) == [] and back.window_start == {"encoder": [0], "decoder": [16], "draft": [16]}


def test_a_session_goes_between_models_with_and_without_draft_head(ced: Ced, tmp_path: Path) -> None:
    """A file made without drafts: with a draft head its windows are replayed, or empty when the others were saved."""
    plain = load_model(ced.directory, exact=True, device="cpu")
    ids = ced.ids[31:58]
    _, cache = feed(plain, ids, [27])
    cache.save(tmp_path / "w", plain, ids.tolist(), with_windows=True)
    cache.save(tmp_path / "s", plain, ids.tolist())
    assert not any(name.startswith(("window.7", "window.8")) for name in contents(tmp_path / "w"))
    back = Cache.load(tmp_path / "w", ced.model).cache
    assert back.window_start == {"encoder": [0], "decoder": [0], "draft": [27]}
    assert Cache.load(tmp_path / "s", ced.model).cache.window_start["draft"] == [27 - W]
    poison(back)
    drafted = ced.model.mtp.draft(ced.model, torch.tensor([11]), back)
    assert drafted.logits.isfinite().all()
    _, with_head = feed(ced.model, ids, [27])
    with_head.save(tmp_path / "h", ced.model, ids.tolist(), with_windows=True)
    want = feed(plain, ced.ids[:4], [4], cache)[0]
    assert same_bits(feed(plain, ced.ids[:4], [4], Cache.load(tmp_path / "h", plain).cache)[0], want)


@pytest.mark.parametrize("kind", ["fast", "bfloat16 rows"])
def test_other_numerics_have_sessions_of_their_own(thirds: Small, tmp_path: Path, kind: str) -> None:
    quant = FakeQuant(window_kv=False, main_kv=False, index_key=False) if kind != "fast" else FakeQuant()
    model = load_model(thirds.directory, exact=kind != "fast", device="cpu", fake_quant=quant)
    _, cache = feed(model, thirds.tokens, [47])
    cache.save(tmp_path / "s", model, thirds.tokens[:47].tolist(), with_windows=True)
    back = session.load(model, tmp_path / "s").cache
    assert same_state(back, cache) == []
    one, other = (feed(model, thirds.tokens[47:], [1, 5], held)[0] for held in (back, cache))
    assert same_bits(one, other)
    sentence = "other numerics: fast, and this one is exact" if kind == "fast" else (
        "other numerics: exact without window_kv without main_kv without index_key, and this one is exact")
    with pytest.raises(ValueError, match=f"s was saved by a model of {sentence}$"):
        session.load(thirds.model, tmp_path / "s")


# ------------------------------------------------------------------------------------------------------------ the file

def contents(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}


def facts_of(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as opened:
        return json.loads(json.loads(opened.metadata()["session"])["facts"])


def write(file: Path, tensors: dict[str, Tensor], **facts: Any) -> None:
    """A session file with these facts, whose digest is right."""
    text = json.dumps(facts)
    save_file(tensors, file, {"session": json.dumps({"facts": text, "sha256": session.digest(text, tensors)})})


def test_a_file_holds_global_kv_and_little_else(ced: Ced, tmp_path: Path) -> None:
    """Per token: the packed rows, an id of four bytes and a type of one. Windows add a constant."""
    sizes = {}
    for end in (44, 58):
        saved(ced, end, tmp_path / "s")
        assert {name.split(".")[0] for name in contents(tmp_path / "s")} == {
            "tokens", "types", "main", "index_key", "kv", "score", "image_rows"}
        sizes[end] = sum(t.nbytes for t in contents(tmp_path / "s").values())
    cache = ced.full(2)
    per_token = (cache.main_rows.bytes + cache.key_rows.bytes) * (1 + 1 / 2)
    assert sizes[58] - sizes[44] == 14 * (per_token + 4 + 1)
    size = (tmp_path / "s").stat().st_size
    saved(ced, 58, tmp_path / "s", with_windows=True)
    depth = W - 1 + 4
    assert 0 < (tmp_path / "s").stat().st_size - size - (7 * depth + 2 * (depth + 1)) * cache.window_rows.bytes < 2000


def test_a_file_that_is_cut_off_anywhere_is_refused(ced: Ced, tmp_path: Path) -> None:
    saved(ced, 33, tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    for size in [0, 1, 7, 8, 100, *range(200, len(whole), len(whole) // 12), len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"/cut.*(is cut off or damaged|not a safetensors file)"):
            session.load(ced.model, tmp_path / "cut")
    (tmp_path / "cut").write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="cut off or damaged"):
        session.load(ced.model, tmp_path / "cut")


def test_a_file_with_one_wrong_byte_is_refused(ced: Ced, tmp_path: Path) -> None:
    """In the header, the facts or the rows: no wrong byte is taken for a session."""
    saved(ced, 33, tmp_path / "s", chat={"text": "hello"})
    whole = bytearray((tmp_path / "s").read_bytes())
    header = int.from_bytes(whole[:8], "little")
    for at in [*range(10, 8 + header, 97), *range(8 + header, len(whole), len(whole) // 40), len(whole) - 1]:
        if at < 8 + header and whole[at] == 0x20:        # padding of the header says nothing
            continue
        damaged = bytearray(whole)
        damaged[at] ^= 4
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged|or damaged|not a session|not a safetensors|do not fit its"):
            session.load(ced.model, tmp_path / "damaged")


def other_checkpoint(ced: Ced, tmp_path: Path, seed: int, **changes: Any) -> Transformer:
    config = json.loads((ced.directory / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_random(tmp_path / "config.json", tmp_path / "other", seed, CHECKPOINT)
    return load_model(tmp_path / "other", exact=True, device="cpu")


def test_sessions_of_other_models_are_refused(ced: Ced, tmp_path: Path) -> None:
    saved(ced, 33, tmp_path / "s")
    with pytest.raises(ValueError, match="s was saved by a model of other weights$"):
        session.load(other_checkpoint(ced, tmp_path, 4), tmp_path / "s")
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(ValueError, match="s was saved by a model of other configuration$"):
        session.load(other_checkpoint(ced, tmp_path, 3, routed_scaling_factor=2.0), tmp_path / "s")
    shutil.copytree(ced.directory, tmp_path / "moved")
    assert len(session.load(load_model(tmp_path / "moved", exact=True, device="cpu"), tmp_path / "s").tokens) == 33


@pytest.mark.parametrize("make, sentence", [
    (lambda file: None, "is missing"), (lambda file: file.write_text("hello"), "is not a safetensors file"),
    (lambda file: shutil.copy(min(CHECKPOINT.glob("*.safetensors")), file), "is not a session file"),
    (lambda file: write(file, {"tokens": torch.zeros(1)}, format="session 7", length=1),
     "is a session file of another version, 'session 7'"),
    (lambda file: save_file({"tokens": torch.zeros(1)}, file, {"session": "[1"}), "is damaged: "),
    (lambda file: file.mkdir(), "cannot be read: Is a directory")])
def test_files_that_are_no_session_are_refused(ced: Ced, tmp_path: Path, make: Callable[[Path], Any],
                                               sentence: str) -> None:
    make(tmp_path / "s")
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / 's'))} {sentence}"):
        session.load(ced.model, tmp_path / "s")


def test_a_session_longer_than_the_cache_may_be_is_refused(ced: Ced, tmp_path: Path) -> None:
    saved(ced, 33, tmp_path / "s")
    with pytest.raises(ValueError, match="s holds 33 tokens, more than max_length = 32$"):
        session.load(ced.model, tmp_path / "s", max_length=32)
    assert session.load(ced.model, tmp_path / "s", max_length=33).cache.max_length == 33


@pytest.mark.parametrize("tokens, images, sentence", [
    (32, [], "a session of 32 tokens does not fit a cache that holds 33"),
    (33, [17], "an image span at positions 17 to 33 does not fit into 33 tokens"),
    (33, [3, 14], "an image span at positions 14 to 30 does not fit into 33 tokens")])
def test_what_does_not_fit_the_cache_is_not_saved(ced: Ced, tmp_path: Path, tokens: int, images: list[int],
                                                  sentence: str) -> None:
    cache = ced.full(33)
    with pytest.raises(ValueError, match=sentence):
        session.save(tmp_path / "s", ced.model, cache, [11] * tokens, [(place, ced.image) for place in images])
    with pytest.raises(ValueError, match="nothing to save"):
        session.save(tmp_path / "s", ced.model, ced.model.new_cache(), [])
    assert not (tmp_path / "s").exists()


def test_saving_is_atomic(ced: Ced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up or a process that dies half way leaves the file of before, and nothing else."""
    saved(ced, 33, tmp_path / "s")
    before = (tmp_path / "s").read_bytes()
    cache = ced.full(44)
    for name, error, raised in (("fsync", OSError(28, "No space left on device"), ValueError),
                                ("replace", KeyboardInterrupt(), KeyboardInterrupt)):
        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(convert.os, name, fail)
            with pytest.raises(raised) as caught:
                session.save(tmp_path / "s", ced.model, cache, ced.ids[:44].tolist(), images_before(ced, 44))
        assert name != "fsync" or str(caught.value) == f"{tmp_path / 's'} cannot be written: No space left on device"
        assert (tmp_path / "s").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["s"]
    with pytest.raises(ValueError, match="cannot be written"):
        session.save(tmp_path / "no" / "folder" / "s", ced.model, cache, ced.ids[:44].tolist(), images_before(ced, 44))


def test_of_several_ranks_the_first_writes(ced: Ced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ced.full(33)
    monkeypatch.setattr(ced.model, "ranks", Ranks(1, 2))
    session.save(tmp_path / "s", ced.model, cache, ced.ids[:33].tolist(), images_before(ced, 33))
    assert not (tmp_path / "s").exists()


def test_a_model_that_came_from_no_checkpoint_has_no_sessions(ced: Ced, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ced.model, "checkpoint", None)
    with pytest.raises(ValueError, match="weights that were loaded from a checkpoint; this model was not"):
        session.save(tmp_path / "s", ced.model, ced.full(33), ced.ids[:33].tolist(), images_before(ced, 33))


def test_the_commands_refuse_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    def at_once(*_: Any) -> None:
        raise AssertionError("loaded before the arguments were checked")
    monkeypatch.setattr(session, "load_model", at_once)
    here, beyond = ["--ckpt-path", str(CHECKPOINT)], "are more than the model's context of 512"
    numbers = "--contexts, --prompt-tokens and --decode take numbers of 1 or more"
    for arguments, sentence in ((["gap", "--ckpt-path", str(tmp_path / "none")], "there is no folder"),
                                (["cost", "--config", str(tmp_path / "none")], "there is no configuration at"),
                                (["cost", "--contexts", "many"], numbers), (["gap", "--prompt-tokens", "0"], numbers),
                                (["cost", "--contexts", "4096,many"], numbers), ([], "the following arguments are required"),
                                (["gap", "--bogus"], "unrecognized arguments: --bogus"),
                                (["cost", "--contexts", "2000000"], "--contexts: 2,000,000 tokens are more"),
                                (["gap", *here, "--prompt-tokens", "449"],
                                 f"--prompt-tokens: 449 tokens and 64 decoded tokens {beyond}"),
                                (["prefill", *here, "--prompt-tokens", "513"], f"--prompt-tokens: 513 tokens {beyond}"),
                                (["time", *here, "--contexts", "8,510", "--decode", "2"],
                                 f"--contexts: 510 tokens and 3 decoded tokens {beyond}")):
        assert session.main(arguments) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith(f"error: {sentence}") and captured.err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------- chat

def chat(cli: Cli, *lines: str, arguments: tuple[Any, ...] = ()) -> Result:  # noqa: F811
    """Sampled answers of six tokens, so that the random stream counts too."""
    options = ("--exact", "--temperature", 1, "--seed", 5, "--max-new-tokens", 6, *arguments)
    return cli(*options, stdin="".join(line + "\n" for line in lines).encode())


@pytest.fixture(scope="module")
def uninterrupted() -> dict[tuple[str, ...], Result]:
    """Chats without a break, by their lines."""
    return {}


FIRST_HALF = ("/system be kind", "hello", f"/image {IMAGE}", "look", "tell me")
SECOND_HALF = ("and then?", f"/image {IMAGE}", "like this?")


@pytest.mark.parametrize("way", ["/save and /load", "--session"])
def test_a_chat_goes_on_another_day(cli: Cli, uninterrupted: dict, tmp_path: Path, way: str) -> None:  # noqa: F811
    """With its windows: the same answers as without the break, and as much of the history reused."""
    lines, file = (*FIRST_HALF, *SECOND_HALF), tmp_path / "it's a session"
    whole = uninterrupted[lines] = uninterrupted.get(lines) or chat(cli, *lines)
    if way == "--session":
        options = ("--with-windows", "--session", file)
        halves = chat(cli, *FIRST_HALF, arguments=options), chat(cli, *SECOND_HALF, arguments=options)
    else:
        halves = (chat(cli, *FIRST_HALF, f'/save "{file}"', arguments=("--with-windows",)),
                  chat(cli, "/think on", f"/load {file}", *SECOND_HALF))
        assert re.search(r"\[\d+ tokens saved to .*it's a session\]", halves[0].err)
    assert all(half.code == 0 and "error" not in half.err for half in halves)
    assert whole.out == "".join(half.out for half in halves) and len(whole.cached) == 5
    assert whole.cached == [line for half in halves for line in half.cached]
    assert re.search(r"it's a session: 6 messages, \d+ tokens\]", halves[1].err)


def test_a_chat_resumed_without_windows_rereads_nothing(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    first = chat(cli, *FIRST_HALF, f"/save {tmp_path / 's'}")
    resumed = chat(cli, f"/load {tmp_path / 's'}", SECOND_HALF[0])
    assert resumed.cached[0][1] == first.cached[-1][0] + 5      # all but the last token, which has not been fed
    assert resumed.cached[0][0] < resumed.cached[0][1] + 16


def test_a_thinking_chat_is_saved_where_its_next_prompt_takes_it_up(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    first = ("/think on", "hello", "why?")
    whole = chat(cli, *first, "so?")
    for options in ((), ("--with-windows",)):
        chat(cli, *first, f"/save {tmp_path / 's'}", arguments=options)
        resumed = chat(cli, f"/load {tmp_path / 's'}", "so?")
        assert resumed.cached[0][:2] == whole.cached[2][:2] and resumed.cached[0][1] > 0
    assert whole.out.endswith(resumed.out)


def test_an_image_whose_pixels_were_not_saved_has_to_be_sent_again(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    chat(cli, *FIRST_HALF, f"/save {tmp_path / 's'}")
    result = chat(cli, f"/load {tmp_path / 's'}", "/system be brief", "and?", "/clear", "and?")
    assert result.err.count("error: an image of the resumed session would have to be read again") == 1
    assert len(result.cached) == 1 and result.code == 0


def test_sessions_that_cannot_be_leave_the_chat_going(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "text").write_text("no session")
    bad = {"/save": "/save needs the name of a file", "/load": "/load needs the name of a file",
           f"/save {tmp_path}/early": "there is nothing to save", f"/load {tmp_path}/none": "none is missing",
           f"/load {tmp_path}/text": "text is not a safetensors file"}
    result = chat(cli, *bad, "hello", f"/save {tmp_path}/no/folder", "bye")
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    for error, sentence in zip(errors, (*bad.values(), "folder cannot be written"), strict=True):
        assert sentence in error
    assert [line[0] > 0 for line in result.cached] == [True, True] and not (tmp_path / "early").exists()
    refused = chat(cli, "hello", arguments=("--session", tmp_path / "text"))
    assert refused.code == 1 and refused.err.splitlines()[-1].startswith("error: ") and refused.out == ""
    refused = chat(cli, arguments=("--session", tmp_path / "s", "--prompt", "hello"))
    assert refused.code == 1 and refused.err == "error: --session needs a chat\n"


def test_what_is_no_session_file_is_never_written_over(ced: Ced, tmp_path: Path) -> None:
    cache, tokens = ced.full(6), ced.ids[:6].tolist()
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    for target, sentence in ((kept, "no session file"), (Path("/dev/null"), "no session file"),
                             (tmp_path / "no" / "folder.session", "there is no folder")):
        with pytest.raises(ValueError, match=sentence):
            cache.save(target, ced.model, tokens)
    assert kept.read_text() == "mine" and not (tmp_path / "no").exists()
    link, target = tmp_path / "link", tmp_path / "real.session"
    link.symlink_to(target)
    for _ in range(2):
        cache.save(link, ced.model, tokens)
    assert link.is_symlink() and target.stat().st_size > 1000
