"""
The chat format against recorded prompts of the released encoder, and its parser against the format.

tests/data/encoding.json holds conversations with their prompts and, under the real tokenizer, their token ids.
"""

import copy
import json
import random
from pathlib import Path

import pytest
from real_tokenizer import real_tokenizer
from tokenizers import Tokenizer

from encoding import (
    ANSWER, ASSISTANT, BOS, EOS, GIVEN, IMAGE, LATEST_REMINDER, REASONING, SYSTEM, TASKS, THINK_END, THINK_START, USER,
    encode_messages, image_source, parse_completion, prompt_ids, render_segments, split_reply,
)

GOLDENS = json.loads((Path(__file__).parent / "data" / "encoding.json").read_text(encoding="utf-8"))
CASES = [
    pytest.param(case, id=f"{group}-{case.get('name', i)}")
    for group in GOLDENS
    for i, case in enumerate(GOLDENS[group])
]
EFFORT_75 = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return real_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def arguments_of(case: dict) -> tuple:
    return case["messages"], case["thinking_mode"], case["reasoning_effort"], case.get("drop_thinking", True)


def user(content: object, **fields: object) -> dict:
    return {"role": "user", "content": content, **fields}


def assistant(content: object, **fields: object) -> dict:
    return {"role": "assistant", "content": content, **fields}


def call(name: str, arguments: object, **fields: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def prompt(messages: list[dict], *arguments: object, **named: object) -> str:
    return encode_messages(messages, *arguments, **named)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Recorded conversations

def test_all_recorded_conversations_are_there():
    assert {group: len(cases) for group, cases in GOLDENS.items()} == {"examples": 23, "fixtures": 2, "generated": 120}


@pytest.mark.parametrize("case", CASES)
def test_recorded_prompt(case: dict):
    before = copy.deepcopy(case["messages"])
    text, images = encode_messages(*arguments_of(case))
    assert text == case["prompt"]
    assert len(images) == text.count(IMAGE) == case.get("n_images", len(images))
    assert case["messages"] == before  # the caller's messages are left alone


@pytest.mark.parametrize("case", [case for case in CASES if "token_ids" in case.values[0]])
def test_recorded_token_ids(case: dict, encode):
    segments = render_segments(*arguments_of(case))
    ids, image_positions = prompt_ids(segments, encode)
    assert ids == case["token_ids"]
    assert image_positions == [i for i, token in enumerate(ids) if token == 129264]

    # Putting ids in place of every text the model wrote changes nothing, where each reply stands between two tokens.
    replies: dict[int, tuple[list[int], list[int]]] = {}
    for segment in segments:
        if segment.kind == REASONING:
            replies[segment.message] = (encode(segment.text), [])
        elif segment.kind == ANSWER:
            replies[segment.message] = (replies.get(segment.message, ([], []))[0], encode(segment.text))
    assert prompt_ids(segments, encode, replies) == (ids, image_positions)


@pytest.mark.parametrize("case", CASES)
def test_recorded_answers_are_parsed_back(case: dict):
    segments = render_segments(*arguments_of(case))
    reasoning = {s.message: s.text for s in segments if s.kind == REASONING}
    for segment in segments:
        if segment.kind != ANSWER or not segment.text.endswith(EOS):
            continue
        message = case["messages"][segment.message]
        mode = "thinking" if segment.message in reasoning else "chat"
        parsed = parse_completion(reasoning.get(segment.message, "") + segment.text, mode)
        assert parsed["content"] == (message.get("content") or "")
        assert parsed["reasoning_content"] == ((message.get("reasoning_content") or "") if mode == "thinking" else "")
        again = prompt([user("q"), {**parsed, "role": "assistant"}], mode)
        assert again.endswith(reasoning.get(segment.message, "") + segment.text)


def test_real_tokenizer_has_the_special_tokens(tokenizer: Tokenizer):
    expected = {
        BOS: 0, EOS: 1, SYSTEM: 128799, USER: 128803, ASSISTANT: 128804, THINK_START: 128821, THINK_END: 128822,
        "｜DSML｜": 128825, LATEST_REMINDER: 128828, IMAGE: 129264,
    }
    assert {token: tokenizer.encode(token, add_special_tokens=False).ids for token in expected} == {
        token: [token_id] for token, token_id in expected.items()
    }
    assert all(len(tokenizer.encode(f"<｜{task}｜>", add_special_tokens=False).ids) == 1 for task in TASKS)
    assert tokenizer.get_vocab_size() == 129280


# ---------------------------------------------------------------------------------------------------------------------
# Rules, one by one

@pytest.mark.parametrize("effort, number", [(None, 75), ("low", 50), ("high", 75), ("max", 100), (1, 1), (100, 100)])
def test_effort(effort: int | str | None, number: int):
    line = EFFORT_75.replace("75", str(number))
    assert prompt([user("q")], "thinking", effort) == BOS + SYSTEM + line + USER + "q" + ASSISTANT + THINK_START
    assert prompt([user("q")], "chat", effort) == BOS + USER + "q" + ASSISTANT + THINK_END


@pytest.mark.parametrize("effort", [True, False, 0, 101, -1, 50.0, "medium", "75", "", "none", [75]])
@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_bad_effort(effort: object, mode: str):
    with pytest.raises(ValueError, match="reasoning_effort must be an integer 1..100"):
        encode_messages([user("q")], mode, effort)


def test_reasoning_is_dropped_before_the_newest_question():
    messages = [
        user("q1"), assistant("a1", reasoning_content="r1"), user("q2"), assistant("a2", reasoning_content="r2")
    ]
    head = BOS + SYSTEM + EFFORT_75 + USER + "q1" + ASSISTANT
    tail = EOS + USER + "q2" + ASSISTANT + THINK_START + "r2" + THINK_END + "a2" + EOS
    dropped = head + THINK_END + "a1" + tail
    kept = head + THINK_START + "r1" + THINK_END + "a1" + tail
    assert prompt(messages, "thinking") == dropped
    assert prompt(messages, "thinking", drop_thinking=False) == kept

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with_tools = prompt([{"role": "system", "content": "", "tools": tools}, *messages], "thinking")
    assert with_tools.endswith(kept.removeprefix(BOS + SYSTEM + EFFORT_75))
    no_tools = prompt([{"role": "system", "content": "", "tools": []}, *messages], "thinking")
    assert no_tools == dropped


@pytest.mark.parametrize("content, asks", [
    ("", True),
    ([{"type": "text", "text": ""}], True),
    ([{"type": "image", "source": "x"}], True),
    ([{"type": "image_url", "image_url": "x"}], True),
    ([{"type": "audio"}], False),
    ([{"type": "tool_result", "content": "42"}], False),
    ([{"type": "tool_result", "content": "42"}, {"type": "text", "text": "and"}], True),
    ([], False),
])
def test_what_makes_earlier_reasoning_old(content: object, asks: bool):
    text = prompt([user("q"), assistant("a", reasoning_content="r"), user(content)], "thinking")
    assert (THINK_START + "r" + THINK_END + "a" in text) == (not asks)
    assert text.endswith(ASSISTANT + THINK_START)  # the reply to come may reason either way


def test_system_message_in_the_middle_asks_too():
    messages = [user("q"), assistant("a", reasoning_content="r"), {"role": "system", "content": "s"}]
    assert prompt(messages, "thinking").endswith(
        USER + "q" + ASSISTANT + THINK_END + "a" + EOS + SYSTEM + "s" + ASSISTANT + THINK_START
    )
    # The one at the start does not: nothing is asked before the assistant speaks, and it gets no header.
    messages = [{"role": "system", "content": "s"}, assistant("a", reasoning_content="r")]
    assert prompt(messages, "thinking") == BOS + SYSTEM + EFFORT_75 + "s" + "r" + THINK_END + "a" + EOS
    assert prompt([{"role": "system", "content": "s"}]) == BOS + SYSTEM + "s"


def test_results_are_ordered_by_the_newest_calls_and_texts_keep_their_places():
    result = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("c", "z", "b", "a")]
    calls = [call("f", "{}", id=i) for i in ("a", "b", "c")]
    messages = [user("q"), assistant("", tool_calls=calls), result[0], user("t"), *result[1:]]
    # z is unknown: it ranks with the first call, in the order given.
    expected = [f"<tool_result>{i}</tool_result>" for i in ("z", "a", "b", "c")]
    assert prompt(messages).endswith(
        EOS + USER + "\n\n".join([expected[0], "t", *expected[1:]]) + ASSISTANT + THINK_END
    )
    newer = [assistant("", tool_calls=[call("f", "{}", id=i) for i in ("c", "a")]), result[3], result[0]]
    assert prompt(messages + newer).endswith(
        EOS + USER + "<tool_result>c</tool_result>\n\n<tool_result>a</tool_result>" + ASSISTANT + THINK_END
    )


