"""What a run leaves on disk, and the same run on two ranks: Qwen3, hybrid Qwen3.5, Qwen3.5 with pictures (test_scale.py makes them)."""

import asyncio
import json
import shutil

import pytest
import test_scale
import torch
from safetensors.torch import load_file, save_file
from test_scale import KINDS, make
from test_trainer import ROOT, arguments, run_main, run_script
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

import batches
import checkpoint
import model as network
import sft
import trainer
from engine import Engine
from records import BadInput, policy_version

folders, data = test_scale.folders, test_scale.data                  # fixtures


# ---------------------------------------------------------------------------------------------- the saved folder

def in_shards(folder, kind, tied=True):
    """The same checkpoint in several files with an index."""
    make(folder, kind, tied)
    auto = AutoModelForImageTextToText if kind == "vision" else AutoModelForCausalLM
    generation = (folder / "generation_config.json").read_bytes()
    net = auto.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    net.save_pretrained(folder, max_shard_size="300KB")
    (folder / "generation_config.json").write_bytes(generation)
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and (folder / "model.safetensors.index.json").exists()
    return folder


def stored(folder):
    """{name: tensor} of all safetensors files; a name may stand in one file only."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not out.keys() & part.keys()
        out |= part
    return out


CASES = {"tied": ("qwen3", True, "float32", False), "untied in shards": ("hybrid", False, "bfloat16", True),
         "vision": ("vision", True, "bfloat16", False), "vision, untied, in shards": ("vision", False, "float32", True)}


@pytest.mark.parametrize("case", CASES)
def test_saved_folder_is_the_source_with_other_weights_and_neutral_sampling(data, tmp_path, case):
    kind, tied, dtype, shards = CASES[case]
    source, output = (in_shards if shards else make)(tmp_path / "source", kind, tied), tmp_path / "out"
    data[kind].write(tmp_path / "data" / "sft.jsonl")
    run_main(sft.main, "--model", source, "--data", tmp_path / "data" / "sft.jsonl", "--output", output, "--max-steps", 1,
             "--save-dtype", dtype)
    before, after = stored(source), stored(output)
    assert before.keys() == after.keys() and ("lm_head.weight" in after) == (not tied)
    assert {x.dtype for x in after.values()} == {getattr(torch, dtype)} and all(after[n].shape == before[n].shape for n in before)
    auto = AutoModelForImageTextToText if kind == "vision" else AutoModelForCausalLM
    net, info = auto.from_pretrained(output, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert net.dtype == getattr(torch, dtype)
    assert (net.get_output_embeddings().weight is net.get_input_embeddings().weight) == tied

    config, old = (json.loads((folder / "config.json").read_text()) for folder in (output, source))
    sections = ["dtype", *(f"{k}_config" for k in ("text", "vision") if kind == "vision")]
    assert config["dtype"] == dtype and all(config[k].get("dtype", dtype) == dtype for k in sections[1:])
    assert kind != "vision" or config["text_config"]["dtype"] == dtype
    differs = {k for k in old.keys() | config.keys() if old.get(k) != config.get(k)}
    assert differs <= set(sections), differs
    for path in source.iterdir():
        if path.name not in ("config.json", "generation_config.json") and "safetensors" not in path.name:
            assert (output / path.name).read_bytes() == path.read_bytes(), path.name
    if kind == "vision":
        assert Qwen2VLImageProcessorPil.from_pretrained(output).to_dict() == Qwen2VLImageProcessorPil.from_pretrained(source).to_dict()
    assert AutoTokenizer.from_pretrained(output).chat_template == AutoTokenizer.from_pretrained(source).chat_template

    generation = json.loads((output / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([2, 0], 0)
    assert {k: generation[k] for k in checkpoint.NEUTRAL} == {
        "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    out = net.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert all(torch.equal(s, x) for s, x in zip(out.scores, out.logits, strict=True))     # nothing is cut off or reweighted


def test_the_engine_ends_a_turn_where_the_saved_generation_config_says(data, folders, tmp_path):
    run = trainer.Trainer(network.load_model(folders["qwen3"], trainer.Ranks(), arguments()), arguments(), trainer.Ranks())
    checkpoint.save_checkpoint(tmp_path / "out", run, folders["qwen3"], {})
    engine = Engine(tmp_path / "out", slots=1, batch=1, max_length=64)
    assert engine.eos == {2, 0}
    asyncio.run(engine.close())
    bare = shutil.copytree(folders["vision"], tmp_path / "bare")       # as a source without any generation config
    (bare / "generation_config.json").unlink()
    run = trainer.Trainer(network.load_model(bare, trainer.Ranks(), arguments()), arguments(), trainer.Ranks())
    checkpoint.save_checkpoint(tmp_path / "other", run, bare, {})
    assert json.loads((tmp_path / "other" / "generation_config.json").read_text()) == {
        "eos_token_id": 2, "pad_token_id": 0, **checkpoint.NEUTRAL,
        **{k: v for k, v in json.loads((tmp_path / "other" / "generation_config.json").read_text()).items() if k == "transformers_version"}}


def test_the_policy_version_is_that_of_the_content(folders, tmp_path):
    run = trainer.Trainer(network.load_model(folders["hybrid"], trainer.Ranks(), arguments()), arguments(), trainer.Ranks())
    first = checkpoint.save_checkpoint(tmp_path / "a", run, folders["hybrid"], {"stage": "sft"})
    again = checkpoint.save_checkpoint(tmp_path / "b", run, folders["hybrid"], {"stage": "rl", "round": 3})
    assert first == again == policy_version(tmp_path / "a") == policy_version(tmp_path / "b")
    assert checkpoint.save_checkpoint(tmp_path / "c", run, tmp_path / "a", {}) == first      # a round that moved nothing
    with torch.no_grad():
        next(run.model.parameters())[3, 5] += 1e-3
    assert checkpoint.save_checkpoint(tmp_path / "a", run, folders["hybrid"], {}) == policy_version(tmp_path / "a") != first
    for name, text in (("chat_template.jinja", "{{ messages }}"), ("generation_config.json", "{}")):
        shutil.copytree(tmp_path / "b", tmp_path / name)
        (tmp_path / name / name).write_text(text)
        assert policy_version(tmp_path / name) != first, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("outer", [True, False])
def test_tied_or_not_is_what_transformers_makes_of_the_config(tmp_path, outer, dtype):
    """The two switches of a vision-language config disagree: transformers heeds the outer one."""
    source = make(tmp_path / "source", "vision", tied=outer)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = not outer
    (source / "config.json").write_text(json.dumps(config))
    args = arguments(save_dtype=dtype)
    run = trainer.Trainer(network.load_model(source, trainer.Ranks(), args), args, trainer.Ranks())
    checkpoint.save_checkpoint(tmp_path / "out", run, source, {})
    assert stored(tmp_path / "out").keys() == stored(source).keys() and ("lm_head.weight" in stored(source)) == (not outer)


def test_a_weight_that_the_model_does_not_know_is_refused_but_for_the_heads_that_transformers_leaves_out(tmp_path):
    source = make(tmp_path / "source", "vision")
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "mtp.fc.weight": torch.ones(3, 3)}, source / "model.safetensors", {"format": "pt"})    # as the published Qwen3.5
    run = trainer.Trainer(network.load_model(source, trainer.Ranks(), arguments()), arguments(), trainer.Ranks())
    checkpoint.save_checkpoint(tmp_path / "out", run, source, {})
    assert stored(tmp_path / "out").keys() == weights.keys()
    extra = "model.language_model.layers.9.mlp.up_proj.weight"         # of a deeper model: it would be lost without a word
    save_file({**weights, extra: torch.ones(4, 4)}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=f"1 weights.*{extra}"):
        network.load_model(source, trainer.Ranks(), arguments())


def test_tables_of_embeddings_and_vectors_are_neither_decayed_nor_made_orthogonal(folders):
    args = arguments(train_vision=True, weight_decay=0.1)
    net = network.load_model(folders["vision"], trainer.Ranks(), args)
    names = {id(p): n for n, p in net.named_parameters()}
    for args.optimizer in ("adamw", "muon"):
        groups = [group for optimizer in trainer.make_optimizers(net, args) for group in optimizer.param_groups]
        decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(names) and len(decayed) > 30
        assert not [n for n in decayed if "embed" in n or "norm" in n or n.endswith("bias") or "A_log" in n or "conv1d" in n], decayed


# ---------------------------------------------------------------------------------------------- one rank and two

DRIVER = """
import sys; sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import torch, torch.distributed as dist
import model, sft, trainer
from test_trainer import arguments
destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None             # one group for all of it
for folder in {loads!r}:
    net, (_, auto) = model.load_model(folder, trainer.Ranks(), arguments()), model.read_config(folder)
    whole = auto.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(net.get_input_embeddings().weight, dist.tensor.DTensor)
    for (n, p), (m, q) in zip(net.named_parameters(), whole.named_parameters(), strict=True):
        assert n == m and torch.equal(p.full_tensor(), q), (folder, n)
    for (n, p), (m, q) in zip(net.named_buffers(), whole.named_buffers(), strict=True):
        assert n == m and torch.equal(p, q), (folder, n)
    assert model.flop_counter(net)([90, 7], 12) == model.flop_counter(whole)([90, 7], 12)      # numbers of whole weights, not of shards
    tied = [x.get_output_embeddings().weight is x.get_input_embeddings().weight for x in (net, whole)]
    assert tied[0] == tied[1], (folder, tied)
    sys.stdout.write(f"loaded {{folder}} {{chr(32).join(map(str, tied))}}\\n")   # in one piece: both ranks share the pipe
