"""
The chat format of DeepSeek-V4.1: messages -> prompt, completion -> message.

The release has no Jinja template: these rules are the format. A prompt is BOS and then the messages in order, with no
separators. A conversation in the two modes ("chat" answers at once, "thinking" reasons first):

    chat       BOS <｜System｜>sys <｜User｜>q1 <｜Assistant｜></think> a1 EOS <｜User｜>q2 <｜Assistant｜></think>
    thinking   BOS <｜System｜>{effort line}sys <｜User｜>q1 <｜Assistant｜></think> a1 EOS <｜User｜>q2 <｜Assistant｜><think>

What is unusual:
  * `<think>` or `</think>` belongs to the header that the *preceding* turn writes, so the text of an assistant turn is
    [reasoning </think>] answer EOS: exactly what the model samples after the header.
  * Reasoning of earlier turns is dropped from the prompt (and its header ends in </think>), unless there are tools.
  * Tool results are user turns. Tool calls are written in DSML, with a space after ｜DSML｜ (V4 had none).
  * An image is one placeholder token here; the image processor expands it to the image's span later.

For one prompt as text, call `encode_messages`. A chat that keeps a KV cache needs the ids that were really sampled,
because decoding an answer to text and encoding it again need not give the same ids: it takes the prompt as a list of
segments (`render_segments`), splits each sampled reply once (`split_reply`), and lets `prompt_ids` put the sampled ids
where the answers stand. Comparing these ids with those in the cache gives the prefix that need not be computed again.

Text is never escaped: someone who types `<｜User｜>` or EOS in a message writes that token, as in the released encoder.
Left out: V4's "developer" role, and continuing from a separate "context" (segments do that better).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK_START = "<think>"
THINK_END = "</think>"
IMAGE = "<｜deepseek_image｜>"
DSML = "｜DSML｜"
IMAGE_TYPES = ("image", "image_url")  # of content blocks
TASKS = ("action", "query", "authority", "domain", "title", "read_url")  # each has a token <｜task｜>

EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

CALLS_START = f"\n\n<{DSML} calls"  # what separates an answer from its calls; ">\n" follows
CALLS_END = f"</{DSML} calls>"
INVOKE_START = f"<{DSML} invoke"
INVOKE_END = f"</{DSML} invoke>\n"
PARAMETER_START = f"<{DSML} parameter"
PARAMETER_END = f"</{DSML} parameter>"

TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_START}), you MUST output your complete reasoning inside \
{THINK_START}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
# The final newline is part of the format: the next turn's token follows it directly.
TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
RESPONSE_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


# ---------------------------------------------------------------------------------------------------------------------
# Checking what was given

# The fields of each role that mean something; on another role they are an error, while unknown fields are ignored.
ROLE_FIELDS = {
    "system": {"tools", "response_format"},
    "user": set(),
    "tool": {"tool_call_id"},
    "latest_reminder": set(),
    "assistant": {"reasoning_content", "tool_calls", "wo_eos"},
}


def _string(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, not {type(value).__name__}")
    return value


def _optional(where: str, message: Mapping, name: str) -> str:
    return "" if message.get(name) is None else _string(f"{where}: {name}", message[name])


def _check_text(where: str, text: object) -> str:
    if IMAGE in _string(where, text):  # it would stand for an image that is not there
        raise ValueError(f"{where} contains {IMAGE} as text; give images as image blocks")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} contains a lone surrogate, which is not valid Unicode text") from None
    return text


def _check_mode(thinking_mode: str) -> None:
    if thinking_mode not in ("chat", "thinking"):
        raise ValueError(f'thinking_mode must be "chat" or "thinking", not {thinking_mode!r}')


def _check_message(index: int, message: object) -> str:
    """Checks role, fields and task of a message; returns the words that later errors name it with."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLE_FIELDS:
        raise ValueError(f"message {index} must be a dict with a role out of {', '.join(ROLE_FIELDS)}, not {role!r}")
    where = f"message {index} ({role})"
    for name in sorted(set().union(*ROLE_FIELDS.values()) - ROLE_FIELDS[role]):
        if message.get(name):
            raise ValueError(f"{where} has {name}, which has no meaning for this role")
    for name in ("tools", "tool_calls"):
        entries = message.get(name) or []
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ValueError(f"{where}: {name} must be a list of dicts")
    task = message.get("task")
    if task is not None and (role == "tool" or task not in TASKS):
        raise ValueError(f"{where} has the task {task!r}; tasks are {', '.join(TASKS)}, and not for tool messages")
    return where


