"""What breaks only on many ranks, or only on a machine with GPUs and their kernels, shown on a CPU."""

import random
from argparse import ArgumentParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

import batches
import checkpoint
import model
import trainer
from records import BadInput


def rows(lengths):
    return [batches.Row(np.arange(n, dtype=np.int32), [(n - 3, n, s)], []) for s, n in enumerate(lengths)]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 32])
def test_plans_of_any_batch_hold_every_row_once(world):
    """Halving searches a list of lists of rows: a plan of 8 x 1000 and 4 x 900 tokens on 4 ranks compared arrays of two sizes."""
    draw = random.Random(world)
    for lengths in ([1000] * 8 + [900] * 4, *([draw.randint(200, 6000) for _ in range(draw.randint(1, 128))] for _ in range(200))):
        plan = batches.plan_micro_batches(rows(lengths), 8192, world)
        assert {len(slot) for slot in plan} == {world}
        assert sorted(row.spans[0][2] for slot in plan for micro in slot for row in micro) == list(range(len(lengths)))
        assert all(len(micro) * max(len(row.tokens) for row in micro) <= 8192 for slot in plan for micro in slot if len(micro) > 1)


def test_the_head_is_checked_without_kernels_that_want_a_gpu(monkeypatch):
    """With fla and causal_conv1d installed, a block of a hybrid cannot run where the weights are read: on the CPU."""
    config = modeling_qwen3_5.Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16)
    net = modeling_qwen3_5.Qwen3_5ForCausalLM(config).eval()

    def refuse(*_, **__):
        raise RuntimeError("Expected x.is_cuda() to be true, but got false.")

    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", refuse)
    with pytest.raises(RuntimeError, match="is_cuda"):
        net(input_ids=torch.arange(4)[None])
    assert model.plain_head(net) and len(model.decoder_layers(net)) == 2            # … and the blocks are back
    net.lm_head.register_forward_hook(lambda module, inputs, logits: 30 * torch.tanh(logits / 30))
    with torch.no_grad():
        net.lm_head.weight.mul_(100)
    assert not model.plain_head(net)


def arguments(*argv):
    p = ArgumentParser()
    trainer.add_arguments(p, 1e-3, 8)
    return p.parse_args(list(argv))


def test_a_round_keeps_the_moments_and_takes_its_own_weight_decay(tmp_path):
    def run(*argv):
        torch.manual_seed(0)
        net, args = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)), arguments(*argv)
        net.get_output_embeddings = lambda: net[1]
        made = SimpleNamespace(model=net, args=args, ranks=trainer.Ranks(), steps=0, lr=0.0, optimizers=trainer.make_optimizers(net, args))
        return made

    before = run("--weight-decay", "0.1")
    before.model(torch.arange(8)).square().sum().backward()
    before.optimizers[0].step()
    checkpoint.save_state(tmp_path, before, {})
    after = run("--weight-decay", "0.3", "--betas", "0.8", "0.9")
    expected = [(g["weight_decay"], g["betas"]) for g in after.optimizers[0].param_groups]
    assert checkpoint.load_state(tmp_path, after)["train_vision"] is False
    assert [(g["weight_decay"], tuple(g["betas"])) for g in after.optimizers[0].param_groups] == expected
    for a, b in zip(before.model.parameters(), after.model.parameters(), strict=True):
        torch.testing.assert_close(before.optimizers[0].state[a]["exp_avg"], after.optimizers[0].state[b]["exp_avg"], rtol=0, atol=0)


def test_each_rank_opens_its_share_of_the_pictures():
    opened = []
    pictures = SimpleNamespace(token=9, count=lambda data: opened.append(data) or 2)
    ids = [np.array([1, 9, 9, 2]) for _ in range(5)]
    responses = SimpleNamespace(prompts=ids, outputs=[np.array([3])] * 5, pictures=[[f"{s}"] for s in range(5)], episodes=list("abcde"),
                                picture=lambda sha: sha)
    for rank in range(3):
        model.check_pictures(responses, pictures, range(5 * rank // 3, 5 * (rank + 1) // 3))
    assert opened == list("01234")


def test_more_ranks_than_gpus_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BadInput, match="shows 2 GPUs"):
        trainer.Ranks()


def test_a_hub_name_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match="somebody/nothing.*HF_HUB_OFFLINE"):
        model.checkpoint_folder("somebody/nothing")
