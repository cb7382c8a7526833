"""What sft.py and rl.py refuse, in one line and before a weight is read; damaged weights; --tensorboard."""

import importlib.util
import json
import shutil

import pytest
import torch
from conftest import TEXTS
from safetensors.torch import load_file

import gate
import model
import sft
import tiny
from records import ImageStore
from test_resume import at_step, killed, png, refused, rows, sft_argv, write_rows
from test_trainer import run_main

WORDS = ["red", "blue", "green", "white", "mug", "pot", "tray"]


@pytest.fixture(scope="module")
def data(tiny_dir, tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data"), tiny_dir, 12)               # 36 rows: 6 steps of two episodes


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """(checkpoint folder, sft.jsonl) of a tiny Qwen3.5 with a vision tower; half the episodes have pictures."""
    folder = tmp_path_factory.mktemp("vision")
    tokenizer = tiny.train_tokenizer((TEXTS + tiny.SCAFFOLD) * 20, 404, WORDS, vision=True)
    tiny.make_hybrid(tokenizer, 64, 2, 4, 2, 128, seed=0, vision=True).save_pretrained(folder / "vl")
    tokenizer.save_pretrained(folder / "vl")
    tiny.picture_processor().save_pretrained(folder / "vl")
    return folder / "vl", write_rows(folder / "data", folder / "vl", 4, shown=[png(64, 64), png(200, 100, "blue")])


def edit(name, **fields):
    """Sets fields of a JSON file of the checkpoint (of its text_config too, where it has them)."""
    def change(folder, data):
        config = json.loads((folder / name).read_text())
        for section in (config, config.get("text_config", {})):
            section.update({k: v for k, v in fields.items() if k in section})
        (folder / name).write_text(json.dumps(config))
    return change


def first_with_pictures(change):
    def changed(folder, data):
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        change(next(row for row in lines if row["pictures"]), data.parent / "images")
        data.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return changed


def other_picture(row, store, content=None):
    """Another file under the same placeholders."""
    row["pictures"] = [ImageStore(store).put(content or png(320, 320, "green"))] * len(row["pictures"])


def another_token(folder, data):
    tokenizer = gate.load_tokenizer(folder)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)


BAD_TEXT = {
    "unknown type": (edit("config.json", model_type="qwen99"), "config.json: transformers cannot read it (The checkpoint you are trying"),
    "no such type": (lambda f, d: (f / "config.json").write_text("{}"), "config.json: transformers cannot read it"),
    "not JSON": (lambda f, d: (f / "config.json").write_text('{"model_type"'), "config.json: "),
    "no causal model": (lambda f, d: (f / "config.json").write_text('{"model_type": "vit"}'), "field model_type is 'vit', which AutoModelForCausalLM does"),
    "foreign data": (edit("config.json", vocab_size=390), "in the data, but {folder} has a vocabulary of 390; give the checkpoint"),
    "foreign tokenizer": (another_token, "its tokenizer writes ids up to 400, but config.json has a vocab_size of 400"),
    "too long": (edit("config.json", max_position_embeddings=60), "but {folder} has 60 positions; give a smaller --max-length"),
    "no config": (lambda f, d: (f / "config.json").unlink(), "{folder}: not a checkpoint folder (no config.json)"),
    "no tokenizer": (lambda f, d: (f / "tokenizer.json").unlink(), "{folder}: "),
    "no data": (lambda f, d: d.unlink(), "sft.jsonl: no such file"),
}
BAD_VISION = {
    "no tower": (lambda f, d: (f / "config.json").write_text(json.dumps(json.loads((f / "config.json").read_text())["text_config"])), "have pictures in their prompts, but this checkpoint has no vision tower"),
    "no processor": (lambda f, d: (f / "preprocessor_config.json").unlink(), "its preprocessor_config.json cannot be loaded"),
    "no file": (first_with_pictures(lambda row, store: shutil.rmtree(store)), "is missing or damaged in {data}/images"),
    "torn file": (first_with_pictures(lambda row, store: [p.write_bytes(p.read_bytes()[:-9]) for p in store.iterdir()]), "is missing or damaged"),
    "no picture": (first_with_pictures(lambda row, store: other_picture(row, store, png(64, 64)[:60])), "cannot be decoded"),
    "too thin": (first_with_pictures(lambda row, store: other_picture(row, store, png(1000, 2))), "ratio"),
    "count": (first_with_pictures(other_picture), "picture placeholders, its 1 pictures make"),
    "one too few": (first_with_pictures(lambda row, store: row.update(pictures=[])), "its 0 pictures make 0"),
    "written": (lambda f, d: first_with_pictures(lambda row, store: row["token_ids"].append(
        json.loads((f / "config.json").read_text())["image_token_id"]))(f, d), "the response itself holds 1"),
}


