"""generate.py without the chat: the loop and its stops, prompts and files, text, benchmark, errors."""
from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

import generate as cli_module
import pytest
import torch
from convert import check_context, load_model
from dspark import PlainDecoder, Sampler
from encoding import EOS, THINK_END
from benchmark import CountOperations, PartTimer, random_model
from generate import Event, Prompt, Screen, TextStream, generate, main, show_answer, to_text
from golden_data import CHECKPOINT, IMAGE, golden, same_bits
from model import Cache, Experts, ModelConfig, Transformer
from quant import Linear, Numerics
from PIL import Image
from tokenizers import Tokenizer
from tqdm import tqdm
from vision import load_image


PARALLEL = str(Path(__file__).parent / "configs" / "parallel.json")


# ------------------------------------------------------------------------------------------- running the command line

@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def cached(self) -> list[tuple[int, int, int]]:
        """(prompt, cached, answer) tokens of each line of statistics."""
        lines = [line for line in self.err.splitlines() if line.startswith("[prompt ")]
        return [(int(w[1]), int(w[2].strip("(")), int(w[5])) for w in (line.split() for line in lines)]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def models(tiny: Transformer) -> Callable[[bool, bool], Transformer]:
    """The golden checkpoint, loaded once for each way of running it."""
    made = {(True, False): tiny}

    def get(exact: bool, draft: bool = False) -> Transformer:
        if (exact, draft) not in made:
            made[exact, draft] = load_model(CHECKPOINT, exact, "cpu", draft=draft)
        return made[exact, draft]
    return get