def test_blocks_of_a_user_turn():
    images = [{"type": "image", "source": i} for i in range(3)]
    content = [
        {"type": "text", "text": "t"},
        images[0],
        {"type": "tool_result", "content": [
            {"type": "text", "text": "u"}, images[1], {"type": "tool_result", "content": ""}
        ]},
        {"type": "video"},
        images[2],
    ]
    text, found = encode_messages([user(content)])
    inside = f"<tool_result>u\n\n{IMAGE}\n\n[Unsupported tool_result]</tool_result>"
    body = "\n\n".join(["t", IMAGE, inside, "[Unsupported video]", IMAGE])
    assert text == BOS + USER + body + ASSISTANT + THINK_END
    assert all(a is b for a, b in zip(found, images, strict=True))


def test_images_follow_the_order_of_the_results():
    results = [
        {"role": "tool", "tool_call_id": i, "content": [{"type": "image", "source": i}]} for i in ("b", "a")
    ]
    calls = [call("f", "{}", id=i) for i in ("a", "b")]
    _, images = encode_messages([user("q"), assistant("", tool_calls=calls), *results])
    assert [image_source(image) for image in images] == ["a", "b"]


@pytest.mark.parametrize("arguments, lines", [
    ({"s": "x", "n": 1}, [("s", "true", "x"), ("n", "false", "1")]),
    ('{"s": "x", "n": 1}', [("s", "true", "x"), ("n", "false", "1")]),
    (json.dumps('{"s": "x", "n": 1}'), [("s", "true", "x"), ("n", "false", "1")]),
    (json.dumps(json.dumps('{"n": 1}')), [("arguments", "true", json.dumps(json.dumps('{"n": 1}')))]),
    ("[1, 2]", [("arguments", "true", "[1, 2]")]),
    ('"scalar"', [("arguments", "true", '"scalar"')]),
    ("not json", [("arguments", "true", "not json")]),
    ("", [("arguments", "true", "")]),
    ("[" * 100_000, [("arguments", "true", "[" * 100_000)]),
    ({"x": {"é": [True, None, 1.5, "世\n"]}}, [("x", "false", '{"é": [true, null, 1.5, "世\\n"]}')]),
])
def test_call_arguments(arguments: object, lines: list[tuple[str, str, str]]):
    expected = "".join(
        f'<｜DSML｜ parameter name="{name}" string="{is_string}">{value}</｜DSML｜ parameter>\n'
        for name, is_string, value in lines
    )
    text = prompt([user("q"), assistant("a", tool_calls=[call("f", arguments)])])
    assert text.endswith(
        f'a\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{expected}</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}'
    )