@pytest.mark.parametrize("name", [*BAD_TEXT, *BAD_VISION])
def test_bad_input_is_one_line_before_a_weight_is_read(name, data, vision, tiny_dir, tmp_path, monkeypatch, capsys):
    source, rows_file = (tiny_dir, data) if name in BAD_TEXT else vision
    change, says = {**BAD_TEXT, **BAD_VISION}[name]
    folder = shutil.copytree(source, tmp_path / "base")
    mine = shutil.copytree(rows_file.parent, tmp_path / "data") / "sft.jsonl"
    change(folder, mine)
    monkeypatch.setattr(model, "read_weights", lambda *_: pytest.fail("weights were read"))
    err = refused(capsys, sft.main, *sft_argv(folder, mine, tmp_path / "out"))
    assert says.format(folder=folder, data=mine.parent) in err, err
    assert not (tmp_path / "out").exists() or not [p for p in (tmp_path / "out").iterdir() if p.name != "args.json"]


def test_vision_checkpoint_without_processor_trains_on_text(vision, tmp_path):
    folder = shutil.copytree(vision[0], tmp_path / "base")
    mine = write_rows(tmp_path / "data", folder, 2)
    (folder / "preprocessor_config.json").unlink()
    assert run_main(sft.main, *sft_argv(folder, mine, tmp_path / "out")) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]["steps"] == 1


@pytest.mark.parametrize("damage, says", [
    (lambda f: f.write_bytes(f.read_bytes()[:1000]), "model.safetensors"), (lambda f: f.write_bytes(f.read_bytes()[:-1000]), "model.safetensors"),
    (lambda f: f.unlink(), "model.safetensors"), (lambda f: f.write_bytes(b""), "model.safetensors")])
def test_damaged_weights_are_one_line(data, tiny_dir, tmp_path, capsys, damage, says):
    folder = shutil.copytree(tiny_dir, tmp_path / "base")
    damage(folder / "model.safetensors")
    assert says in refused(capsys, sft.main, *sft_argv(folder, data, tmp_path / "out"))


def test_encoder_is_refused_in_one_line(data, tiny_dir, tmp_path, capsys):
    from transformers import BertConfig, BertLMHeadModel
    folder = shutil.copytree(tiny_dir, tmp_path / "base")
    BertLMHeadModel(BertConfig(vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)).save_pretrained(folder)
    assert "BertLMHeadModel" in refused(capsys, sft.main, *sft_argv(folder, data, tmp_path / "out"))


def test_missing_and_misshapen_weights_are_one_line(data, tiny_dir, tmp_path, capsys):
    from safetensors.torch import save_file
    for name, change in (("missing", lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
                         ("shape", lambda w: w.update({"model.norm.weight": torch.ones(3)}))):
        folder = shutil.copytree(tiny_dir, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        err = refused(capsys, sft.main, *sft_argv(folder, data, tmp_path / f"{name}-out"))
        assert "1 weights are missing, unknown or of another shape than config.json says, model." in err


def test_tensorboard_without_its_package_is_refused_in_the_parser(data, tiny_dir, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else find(name, *a))
    with pytest.raises(SystemExit) as end:
        run_main(sft.main, *sft_argv(tiny_dir, data, tmp_path / "out", "--tensorboard"))
    assert end.value.code == 2 and "--tensorboard: the package is not installed; pip install tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_tensorboard_holds_the_scalars_of_metrics(data, tiny_dir, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    argv = sft_argv(tiny_dir, data, tmp_path / "out", "--tensorboard", "--save-every", 2)

    def read():
        board = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
        board.Reload()
        return board
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        at_step(m, 3, lambda: (written.append(read()), killed()))
        written = []
        run_main(sft.main, *argv)
    assert [e.step for e in written[0].Scalars("loss")] == [1, 2, 3]       # on disk at once
    assert run_main(sft.main, *argv) == 0
    board, log = read(), rows(tmp_path / "out", clocks=True)               # step 3, done twice, stands there once
    shown = [k for k, v in log[0].items() if k != "step" and v is not None]
    assert sorted(board.Tags()["scalars"]) == sorted(shown) and "mfu" not in shown
    for key in shown:
        assert [(e.step, e.value) for e in board.Scalars(key)] == [(r["step"], pytest.approx(r[key], rel=1e-6, abs=1e-8)) for r in log], key
