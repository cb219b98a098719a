"""The chat: what a turn computes and reuses, the commands, pipes, and a scripted session in a pseudo-terminal."""
from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from generate import Prompt, Session, Stopped, generate
from golden_data import CHECKPOINT, IMAGE, golden, same_bits
from model import Cache, Chunk, Transformer
from PIL import Image
from test_generate import Cli, cli, models, rows_of  # noqa: F401
from vision import load_image

TEXT = golden("text")["tokens"].tolist()
OTHER = golden("image")["tokens"].tolist()[40:]


@pytest.fixture
def computed(tiny: Transformer) -> Iterator[list[int]]:
    """The number of tokens that each forward of the backbone has been given."""
    counts: list[int] = []
    hook = tiny.embed.register_forward_hook(lambda module, given, out: counts.append(given[0].numel()))
    yield counts
    hook.remove()


def ask(session: Session, prompt: Prompt | list[int], tokens: int = 3, **options: Any) -> list[int]:
    """The session's greedy answer, after which its cache is what a fresh one would be, and so is the answer."""
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    answer = rows_of(session.answer(prompt, temperature=0, max_new_tokens=tokens, **options))[0][0]
    fresh = session.model.new_cache()
    assert rows_of(generate(session.model, [prompt], fresh, temperature=0, max_new_tokens=tokens))[0][0] == answer
    state, wanted = session.cache.live_state(0), fresh.live_state(0)
    assert [name for name in wanted if not same_bits(state[name], wanted[name])] == []
    return answer


# ------------------------------------------------------------------------------------------------------------ the cache

def test_a_turn_computes_only_what_is_new(tiny: Transformer, computed: list[int]) -> None:
    session = Session(tiny)
    first = ask(session, TEXT[:30])
    assert computed[:3] == [30, 1, 1]  # the last token of an answer is not fed
    second = TEXT[:30] + first + OTHER[:9]
    computed.clear()
    answer = ask(session, second)
    assert computed[:3] == [1 + 9, 1, 1]
    computed.clear()
    ask(session, second + answer + OTHER[9:10])
    assert computed[:3] == [1 + 1, 1, 1]


@pytest.mark.long
def test_a_prompt_that_leaves_the_last_one_at_its_end(tiny: Transformer, computed: list[int]) -> None:
    """As thinking mode does: <think> becomes </think>, the reasoning goes."""
    session, history = Session(tiny), TEXT[:40]
    ask(session, history, tokens=7)  # 7 tokens are further back than a rollback reaches: a snapshot is needed
    for turn in range(2):
        computed.clear()
        history = history[:-1] + OTHER[turn * 8 : turn * 8 + 8]
        ask(session, history, tokens=7)
        assert computed[0] == 8
    computed.clear()
    ask(session, history, tokens=1)  # the same once more: one token gives the logits
    assert computed[0] == 1
    computed.clear()
    # back to the first prompt's end: its snapshot fell when position 39 was rewritten
    ask(session, TEXT[:39] + TEXT[60:70], tokens=1)
    assert computed[0] == 49
    computed.clear()
    ask(session, OTHER[:10], tokens=1)
    assert computed[0] == 10


def test_the_newest_snapshot_that_still_fits(tiny: Transformer, computed: list[int]) -> None:
    session, lengths, history = Session(tiny), [], TEXT[:20]
    for turn in range(2):
        lengths.append(len(history))
        history = history + ask(session, history, tokens=7) + OTHER[turn * 5 : turn * 5 + 5]
    computed.clear()
    ask(session, history[: lengths[1]] + OTHER[30:34], tokens=1)
    assert computed[0] == 4
    computed.clear()
    ask(session, history[: lengths[0] - 2] + OTHER[30:34], tokens=1)  # a little before the first prompt's end
    assert computed[0] == 4


def test_images_of_one_size_are_not_mistaken(tiny: Transformer, computed: list[int], tmp_path: Path) -> None:
    picture = Image.open(IMAGE).convert("RGB")
    picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "mirrored.png")
    one, two = (load_image(path, tiny.config.vision_config) for path in (IMAGE, tmp_path / "mirrored.png"))
    marked = [*TEXT[:10], tiny.config.image_token_id, *TEXT[10:20]]
    prompts = [Prompt.expand(marked, [10], [image]) for image in (one, two)]
    assert prompts[0].ids == prompts[1].ids  # what tells them apart are the pixels alone
    session = Session(tiny)
    answer = ask(session, prompts[0])
    computed.clear()
    ask(session, prompts[1])
    assert computed[0] == len(prompts[1].ids)
    longer = Prompt(prompts[1].ids + OTHER[:5], prompts[1].images)
    computed.clear()
    ask(session, longer)
    assert computed[0] == 5 and answer


