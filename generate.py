"""Talk to the model: chat, one prompt, a file of conversations, or a benchmark.

    python generate.py                                   chat, with the small checkpoint in tiny/
    python generate.py --prompt "..." [--image FILE]     one answer
    python generate.py --input-file FILE                 JSON conversations in, JSON lines of messages out
    python generate.py --benchmark 512,4096              speed and memory
    torchrun --nproc-per-node N generate.py ...          the same, cut over N processes

From a notebook, `generate(model, prompts)` is an iterator over the tokens as they are chosen. It is the one place that
ends answers (end of sequence, limits); how the next tokens come about, one by one or drafted and verified, is a
decoder's affair (dspark.py). `Session` keeps a conversation's cache, so that a turn computes only what is new.

Answers go to stdout, remarks to stderr, control codes to terminals only.
"""
from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C during the imports, which take seconds: without a traceback

import argparse
import base64
import codecs
import contextlib
import ctypes
import datetime
import io
import json
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence, TypeVar

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from benchmark import random_benchmark, run_benchmark
from convert import INDEX, Parser, check_context, load_model, open_checkpoint
from dspark import PlainDecoder, Sampler, SpeculativeDecoder
from encoding import (ASSISTANT, BOS, EOS, THINK_END, THINK_START, USER, encode_messages, image_source, parse_completion,
                      prompt_ids, render_segments, split_reply)
from kv_cache import Snapshot
from model import Cache, ImageTokens, ModelConfig, Transformer
from session import SavedImage
from session import load as load_session
from session import save as save_session
from vision import IMAGE, TEXT, ImageInput, load_image

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------- prompts

@dataclass(frozen=True)
class Prompt:
    """The ids of a prompt with its image spans expanded, and each image with the position at which its span begins."""
    ids: list[int]
    images: tuple[tuple[int, ImageInput], ...] = ()

    @classmethod
    def expand(cls, ids: Sequence[int], places: Sequence[int], images: Sequence[ImageInput]) -> Prompt:
        """Replace the placeholder at each of `places` by the span of the image it stands for: the same id, repeated."""
        if len(places) != len(images):
            raise ValueError(f"the prompt has {len(places)} image placeholders for {len(images)} images")
        out, begun, done = [], [], 0
        for place, image in zip(places, images):
            out += ids[done:place]
            begun.append((len(out), image))
            out += [ids[place]] * len(image.span)
            done = place + 1
        return cls([*out, *ids[done:]], tuple(begun))

    @property
    def keys(self) -> list[int | bytes]:
        """What tells two histories apart, for each position. Ids do not: all images are runs of one id."""
        keys: list[int | bytes] = list(self.ids)
        for place, image in self.images:
            keys[place : place + len(image.span)] = [image.digest] * len(image.span)
        return keys


def image_tokens(model: Transformer, prompts: Sequence[Prompt], starts: Sequence[int]) -> ImageTokens | None:
    """The spans among the tokens of each prompt from its start on. Images that end before it are not encoded again."""
    width, features = max(len(p.ids) - start for p, start in zip(prompts, starts)), []
    types = torch.full((len(prompts), width), TEXT, dtype=torch.int8)                          # [B, S]
    for row, (prompt, start) in enumerate(zip(prompts, starts)):
        for place, image in prompt.images:
            span, past = image.span, max(0, start - place)  # past: tokens of the span that the cache holds already
            if past < len(span):
                if isinstance(image, SavedImage):
                    raise ValueError("an image of the resumed session would have to be read again, but only its place in "
                                     "the cache was saved: /clear and send it once more")
                at = place + past - start
                types[row, at : at + len(span) - past] = span[past:]
                rows = model.encode_image(image.patches, image.grid)                            # [n, D]
                features.append(rows[int((span[:past] == IMAGE).sum()) :])
    return ImageTokens(types, torch.cat(features)) if features else None


# ---------------------------------------------------------------------------------------------------------- generation

class Event(NamedTuple):
    """New tokens of one row."""
    row: int
    tokens: list[int]
    stop: str | None     # with the last ones, why: "eos", "length" (max_new_tokens), "context" (the cache is full)


def generate(model: Transformer, prompts: Sequence[Prompt | Sequence[int]], cache: Cache | None = None, *,
             max_new_tokens: int | None = None, temperature: float = 1.0, top_p: float = 0.95, seed: int = 0,
             prefill: str = "full", decoder: PlainDecoder | None = None,
             progress: Callable[[int], None] | None = None) -> Iterator[Event]:
    """Continue each prompt to the end of sequence, `max_new_tokens` or the cache's max_length; -> events as they come.

    `prompts` are token ids or Prompts, complete: of row b, the first cache.lengths[b] are taken as held already. `seed`
    is that of a CPU generator; temperature 0 takes the most likely token. `decoder` replaces plain decoding, with a
    sampler of its own. `prefill`: full, bounded or exact-replay. Between events the cache holds the prompt and all new
    tokens but at most the last. ValueError for prompts that are empty, too long, or not longer than what the cache
    holds.
    """
    prompts = [p if isinstance(p, Prompt) else Prompt(list(p)) for p in prompts]
    cache = model.new_cache(len(prompts)) if cache is None else cache
    if len(prompts) != cache.batch_size:
        raise ValueError(f"{len(prompts)} prompts do not fit a cache made for {cache.batch_size} rows")
    for prompt, held in zip(prompts, cache.lengths):
        check_length(prompt, cache.max_length)
        if held >= len(prompt.ids):
            raise ValueError(f"the cache holds {held} tokens, the prompt has no more than {len(prompt.ids)}")
    decoder = PlainDecoder(model, Sampler(temperature, top_p, seed)) if decoder is None else decoder
    return _events(model, prompts, cache, max_new_tokens, prefill, decoder, progress)


