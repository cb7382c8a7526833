"""bench/memory.py: its formulas against measurement at a small size, its numbers for Qwen3.5-9B, and the claim that they fit."""

import sys

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3_5Config

from conftest import ROOT

sys.path.append(str(ROOT / "bench"))

import memory
import model as trained
from memory import GIB, c, f
from records import BadInput


def small(**text):
    """The 9B model's proportions at a 16th of its width, 4 blocks, 5,000 tokens of vocabulary, a vision tower of 2 blocks."""
    text = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 5000, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "linear_num_key_heads": 4, "linear_num_value_heads": 8, **text}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256,
              "num_position_embeddings": 64, "patch_size": 4}
    return Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=4999, video_token_id=4998,
                         vision_start_token_id=4997, vision_end_token_id=4996)


def test_parameters():
    with torch.device("meta"):
        net = AutoModelForImageTextToText.from_config(memory.shape("qwen3.5-9b"))
        little = AutoModelForImageTextToText.from_config(small(linear_value_head_dim=48))
    P = memory.parameters(memory.shape("qwen3.5-9b"))
    blocks = trained.decoder_layers(net)
    counts = [sum(p.numel() for p in part.parameters()) for part in (blocks[0], blocks[3], *trained.vision_towers(net), net)]
    assert counts == [P["linear"], P["full"], P["vision"], 9_409_813_744] == [218_407_104, 209_723_904, 456_010_480, 9_409_813_744]
    assert 24 * P["linear"] + 8 * P["full"] + P["embedding"] + P["head"] + P["norm"] + P["vision"] == counts[-1]
    P = memory.parameters(small(linear_value_head_dim=48))
    counts = [sum(p.numel() for p in part.parameters()) for part in (*trained.decoder_layers(little)[2:], *trained.vision_towers(little))]
    assert counts == [P["linear"], P["full"], P["vision"]]


@pytest.mark.parametrize("kind", ["linear", "full"])
def test_block_keeps_what_the_formula_says(kind):
    t, T = small().text_config, 1024
    index = {"linear": 0, "full": 3}[kind]
    formula = memory.saved_full(t, T) if kind == "full" else memory.saved_linear(t, T, False)
    kept, alive, _ = memory.measure_block(t, index, T, fake=False)                        # real tensors
    assert kept == pytest.approx(formula, rel=0.004) and alive == pytest.approx(formula, rel=0.004)
    assert memory.measure_block(t, index, T, fake=True)[0] == kept                        # shapes alone say the same
    assert memory.measure_block(t, index, T, fake=False, recompute=True)[1] == 0          # and recomputed, only its input stays
    peak = memory.measure_block(t, index, T, fake=True)[2]
    last = t.hidden_size * t.intermediate_size * c
    computed = formula + memory.in_flight(t, T) + last
    assert peak == pytest.approx(computed, rel=0.01)


def test_fused_kernels_keep_less():
    t, T = small().text_config, 1024
    fused = memory.measure_block(t, 0, T, fake=True, fused=True)[0]
    assert fused == pytest.approx(memory.saved_linear(t, T, True), rel=0.004) and fused < 0.65 * memory.saved_linear(t, T, False)


@pytest.mark.parametrize("dtype, weight", [(torch.float32, f), (torch.bfloat16, c)])
@pytest.mark.parametrize("N, H", [(40, 64), (1000, 64), (1000, 4)])                       # one chunk, many, and logits above dL/dW
def test_head_peak(dtype, weight, N, H, monkeypatch):
    monkeypatch.setattr(trained, "LOGITS", 2**19)
    V = 5000
    assert memory.chunk(V, N) == min(N, 104)
    computed = sum(memory.head_backward(V, H, N, weight)) + N * H * weight
    assert memory.measure_head(V, H, N, dtype=dtype) == pytest.approx(computed, rel=0.01)


def test_all_logits_at_once_cost_more():
    V, N, H = 20_000, 2000, 32
    whole = memory.measure_head(V, H, N, chunked=False, fake=True)
    assert whole == pytest.approx(3 * N * V * f, rel=0.01)                    # log-softmax, its gradient, that of the logits
    assert memory.measure_head(V, H, 20 * N, fake=True) < 2.3 * trained.LOGITS * f        # twenty times the targets, no more memory