def test_a_stopped_answer_is_kept_as_far_as_it_came(tiny: Transformer, computed: list[int]) -> None:
    session, said = Session(tiny), []
    events = session.answer(Prompt(TEXT[:30]), temperature=0)
    for event in events:
        said += event.tokens
        if len(said) == 4:
            break
    events.close()
    computed.clear()
    ask(session, TEXT[:30] + said + OTHER[:6])
    assert computed[0] == 1 + 6


def test_a_prompt_stopped_while_it_is_read_leaves_no_trace(tiny: Transformer, computed: list[int]) -> None:
    session = Session(tiny)
    first = ask(session, TEXT[:30])

    def stop(count: int) -> None:
        raise Stopped

    longer = TEXT[:30] + first + OTHER
    with pytest.raises(Stopped):
        next(session.answer(Prompt(longer), progress=stop))
    computed.clear()
    ask(session, longer)
    assert computed[0] == 1 + len(OTHER)


def test_an_interrupt_in_the_worst_place_costs_the_cache_alone(tiny: Transformer,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(tiny)
    events = session.answer(Prompt(TEXT[:30]), temperature=0)
    first = next(events).tokens

    def torn(cache: Cache, chunk: Chunk, *_: Any) -> None:
        cache.lengths = list(chunk.ends)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Cache, "commit", torn)
        next(events)
    ask(session, TEXT[:30] + first + OTHER[:6])


# ------------------------------------------------------------------------------------------------------------- by pipes

def chat(cli: Cli, *lines: str | bytes, arguments: tuple[Any, ...] = ()) -> Any:  # noqa: F811
    given = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    return cli("--exact", "--temperature", 0, "--max-new-tokens", 6, *arguments, stdin=given)


def test_chat_in_a_pipe(cli: Cli) -> None:  # noqa: F811
    result = chat(cli, "hello", "and then?", f"/image {IMAGE}", "look", "more", "/clear", "hello",
                  "/system be kind", "hello")
    assert result.code == 0 and "\x1b" not in result.out + result.err and ">" not in result.err
    one, two, three, four, again, kind = result.cached
    assert one[1:] == (0, 6) and again[:2] == (one[0], 0)
    assert two[1] == one[0] + 5 and three[1] == two[0] + 5  # all of the history but the token that has not been fed
    assert three[0] > two[0] + 6 + 17 and four[0] < three[0] + 6 + 17  # an image goes with one message only
    assert "[an image of 17 tokens goes with your next message]" in result.err
    assert kind[1] == 0 and kind[0] > one[0]
    alone = chat(cli, "hello")
    assert result.out.startswith(alone.out) and alone.err.count("[stopped after 6 tokens") == 1