def _events(model: Transformer, prompts: list[Prompt], cache: Cache, max_new_tokens: int | None, prefill: str,
            decoder: PlainDecoder, progress: Callable[[int], None] | None) -> Iterator[Event]:
    new = [p.ids[n:] for p, n in zip(prompts, cache.lengths)]
    counts = [len(ids) for ids in new]
    padded = torch.tensor([ids + [0] * (max(counts) - len(ids)) for ids in new])               # [B, S]
    images = image_tokens(model, prompts, cache.lengths)
    out = model.prefill(padded, cache, prefill, counts, images, progress=progress)
    chosen = [[token] for token in decoder.sampler.choose(out.logits[:, -1])]
    known = [len(p.ids) for p in prompts]                       # tokens of each row, fed or not
    limit = [min(n + (max_new_tokens or cache.max_length), cache.max_length) for n in known]
    pending, active = [0] * len(prompts), [True] * len(prompts)
    while True:
        for row, tokens in enumerate(chosen):
            if not active[row]:
                continue
            tokens, stop = tokens[: limit[row] - known[row]], None
            known[row] += len(tokens)
            if known[row] == limit[row]:
                stop = "context" if limit[row] == cache.max_length else "length"
            if model.config.eos_token_id in tokens:             # possibly inside an accepted run of drafts
                end = tokens.index(model.config.eos_token_id) + 1
                known[row] -= len(tokens) - end
                tokens, stop = tokens[:end], "eos"
            if cache.lengths[row] > known[row]:
                cache.truncate([min(n, known[b]) if b == row else n for b, n in enumerate(cache.lengths)])
            pending[row], active[row] = tokens[-1], stop is None
            yield Event(row, tokens, stop)
        if not any(active):
            return
        chosen = decoder.step(cache, pending, active, [end - n for end, n in zip(limit, known)])


def check_length(prompt: Prompt, max_length: int) -> None:
    if not prompt.ids:
        raise ValueError("the prompt is empty")
    if len(prompt.ids) >= max_length:
        raise ValueError(f"the prompt has {len(prompt.ids):,} tokens: no room for an answer in a context of "
                         f"{max_length:,}")


class Session:
    """The cache of one conversation. Of each prompt, only the tokens behind what the cache holds of it are computed.

    A history can be taken up at its end, at the end of an earlier prompt, where a snapshot is kept, and up to
    `rollback` tokens before either: this is what saves thinking mode, where reasoning is dropped and the next prompt
    repeats the last one up to its final token (<think> becomes </think>).
    """
    SNAPSHOTS = 16  # kept; each holds the windows of all layers, a few MB at released size

    def __init__(self, model: Transformer, max_length: int | None = None) -> None:
        self.model, self.cache = model, model.new_cache(1, max_length)
        self.clear()

    def clear(self) -> None:
        self.cache.reset()
        self.held: list[int | bytes] = []     # the keys of the tokens in the cache, and maybe of one behind them
        self.images: tuple[tuple[int, ImageInput], ...] = ()   # of the last prompt, with their positions
        self.snapshots: list[Snapshot] = []

    def rewind(self, prompt: Prompt) -> int:
        """Take the cache back to the longest beginning of the prompt that it can give; -> its length."""
        check_length(prompt, self.cache.max_length)
        keys = prompt.keys
        same = next((i for i, (a, b) in enumerate(zip(self.held, keys)) if a != b), min(len(self.held), len(keys)))
        usable, reached = min(same, len(keys) - 1), 0            # one token at least has to be fed for its logits
        for state in [self.cache.snapshot(), *reversed(self.snapshots)]:
            n = min(state.lengths[0], usable)
            if n > 0 and (n == state.lengths[0] or n >= state.highest[0] - self.cache.rollback):
                self.cache.restore(state)
                reached = n
                break
        self.cache.truncate(reached)
        self.snapshots = [s for s in self.snapshots if s.lengths[0] <= reached][-self.SNAPSHOTS :]
        self.held = keys[:reached]
        return reached

    def answer(self, prompt: Prompt, **options: Any) -> Iterator[Event]:
        """`generate` for the conversation's next prompt, which may be stopped between any two events."""
        self.rewind(prompt)
        begun, before = False, self.cache.snapshot()
        try:
            for event in generate(self.model, [prompt], self.cache, **options):
                if not begun:                                    # the prompt has been read, no answer has been fed
                    self.snapshots.append(self.cache.snapshot())
                    self.held, self.images, begun = prompt.keys, prompt.images, True
                self.held += event.tokens
                yield event
        except GeneratorExit:                                    # between two events
            raise
        except Stopped:                                          # between two chunks of the prompt
            self.cache.restore(before)
            raise
        except BaseException:                                    # in the middle of anything: trust nothing
            self.cache = self.model.new_cache(1, self.cache.max_length)
            self.clear()
            raise


    def save(self, file: str, chat: Any, at_prompt: bool, with_windows: bool) -> int:
        """Write it to a session file; -> the tokens in it. `at_prompt`: as of the end of the last prompt, where the
        next one will take up the history when the reasoning behind it is dropped."""
        cache = self.cache.fork(self.snapshots[-1]) if at_prompt and self.snapshots else self.cache
        n = cache.lengths[0]
        tokens = [self.model.config.image_token_id if isinstance(key, bytes) else key for key in self.held[:n]]
        images = [(place, image) for place, image in self.images if place + len(image.span) <= n]
        save_session(file, self.model, cache, tokens, images, chat, with_windows=with_windows)
        return n

    def resume(self, file: str) -> tuple[Any, list[SavedImage]]:
        """Go on with a session file; -> its chat and its images."""
        loaded = load_session(self.model, file, self.cache.max_length)
        self.clear()
        self.cache, self.images = loaded.cache, loaded.images
        self.held = Prompt(loaded.tokens, loaded.images).keys
        return loaded.chat, [image for _, image in loaded.images]