def test_namespaces():
    def schema(tool: dict) -> dict:
        text = prompt([{"role": "system", "content": "s", "tools": [{"type": "function", **tool}]}])
        return json.loads(text.split("### Available Tool Schemas\n\n")[1].split("\n")[0])

    function = {"name": "f", "description": "d", "parameters": {}}
    assert schema({"function": function}) == function
    assert list(schema({"function": function, "namespace": "n"}).items()) == list({**function, "name": "n::f"}.items())
    assert schema({"function": {**function, "namespace": "n"}}) == {**function, "name": "n::f"}
    namespace = {"name": "n", "description": "N"}
    assert schema({"function": function, "namespace": namespace}) == {**function, "name": "n::f", "description": "N\nd"}
    assert schema({"function": {"name": "f"}, "namespace": namespace}) == {"name": "n::f", "description": "N\n"}
    assert schema({"function": {"name": "n::f"}}) == {"name": "n::f"}

    for tool_call in (call("n::f", "{}"), call("f", "{}", namespace="n"), call("f", "{}", namespace=namespace)):
        assert '<｜DSML｜ invoke name="n::f">' in prompt([user("q"), assistant("", tool_calls=[tool_call])])


def test_response_format_follows_the_tools():
    system = {"role": "system", "content": "s", "response_format": {"é": 1}}
    tail = '\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"é": 1}'
    assert prompt([system]) == BOS + SYSTEM + "s" + tail
    with_tools = prompt([{**system, "tools": [{"function": {"name": "f"}}]}])
    assert with_tools.startswith(BOS + SYSTEM + "s\n\n## Tools\n\nYou have access")
    assert with_tools.endswith("to invoke tool calls.\n" + tail)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_tasks(task: str, mode: str):
    think = THINK_START if mode == "thinking" else THINK_END
    token = ASSISTANT + think + "<｜action｜>" if task == "action" else f"<｜{task}｜>"
    question = user("q", task=task)
    assert prompt([question], mode).endswith(USER + "q" + token)
    # The reply to a task has no reasoning part, even where reasoning is kept.
    reply = assistant("a", reasoning_content="r")
    assert prompt([question, reply], mode, drop_thinking=False).endswith(USER + "q" + token + "a" + EOS)
    # Without a reply, and where a user message joins others, the task is lost (as released).
    assert prompt([question, user("p")], mode).endswith(USER + "q" + USER + "p" + ASSISTANT + think)
    assert prompt([user("p"), question], mode).endswith(USER + "p\n\nq" + ASSISTANT + think)
    # A tool result joins even a turn with a task.
    result = {"role": "tool", "content": "42"}
    assert prompt([question, result], mode).endswith(USER + "q\n\n<tool_result>42</tool_result>" + token)


def test_a_turn_without_blocks_takes_others_in():
    assert prompt([user("p"), user([]), user("q")]).endswith(USER + "p\n\nq" + ASSISTANT + THINK_END)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