def test_answers_keep_the_ids_that_were_sampled(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    prompts: list[list[int]] = []
    sampled: list[list[int]] = []
    answer = Session.answer

    def recorded(self: Session, prompt: Prompt, **options: Any) -> Iterator[Any]:
        prompts.append(prompt.ids)
        sampled.append([])
        for event in answer(self, prompt, **options):
            sampled[-1].extend(event.tokens)
            yield event

    monkeypatch.setattr(Session, "answer", recorded)
    chat(cli, "hello", "more", "and more", arguments=("--temperature", 1, "--seed", 2, "--system", "be kind"))
    for i in (1, 2):
        n = len(prompts[i - 1])
        assert prompts[i][: n + 6] == prompts[i - 1] + sampled[i - 1] and len(sampled[i - 1]) == 6


def test_thinking_reuses_all_but_the_reasoning(cli: Cli) -> None:  # noqa: F811
    result = chat(cli, "/think on", "hello", "why?", "/think 20", "more", "/think off", "more")
    first, second, third, last = result.cached
    assert first[1] == third[1] == last[1] == 0  # the mode and the effort stand in the first tokens
    assert second[1] == first[0] - 1  # up to the <think> that has become </think>
    assert result.out.count("<think>") == 3 and result.err.count("[reasons before it answers]") == 2


def test_bad_input_leaves_the_chat_going(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.png").write_bytes(b"")
    bad = {"/dance": "/dance is not a command", "/image": "/image needs",
           "/image nowhere.png": "no image file nowhere.png",
           f"/image '{tmp_path}/text.png'": "text.png is not an image",
           f"/image {tmp_path}/empty.png": "empty.png is empty",
           "/image https://example.org/a.png": "network access is off", "/think 0": "1..100", "/think much": "1..100",
           "word " * 1000: "no room for an answer in a context of 512", "a <｜deepseek_image｜>": "as text",
           b"caf\xe9": "this line is not valid UTF-8"}
    result = chat(cli, "", "  \t", "hello", *bad, "bye", "/help", "/exit", "never read")
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.code == 0 and len(errors) == len(bad)
    for error, sentence in zip(errors, bad.values()):
        assert sentence in error
    (first, second) = result.cached
    assert second[1] == first[0] + 5  # nothing of what failed stayed in the history
    assert "/think on|off|N" in result.err and max(map(len, result.err.splitlines()[:2])) <= 80


@pytest.mark.long
def test_speculation_in_chat_says_the_same(cli: Cli) -> None:  # noqa: F811
    lines = (f"/image {IMAGE}", "look", "/think on", "so?", "and?")
    plain, drafted = chat(cli, *lines), chat(cli, *lines, arguments=("--speculative",))
    assert plain.out == drafted.out and plain.cached == drafted.cached and len(plain.cached) == 3


# ------------------------------------------------------------------------------------------------------- in a terminal

CTRL_C, CTRL_D, DIM = "\x03", "\x04", "\x1b[2m"


class Session80:
    """generate.py in a pseudo-terminal of 80 columns, and a hand at its keyboard."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        program = Path(__file__).parent.parent / "generate.py"
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(program), "--ckpt-path", str(CHECKPOINT), "--device", "cpu", *arguments], stdin=slave,
            stdout=slave, stderr=slave, env=environment, preexec_fn=lambda: os.login_tty(0))
        os.close(slave)
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Read until a pattern has come; -> everything up to it."""
        began = time.monotonic()
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() - began < seconds, f"waited for {pattern!r}, got {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # Linux's way of saying that the other side is closed
                    assert re.search(pattern, self.seen), f"ended without {pattern!r}: {self.seen!r}"
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())


def test_a_session_in_a_terminal() -> None:
    """Every answer would take 400 tokens, and is cut short by Ctrl-C once it has begun."""
    session = Session80("--temperature", "0", "--max-new-tokens", "400")
    statistics = r"\[prompt (\d+) \((\d+) cached\), answer (\d+) tokens( at [\d.]+/s)?, cache [\d,]+ bytes\]"

    def ask(text: str) -> tuple[str, int, int, int]:
        session.expect(r"\n> ")
        session.type(text + "\r")
        shown = session.expect(re.escape(text) + r"\r\n(?=.{5})")
        session.type(CTRL_C)
        shown += session.expect(statistics)
        assert "interrupted" in shown
        return shown, *map(int, re.search(statistics, shown).groups()[:3])

    try:
        banner = session.expect(r"(?=\n> )")
        assert "DeepSeek-V4.1-Flash" in banner and "/help" in banner
        assert all(len(re.sub(r"\x1b\[[0-9;?]*[a-z]", "", line)) <= 80 for line in banner.splitlines())
        session.expect(r"\n> ")
        time.sleep(1)  # readline does not notice a signal that comes right after it has written the prompt
        session.type(CTRL_C)  # at the prompt: a hint, and the session lives
        session.expect(r"Ctrl-D or /exit leaves")
        shown, asked, cached, said = ask("tell me a long story")
        assert cached == 0 and 0 < said < 400 and DIM not in shown.split("[interrupted]")[0].removesuffix(DIM)
        _, _, cached, _ = ask("go on")
        assert cached == asked + said - 1  # what was said before Ctrl-C is history
        session.expect(r"\n> ")
        session.type("/think on\r")
        session.expect(r"reasons before it answers")
        shown, *_ = ask("why?")
        assert DIM in shown.split("[interrupted]")[0].removesuffix(DIM) and "<think>" not in shown  # reasoning is dim
        session.expect(r"\n> ")
        session.type(CTRL_D)
        assert session.process.wait(60) == 0
        assert "Traceback" not in session.seen
    finally:
        session.process.kill()
        os.close(session.master)