class Stopped(Exception):
    """The user stopped a prompt while it was being read."""


# ----------------------------------------------------------------------------------------------------------------- text

def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


# Byte-level BPE writes bytes as characters: printable ones as themselves, the others from U+0100 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(b): b for b in _PRINTABLE}
_BYTES |= {chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


class TextStream:
    """Ids -> text, piece by piece, in whole characters: the first bytes of a character wait for the others. All pieces
    together are what the tokenizer makes of all ids; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.utf8 = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        piece = self.tokenizer.id_to_token(token)
        if piece is None:                                        # the embedding has more rows than the tokenizer tokens
            return self.finish() + "\N{REPLACEMENT CHARACTER}"
        known = all(c in _BYTES for c in piece)
        return self.utf8.decode(bytes(_BYTES[c] for c in piece) if known else piece.encode())

    def finish(self) -> str:
        text = self.utf8.decode(b"", final=True)
        self.utf8.reset()
        return text


def to_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = TextStream(tokenizer)
    return "".join(stream.push(token) for token in ids) + stream.finish()


# A model may write anything, also what a terminal obeys: control characters are shown as their pictures.
_VISIBLE = {c: 0x2400 + c for c in range(32) if c not in (9, 10)} | {127: 0x2421} | {c: 0xFFFD for c in range(128, 160)}


class Screen:
    """Answers to stdout, remarks to stderr; dimmed where that is a terminal. Ranks other than 0 have no screen."""

    def __init__(self, visible: bool = True) -> None:
        self.visible = visible
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def write(self, text: str, dim: bool = False) -> None:
        if text and self.visible:
            text = text.translate(_VISIBLE)
            print(f"\x1b[2m{text}\x1b[0m" if dim and sys.stdout.isatty() else text, end="", flush=True)

    def note(self, text: str) -> None:
        if self.visible:
            text = text.translate(_VISIBLE)
            print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------- several ranks

class Team:
    """The processes that hold one model: rank 0 reads and writes for all of them. A process alone is a team of one."""

    def __init__(self, device: str | None) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError:
            raise ValueError(f"--device {device} is not a device such as cpu, cuda or cuda:1") from None
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"--device {device}: only cpu and cuda are supported")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device {device}: there is no CUDA device here")
        self.group = self.control = None
        if self.size > 1:
            if self.device.type == "cuda":
                local, here = (int(os.environ.get(name, at)) for name, at in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
                if here > torch.cuda.device_count():
                    raise ValueError(f"{here} ranks need a CUDA device each, this machine has {torch.cuda.device_count()}")
                self.device = torch.device("cuda", local)
                torch.cuda.set_device(self.device)
            # Ctrl-C ends a rank at once, without Python: it may be waiting for the others inside a library.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # People take their time: the ranks that wait for what rank 0 reads must not give up.
            torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self.group = torch.distributed.group.WORLD
            self.control = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(days=365))

    def share(self, produce: Callable[[], T]) -> T:
        """What rank 0 gets by calling `produce`, on every rank; errors are raised on every rank too."""
        if self.size == 1:
            return produce()
        box: list[Any] = [None]
        if self.rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)         # what reads a terminal has to tidy up
            try:
                box[0] = produce()
            except (ValueError, EOFError) as error:
                box[0] = error
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch.distributed.broadcast_object_list(box, 0, group=self.control)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def each(self, action: Callable[[], T]) -> T:
        """The result of `action` on each rank. When it fails on one, whatever the others did, all raise that error."""
        if self.size == 1:
            return action()
        result, failure = None, None
        try:
            result = action()
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            failure = str(error) or type(error).__name__
        failures: list[str | None] = [None] * self.size
        torch.distributed.all_gather_object(failures, failure, group=self.control)
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise ValueError(f"rank {rank}: {failure}" if rank else failure)
        return result

    def part(self) -> None:
        """Wait until every rank is done."""
        if self.size > 1:
            torch.distributed.barrier(group=self.control)


@dataclass(frozen=True)
class Setting:
    """What every way of talking to the model needs."""
    args: argparse.Namespace
    model: Transformer
    tokenizer: Tokenizer | None    # none for the benchmark
    team: Team
    screen: Screen

    def load(self, source: object) -> ImageInput:
        if isinstance(source, ImageInput):
            return source
        if self.model.config.vision_config is None:
            raise ValueError("this model has no vision tower and takes no images")
        return self.team.share(lambda: load_image(source, self.model.config.vision_config, self.args.allow_urls))

    def sampler(self, index: int = 0) -> Sampler:
        return Sampler(self.args.temperature, self.args.top_p, self.args.seed + index)

    def decoder(self, sampler: Sampler) -> PlainDecoder:
        if self.args.speculative:
            return SpeculativeDecoder(self.model, sampler, self.args.draft_confidence)
        return PlainDecoder(self.model, sampler)

    def prompt(self, messages: Sequence[dict], mode: str, effort: int | str | None = None,
               replies: dict[int, tuple[list[int], list[int]]] | None = None) -> Prompt:
        """Messages -> prompt in the chat format; `replies` holds the sampled ids of earlier answers, as split_reply
        gives them."""
        segments = render_segments(messages, mode, effort)
        ids, places = prompt_ids(segments, encoder(self.tokenizer), replies)
        return Prompt.expand(ids, places, [self.load(image_source(i)) for segment in segments for i in segment.images])

    @property
    def max_length(self) -> int:
        return self.args.max_length or self.model.config.max_position_embeddings


# ------------------------------------------------------------------------------------- one answer, on the screen

class Answer(NamedTuple):
    ids: list[int]
    stop: str            # as in Event, or "interrupted"
    seconds: float       # from the first token on


def show_answer(events: Iterator[Event], bar: tqdm, tokenizer: Tokenizer, screen: Screen, thinking: bool,
                stopped: Sequence[bool]) -> Answer:
    """Print an answer while it is made. Reasoning is dim in a terminal and stands in its tags elsewhere."""
    stream, end, eos = TextStream(tokenizer), tokenizer.token_to_id(THINK_END), tokenizer.token_to_id(EOS)
    ids: list[int] = []
    stop, began, last, dims = "interrupted", time.perf_counter(), "\n", sys.stdout.isatty()

    def write(text: str, dim: bool) -> None:
        nonlocal last
        screen.write(text, dim)
        last = text[-1:] or last

    write(THINK_START if thinking and not dims else "", False)
    try:
        for event in events:
            if not ids:
                began = time.perf_counter()
                bar.close()
            ids += event.tokens
            for token in event.tokens:
                if thinking and token == end:
                    write(stream.finish(), True)
                    write("\n\n" if dims else THINK_END, False)
                    thinking = False
                elif token != eos:
                    write(stream.push(token), thinking)
            stop = event.stop or stop
            if stopped:
                break
    except Stopped:
        pass
    finally:
        events.close()
        bar.close()
        write(stream.finish(), thinking)
        write("" if last == "\n" else "\n", False)
    return Answer(ids, stop, time.perf_counter() - began)


def remarks(prompt: int, held: int, answer: Answer, cache: Cache, decoder: PlainDecoder) -> str:
    """Why an answer ended, if not by itself, and what it took."""
    why = {"length": f"stopped after {len(answer.ids)} tokens, the limit set by --max-new-tokens",
           "context": f"stopped: the context of {cache.max_length:,} tokens is full", "interrupted": "interrupted"}
    rate = f" at {(len(answer.ids) - 1) / answer.seconds:.1f}/s" if len(answer.ids) > 1 else ""
    lines = [why[answer.stop]] if answer.stop in why else []
    lines += [f"prompt {prompt} ({held} cached), answer {len(answer.ids)} tokens{rate}, cache {cache.nbytes():,} bytes"]
    lines += str(decoder.statistics).split("; ") if isinstance(decoder, SpeculativeDecoder) else []
    return "\n".join(f"[{line}]" for line in lines)


def ask(s: Setting, session: Session, prompt: Prompt, thinking: bool, sampler: Sampler,
        stopped: Sequence[bool] = ()) -> Answer:
    """Have a session's next prompt answered on the screen; it is given up once there is something in `stopped`."""
    held, decoder = session.rewind(prompt), s.decoder(sampler)
    new = len(prompt.ids) - held
    hidden = not (s.screen.visible and sys.stderr.isatty()) or new <= 4096      # bars are for people who wait
    bar = tqdm(total=new, desc="reading", unit="tok", file=sys.stderr, leave=False, disable=hidden)

    def progress(count: int) -> None:
        bar.update(count)
        if stopped:
            raise Stopped

    events = session.answer(prompt, max_new_tokens=s.args.max_new_tokens, prefill=s.args.prefill, decoder=decoder,
                            progress=progress)
    answer = show_answer(events, bar, s.tokenizer, s.screen, thinking, stopped)
    s.screen.note(remarks(len(prompt.ids), held, answer, session.cache, decoder))
    return answer


# ------------------------------------------------------------------------------------------------- one prompt, a file

def check_text(text: str, name: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in text):             # bytes that could not be decoded arrive as surrogates
        raise ValueError(f"{name} is not valid UTF-8")
    return text


def user_message(text: str, images: Sequence[object]) -> dict:
    blocks: list[dict] = [{"type": "image", "source": image} for image in images]
    return {"role": "user", "content": [*blocks, {"type": "text", "text": text}] if blocks else text}


def system_message(text: str | None) -> list[dict]:
    return [] if text is None else [{"role": "system", "content": text}]


def run_once(s: Setting) -> None:
    args = s.args
    text = s.team.share(lambda: check_text(sys.stdin.read() if args.prompt == "-" else args.prompt, "the prompt"))
    if not text.strip():
        raise ValueError("the prompt is empty")
    prompt = s.prompt([*system_message(args.system), user_message(text, args.image)], args.mode, args.reasoning_effort)
    ask(s, Session(s.model, s.max_length), prompt, args.mode == "thinking", s.sampler())


def read_conversations(path: str) -> list[Any]:
    """The conversations of a file: a JSON list of them, one in each line, or a single one."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")                          # a byte order mark is no part of it
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{'standard input' if path == '-' else path} is not valid UTF-8 (line {line})") from None
    with contextlib.suppress(ValueError, RecursionError):
        whole = json.loads(text)
        if isinstance(whole, list) and not all(isinstance(m, dict) and "role" in m for m in whole):
            return whole
        return [whole]
    found, path = [], "standard input" if path == "-" else path
    for number, line in enumerate(text.split("\n"), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no conversations")
    return found


def run_file(s: Setting) -> int:
    """Answer the conversations of a file: lists of messages, or {"messages": [...]} with thinking_mode and
    reasoning_effort of their own. One JSON line for each, in order: the message, or {"error": ...}. A batch draws from
    one generator, seeded with seed + the index of its first conversation."""
    args = s.args
    conversations, failed = s.team.share(lambda: read_conversations(args.input_file)), 0
    hidden = not (s.screen.visible and sys.stderr.isatty() and not sys.stdout.isatty())
    bar = tqdm(total=len(conversations), desc="conversations", file=sys.stderr, leave=False, disable=hidden)
    for first in range(0, len(conversations), args.batch_size):
        lines: dict[int, dict] = {}
        rows: dict[int, tuple[Prompt, str]] = {}
        for index in range(first, min(first + args.batch_size, len(conversations))):
            try:
                own = conversations[index]
                own = own if isinstance(own, dict) else {"messages": own}
                mode, effort = own.get("thinking_mode", args.mode), own.get("reasoning_effort", args.reasoning_effort)
                rows[index] = s.prompt(own.get("messages"), mode, effort), mode
                check_length(rows[index][0], s.max_length)
            except ValueError as error:
                lines[index] = {"error": str(error)}
                rows.pop(index, None)
                failed += 1
        if rows:
            cache, ids = s.model.new_cache(len(rows), s.max_length), {index: [] for index in rows}
            order, stops = list(rows), {}
            for event in generate(s.model, [prompt for prompt, _ in rows.values()], cache, prefill=args.prefill,
                                  max_new_tokens=args.max_new_tokens, decoder=s.decoder(s.sampler(first))):
                ids[order[event.row]] += event.tokens
                stops[order[event.row]] = event.stop
            for index, (_, mode) in rows.items():
                message = parse_completion(to_text(s.tokenizer, ids[index]), mode, strict=False)
                lines[index] = message | {"finish_reason": "stop" if stops[index] == "eos" else "length"}
        for index in sorted(lines):
            if s.screen.visible:
                print(json.dumps(lines[index], ensure_ascii=False), flush=True)
        bar.update(len(lines))
    bar.close()
    if failed:
        s.screen.note(f"error: {failed} of {len(conversations)} conversations could not be answered")
    return 1 if failed else 0


# ----------------------------------------------------------------------------------------------------------------- chat

HELP = """/image FILE       send an image with the next message
/system [TEXT]    set the system message; without TEXT: remove it
/think on|off|N   reason before answering, with effort N (1-100, low, high, max)
/save FILE        write the conversation and its cache to a session file
/load FILE        go on with one
/clear            start over
/exit             leave, as Ctrl-D does
Ctrl-C stops an answer. A space before a / makes it text."""


@contextlib.contextmanager
def interruptible(alone: bool) -> Iterator[list[bool]]:
    """Within, Ctrl-C fills the list that is given out, and is a KeyboardInterrupt the second time. Of several ranks,
    one cannot stop while the others go on: there it ends the program."""
    stopped: list[bool] = []

    def on_interrupt(signum: int, frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(True)

    before = signal.signal(signal.SIGINT, on_interrupt) if alone else None
    try:
        yield stopped
    finally:
        if alone:
            signal.signal(signal.SIGINT, before)


def pack(value: Any) -> Any:
    """Messages as JSON: of an image, its sizes and the digest of its pixels."""
    if isinstance(value, ImageInput):
        return {"image": {"grid": value.grid, "llm_grid": value.llm_grid, "sha256": value.digest.hex()}}
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    return [pack(item) for item in value] if isinstance(value, (list, tuple)) else value


def unpack(value: Any, images: Sequence[SavedImage]) -> Any:
    if isinstance(value, dict) and isinstance(image := value.get("image"), dict) and "sha256" in image:
        none, pixels = torch.empty(0), bytes.fromhex(image["sha256"])
        unread = SavedImage(none, tuple(image["grid"]), tuple(image["llm_grid"]), pixels, none)
        same = [known for known in images if known.digest == pixels]
        return max(same, key=lambda known: len(known.features), default=unread)
    if isinstance(value, dict):
        return {key: unpack(item, images) for key, item in value.items()}
    return [unpack(item, images) for item in value] if isinstance(value, list) else value


def path_of(argument: str, command: str) -> str:
    """A file name as people type it after a command."""
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
        argument = argument[1:-1]
    if not argument:
        raise ValueError(f"{command} needs the name of a file")
    return os.path.expanduser(argument)


class Chat:
    def __init__(self, s: Setting) -> None:
        self.s, self.session = s, Session(s.model, s.max_length)
        self.system, self.mode, self.effort = s.args.system, s.args.mode, s.args.reasoning_effort
        self.turns: list[tuple[dict, tuple[list[int], list[int]] | None]] = []   # messages; an answer's sampled ids
        self.images = [s.load(image) for image in s.args.image]                  # they go with the next message
        self.sampler = s.sampler()

    def save(self, file: str) -> int:
        chat = {"turns": pack(self.turns), "system": self.system, "mode": self.mode, "effort": self.effort,
                "random": base64.b64encode(self.sampler.generator.get_state().numpy().tobytes()).decode()}
        thinking, with_windows = self.mode == "thinking", self.s.args.with_windows
        return self.s.team.each(lambda: self.session.save(file, chat, thinking, with_windows))

    def load(self, file: str) -> None:
        session = Session(self.s.model, self.s.max_length)
        chat, images = self.s.team.each(lambda: session.resume(file))
        if not isinstance(chat, dict) or "turns" not in chat:
            raise ValueError(f"{file} is a session without a chat")
        self.session, self.images = session, []
        self.turns = [(message, None if ids is None else tuple(ids)) for message, ids in unpack(chat["turns"], images)]
        self.system, self.mode, self.effort = chat["system"], chat["mode"], chat["effort"]
        state = bytearray(base64.b64decode(chat["random"]))
        self.sampler.generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        self.s.screen.note(f"[{file}: {len(self.turns)} messages, {session.cache.lengths[0]:,} tokens]")

    def run(self) -> None:
        s, c = self.s, self.s.model.config
        s.screen.note(f"DeepSeek-V4.1-Flash, {len(s.model.layers)} layers of width {c.hidden_size}, {s.max_length:,} "
                      f"tokens of context, on {s.model.device}\n/help lists the commands, Ctrl-D leaves")
        if s.args.session is not None and s.team.share(lambda: os.path.exists(s.args.session)):
            self.load(s.args.session)
        while True:
            try:
                line = s.team.share(self.read)
                if line.strip() == "/exit":
                    return
                if line.startswith("/"):
                    self.command(*line.partition(" ")[::2])
                elif line.strip():
                    self.answer(line)
            except EOFError:
                if s.screen.terminal:
                    s.screen.write("\n")
                return
            except KeyboardInterrupt:
                if s.team.size > 1:
                    raise
                s.screen.note("\n[Ctrl-D or /exit leaves]")
            except (ValueError, torch.OutOfMemoryError) as error:
                if s.team.size > 1 and not isinstance(error, ValueError):    # the other ranks know nothing of it
                    raise
                s.screen.note(f"error: {error}")

    def read(self) -> str:
        if self.s.screen.terminal:
            print()
            return check_text(input("> "), "this line")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return check_text(line.rstrip("\r\n"), "this line")

    def command(self, name: str, argument: str) -> None:
        argument = argument.strip()
        if name == "/help":
            self.s.screen.note(HELP)
        elif name == "/clear":
            self.turns, self.images = [], []
            self.session = Session(self.s.model, self.s.max_length)
            self.s.screen.note("[the conversation is empty]")
        elif name == "/image":
            image = self.s.load(path_of(argument, name))
            self.images.append(image)
            self.s.screen.note(f"[an image of {len(image.span)} tokens goes with your next message]")
        elif name == "/save":
            file = path_of(argument, name)
            self.s.screen.note(f"[{self.save(file):,} tokens saved to {file}]")
        elif name == "/load":
            self.load(path_of(argument, name))
        elif name == "/system":
            self.system = argument or None
            self.s.screen.note(f"[system message {'set' if argument else 'removed'}]")
        elif name == "/think":
            effort = {"on": None, "off": None}.get(argument, int(argument) if argument.isdecimal() else argument)
            encode_messages([user_message("", [])], "thinking", effort)          # ValueError for efforts there are not
            self.mode, self.effort = "chat" if argument == "off" else "thinking", effort
            self.s.screen.note("[answers at once]" if argument == "off" else "[reasons before it answers]")
        else:
            raise ValueError(f"{name} is not a command; /help lists them")

    def answer(self, text: str) -> None:
        s = self.s
        turns = [*self.turns, (user_message(text, self.images), None)]
        system = system_message(self.system)
        replies = {len(system) + i: ids for i, (_, ids) in enumerate(turns) if ids is not None}
        messages = system + [message for message, _ in turns]
        prompt = s.prompt(messages, self.mode, self.effort, replies)
        with interruptible(s.team.size == 1) as stopped:
            answer = ask(s, self.session, prompt, self.mode == "thinking", self.sampler, stopped)
        if not answer.ids:                                       # nothing was said: as if nothing had been asked
            return
        message = parse_completion(to_text(s.tokenizer, answer.ids), self.mode, strict=False)
        self.turns = [*turns, (message, split_reply(answer.ids, self.mode, encoder(s.tokenizer)))]
        self.images = []
        if s.args.session is not None:
            self.save(s.args.session)


# --------------------------------------------------------------------------------------------------------- command line

def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Talk to DeepSeek-V4.1-Flash: a chat, unless told otherwise.", allow_abbrev=False,
                    usage="generate.py [--prompt TEXT | --input-file FILE | --benchmark N,...] ...")
    add = parser.add_argument_group("what to do").add_mutually_exclusive_group().add_argument
    add("--interactive", action="store_true", help="chat (the default)")
    add("--prompt", metavar="TEXT", help="answer this prompt; -: the one on standard input")
    add("--input-file", metavar="FILE", help="answer conversations, JSON lines or a JSON list; -: standard input")
    add("--benchmark", metavar="N,N,...", help="measure speed and memory at these prompt lengths")
    add = parser.add_argument_group("the prompt").add_argument
    add("--image", metavar="FILE", action="append", default=[], help="an image for the first message; repeatable")
    add("--system", metavar="TEXT", help="system message")
    add("--thinking", action="store_true", help="reason before answering")
    add("--reasoning-effort", metavar="N", type=lambda text: int(text) if text.isdecimal() else text,
        help="1-100, low, high or max; implies --thinking")
    add("--allow-urls", action="store_true", help="fetch images from http(s) addresses")
    add("--session", metavar="FILE", help="chat: go on with this session file if there is one, and keep it up to date")
    add("--with-windows", action="store_true", help="save sliding windows too: a resumed session is then exact")
    add = parser.add_argument_group("the answer").add_argument
    add("--max-new-tokens", metavar="N", type=int, default=512, help="default %(default)s")
    add("--temperature", metavar="T", type=float, default=1.0, help="default %(default)s; 0: the most likely token")
    add("--top-p", metavar="P", type=float, default=0.95, help="default %(default)s")
    add("--seed", metavar="S", type=int, default=0, help="default %(default)s")
    add("--speculative", action="store_true", help="draft several tokens, verify them in one forward")
    add("--draft-confidence", metavar="P", type=float, default=0.0,
        help="submit drafts that survive with this probability at least (default 0: all)")
    add = parser.add_argument_group("the model").add_argument
    add("--ckpt-path", metavar="DIR", default=str(Path(__file__).resolve().parent / "tiny"),
        help="checkpoint, as published or cut by convert.py (default: tiny/)")
    add("--device", help="cpu, cuda, cuda:N (default: cuda where there is one)")
    add("--exact", action="store_true", help="exact arithmetic: the same bits on any device, in any batch")
    add("--offload", action="store_true", help="leave the experts on disk, read those that are used")
    add("--max-length", metavar="N", type=int, help="context (default: what the model was made for)")
    add("--prefill", choices=("full", "bounded", "exact-replay"), default="full", help="tokens of a prompt that the "
        "decoder layers run over: all, the last window, or as many as give the result of full (default: full)")
    add("--batch-size", metavar="N", type=int, help="rows of --input-file (8) or --benchmark (1)")
    add("--benchmark-decode", metavar="N", type=int, default=64, help="tokens that --benchmark decodes (default 64)")
    add("--random", metavar="CONFIG.json", help="--benchmark layers of this configuration with random weights, part by part")
    add("--context", metavar="N,N,...", default="", help="with --random: decode at these contexts, the cache filled at random")
    args = parser.parse_args(arguments)
    if args.draft_confidence and not args.speculative:
        raise ValueError("--draft-confidence needs --speculative")
    if args.session and (args.prompt is not None or args.input_file or args.benchmark):
        raise ValueError("--session needs a chat")
    if args.image and (args.input_file or args.benchmark):
        raise ValueError("--image needs --prompt or a chat")
    if args.seed >= 2**63:
        raise ValueError(f"--seed {args.seed} must be below 2**63")
    least_of = {"max_new_tokens": 1, "seed": 0, "max_length": 2, "batch_size": 1, "benchmark_decode": 1}
    for name, least in least_of.items():
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    for name in ("benchmark", "context"):
        if text := getattr(args, name):
            if not all(n.isdecimal() and int(n) for n in text.split(",")):
                raise ValueError(f"--{name} {text} is not a list of lengths such as 512,4096")
            setattr(args, name, sorted(int(n) for n in text.split(",")))
    if (args.random or args.context) and not (args.random and args.benchmark):
        raise ValueError("--random CONFIG.json and --context go with --benchmark and with each other")
    Sampler(args.temperature, args.top_p)                        # ValueErrors now, not after minutes of loading
    args.mode = "thinking" if args.thinking or args.reasoning_effort is not None else "chat"
    encode_messages([user_message("", [])], args.mode, args.reasoning_effort)
    args.batch_size = args.batch_size or (8 if args.input_file else 1)
    return args


def random_seed(directory: str) -> int | None:
    """The seed of a checkpoint made by `convert.py --random`, from its index; None for other checkpoints."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((Path(directory) / INDEX).read_text(encoding="utf-8")).get("metadata", {}).get("random_seed")
    return None


def check_benchmark(args: argparse.Namespace) -> None:
    """ValueError, before anything is loaded, for lengths of a benchmark beyond the context of its model."""
    with contextlib.redirect_stderr(io.StringIO()):              # what there is to note about it is said by loading
        config = ModelConfig.from_json(args.random) if args.random else open_checkpoint(args.ckpt_path).config
    for length in args.benchmark:
        check_context(config, "--benchmark", length, 0 if args.random else args.benchmark_decode)
    for length in args.context:
        check_context(config, "--context", length, 1)


def read_tokenizer(directory: str, vocabulary: int) -> Tokenizer:
    """The tokenizer of a checkpoint folder; ValueError when there is none, or one that does not know the chat format."""
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"there is no tokenizer.json in {directory}")
    tokenizer = Tokenizer.from_file(str(path))
    for token in (BOS, EOS, USER, ASSISTANT, THINK_START, THINK_END):
        if (found := tokenizer.token_to_id(token)) is None or found >= vocabulary:
            raise ValueError(f"{path} is not the tokenizer of this model: the token {token} is "
                             f"{'missing' if found is None else f'{found}, outside the vocabulary'}")
    return tokenizer


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next layer. It would give the end of the heap back to the system whenever that
    is free and ask for it again at once: a tenth of the time of a prompt. Other C libraries are left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 32 << 20)      # M_MMAP_THRESHOLD: larger pieces do not come from the heap
        mallopt(-1, 128 << 20)     # M_TRIM_THRESHOLD: how much of the heap's end may stay