@pytest.mark.parametrize("T, N, vocabulary, fused, peak", [
    (512, 64, 5000, False, "linear block, torch"), (512, 64, 5000, True, "linear block, fla"),
    (256, 256, 40_000, True, "head"), (64, 64, 40_000, True, "root's gradient")])
def test_one_step_of_the_loaded_network(T, N, vocabulary, fused, peak):
    config = small(vocab_size=vocabulary)
    moments = {name: sum(items.values()) for name, items in memory.moments(config, 8, T, N).items()}
    moments = {name: size for name, size in moments.items() if name not in ("update", f"linear block, {'torch' if fused else 'fla'}")}
    assert max(moments, key=moments.get) == peak
    measured = memory.measure_step(config, 8, T, N, fused)
    assert measured["Total"] == pytest.approx(moments[peak], rel=0.01)
    P = memory.parameters(config)
    trainable = 3 * P["linear"] + P["full"] + P["embedding"] + P["head"] + P["norm"]
    assert measured["OptState"] == pytest.approx(2 * f * trainable / 8, rel=0.01)
    assert measured["Sharded Param"] == pytest.approx(f * (trainable + P["vision"]) / 8, rel=0.01)


def test_attention_makes_no_square_mask(monkeypatch):
    """measure_step leaves the causal mask out, as transformers does for real rows: unpadded positions, also around pictures."""
    made, real = [], memory.qwen.create_causal_mask
    monkeypatch.setattr(memory.qwen, "create_causal_mask", lambda **given: made.append(real(**given)))
    config = small()
    net = trained.prepare(AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa"), False, False)
    tokens = torch.arange(24).view(2, 12)                                                 # (B, T)
    tokens[0, 2:6] = config.image_token_id                                                # 4 placeholders: 4 x 4 patches, merged by 2
    where, targets = torch.tensor([7, 20]), torch.tensor([3, 4])
    pictures = {"pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]]),
                "mm_token_type_ids": (tokens == config.image_token_id).int()}
    with torch.no_grad():
        shown = net.target_logp(tokens, where, targets, pictures)
        blind = net.target_logp(tokens, where, targets, {})
    assert made == [None, None] and shown[0] != blind[0] and shown[1] == pytest.approx(float(blind[1]), abs=1e-5)


def test_nine_billion_fit():
    """The issue's setting: one sample of 32,768 tokens on 8 x 80 GB."""
    moments = memory.moments(memory.shape("qwen3.5-9b"), 8, 32768, 2048)
    total = {name: round(sum(items.values()) / GIB, 1) for name, items in moments.items()}
    assert total == {"head": 37.3, "linear block, torch": 51.2, "linear block, fla": 43.8, "full-attention block": 43.0,
                     "root's gradient": 28.3, "update": 21.1}
    worst = moments["linear block, torch"]
    assert worst["Adam's two moments, float32, 1/R"] == 8 * (9_409_813_744 - 456_010_480) // 8
    assert worst["hidden states kept, bf16"] == 31 * 32768 * 4096 * 2                     # block 31 of 32 is the deepest linear one
    everything = [sum(items.values()) for items in memory.moments(memory.shape("qwen3.5-9b"), 8, 32768, 32768).values()]
    assert max(everything) < 79 * GIB                                                     # every token a target
    single = [sum(items.values()) for items in memory.moments(memory.shape("qwen3.5-9b"), 1, 32768, 2048).values()]
    assert max(single) > 141 * GIB                                                        # and not on one GPU of any kind


def test_command(tiny_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory.py", "--tokens", "1024", "--targets", "100", "--ranks", "4", "--gpu", "40"])
    memory.main()
    lines = capsys.readouterr().out.splitlines()
    wanted = memory.table(memory.moments(memory.shape("qwen3.5-9b"), 4, 1024, 100), 40)
    assert lines[:len(wanted)] == wanted and "9,409,813,744 parameters" in lines[-1]
    with pytest.raises(BadInput, match="field model_type is 'qwen3'; these formulas are those of qwen3_5"):
        memory.shape(tiny_dir)
