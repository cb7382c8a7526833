"""tiny.py: the tokenizer's promises, and what the command refuses."""

import io
import json
import re
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
    # Sorted whatever a process's hash seed: the file's content makes the policy version.
    assert json.dumps(r"\b(?:tray|mug|red)\b|[0-9]") in (tmp_path / "base" / "tokenizer.json").read_text()


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


HYBRID = ("--family", "qwen3_5", "--vocab", 330, "--hidden", 24, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--ff", 16)


def made(calls, output, *argv):
    """Runs the command -> (model, its loading report, tokenizer, config as written)"""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
    run("--calls", calls, "--output", output, *argv)
    auto = AutoModelForImageTextToText if "--vision" in argv else AutoModelForCausalLM
    model, report = auto.from_pretrained(output, dtype=torch.float32, output_loading_info=True)
    return model, report, AutoTokenizer.from_pretrained(output), json.loads((output / "config.json").read_text())


def test_a_text_hybrid_has_both_kinds_of_layer_and_loads_whole(calls, tmp_path):
    model, report, tokenizer, config = made(calls, tmp_path / "base", *HYBRID)
    assert type(model).__name__ == "Qwen3_5ForCausalLM" and "vision_config" not in config
    assert config["layer_types"] == ["linear_attention", "full_attention"]
    assert not any(report.values()) and model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    again, *_ = made(calls, tmp_path / "again", *HYBRID)
    other, *_ = made(calls, tmp_path / "other", *HYBRID, "--seed", 1)
    weights = [m.model.layers[0].linear_attn.in_proj_qkv.weight for m in (model, again, other)]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])
    assert not (tmp_path / "base" / "preprocessor_config.json").exists()
    assert tokenizer.decode(tokenizer.apply_chat_template(PICTURE, return_dict=True)["input_ids"]).count("<|image|>") == 1


PICTURE = [{"role": "user", "content": [{"type": "text", "text": "Put the red mug here."}, {"type": "image"}]}]


def test_a_hybrid_with_vision_has_a_processor_and_placeholders_as_one_token(calls, tmp_path):
    from pictures import load_pictures
    from PIL import Image
    model, report, tokenizer, config = made(calls, tmp_path / "base", *HYBRID, "--vision")
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration" and not any(report.values())
    ids = [config[k] for k in ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")]
    assert tokenizer.convert_ids_to_tokens(ids) == tiny.VISION
    prompt = tokenizer.apply_chat_template(PICTURE, return_dict=True)["input_ids"]
    assert [t for t in prompt if t in ids] == ids[:3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    pictures, counts = load_pictures(tmp_path / "base"), []
    for size in ((256, 256), (480, 360), (1, 1), (4000, 3000)):
        Image.new("RGB", size).save(out := io.BytesIO(), "PNG")
        counts.append(pictures.count(out.getvalue()))
        assert pictures.inputs(out.getvalue())[0].shape == (counts[-1] * 4, 3 * 2 * 16 * 16)
    assert counts == [16, 20, 4, 20]


@pytest.mark.parametrize("argv, message", [
    (["--vision"], "--vision: --family qwen3 has no vision tower"),
    ([*HYBRID, "--layers", 1], "--layers 1: .*at least 2"),
    ([*HYBRID, "--hidden", 20], "heads of 4, 8, 12"),
    ([*HYBRID, "--vision", "--hidden", 16], "heads at least 12 wide"),
    ([*HYBRID, "--vision", "--vocab", 266], "--vocab 266: expected at least 267"),
])
def test_sizes_and_families_that_do_not_fit_are_refused_in_one_line(calls, tmp_path, capsys, argv, message):
    with pytest.raises(SystemExit) as e:
        run("--calls", calls, "--output", tmp_path / "base", *argv)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert e.value.code == 2 and re.search(message, line) and not (tmp_path / "base").exists()