def _effort(reasoning_effort: int | str | None) -> int:
    effort = DEFAULT_EFFORT if reasoning_effort is None else reasoning_effort
    if isinstance(effort, str) and effort in EFFORTS:
        return EFFORTS[effort]
    if type(effort) is not int or not 1 <= effort <= 100:  # bool is an int for isinstance
        raise ValueError(f"reasoning_effort must be an integer 1..100, low, high or max, not {reasoning_effort!r}")
    return effort


# ---------------------------------------------------------------------------------------------------------------------
# Tools: their schemas in a system turn, their calls in an assistant turn

def _json(where: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from None


def _split_name(where: str, name: str) -> list[str]:
    parts = name.split("::")
    if len(parts) > 2 or not all(parts):
        raise ValueError(f"{where}: the name {name!r} is not of the form name or namespace::name")
    return parts


def _function(where: str, entry: Mapping) -> tuple[dict, str, str]:
    """Of an OpenAI-style tool or call: its function, the name with the namespace, the namespace's description."""
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f'{where} must have a "function" dict')
    name, description = _string(f"{where}: name", function.get("name")), ""
    namespace = entry.get("namespace") or function.get("namespace")
    if isinstance(namespace, Mapping):
        description = _optional(f"{where}: namespace", namespace, "description")
        namespace = namespace.get("name")
    if namespace:
        name = _string(f"{where}: namespace", namespace) + "::" + name
    _split_name(where, name)
    return dict(function), name, description


def _render_tools(where: str, tools: Sequence[dict]) -> str:
    schemas = []
    for i, tool in enumerate(tools):
        function, name, description = _function(f"{where}: tool {i}", tool)
        function["name"] = name  # keeps its place in the JSON
        function.pop("namespace", None)
        if description:
            function["description"] = description + "\n" + _optional(f"{where}: tool {i}", function, "description")
        schemas.append(_json(f"{where}: tool {i}", function))
    return TOOLS_HEAD + "\n".join(schemas) + TOOLS_TAIL


def _call_arguments(where: str, arguments: object) -> dict:
    """The arguments of a call as a dict; text that is not a JSON object becomes one argument named "arguments"."""
    value = arguments
    for _ in range(2):  # clients send a dict, its JSON, or the JSON of its JSON
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                break
    if isinstance(value, Mapping):
        return dict(value)
    return {"arguments": _string(f"{where}: arguments that are not a dict", arguments)}  # as given, not as decoded


def _render_calls(where: str, calls: Sequence[dict]) -> str:
    text = ""
    for i, call in enumerate(calls):
        function, name, _ = _function(f"{where}: tool call {i}", call)
        lines = []
        for key, value in _call_arguments(f"{where}: tool call {i}", function.get("arguments")).items():
            is_string = "true" if isinstance(value, str) else "false"
            # There is no escape: a string that holds PARAMETER_END itself cannot be read back.
            value = value if isinstance(value, str) else _json(f"{where}: argument {key!r} of tool call {i}", value)
            lines.append(f'{PARAMETER_START} name="{key}" string="{is_string}">{value}{PARAMETER_END}')
        # Without arguments an empty line is left between the tags.
        text += f'{INVOKE_START} name="{name}">\n' + "\n".join(lines) + "\n" + INVOKE_END
    return CALLS_START + ">\n" + text + CALLS_END if calls else ""


# ---------------------------------------------------------------------------------------------------------------------
# Messages -> turns: user messages and tool results that follow each other share one user turn