for sys.argv in {runs!r}:
    sft.main()
import gc; gc.collect(); destroy()           # as records.run_main: or gloo's threads may abort at the exit
"""


def rank_without(data, args, what):
    """Numbers of the steps of which some slot has a rank without `what` ("rows" or "pictures") beside one with them, on two ranks."""
    has = {"rows": bool, "pictures": lambda micro: any(row.pictures for row in micro)}[what]
    plans = [batches.plan_micro_batches(batches.merge_prefix(data.responses, batch), args.micro_tokens, 2)
             for batch in sft.make_batches(data.responses, args)]
    return [step for step, plan in enumerate(plans) if any(has(slot[0]) != has(slot[1]) for slot in plan)]


def moved_apart(a, b, start):
    """{name: distance of two checkpoints, relative to how far the first moved from `start`}, of weights that moved."""
    a, b, start = (load_file(folder / "model.safetensors") for folder in (a, b, start))
    return {n: float((a[n] - b[n]).norm() / (a[n] - start[n]).norm()) for n in a if not torch.equal(a[n], start[n])}


def test_two_ranks_load_the_same_weights_and_train_them_to_those_of_one(folders, data, tmp_path):
    common = ["--lr", 1e-3, "--weight-decay", 0.1, "--max-steps", 3, "--save-every", 0]
    runs = {"hybrid": ["--global-batch", 6, "--micro-tokens", 200], "vision": ["--global-batch", 6, "--micro-tokens", 400],
            "tower": ["--global-batch", 3, "--micro-tokens", 200, "--train-vision"]}
    args = arguments(global_batch=3, micro_tokens=200)
    args.epochs, args.max_steps, pictures = 1, 3, data["vision"].responses.pictures
    for args.seed in range(999):       # steps with pictures, on one rank only, and a step without any between them
        shown = [any(pictures[s] for s in batch) for batch in sft.make_batches(data["vision"].responses, args)]
        if shown == [True, False, True] and rank_without(data["vision"], args, "pictures"):
            break
    else:
        raise AssertionError("no such order")
    runs["tower"] += ["--seed", args.seed]
    args.seed, args.global_batch = 0, 6
    assert rank_without(data["hybrid"], args, "rows")
    args.micro_tokens = 400
    assert rank_without(data["vision"], args, "pictures")
    command = {}
    for name, more in runs.items():
        kind = "hybrid" if name == "hybrid" else "vision"
        path = data[kind].write(tmp_path / f"data-{kind}" / "sft.jsonl")
        command[name] = ["--model", folders[kind], "--data", path, *common, *more]
        run_main(sft.main, *command[name], "--output", tmp_path / f"{name}-1")
    loads = [folders["qwen3"], folders["vision"], *(make(tmp_path / f"untied-{kind}", kind, tied=False) for kind in KINDS[1:])]
    (tmp_path / "driver.py").write_text(DRIVER.format(
        root=str(ROOT), loads=[str(folder) for folder in loads],
        runs=[["sft", *map(str, argv), "--output", str(tmp_path / f"{name}-2"), "--recompute", "on"] for name, argv in command.items()]))
    said = run_script(tmp_path / "driver.py", ranks=2).stdout
    assert [said.count(f"loaded {folder} {tied} {tied}\n") for folder in loads if (tied := 'untied' not in str(folder)) or True] == [2] * 4, said

    rows = lambda name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for name in runs:
        source = folders["hybrid" if name == "hybrid" else "vision"]
        for a, b in zip(rows(f"{name}-1"), rows(f"{name}-2"), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3), name
            assert a["tokens"] == b["tokens"] and a["lr"] == b["lr"]
        apart = moved_apart(tmp_path / f"{name}-1", tmp_path / f"{name}-2", source)
        worst = sorted(((v, k) for k, v in apart.items()), reverse=True)
        print(f"\n{name}: two ranks against one, largest differences relative to the update: {worst[:3]}")
        assert worst[0][0] < 3e-3, worst[:9]
        names = load_file(source / "model.safetensors").keys()
        assert {n for n in names if n not in apart} == {n for n in names if ".visual." in n and name == "vision"}     # bit for bit
        assert {n for n in names if n not in moved_apart(tmp_path / f"{name}-2", tmp_path / f"{name}-1", source)} == names - apart.keys()
