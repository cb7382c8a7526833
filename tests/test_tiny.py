"""tiny.py: the tokenizer's promises, and what the command refuses."""

import json
import sys

import pytest

import tiny
from records import BadInput, Call, JsonlWriter, to_line

WORDS = ["red", "mug", "tray"]


@pytest.fixture
def calls(tmp_path):
    """A run of two shards. Shard 1 alone knows the word tray."""
    for i, text in enumerate(("Put the red mug here. ", "Put the red mug on the tray. ")):
        with JsonlWriter(tmp_path / "run" / f"shard-{i}-of-2" / "calls.jsonl") as w:
            for n in range(30):
                name = f"e{i}.{n}"
                w.append(to_line(Call(f"{name}/0", name, 0, messages=[{"role": "user", "content": text * 3}],
                                      message={"role": "assistant", "content": "I see the red mug."})))
    return tmp_path / "run"


def run(*argv):
    saved, sys.argv = sys.argv, ["tiny.py", *map(str, argv)]
    try:
        tiny.main()
    finally:
        sys.argv = saved


def test_isolated_words_of_every_shard_are_single_tokens(calls, tmp_path):
    from transformers import AutoTokenizer
    size = ("--vocab", 330, "--hidden", 16, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--ff", 16)
    run("--calls", calls, "--output", tmp_path / "base", "--isolate", *WORDS, *size)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokens = tokenizer.tokenize("Put the red mug, the mug and 12 on the tray.")
    assert [t for t in tokens if t in (*WORDS, "1", "2")] == ["red", "mug", "mug", "1", "2", "tray"]
    assert json.loads((tmp_path / "base" / "manifest.json").read_text())["counts"]["vocabulary"] == len(tokenizer)


def test_words_that_would_be_cut_are_named_and_no_model_is_made(calls, tmp_path):
    with pytest.raises(BadInput, match="no single token for bottle, pan;") as e:
        run("--calls", calls, "--output", tmp_path / "base", "--isolate", "red", "bottle", "mug", "pan", "--vocab", 330)
    assert "red" not in str(e.value).split("leave out")[0]
    assert not (tmp_path / "base" / "config.json").exists()
    with pytest.raises(BadInput, match="no single token for red, mug, tray;.* --vocab 263"):     # no room for a word
        run("--calls", calls, "--output", tmp_path / "base", "--isolate", *WORDS, "--vocab", 263)


def test_vocabulary_below_bytes_and_markers_is_refused(calls, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        run("--calls", calls, "--output", tmp_path / "base", "--vocab", 262)
    assert e.value.code == 2 and "--vocab 262: expected at least 263" in capsys.readouterr().err
    assert not (tmp_path / "base").exists()