BAD_MESSAGES = {
    "not a list": ("q", "messages must be a list of at least one message"),
    "one dict": (user("q"), "messages must be a list of at least one message"),
    "empty": ([], "messages must be a list of at least one message"),
    "not a dict": ([user("q"), "q"], "message 1 must be a dict with a role out of system, user, .*, not None"),
    "no role": ([{"content": "q"}], "message 0 must be a dict with a role"),
    "unknown role": ([user("q"), {"role": "developer", "content": "q"}], "message 1 must .*, not 'developer'"),
    "role of a wrong type": ([{"role": ["user"], "content": "q"}], r"message 0 must .*, not \['user'\]"),
    "no content": ([{"role": "user"}], r"message 0 \(user\): content .* must be a string, not NoneType"),
    "content of a wrong type": ([user(42)], r"message 0 \(user\): content .* must be a string, not int"),
    "tool without content": ([{"role": "tool"}], r"message 0 \(tool\): .*must be a string, not NoneType"),
    "reminder without content": (
        [{"role": "latest_reminder"}], r"message 0 \(latest_reminder\): content must be a string, not NoneType"),
    "system content": ([{"role": "system", "content": ["q"]}], r"0 \(system\): content must be a string, not list"),
    "assistant content": ([user("q"), assistant(["q"])], r"1 \(assistant\): content must be a string, not list"),
    "assistant content false": ([assistant(False)], r"message 0 \(assistant\): content must be a string, not bool"),
    "reasoning": ([assistant("", reasoning_content=1)], r"message 0 \(assistant\): reasoning_content must be a string"),
    "block": ([user(["q"])], r"message 0 \(user\): block 0 must be a dict, not str"),
    "block without type": ([user([{}])], r"message 0 \(user\): the type of block 0 must be a string, not NoneType"),
    "text block": ([user([{"type": "text"}])], r"0 \(user\): the text of block 0 must be a string, not N"),
    "part of a tool result": ([{"role": "tool", "content": [3]}], r"0 \(tool\): block 0 must be a dict, not int"),
    "task": ([user("q", task="dance")], r"message 0 \(user\) has the task 'dance'; tasks are action, query"),
    "task of a tool": ([{"role": "tool", "content": "", "task": "query"}], "not for tool messages"),
    "tools of a user": ([user("q", tools=[{}])], r"message 0 \(user\) has tools, which has no meaning for this role"),
    "calls of a user": ([user("q", tool_calls=[{}])], r"message 0 \(user\) has tool_calls, which has no meaning"),
    "tools of a wrong type": ([{"role": "system", "tools": {"a": 1}}], r"0 \(system\): tools must be a list of dicts"),
    "calls of a wrong type": ([assistant("", tool_calls=["f"])], r"message 0 .*: tool_calls must be a list of dicts"),
    "tool without function": ([{"role": "system", "tools": [{"name": "f"}]}], r"tool 0 must have a \"function\" dict"),
    "call without function": ([assistant("", tool_calls=[{}])], r"tool call 0 must have a \"function\" dict"),
    "call without name": ([assistant("", tool_calls=[{"function": {}}])], "tool call 0: name must be a string, not N"),
    "call without arguments": (
        [assistant("", tool_calls=[call("f", None)])], "tool call 0: arguments .* must be a string, not NoneType"),
    "call with a list": ([assistant("", tool_calls=[call("f", [1])])], "tool call 0: arguments .* not list"),
    "two namespaces": ([assistant("", tool_calls=[call("a::b::c", "{}")])], "the name 'a::b::c' is not of the form"),
    "namespace twice": ([assistant("", tool_calls=[call("a::b", "{}", namespace="c")])], "the name 'c::a::b' is not"),
    "empty namespace": ([assistant("", tool_calls=[call("::b", "{}")])], "the name '::b' is not of the form"),
    "namespace of a wrong type": ([assistant("", tool_calls=[call("b", "{}", namespace=3)])], "namespace must be"),
    "not JSON": ([{"role": "system", "response_format": {1, 2}}], "response_format cannot be written as JSON"),
    "argument not JSON": ([assistant("", tool_calls=[call("f", {"x": {1}})])], "argument 'x' of tool call 0 cannot be"),
    "placeholder in text": ([user("p"), user("a" + IMAGE)], r"1 \(user\): .* as text; give images as image blocks"),
    "placeholder in a block": ([user([{"type": "text", "text": IMAGE}])], r"0 \(user\): the text of block 0 contains"),
    "placeholder in a result": ([{"role": "tool", "content": IMAGE}], r"message 0 \(tool\): .* as text"),
    "placeholder in a type": ([user([{"type": IMAGE}])], "the type of block 0 contains"),
    "placeholder in system": ([{"role": "system", "content": IMAGE}], r"message 0 \(system\): content contains"),
    "placeholder in tools": (
        [{"role": "system", "tools": [{"function": {"name": IMAGE}}]}], r"message 0 \(system\): .* contains"),
    "placeholder in a reminder": ([{"role": "latest_reminder", "content": IMAGE}], "message 0 .* contains"),
    "placeholder in an answer": ([user("q"), assistant(IMAGE)], r"message 1 \(assistant\) contains"),
    "placeholder in a call": ([assistant("", tool_calls=[call("f", {"x": IMAGE})])], r"0 \(assistant\) contains"),
    "surrogate": ([user("\udcff")], r"message 0 \(user\): .* lone surrogate"),
}


@pytest.mark.parametrize("messages, error", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_bad_messages(messages: object, error: str):
    with pytest.raises(ValueError, match=error):
        encode_messages(messages)


def test_bad_mode():
    for function in (lambda: encode_messages([user("q")], "Thinking"), lambda: parse_completion(EOS, "think")):
        with pytest.raises(ValueError, match='thinking_mode must be "chat" or "thinking"'):
            function()


def test_image_source():
    assert image_source({"type": "image", "source": "a.png"}) == "a.png"
    assert image_source({"type": "image_url", "image_url": "a.png"}) == "a.png"
    assert image_source({"type": "image_url", "image_url": {"url": "a.png"}}) == "a.png"
    for block in ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}}):
        with pytest.raises(ValueError, match="must say where its image is"):
            image_source(block)