def run(args: argparse.Namespace, team: Team) -> int:
    keep_freed_memory()
    screen = Screen(visible=team.rank == 0)
    if args.benchmark:
        check_benchmark(args)
    if args.random:
        random_benchmark(args.random, args.benchmark, args.context or [], args.batch_size or 1, args.exact, team.device,
                         args.seed, screen.write)
        return 0
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: screen.note(f"warning: {message}")
        with contextlib.redirect_stderr(sys.stderr if team.rank == 0 else io.StringIO()):  # bars and remarks: one of each
            model = team.each(lambda: load_model(args.ckpt_path, args.exact, team.device, group=team.group,
                                                 draft=args.speculative, offload=args.offload))
        if args.benchmark:
            s = Setting(args, model, None, team, screen)
            run_benchmark(s, s.decoder(Sampler()))
            return 0
        if (seed := random_seed(args.ckpt_path)) is not None:
            screen.note(f"note: these weights are random (seed {seed}), so the answers mean nothing")
        s = Setting(args, model, read_tokenizer(args.ckpt_path, model.config.vocab_size), team, screen)
        if args.input_file is not None:
            return run_file(s)
        elif args.prompt is not None:
            run_once(s)
        else:
            if screen.terminal:
                import readline  # noqa: F401  (gives input() a line editor and a history)
            Chat(s).run()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape" if stream is sys.stdin else "replace")
    rank, alone, code = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) == 1, 1
    try:
        args = parse_arguments(arguments)
        team = Team(args.device)
        code = run(args, team)
        team.part()
    except ValueError as error:
        if rank:                                                 # rank 0 says it too, and its end ends this rank
            time.sleep(5)
        print(f"error: rank {rank}: {error}" if rank else f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code = 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        # if it is the pipe, the reader has had enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except RuntimeError as error:
        if alone and not isinstance(error, torch.OutOfMemoryError):
            raise
        text = str(error).strip().split("\n")[0]
        text = "another rank has ended" if "Connection closed" in text or "Connection reset" in text else text
        print(f"error: {text}" if alone else f"error: rank {rank}: {text}", file=sys.stderr)
    except Exception:
        if alone:
            raise
        traceback.print_exc()
    if not alone:
        # At once: after an error the others may be waiting for this rank in the middle of anything, and torchrun ends them
        # when it is gone; and taking down the groups while other ranks still use theirs has crashed in the library.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
