"""A CLIP tokenizer whose every word of the grammar is one token; other words fall to letters."""

from __future__ import annotations

import json
import string
from pathlib import Path

from rewards.shapes.grammar import VOCABULARY

MAX_TOKENS = 12  # the longest prompt: ten words, begin and end
BEGIN, END = "<|startoftext|>", "<|endoftext|>"


def merges() -> list[tuple[str, str]]:
    """Byte-pair merges that turn every word of the grammar into one token.

    Words are taken in turn: what earlier merges leave of a word is merged from the left. Later
    merges rank lower, so they cannot disturb a word that is already whole.
    """
    ranked: list[tuple[str, str]] = []
    for word in VOCABULARY:
        parts = [*word[:-1], word[-1] + "</w>"]
        for pair in ranked:
            parts = _apply(parts, pair)
        while len(parts) > 1:
            pair = (parts[0], parts[1])
            ranked.append(pair)
            parts = _apply(parts, pair)
    return ranked


def _apply(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined, i = [], 0
    while i < len(parts):
        if tuple(parts[i : i + 2]) == pair:
            joined.append(parts[i] + parts[i + 1])
            i += 2
        else:
            joined.append(parts[i])
            i += 1
    return joined


def vocabulary() -> dict[str, int]:
    """token -> id: letters, letters that end a word, merged tokens, begin, end."""
    tokens = [*string.ascii_lowercase, *(c + "</w>" for c in string.ascii_lowercase)]
    tokens += [a + b for a, b in merges()]
    tokens += [BEGIN, END]  # last, as CLIP expects of the largest id
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def token_ids(caption: str) -> list[int]:
    """Ids of a caption of the grammar's words, padded with END to MAX_TOKENS."""
    words = vocabulary()
    ids = [words[BEGIN], *(words[word + "</w>"] for word in caption.split()), words[END]]
    if len(ids) > MAX_TOKENS:
        raise ValueError(f"caption takes {len(ids)} tokens, at most {MAX_TOKENS}: {caption!r}")
    return ids + [words[END]] * (MAX_TOKENS - len(ids))


def write_tokenizer(folder: Path) -> None:
    """Write vocab.json, merges.txt and the two config files of a CLIPTokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary()), encoding="ascii")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges())]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="ascii")
    special = {"bos_token": BEGIN, "eos_token": END, "unk_token": END, "pad_token": END}
    config = {
        **special,
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": MAX_TOKENS,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