# ---------------------------------------------------------------------------------------------------------------------
# The parser: round trip, strictness, forgiveness

NASTY = [
    "", " ", "\n", "\n\n", "a", "é世界🙂", "\u2028", "\x00", '"', "'", "\\", "\\n", "<", ">", "</", "{x}", "%s", "::",
    "&lt;", '" string="true">', '">\n', "<tool_result>", "true", "null", "1", "[1, 2]", '{"a": 1}', "<|DSML| calls>",
    "｜", USER, SYSTEM, "<｜query｜>",
]
# In the value of a string argument even the format's own tags are plain text, except the one that ends it.
TAGS = [
    EOS, BOS, THINK_START, THINK_END, "\n\n<｜DSML｜ calls>\n", "</｜DSML｜ calls>", '<｜DSML｜ invoke name="f">\n',
    "</｜DSML｜ invoke>\n", '<｜DSML｜ parameter name="x" string="true">', "<｜DSML｜tool_calls>", "｜DSML｜",
]


def random_text(rng: random.Random, pieces: list[str]) -> str:
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(6)))


def random_json(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {random_text(rng, NASTY): random_json(rng, depth - 1) for _ in range(rng.randrange(4))}
    values = [None, True, False, rng.randrange(-(10**20), 10**20), rng.uniform(-1e3, 1e300), rng.random()]
    return random_text(rng, NASTY) if kind == 6 else values[kind]


def random_turn(rng: random.Random) -> dict:
    calls = []
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        arguments = {}
        for _ in range(rng.randrange(4)):
            name = rng.choice(["x", "arguments", "name with \"quotes\"", "世", "a\nb", "", " "])
            value = random_text(rng, NASTY + TAGS) if rng.random() < 0.5 else random_json(rng, 3)
            arguments[name + rng.choice(["", "1", "é"])] = value
        tool_call = call(rng.choice(["f", "get_weather", "a b", 'q"', "世"]), json.dumps(arguments, ensure_ascii=False))
        if rng.random() < 0.4:
            tool_call["namespace"] = rng.choice(["ns", "n s", "ns\n", "世"])
        calls.append(tool_call)
    content, reasoning = random_text(rng, NASTY), random_text(rng, NASTY)
    return assistant(content, reasoning_content=reasoning, tool_calls=calls)


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_round_trip(mode: str):
    rng = random.Random(f"round trip {mode}")
    shapes = set()
    for _ in range(1500):
        turn = random_turn(rng)
        header = prompt([user("q")], mode)
        text = prompt([user("q"), turn], mode)
        assert text.startswith(header)
        if mode == "chat":
            turn["reasoning_content"] = ""  # chat mode does not write it
        completion = text[len(header):]
        assert parse_completion(completion, mode) == turn
        assert parse_completion(completion, mode, strict=False) == turn
        assert parse_completion(completion.removesuffix(EOS), mode, strict=False) == turn
        shapes.add((len(turn["tool_calls"]), bool(turn["content"]), bool(turn["reasoning_content"])))
    assert len(shapes) == 4 * 2 * (2 if mode == "thinking" else 1)


def test_json_arguments_stay_as_written():
    text = (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="x" string="false">[1,2.50,  1e3]'
        f"</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}"
    )
    assert parse_completion(text)["tool_calls"] == [call("f", '{"x": [1,2.50,  1e3]}')]


def block(inside: str) -> str:
    return f"\n\n<｜DSML｜ calls>\n{inside}</｜DSML｜ calls>"


def invoke(inside: str, name: str = "f") -> str:
    return f'<｜DSML｜ invoke name="{name}">\n{inside}</｜DSML｜ invoke>\n'


X = '<｜DSML｜ parameter name="x" string="true">1</｜DSML｜ parameter>\n'
J = X.replace("true", "false")
GOOD_COMPLETIONS = {
    "empty": EOS,
    "no parameters": block(invoke("\n")) + EOS,
    "no parameters, no empty line": block(invoke("")) + EOS,
    "no calls": block("") + EOS,
    "same parameter in two calls": block(invoke(X) + invoke(X)) + EOS,
}
BAD_COMPLETIONS = {  # text, error, what forgiveness makes of it: content and names of the calls
    "no EOS": ("a", "does not end with", "a", []),
    "no EOS after calls": (block(invoke(X)), "does not end with", "", ["f"]),
    "text after EOS": (f"a{EOS}b", "text after <｜end", "a", []),
    "text after calls": (f"a{block(invoke(X))}b{EOS}", "text after the tool calls: 'b'", "ab", ["f"]),
    "newline after calls": (block(invoke(X)) + "\n" + EOS, "text after the tool calls", "\n", ["f"]),
    "second block": (block(invoke(X)) * 2 + EOS, "text after the tool calls", block(invoke(X)), ["f"]),
    "BOS": (f"a{BOS}b{EOS}", "unexpected <｜begin", f"a{BOS}b", []),
    "think start": (f"a{THINK_START}{EOS}", "unexpected <think> inside the content", f"a{THINK_START}", []),
    "think end": (f"a{THINK_END}{EOS}", "unexpected </think> inside the content", f"a{THINK_END}", []),
    "tag in content": (f"a<｜DSML｜ invoke{EOS}", "unexpected ｜DSML｜ inside the content", "a<｜DSML｜ invoke", []),
    "V4 block": (
        f"\n\n<｜DSML｜tool_calls>\n{EOS}", "unexpected ｜DSML｜ inside the content", "\n\n<｜DSML｜tool_calls>\n", []),
    "unspaced block": ("\n\n<｜DSML｜calls>\n" + EOS, "unexpected ｜DSML｜", "\n\n<｜DSML｜calls>\n", []),
    "one newline before the block": (block("")[1:] + EOS, "unexpected ｜DSML｜", block("")[1:], []),
    "unspaced invoke": (block('<｜DSML｜invoke name="f">\n') + EOS, "expected <｜DSML｜ invoke", None, []),
    "unspaced parameter": (block(invoke(X.replace("｜ par", "｜par"))) + EOS, "the call of 'f' is not closed", None, []),
    "no newline after the block's tag": ("\n\n<｜DSML｜ calls>" + EOS, "expected a newline after <｜DSML", None, []),
    "other block": ("\n\n<｜DSML｜ callsign>\n" + EOS, "expected a newline after", None, []),
    "no end of the block": (block(invoke(X))[:-len("</｜DSML｜ calls>")] + EOS, "expected <｜DSML｜ invoke", "", ["f"]),
    "text in the block": (block("a" + invoke(X)) + EOS, "expected <｜DSML｜ invoke name=.*, found 'a<", None, []),
    "no name": (block(invoke(X).replace(' name="f"', "")) + EOS, "expected <｜DSML｜ invoke name=", None, []),
    "no newline after the name": (block(invoke(X).replace('f">\n', 'f">')) + EOS, "expected <｜DSML｜ invoke", None, []),
    "head that swallows": (
        block('<｜DSML｜ invoke name="f>\n<｜DSML｜ parameter name="x" string="true">\n</｜DSML｜ invoke>\n') + EOS,
        "expected <｜DSML｜ invoke name=", None, []),
    "no newline after a call": (block(invoke(X).rstrip()) + EOS, "the call of 'f' is not closed", None, []),
    "text in a call": (block(invoke(X + "a")) + EOS, "the call of 'f' is not closed", None, []),
    "empty line after parameters": (block(invoke(X + "\n")) + EOS, "the call of 'f' is not closed", None, []),
    "open parameter": (block(invoke(X[:-5])) + EOS, "a parameter of 'f' is malformed", None, []),
    "no newline after a parameter": (block(invoke(X[:-1])) + EOS, "a parameter of 'f' is malformed", None, []),
    "end tag in a value": (
        block(invoke(X.replace("1", "1</｜DSML｜ parameter>"))) + EOS, "a parameter of 'f' is malformed", None, []),
    "string=maybe": (block(invoke(X.replace("true", "maybe") + X)) + EOS, "a parameter of 'f' is malformed", None, []),
    "no string=": (block(invoke(X.replace(' string="true"', "") + X)) + EOS, "a parameter .* is malformed", None, []),
    "duplicate parameter": (block(invoke(X + X)) + EOS, "'f' is called with the parameter 'x' twice", None, []),
    "second call is bad": (
        "a" + block(invoke(X) + invoke(X + X, "g")) + EOS, "'g' is called with the parameter 'x' twice",
        "a" + invoke(X + X, "g") + "</｜DSML｜ calls>", ["f"]),
    "not JSON": (block(invoke(J.replace("1", "True"))) + EOS, "parameter 'x' of 'f' is not JSON: 'True'", None, []),
    "deep JSON": (block(invoke(J.replace("1", "[" * 100_000))) + EOS, "parameter 'x' of 'f' is not JSON", None, []),
    "two namespaces": (block(invoke(X, "a::b::c")) + EOS, "'a::b::c' is not of the form name or", None, []),
    "no function": (block(invoke(X, "")) + EOS, "'' is not of the form", None, []),
    "empty namespace": (block(invoke(X, "::f")) + EOS, "'::f' is not of the form", None, []),
}


@pytest.mark.parametrize("text", GOOD_COMPLETIONS.values(), ids=GOOD_COMPLETIONS)
def test_accepted_completions(text: str):
    assert parse_completion(text) == parse_completion(text, strict=False)
    assert parse_completion(text)["content"] == ""
    assert len(parse_completion(text)["tool_calls"]) == text.count("<｜DSML｜ invoke")


@pytest.mark.parametrize("text, error, content, names", BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS)
def test_bad_completions(text: str, error: str, content: str | None, names: list[str]):
    for mode, before in (("chat", ""), ("thinking", "r" + THINK_END)):
        with pytest.raises(ValueError, match=error):
            parse_completion(before + text, mode)
        message = parse_completion(before + text, mode, strict=False)
        assert message["reasoning_content"] == before.removesuffix(THINK_END)
        assert message["content"] == (text.removesuffix(EOS) if content is None else content)
        assert [c["function"]["name"] for c in message["tool_calls"]] == names


@pytest.mark.parametrize("text, error, reasoning, content", [
    ("r", "the reasoning is not closed by </think>", "r", ""),
    (f"r{EOS}", "the reasoning is not closed by </think>", "r", ""),
    (f"r{block(invoke(X))}{THINK_END}{EOS}", "the reasoning is not closed", "r" + block(invoke(X)), ""),
    (f"r{EOS}s{THINK_END}a{EOS}", f"unexpected {EOS} inside the reasoning", f"r{EOS}s", "a"),
    (f"r{THINK_START}{THINK_END}a{EOS}", "unexpected <think> inside the reasoning", f"r{THINK_START}", "a"),
    (f"r{THINK_END}a{THINK_END}b{EOS}", "unexpected </think> inside the content", "r", f"a{THINK_END}b"),
])
def test_bad_reasoning(text: str, error: str, reasoning: str, content: str):
    with pytest.raises(ValueError, match=error):
        parse_completion(text, "thinking")
    message = parse_completion(text, "thinking", strict=False)
    assert message == assistant(content, reasoning_content=reasoning, tool_calls=[])


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_every_cut_of_a_reply_is_forgiven(mode: str):
    turn = assistant("a\n", reasoning_content="r", tool_calls=[call("f", {"x": "1", "y": [2]}), call("n::g", {})])
    header = prompt([user("q")], mode)
    completion = prompt([user("q"), turn], mode)[len(header):]
    whole = parse_completion(completion, mode)
    answer = completion.partition(THINK_END)[2] if mode == "thinking" else completion
    seen = 0
    for end in range(len(completion) - len(EOS) + 1):  # EOS is one token: it is there or not
        text = completion[:end]
        with pytest.raises(ValueError):
            parse_completion(text, mode)
        message = parse_completion(text, mode, strict=False)
        calls = message["tool_calls"]
        assert calls == whole["tool_calls"][:len(calls)] and len(calls) >= seen
        seen = len(calls)
        if seen == 2:
            assert message["content"] == "a\n"  # a cut closing tag is no loss
        if mode == "thinking" and THINK_END not in text:
            assert (message["reasoning_content"], message["content"]) == (text, "")
        elif not calls:  # nothing is lost: what is no complete call is still there as text
            assert message["content"] == text[len(completion) - len(answer):].replace(block(""), "")
            assert message["reasoning_content"] == whole["reasoning_content"]
        else:
            assert message["content"].startswith("a\n")
    assert seen == 2 and message == whole


# ---------------------------------------------------------------------------------------------------------------------
# Ids for a chat that keeps a cache

def test_segments_say_who_wrote_what():
    messages = [
        {"role": "system", "content": "s"}, user("q1"), user([{"type": "image", "source": "i"}]),
        assistant("a1", reasoning_content="r1"), user("q2"),
    ]
    segments = render_segments(messages, "thinking", drop_thinking=False)
    assert [(s.kind, s.message, s.text) for s in segments] == [
        (GIVEN, 0, BOS + SYSTEM + EFFORT_75), (GIVEN, 0, "s"), (GIVEN, 1, f"{USER}q1\n\n{IMAGE}"),
        (GIVEN, 1, ASSISTANT + THINK_START), (REASONING, 3, "r1" + THINK_END), (ANSWER, 3, "a1" + EOS),
        (GIVEN, 4, USER + "q2"), (GIVEN, 4, ASSISTANT + THINK_START),
    ]
    assert [s.images for s in segments if s.images] == [({"type": "image", "source": "i"},)]
    assert "".join(s.text for s in segments) == prompt(messages, "thinking", drop_thinking=False)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# Ids a tokenizer would never choose for this text: one byte-level token a letter.
def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.token_to_id(letter) for letter in text]


