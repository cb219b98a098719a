"""Makes tokenizer.json and tokenizer_config.json beside this file: `python tiny/make_tokenizer.py`.

A byte-level BPE of 2,048 tokens with the special tokens of DeepSeek-V4.1 under small ids, trained on the documentation
that comes with Python: the language reference that `help()` prints and the docstrings of the standard library. The
shipped files were made with Python 3.11 and tokenizers 0.23. Another version's documentation gives other merges, and
with them another number of Engram classes than the 1,592 that the configuration beside this file names
(engram.build_token_map says so).
"""
from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 2048
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# As in the released tokenizer, only these three are "special": the others survive decode(skip_special_tokens=True),
# which is what lets a completion be parsed.
NAMED = ["<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "<｜latest_reminder｜>", "｜DSML｜",
         "<｜deepseek_image｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"]


def texts() -> Iterator[str]:
    """The language reference, then every docstring of the standard library, in the order of the file names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from ast.literal_eval(
        next(node.value for node in ast.parse((library / "pydoc_data" / "topics.py").read_text("utf-8")).body
             if isinstance(node, ast.Assign))).values()
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if path.parent.name in ("test", "idlelib", "site-packages", "lib2to3", "pydoc_data"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8", errors="replace"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                yield ast.get_docstring(node)


def make() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # adds no BOS: the prompt carries it
    # every byte is a token, so any text at all can be written
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS, PAD, *NAMED], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in NAMED
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False))


def main() -> None:
    directory = Path(__file__).parent
    tokenizer = make()
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {"add_bos_token": False, "add_eos_token": False, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
              "unk_token": None, "clean_up_tokenization_spaces": False, "model_max_length": 1048576,
              "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", "utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