@pytest.fixture
def cli(models: Callable[[bool, bool], Transformer], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Calls main() in this process with pipes for stdin, stdout and stderr, and with a model that is loaded already."""
    def run(*arguments: Any, stdin: bytes = b"") -> Result:
        given = {"stdin": stdin, "stdout": b"", "stderr": b""}
        streams = {name: io.TextIOWrapper(io.BytesIO(data)) for name, data in given.items()}
        with monkeypatch.context() as patch:
            patch.setattr(cli_module, "load_model", lambda path, exact, device, draft=False, **_: models(exact, draft))
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = main(["--ckpt-path", str(CHECKPOINT), *map(str, arguments)])
        for stream in streams.values():
            stream.flush()
        return Result(code, *(streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr")))
    return run


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def rows_of(events: Any) -> tuple[dict[int, list[int]], dict[int, str]]:
    tokens: dict[int, list[int]] = {}
    stops: dict[int, str] = {}
    for row, new, stop in events:
        assert row not in stops and new, "nothing may follow a row's end, and no event is empty"
        tokens.setdefault(row, []).extend(new)
        if stop is not None:
            stops[row] = stop
    return tokens, stops


class InRuns(PlainDecoder):
    """Chooses as the plain decoder does, but hands out runs of several tokens, as accepted drafts come."""

    def __init__(self, model: Transformer, size: int) -> None:
        super().__init__(model, Sampler())
        self.size = size

    def step(self, cache: Cache, pending: list[int], active: list[bool], room: list[int]) -> list[list[int]]:
        runs: list[list[int]] = [[] for _ in pending]
        for _ in range(self.size):
            for row, tokens in enumerate(super().step(cache, pending, active, room)):
                runs[row] += tokens
            pending = [run[-1] if run else token for run, token in zip(runs, pending)]
        return runs


# ------------------------------------------------------------------------------------------------------------- the loop

def test_greedy_answers_are_the_recorded_ones(tiny: Transformer) -> None:
    for run, stop, length in (("text", "length", 25), ("short", "eos", 8)):  # the short one comes to an end of sequence
        recorded, n = golden(run)["tokens"].tolist(), int(golden(run)["prompt_length"])
        tokens, stops = rows_of(generate(tiny, [recorded[:n]], temperature=0, max_new_tokens=25))
        assert tokens[0] == recorded[n : n + length] and stops == {0: stop}


def test_image_prompt_is_the_recorded_one(tiny: Transformer) -> None:
    recorded, n = golden("image")["tokens"].tolist(), int(golden("image")["prompt_length"])
    place, image = recorded.index(tiny.config.image_token_id), load_image(IMAGE, tiny.config.vision_config)
    marked = recorded[: place + 1] + recorded[place + len(image.span) : n]  # one placeholder
    prompt = Prompt.expand(marked, [place], [image])
    assert prompt.ids == recorded[:n]
    for held in (0, 10, 30, 38):  # before, inside and behind the span, which is 21..37: the rest follows in one chunk
        cache = tiny.new_cache()
        if held:
            given = cli_module.image_tokens(tiny, [prompt], [0])
            tiny(torch.tensor([prompt.ids[:held]]), cache, images=given.columns(0, held), logits="none")
        tokens, _ = rows_of(generate(tiny, [prompt], cache, temperature=0, max_new_tokens=2))
        assert tokens[0] == recorded[n : n + 2], held
    with pytest.raises(ValueError, match="1 image placeholders for 2 images"):
        Prompt.expand(marked, [place], [image, image])


def test_rows_of_a_ragged_batch_are_as_alone(tiny: Transformer, golden_text: dict[str, torch.Tensor]) -> None:
    text = golden_text["tokens"].tolist()
    prompts = [text[:64], golden("short")["tokens"].tolist()[:5], text[:3]]  # the second ends after 8 tokens
    tokens, stops = rows_of(generate(tiny, prompts, temperature=0, max_new_tokens=9))
    assert stops == {0: "length", 1: "eos", 2: "length"}
    for row, prompt in enumerate(prompts):
        assert rows_of(generate(tiny, [prompt], temperature=0, max_new_tokens=9))[0][0] == tokens[row]


@pytest.mark.long
def test_ends_exactly_inside_an_accepted_run(tiny: Transformer, golden_text: dict[str, torch.Tensor],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, follows = golden_text["tokens"].tolist()[:150], golden_text["tokens"].tolist()[150:]
    for limit in (1, 5, 6):  # 1 comes from the prompt, runs of 4 follow it
        cache = tiny.new_cache()
        tokens, stops = rows_of(generate(tiny, [prompt], cache, max_new_tokens=limit, decoder=InRuns(tiny, 4)))
        assert tokens[0] == follows[:limit] and stops == {0: "length"}
        assert cache.lengths[0] <= 150 + limit
    end = next(i for i in range(2, 5) if follows[i] not in follows[:i])
    monkeypatch.setattr(tiny, "config", replace(tiny.config, eos_token_id=follows[end]))
    cache, plain = tiny.new_cache(), tiny.new_cache()
    tokens, stops = rows_of(generate(tiny, [prompt], cache, max_new_tokens=20, decoder=InRuns(tiny, 4)))
    assert tokens[0] == follows[: end + 1] and stops == {0: "eos"}
    assert cache.lengths == [150 + end + 1]  # what was fed after the end is taken back
    tiny(torch.tensor([prompt + follows[: end + 1]]), plain, logits="none")
    for name, value in plain.live_state(0).items():
        assert same_bits(cache.live_state(0)[name], value), name


def test_the_context_is_a_limit_that_says_so(tiny: Transformer, cli: Cli) -> None:
    prompt = golden("text")["tokens"].tolist()[:10]
    tokens, stops = rows_of(generate(tiny, [prompt], tiny.new_cache(1, 14), temperature=0, max_new_tokens=100))
    assert len(tokens[0]) == 4 and stops == {0: "context"}
    for length in (14, 15, 600):
        with pytest.raises(ValueError, match=f"{length} tokens: no room for an answer in a context of 14"):
            generate(tiny, [(prompt * 60)[:length]], tiny.new_cache(1, 14))
    with pytest.raises(ValueError, match="empty"):
        generate(tiny, [[]])
    with pytest.raises(ValueError, match="2 prompts do not fit a cache made for 1"):
        generate(tiny, [prompt, prompt], tiny.new_cache())
    result = cli("--exact", "--prompt", "Hello", "--max-length", 12, "--temperature", 0)
    assert result.code == 0 and "[stopped: the context of 12 tokens is full]" in result.err
    assert result.cached == [(8, 0, 4)]


def test_exact_replay_equals_full(cli: Cli) -> None:
    text = "the cache of this model keeps a window and compressed rows for every token " * 3
    options = ["--exact", "--prompt", text, "--max-new-tokens", 4, "--temperature", 0, "--prefill"]
    full, replayed, bounded = (cli(*options, way) for way in ("full", "exact-replay", "bounded"))
    assert full.code == bounded.code == 0 and full.out == replayed.out
    assert full.cached == bounded.cached and full.cached[0][0] > 5 * 15 + 1  # longer than what is replayed


def test_a_seed_repeats_and_another_does_not(cli: Cli) -> None:
    first, again, other, drafted = (cli("--prompt", "Hello", "--max-new-tokens", 6, "--seed", *more)
                                    for more in ([3], [3], [4], [3, "--speculative"]))
    assert first.out == again.out != other.out
    assert drafted.code == 0 and drafted.cached[0][2] == 6


def test_speculation_changes_no_greedy_token(cli: Cli) -> None:
    plain, drafted = (cli("--exact", "--prompt", "Hello there", "--max-new-tokens", 12, "--temperature", 0, *more)
                      for more in ([], ["--speculative"]))
    assert plain.out == drafted.out and plain.cached == drafted.cached == [(10, 0, 12)]
    assert "backbone steps" in drafted.err and "drafts accepted by position" in drafted.err
    assert "backbone steps" not in plain.err


# ---------------------------------------------------------------------------------------------------------------- files

CONVERSATIONS: list[Any] = [
    [{"role": "user", "content": "Hello"}],
    {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": [
        {"type": "image", "source": str(IMAGE)}, {"type": "text", "text": "what is this?"}]}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                  {"role": "user", "content": "and?"}], "thinking_mode": "thinking", "reasoning_effort": 7},
]


def test_a_file_is_answered_in_batches_as_one_by_one(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, CONVERSATIONS)) + "\n\n")
    options = ["--exact", "--input-file", path, "--max-new-tokens", 4, "--temperature", 0]
    together, alone = cli(*options), cli(*options, "--batch-size", 1)
    assert together.code == 0 and together.err == "" and together.out == alone.out
    messages = [json.loads(line) for line in together.out.splitlines()]
    assert [m["role"] for m in messages] == ["assistant"] * 3
    assert messages[0]["content"] and messages[2]["reasoning_content"] and messages[0]["finish_reason"] == "length"
    once = cli("--exact", "--prompt", "Hello", "--max-new-tokens", 4, "--temperature", 0)
    assert once.out == messages[0]["content"] + "\n"
    pictured = cli("--exact", "--prompt", "what is this?", "--image", IMAGE, "--system", "be kind",
                   "--max-new-tokens", 4, "--temperature", 0)
    assert pictured.out == messages[1]["content"] + "\n"
    assert cli(*options, "--speculative").out == together.out


def test_conversations_of_a_file_draw_from_streams_of_their_own(cli: Cli) -> None:
    given = json.dumps([CONVERSATIONS[0]] * 2).encode()
    result = cli("--exact", "--input-file", "-", "--batch-size", 1, "--max-new-tokens", 5, stdin=given)
    first, second = result.out.splitlines()
    assert result.code == 0 and first != second


@pytest.mark.parametrize("text, count", [
    (json.dumps(CONVERSATIONS), 3), (json.dumps(CONVERSATIONS[0]), 1), (json.dumps(CONVERSATIONS[1], indent=2), 1),
    ("\n".join(map(json.dumps, CONVERSATIONS)), 3), (json.dumps(CONVERSATIONS[0], indent=1), 1), ("[]", 1),
    ("\ufeff" + json.dumps(CONVERSATIONS), 3)])
def test_forms_of_a_file(text: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(text)
    assert len(cli_module.read_conversations(str(tmp_path / "in"))) == count


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n\n")
    with pytest.raises(ValueError, match="holds no conversations"):
        cli_module.read_conversations(str(tmp_path / "in"))


def test_one_bad_conversation_does_not_stop_the_others(cli: Cli) -> None:
    user = {"role": "user", "content": "x"}
    bad = [[{"role": "king"}], 7, {"messages": [user], "thinking_mode": "slow"}, [user | {"content": "x" * 2000}],
           [user | {"content": [{"type": "image", "source": "nowhere.png"}]}],
           [user | {"content": [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]}]]
    given = "\n".join(map(json.dumps, [*bad[:3], [user], *bad[3:]])).encode()
    result = cli("--exact", "--input-file", "-", "--max-new-tokens", 2, "--temperature", 0, stdin=given)
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 1 and "6 of 7 conversations" in result.err
    assert [list(line) == ["error"] for line in lines] == [True, True, True, False, True, True, True]
    for line, word in zip(lines[:3] + lines[4:], ("king", "list", "slow", "no room", "nowhere.png", "network access")):
        assert word in line["error"]


@pytest.mark.parametrize("data, sentence", [
    (b'[1]\n{"messages"\n', "standard input: line 2 is not JSON"),
    (b'[]\n[]\n"\xff"', "standard input is not valid UTF-8 (line 3)")])
def test_files_that_are_none(data: bytes, sentence: str, cli: Cli) -> None:
    result = cli("--exact", "--input-file", "-", stdin=data)
    assert result.code == 1 and result.err.startswith("error: ") and sentence in result.err
    assert result.err.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------- text

def test_text_comes_in_whole_characters(tokenizer: Tokenizer) -> None:
    text = "naïve café, 你好 🙂 <think>\n\ttext</think> ∑∏"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text and stream.finish() == ""
    assert "" in pieces, "some character is spread over several tokens"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_text_of_any_ids_is_what_the_tokenizer_makes_of_them(tokenizer: Tokenizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        ids = torch.randint(0, 640, (30,), generator=generator).tolist()
        assert to_text(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert to_text(tokenizer, [87, 9999]) == to_text(tokenizer, [87]) + "\N{REPLACEMENT CHARACTER}"


def answer_on(stream: io.TextIOWrapper, tokenizer: Tokenizer, text: str, thinking: bool,
              monkeypatch: pytest.MonkeyPatch) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    events = (Event(0, [token], "eos" if i == len(ids) - 1 else None) for i, token in enumerate(ids))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        answer = show_answer(events, tqdm(disable=True), tokenizer, Screen(), thinking, [])
    assert answer.ids == ids and answer.stop == "eos"
    stream.flush()
    return stream.buffer.getvalue().decode()


def test_reasoning_is_told_from_the_answer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"hm{THINK_END}yes{THINK_END}{EOS}"
    for thinking, shown in ((True, "<think>hm</think>yes</think>\n"), (False, "hm</think>yes</think>\n")):
        assert answer_on(io.TextIOWrapper(io.BytesIO()), tokenizer, text, thinking, monkeypatch) == shown
    shown = answer_on(Terminal(io.BytesIO()), tokenizer, text, True, monkeypatch)
    assert shown.replace("\x1b[0m\x1b[2m", "") == "\x1b[2mhm\x1b[0m\n\nyes</think>\n"


def test_control_characters_do_not_reach_the_terminal(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.TextIOWrapper(io.BytesIO()), Terminal(io.BytesIO())):
        assert answer_on(stream, tokenizer, f"a\x1b]0;x\x07\x7fb\tc\n{EOS}", False, monkeypatch) == "a␛]0;x␇␡b\tc\n"


# ----------------------------------------------------------------------------------------------------- the command line

@pytest.mark.parametrize("arguments, sentence", [
    (["--temperature", "-1"], "temperature = -1.0"), (["--top-p", "0"], "top_p"), (["--top-p", "1.5"], "top_p"),
    (["--max-new-tokens", "0"], "--max-new-tokens 0"), (["--seed", "-2"], "--seed -2"), (["--seed", "x"], "--seed"),
    (["--prompt", "a", "--input-file", "b"], "not allowed with"), (["--prefill", "half"], "--prefill"),
    (["--reasoning-effort", "101"], "1..100"), (["--reasoning-effort", "huge"], "1..100"), (["--bogus"], "--bogus"),
    (["--benchmark", "a,b"], "--benchmark a,b"), (["--benchmark", "0"], "--benchmark 0"),
    (["--draft-confidence", "0.5", "--prompt", "x"], "--speculative"),
    (["--image", "x", "--benchmark", "4"], "--image"),
    (["--benchmark", "8,500"], "--benchmark: 500 tokens and 64 decoded tokens are more than the model's context of 512"),
    (["--benchmark", "512", "--benchmark-decode", "1"], "512 tokens and 1 decoded token are more"),
    (["--random", PARALLEL, "--benchmark", "2049"], "--benchmark: 2,049 tokens are more than the model's context of 2,048"),
    (["--random", PARALLEL, "--benchmark", "8", "--context", "2048"], "--context: 2,048 tokens and 1 decoded token are"),
    (["--prompt", ""], "the prompt is empty"), (["--prompt", " \n\t"], "the prompt is empty"),
    (["--prompt", "caf\udce9"], "the prompt is not valid UTF-8"), (["--prompt", "x <｜deepseek_image｜>"], "as text"),
    (["--prompt", "word " * 20_000], "no room for an answer in a context of 512"),
    (["--input-file", "nowhere"], "nowhere cannot be read"),
    (["--prompt", "x", "--image", "nowhere.png"], "no image file nowhere.png"), (["--device", "abacus"], "abacus"),
    (["--prompt", "x", "--image", "http://example.org/a.png"], "network access is off")])
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, cli: Cli) -> None:
    result = cli("--exact", *arguments)
    assert result.code == 1 and result.out == "" and result.err.startswith("error: ")
    assert sentence in result.err and result.err.count("\n") == 1 and "Traceback" not in result.err


def test_there_is_no_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--ckpt-path", str(tmp_path / "none"), "--prompt", "x"]) == 1
    assert capsys.readouterr().err == f"error: there is no folder {tmp_path / 'none'}\n"


def test_prompts_from_a_pipe(cli: Cli) -> None:
    options = ["--exact", "--max-new-tokens", 3, "--temperature", 0, "--prompt"]
    assert cli(*options, "-", stdin="größer".encode()).out == cli(*options, "größer").out
    bad = cli(*options, "-", stdin=b"caf\xe9")
    assert bad.code == 1 and bad.err == "error: the prompt is not valid UTF-8\n"


def test_long_text_is_refused_quickly(cli: Cli) -> None:
    began = time.perf_counter()
    result = cli("--exact", "--prompt", "-", stdin=b"many words, " * 8334)  # 100,000 characters
    assert result.code == 1 and "no room" in result.err and time.perf_counter() - began < 5


def test_deep_greyscale_is_warned_about(cli: Cli, tmp_path: Path) -> None:
    Image.new("I;16", (60, 60), 900).save(tmp_path / "deep.png")
    result = cli("--exact", "--prompt", "x", "--image", tmp_path / "deep.png", "--max-new-tokens", 1)
    assert result.code == 0 and result.err.startswith("warning: ") and "deep.png has more than 8 bits" in result.err


def test_random_weights_are_named(cli: Cli, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(CHECKPOINT / name)
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())
    for seed in (None, 0, 7):
        if seed is not None:
            index["metadata"]["random_seed"] = seed
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        result = cli("--exact", "--ckpt-path", tmp_path, "--prompt", "x", "--max-new-tokens", 1)
        notes = [line for line in result.err.splitlines() if "random" in line]
        said = f"note: these weights are random (seed {seed}), so the answers mean nothing"
        assert notes == ([] if seed is None else [said])


def test_a_benchmark_needs_no_tokenizer(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    assert cli("--ckpt-path", tmp_path, "--benchmark", "4", "--benchmark-decode", 1).code == 0
    result = cli("--ckpt-path", tmp_path, "--prompt", "Hi")
    assert result.code == 1 and result.err.splitlines()[-1] == f"error: there is no tokenizer.json in {tmp_path}"


def test_a_context_may_be_filled_to_its_last_token() -> None:
    config = ModelConfig.from_json(PARALLEL)
    check_context(config, "--benchmark", 2047, 1)
    with pytest.raises(ValueError, match="--benchmark: 2,047 tokens and 2 decoded tokens are more than the model's context"):
        check_context(config, "--benchmark", 2047, 2)


def test_random_models_are_prepared_and_timers_leave_nothing_behind() -> None:
    config = replace(ModelConfig.from_json(PARALLEL), engram_layer_ids=(), engram_num_embeddings=())
    model = random_model(config, Numerics(), torch.device("cpu"))
    assert all(module.ready for module in model.modules() if isinstance(module, Linear))
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert all(module.rows is not None for module in experts)
    timer = PartTimer(model)
    assert all("dense" in vars(module) for module in experts)
    model.prefill(torch.arange(9).unsqueeze(0), model.new_cache(1, 16))
    spent = timer.seconds(1.0, 1)
    assert min(spent.values()) > 0
    assert not any("dense" in vars(module) for module in experts)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("handler, pressed, code", [
    ("default_int_handler", True, -signal.SIGINT), ("SIG_IGN", True, 1), ("default_int_handler", False, 1)])
def test_ctrl_c_during_the_imports_leaves_no_traceback(handler: str, pressed: bool, code: int) -> None:
    """Who ignores it goes on, to a wrong argument; after the imports it is as it was."""
    path = Path(cli_module.__file__)
    program = f"""
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.{handler})
class Press:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch" and {pressed}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press)
sys.argv = ["generate.py", "--nonsense"]
try:
    runpy.run_path({str(path)!r}, run_name="__main__")