def test_next_turn_extends_the_cache_with_the_ids_that_were_sampled(tokenizer: Tokenizer, encode):
    messages, replies, cache = [], {}, []
    for turn in range(3):
        messages.append(user(f"question {turn}"))
        ids, _ = prompt_ids(render_segments(messages), encode, replies)
        assert common_prefix(ids, cache) == len(cache) < len(ids)  # nothing in the cache is computed again
        sampled = spelled(tokenizer, "hello") + encode(EOS)
        assert sampled != encode("hello" + EOS)
        replies[len(messages)] = split_reply(sampled, "chat", encode)
        messages.append(parse_completion(tokenizer.decode(sampled, skip_special_tokens=False)))
        assert messages[-1]["content"] == "hello"
        cache = ids + sampled
    assert cache != encode(prompt(messages))
    assert tokenizer.decode(cache, skip_special_tokens=False) == prompt(messages)


def test_dropped_reasoning_shortens_the_prefix_to_the_header(tokenizer: Tokenizer, encode):
    first, _ = prompt_ids(render_segments([user("q1")], "thinking"), encode)
    sampled = spelled(tokenizer, "so") + encode(THINK_END) + spelled(tokenizer, "hello") + encode(EOS)
    replies = {1: split_reply(sampled, "thinking", encode)}
    answer = parse_completion(tokenizer.decode(sampled, skip_special_tokens=False), "thinking")
    messages = [user("q1"), answer, user("q2")]
    ids, _ = prompt_ids(render_segments(messages, "thinking"), encode, replies)
    assert ids[:len(first)] == first[:-1] + encode(THINK_END)
    assert ids[len(first):] == replies[1][1] + encode(USER + "q2" + ASSISTANT + THINK_START)
    assert common_prefix(ids, first + sampled) == len(first) - 1

    kept, _ = prompt_ids(render_segments(messages, "thinking", drop_thinking=False), encode, replies)
    assert kept == first + sampled + encode(USER + "q2" + ASSISTANT + THINK_START)
    # Switched to chat mode, the reasoning is not there either.
    chat, _ = prompt_ids(render_segments(messages), encode, replies)
    assert chat == encode(BOS + USER + "q1" + ASSISTANT + THINK_END) + replies[1][1] + encode(
        USER + "q2" + ASSISTANT + THINK_END
    )