@dataclass
class _Turn:
    index: int  # of its (first) message
    where: str  # the words that errors name that message with
    message: dict
    role: str  # system, user, latest_reminder or assistant
    blocks: list[dict]  # of a user turn

    def asks(self) -> bool:
        """Whether this turn makes earlier reasoning old: results alone (or unsupported blocks alone) ask nothing."""
        return self.role == "system" or any(block["type"] in ("text", *IMAGE_TYPES) for block in self.blocks)


def _blocks(where: str, content: object) -> list[dict]:
    """Content as a list of blocks of which the types, texts and tool results are checked."""
    if not isinstance(content, list):
        return [{"type": "text", "text": _check_text(f"{where}: content that is not a list of blocks", content)}]
    blocks = []
    for i, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise ValueError(f"{where}: block {i} must be a dict, not {type(block).__name__}")
        kind = _check_text(f"{where}: the type of block {i}", block.get("type"))
        if kind == "text":
            _check_text(f"{where}: the text of block {i}", block.get("text"))
        if kind == "tool_result":
            block = {**block, "content": _blocks(where, block.get("content"))}
        blocks.append(block)
    return blocks


def _merge_turns(messages: Sequence[dict]) -> list[_Turn]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
        raise ValueError("messages must be a list of at least one message")
    turns: list[_Turn] = []
    order: dict[str, int] = {}  # the newest calls' ids -> their position
    for index, message in enumerate(messages):
        where, role, content = _check_message(index, message), message["role"], message.get("content")
        if role == "tool":
            content = [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": content}]
        blocks = _blocks(where, content) if role in ("user", "tool") else []
        joins = role == "tool" or role == "user" and turns and turns[-1].message.get("task") is None
        if joins and turns and turns[-1].role == "user":
            turns[-1].blocks += blocks  # a task of the joining message is lost here, as in the released encoder
        else:
            turns.append(_Turn(index, where, message, "user" if role == "tool" else role, blocks))
    for turn in turns:
        calls = turn.message.get("tool_calls")
        if calls:
            order = {str(call["id"]): i for i, call in enumerate(calls) if call.get("id") is not None}
        # Results come in the order of the calls they answer, unknown ids as if first; other blocks keep their places.
        results = [block for block in turn.blocks if block["type"] == "tool_result"]
        ranked = iter(sorted(results, key=lambda block: order.get(str(block.get("tool_use_id")), 0)))
        turn.blocks = [next(ranked) if block["type"] == "tool_result" else block for block in turn.blocks]
    return turns


# ---------------------------------------------------------------------------------------------------------------------
# Turns -> segments -> prompt

GIVEN, REASONING, ANSWER = "given", "reasoning", "answer"


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt: text given to the model, or the reasoning or the answer of an assistant message.

    `message` is an index into the messages (of the first one where several share a turn). A reasoning segment ends with
    THINK_END; an answer segment is content, calls and EOS (no EOS where the message says `wo_eos`). `images` holds the
    image blocks whose placeholders are in `text`, in order.
    """
    kind: str
    message: int
    text: str
    images: tuple[dict, ...] = ()


def _render_blocks(blocks: Sequence[dict], images: list[dict], inside_result: bool = False) -> str:
    parts = []
    for block in blocks:
        if block["type"] == "text":
            parts.append(block["text"])
        elif block["type"] in IMAGE_TYPES:
            images.append(block)
            parts.append(IMAGE)
        elif block["type"] == "tool_result" and not inside_result:
            parts.append("<tool_result>" + _render_blocks(block["content"], images, True) + "</tool_result>")
        else:
            parts.append(f"[Unsupported {block['type']}]")
    return "\n\n".join(parts)


def _render_system(turn: _Turn) -> str:
    text, message = _optional(turn.where, turn.message, "content"), turn.message
    if message.get("tools"):
        text += "\n\n" + _render_tools(turn.where, message["tools"])
    if message.get("response_format"):
        text += RESPONSE_FORMAT + _json(f"{turn.where}: response_format", message["response_format"])
    return _check_text(f"{turn.where}: content", text)


def _render_assistant(turn: _Turn) -> tuple[str, str]:
    """Reasoning and answer. Not searched for placeholders here: ids may replace this text (see `prompt_ids`)."""
    message, where = turn.message, turn.where
    reasoning = _optional(where, message, "reasoning_content") + THINK_END
    answer = _optional(where, message, "content") + _render_calls(where, message.get("tool_calls") or [])
    return reasoning, answer if message.get("wo_eos") else answer + EOS


def render_segments(
    messages: Sequence[dict], thinking_mode: str = "chat", reasoning_effort: int | str | None = None,
    drop_thinking: bool = True,
) -> list[Segment]:
    """The prompt as segments in order; arguments and errors as for `encode_messages`."""
    _check_mode(thinking_mode)
    effort = _effort(reasoning_effort)
    thinking = thinking_mode == "thinking"
    turns = _merge_turns(messages)

    newest = max((i for i, turn in enumerate(turns) if turn.asks()), default=-1)  # reasoning is kept after it
    keeps_all = not drop_thinking or any(turn.message.get("tools") for turn in turns)

    opening = BOS
    if thinking or turns[0].role == "system":
        opening += SYSTEM
    if thinking:
        opening += EFFORT_LINE.format(effort)  # also without a system message
    segments = [Segment(GIVEN, 0, opening)]
    for i, turn in enumerate(turns):
        task_before = turns[i - 1].message.get("task") if i > 0 else None
        if turn.role == "assistant":
            reasoning, answer = _render_assistant(turn)
            if thinking and (keeps_all or i > newest) and task_before is None:  # the reply to a task has no reasoning
                segments.append(Segment(REASONING, turn.index, reasoning))
            segments.append(Segment(ANSWER, turn.index, answer))
        elif turn.role == "user":
            images: list[dict] = []
            text = USER + _render_blocks(turn.blocks, images)
            segments.append(Segment(GIVEN, turn.index, text, tuple(images)))
        elif turn.role == "system":
            segments.append(Segment(GIVEN, turn.index, (SYSTEM if i > 0 else "") + _render_system(turn)))
        else:
            reminder = _check_text(f"{turn.where}: content", turn.message.get("content"))
            segments.append(Segment(GIVEN, turn.index, LATEST_REMINDER + reminder))

        if i + 1 < len(turns) and turns[i + 1].role not in ("assistant", "latest_reminder"):
            continue  # no reply follows: no header
        task, header = turn.message.get("task"), ""
        if task == "action":
            header = ASSISTANT + (THINK_START if thinking else THINK_END) + "<｜action｜>"
        elif task is not None:
            header = f"<｜{task}｜>"
        elif turn.role == "user" or turn.role == "system" and i > 0:
            header = ASSISTANT + (THINK_START if thinking and (keeps_all or i >= newest) else THINK_END)
        if header:
            segments.append(Segment(GIVEN, turn.index, header))
    return segments


def encode_messages(
    messages: Sequence[dict], thinking_mode: str = "chat", reasoning_effort: int | str | None = None,
    drop_thinking: bool = True,
) -> tuple[str, list[dict]]:
    """The prompt for a conversation, and its image blocks in the order of their placeholders.

    `messages`: OpenAI-style dicts with `role` (system, user, tool, latest_reminder, assistant) and `content`; system
    may have `tools` and `response_format`, assistant `reasoning_content`, `tool_calls` and `wo_eos` (left open, to be
    continued), any but tool a `task`. `reasoning_effort`: 1..100, low (50), high (75, the default), max (100); only
    thinking mode writes it. `drop_thinking=False` keeps the reasoning of all turns. ValueErrors name the message.
    """
    segments = render_segments(messages, thinking_mode, reasoning_effort, drop_thinking)
    for segment in segments:
        if segment.kind != GIVEN:
            _check_text(f"message {segment.message} (assistant)", segment.text)
    return "".join(segment.text for segment in segments), [image for segment in segments for image in segment.images]


# ---------------------------------------------------------------------------------------------------------------------
# Segments -> ids, for a chat that keeps a cache

def _token(encode: Callable[[str], list[int]], text: str) -> int:
    ids = encode(text)
    if len(ids) != 1:
        raise ValueError(f"the tokenizer does not know the token {text}")
    return ids[0]


def split_reply(
    ids: Sequence[int], thinking_mode: str, encode: Callable[[str], list[int]]
) -> tuple[list[int], list[int]]:
    """Sampled ids of a reply -> (reasoning with its THINK_END, answer), for `prompt_ids`; either may be cut short."""
    _check_mode(thinking_mode)
    ids, think_end, eos = list(ids), _token(encode, THINK_END), _token(encode, EOS)
    if thinking_mode == "chat":
        return [], ids
    if think_end in ids:
        cut = ids.index(think_end) + 1
    else:  # stopped while reasoning, from outside or by EOS
        cut = len(ids) - (ids[-1:] == [eos])
    return ids[:cut], ids[cut:]


def prompt_ids(
    segments: Sequence[Segment],
    encode: Callable[[str], list[int]],
    replies: Mapping[int, tuple[list[int], list[int]]] | None = None,
) -> tuple[list[int], list[int]]:
    """The ids of a prompt, and the positions in them of the image placeholders, in the order of the images.

    `encode` turns text into ids and adds none of its own. `replies`: message index -> what `split_reply` gave for it;
    these ids replace the text of that message, and what a cut reply lacks (THINK_END, EOS) is added. An image token
    that the model sampled is an id like any other: only the positions returned stand for images.
    """
    replies = replies or {}
    closing = {REASONING: THINK_END, ANSWER: EOS}
    image_token = _token(encode, IMAGE) if any(segment.images for segment in segments) else None
    ids: list[int] = []
    image_positions: list[int] = []

    def append_text(text: str) -> None:
        new = encode(text)
        image_positions.extend(len(ids) + i for i, token in enumerate(new) if token == image_token)
        ids.extend(new)

    text = ""  # neighbouring text is encoded in one piece: tokens may cross a border that no special token marks
    for segment in segments:
        if segment.kind == GIVEN or segment.message not in replies:
            if segment.kind != GIVEN:
                _check_text(f"message {segment.message} (assistant)", segment.text)
            text += segment.text
            continue
        append_text(text)
        text = ""
        sampled = list(replies[segment.message][segment.kind == ANSWER])
        end = closing[segment.kind]
        if sampled[-1:] == [_token(encode, end)]:
            sampled.pop()
        ids.extend(sampled)
        if segment.text.endswith(end):  # not where the message is left open
            text = end
    append_text(text)
    return ids, image_positions


def image_source(image: Mapping) -> object:
    """What an image block refers to (path, URL, data), as it was given: its `source`, or the url of its `image_url`."""
    source = image.get("source") if image.get("type") == "image" else image.get("image_url")
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    if not source:
        raise ValueError(f"an {image.get('type')} block must say where its image is (`source`, or `image_url`)")
    return source


# ---------------------------------------------------------------------------------------------------------------------
# Completion -> message

# Names stop before any other tag, so that a damaged head cannot swallow what follows it.
_INVOKE_HEAD = re.compile(rf'{INVOKE_START} name="((?:(?!{DSML}).)*?)">\n', re.DOTALL)
_PARAMETER = re.compile(
    rf'{PARAMETER_START} name="((?:(?!{DSML}).)*?)" string="(true|false)">(.*?){PARAMETER_END}(\n?)', re.DOTALL
)


def _parse_call(text: str, position: int) -> tuple[dict, int]:
    """One `invoke` element at `position` -> the call and the position behind it."""
    head = _INVOKE_HEAD.match(text, position)
    if not head:
        raise ValueError(f"expected {INVOKE_START} name=\"...\">, found {text[position:position + 80]!r}")
    function, position = head[1], head.end()
    arguments: dict[str, str] = {}  # name -> value as JSON text
    while text.startswith(PARAMETER_START, position):
        match = _PARAMETER.match(text, position)
        if not match or not match[4]:
            raise ValueError(f"a parameter of {function!r} is malformed: {text[position:position + 80]!r}")
        name, is_string, value, position = match[1], match[2] == "true", match[3], match.end()
        if name in arguments:
            raise ValueError(f"{function!r} is called with the parameter {name!r} twice")
        if not is_string:
            try:
                json.loads(value)
            except (ValueError, RecursionError):
                raise ValueError(f"parameter {name!r} of {function!r} is not JSON: {value[:80]!r}") from None
        arguments[name] = json.dumps(value, ensure_ascii=False) if is_string else value
    if not arguments and text.startswith("\n", position):  # the encoder's empty line
        position += 1
    if not text.startswith(INVOKE_END, position):
        raise ValueError(f"the call of {function!r} is not closed by {INVOKE_END.strip()}")

    parts = _split_name("a tool call", function)
    # Assembled as text: JSON values stay as the model wrote them.
    fields = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in arguments.items())
    call: dict = {"type": "function", "function": {"name": parts[-1], "arguments": "{" + fields + "}"}}
    if len(parts) == 2:
        call["namespace"] = parts[0]
    return call, position + len(INVOKE_END)


def _parse_calls(text: str, start: int) -> tuple[list[dict], int, str]:
    """Calls block at `start` -> complete calls, the position up to which text was understood, what is wrong there."""
    calls: list[dict] = []
    position = start + len(CALLS_START)
    if not text.startswith(">\n", position):
        return [], start, f"expected a newline after {CALLS_START.strip()}>"
    position += 2
    try:
        while not text.startswith(CALLS_END, position):
            call, position = _parse_call(text, position)
            calls.append(call)
    except ValueError as error:
        return calls, position if calls else start, str(error)
    return calls, position + len(CALLS_END), ""


def parse_completion(text: str, thinking_mode: str = "chat", strict: bool = True) -> dict:
    """What the model wrote after the header of its turn, up to and with EOS -> an assistant message.

    The message has `role`, `reasoning_content`, `content` and `tool_calls`; each call's arguments are JSON text, its
    `namespace` is there if the name had one, and ids are the caller's to give. strict=True raises ValueError for all
    that the format does not allow: missing THINK_END or EOS, text after the calls or after EOS, special tokens inside
    the text, malformed or unspaced tags, duplicate parameters, and (where the released parser hands on broken
    arguments) a JSON parameter that is not JSON. strict=False is for replies that may be cut anywhere: it never raises
    for what is there, returns complete calls only, and leaves a damaged rest of a calls block in the content as text.
    """
    _check_mode(thinking_mode)
    reasoning, rest = "", text
    if thinking_mode == "thinking":
        reasoning, end, rest = text.partition(THINK_END)
        if strict and (not end or CALLS_START in reasoning):
            raise ValueError(f"the reasoning is not closed by {THINK_END}")
        if not end:  # EOS can only have ended the reply
            reasoning = reasoning.partition(EOS)[0]

    calls: list[dict] = []
    stop = re.search(f"{CALLS_START}|{EOS}", rest)
    content, position, problem = (rest[:stop.start()], stop.start(), "") if stop else (rest, len(rest), "")
    if stop and stop[0] == CALLS_START:
        calls, position, problem = _parse_calls(rest, position)
    left, eos, after = rest[position:].partition(EOS)
    if strict:
        if problem:
            raise ValueError(problem)
        if left:
            raise ValueError(f"text after the tool calls: {left[:80]!r}")
        if not eos:
            raise ValueError(f"the reply does not end with {EOS}")
        if after:
            raise ValueError(f"text after {EOS}: {after[:80]!r}")
        for token in (BOS, EOS, THINK_START, THINK_END, DSML):
            if token in reasoning or token in content:
                raise ValueError(f"unexpected {token} inside the {'reasoning' if token in reasoning else 'content'}")
    elif not (calls and CALLS_END.startswith(left)):  # a cut closing tag is no loss
        content += left
    return {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": calls}