except SystemExit as end:
    assert signal.getsignal(signal.SIGINT) is signal.{handler}
    sys.exit(end.code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=path.parent,
                          env={**os.environ, "PYTHONPATH": str(path.parent)})
    assert done.returncode == code and "Traceback" not in done.stderr


def test_the_first_prefill_of_a_benchmark_does_not_count(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that prefills move: the median of those after the first."""
    now, original = [0.0], Transformer.prefill
    seconds = iter([9.0] * 7 + [50.0, 1.0, 8.0, 2.0, 9.0, 4.0, 9.0])       # a short prompt to warm up, then this one

    def prefill(*args: Any, **more: Any) -> Any:
        now[0] += next(seconds)
        return original(*args, **more)

    def perf_counter() -> float:
        now[0] += 1e-4
        return now[0]
    monkeypatch.setattr(Transformer, "prefill", prefill)
    monkeypatch.setattr(time, "perf_counter", perf_counter)
    line = cli("--exact", "--benchmark", "40", "--benchmark-decode", 1).out.splitlines()[-1].split()
    assert float(line[1]) == pytest.approx(40 / 4.0, rel=0.01) and next(seconds, None) is None


def test_benchmark_prints_a_table(cli: Cli, tiny: Transformer) -> None:
    result = cli("--exact", "--benchmark", "40,8", "--benchmark-decode", 3, "--batch-size", 2)
    assert result.code == 0 and "exact" in result.err and max(map(len, result.out.splitlines())) <= 80
    head, first, second = result.out.splitlines()
    assert head.split() == "prompt prefill/s GFLOP decode/s ops/step cache MiB peak RSS MiB".split()
    rows = [[float(word) for word in line.split()] for line in (first, second)]
    assert [row[0] for row in rows] == [8, 40] and all(value > 0 for row in rows for value in row)
    cache = tiny.new_cache(2)
    tiny(torch.zeros(2, 40, dtype=torch.int64), cache)
    tiny(torch.zeros(2, 4, dtype=torch.int64), cache)  # 3 decoded, 1 counted
    assert rows[1][5] == round(cache.nbytes() / 2**20, 2)
    with CountOperations() as operations:
        torch.ones(3).add(1).mul(2)
    assert operations.count == 3


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0 and max(map(len, text.splitlines())) <= 80