@pytest.mark.parametrize("mode, sampled, reasoning, answer", [
    ("chat", "a" + EOS, "", "a" + EOS),
    ("chat", "a", "", "a"),
    ("chat", f"a{THINK_END}b{EOS}", "", f"a{THINK_END}b{EOS}"),
    ("chat", "", "", ""),
    ("thinking", f"r{THINK_END}a{EOS}", "r" + THINK_END, "a" + EOS),
    ("thinking", f"r{THINK_END}a{THINK_END}{EOS}", "r" + THINK_END, f"a{THINK_END}{EOS}"),
    ("thinking", f"r{THINK_END}", "r" + THINK_END, ""),
    ("thinking", "r", "r", ""),
    ("thinking", f"r{EOS}", "r", EOS),
    ("thinking", "", "", ""),
])
def test_a_reply_cut_anywhere_is_split_and_closed(encode, mode: str, sampled: str, reasoning: str, answer: str):
    reply = split_reply(encode(sampled), mode, encode)
    assert reply == (encode(reasoning), encode(answer))
    message = parse_completion(sampled, mode, strict=False)
    segments = render_segments([user("q"), message, user("p")], mode, drop_thinking=False)
    ids, _ = prompt_ids(segments, encode, {1: reply})
    think = reasoning.removesuffix(THINK_END) + THINK_END if mode == "thinking" else ""
    expected = [s.text for s in segments if s.message == 0] + [think, answer.removesuffix(EOS), EOS]
    assert ids == encode("".join(expected) + "".join(s.text for s in segments if s.message == 2))


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_a_chat_survives_whatever_a_model_samples(encode, mode: str):
    rng = random.Random(f"soup {mode}")
    pieces = NASTY + TAGS * 3 + [IMAGE, "f", '<｜DSML｜ invoke name="', "</｜DSML｜ parameter>\n", block(invoke(X, IMAGE))]
    with_calls = 0
    for _ in range(400):
        start = rng.choice(["", "r" + THINK_END]) if mode == "thinking" else ""
        text = start + "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
        message = parse_completion(text, mode, strict=False)
        with_calls += bool(message["tool_calls"])
        segments = render_segments([user("q"), message, user("p")], mode)
        reply = split_reply(encode(text), mode, encode)
        ids, positions = prompt_ids(segments, encode, {1: reply})
        think = THINK_START if mode == "thinking" else THINK_END
        answer = reply[1] if reply[1][-1:] == encode(EOS) else reply[1] + encode(EOS)
        assert ids[-len(answer) - 4:] == answer + encode(USER + "p" + ASSISTANT + think)
        assert positions == []
    assert with_calls >= 10


def test_open_answer_stays_open(encode):
    messages = [user("q"), assistant("a", wo_eos=True)]
    for sampled in ("a", "a" + EOS):
        ids, _ = prompt_ids(render_segments(messages), encode, {1: ([], encode(sampled))})
        assert ids == encode(prompt(messages))


def test_a_sampled_image_token_stands_for_no_image(encode):
    image = {"type": "image", "source": "i"}
    messages = [user([image]), assistant("a" + IMAGE), user([{"type": "text", "text": "and"}, image])]
    segments = render_segments(messages)
    ids, positions = prompt_ids(segments, encode, {1: ([], encode("a" + IMAGE))})
    assert ids.count(129264) == 3 and len(positions) == 2
    assert all(ids[position] == 129264 for position in positions)
    assert positions == [2, len(ids) - 3]
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) contains <｜deepseek_image｜> as text"):
        prompt_ids(segments, encode)


def test_neighbouring_texts_are_encoded_in_one_piece(encode):
    messages = [user("q"), assistant("hel", wo_eos=True), assistant("lo")]
    assert prompt_ids(render_segments(messages), encode)[0] == encode(prompt(messages))
    assert encode("hel") + encode("lo") != encode("hello")


def test_wrong_tokenizer_is_named():
    with pytest.raises(ValueError, match="the tokenizer does not know the token </think>"):
        split_reply([5], "thinking", lambda text: list(text.encode()))
