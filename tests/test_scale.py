"""model.py and checkpoint.py on the families of a full run: Qwen3, hybrid Qwen3.5, Qwen3.5 with pictures; one rank and two.

Checkpoints are random, but sharpened (matrices four times as large as at initialisation): what stands in a row, a picture too, then moves
log-probs by 0.05 nats and more, and an error of padding, positions or order cannot hide below the tolerances of 3e-5.
"""

import io
import json
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import TEXTS
from PIL import Image
from safetensors.torch import load_file
from test_trainer import arguments, run_main, write_round
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3VLProcessor

import batches
import gate
import loss
import model as network
import rl
import tiny
import trainer
from pictures import decode, load_pictures
from records import TRAIN_SAMPLING, Call, Episode, ImageStore, policy_version

KINDS = ("qwen3", "hybrid", "vision")
WORDS = ["red", "blue", "green", "white", "mug", "pot", "tray"]
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------- checkpoints and data

def make(folder, kind, tied=True, seed=0):
    """A sharpened checkpoint of `kind` in float32, with a generation config as published ones have it."""
    tokenizer = tiny.train_tokenizer((TEXTS + tiny.SCAFFOLD) * 20, 404, WORDS, vision=kind == "vision")
    if kind == "qwen3":
        net = tiny.make_model(len(tokenizer), 64, 2, 4, 2, 128, seed)
    else:
        net = tiny.make_hybrid(tokenizer, 64, 4, 4, 2, 128, seed, vision=kind == "vision")
    if not tied:
        for config in (net.config, net.config.get_text_config()):
            config.tie_word_embeddings = False
        net = type(net)(net.config)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim > 1:
                p.mul_(4)
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "vision":
        tiny.picture_processor().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 0], "pad_token_id": 0}, indent=4) + "\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: checkpoint folder}."""
    return {kind: make(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def picture(rng, width=None, height=None):
    """PNG bytes of noise, of 40 to 300 pixels a side: 4 to 24 tokens."""
    size = height or rng.randint(40, 300), width or rng.randint(40, 300), 3
    out = io.BytesIO()
    noise = np.random.default_rng(rng.randrange(2**32)).integers(0, 64, size) + [rng.randrange(192) for _ in range(3)]      # around a colour
    Image.fromarray(noise.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def talk(rng, turns, store=None, edit=None):
    """Yields (messages, reply) of one episode. store: an ImageStore, for an episode with pictures; edit: what becomes of the
    history before the last turn: "swap" its first picture for another of the same grid, or "drop" its first message."""
    messages = [{"role": "user", "content": rng.choice(TEXTS[:2])}]
    show = lambda *size: {"type": "image", "sha256": store.put(picture(rng, *size))}
    for t in range(turns):
        if store:
            pictures = [show(96, 64)] if t == 0 else [show() for _ in range(rng.randint(1, 2))]
            messages = messages + [{"role": "user", "content": [{"type": "text", "text": f"View {rng.randrange(100)}."}, *pictures]}]
        elif t:
            messages = messages + [{"role": "user", "content": f"go on {rng.randrange(1000)} " * rng.randint(1, 3)}]
        if t == turns - 1 and edit == "swap":
            messages[1] = {"role": "user", "content": [messages[1]["content"][0], show(96, 64)]}
        if t == turns - 1 and edit == "drop":
            messages = messages[1:]
        reply = {"role": "assistant", "content": " ".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 2)))}
        yield list(messages), reply
        messages.append(reply)


class Data:
    """Recorded responses of seven episodes (with and without pictures, histories edited and not), and what made them."""

    def __init__(self, kind, folder, images):
        rng, tokenizer, self.pictures = random.Random(3), gate.load_tokenizer(folder), load_pictures(folder)
        self.store = store = ImageStore(images)
        self.messages, prompts, outputs, episodes, shown = [], [], [], [], []
        edits = (None, None, "swap" if kind == "vision" else "drop", "drop", None, "drop", None)
        for e, (turns, edit) in enumerate(zip((3, 4, 3, 3, 2, 4, 1), edits, strict=True)):
            for messages, reply in talk(rng, turns, store if kind == "vision" and e in (1, 2, 4, 6) else None, edit):
                prompt, output = gate.render_target(tokenizer, messages, None, reply, {}, store, self.pictures)
                self.messages.append(messages)
                prompts.append(np.array(prompt, np.int32))
                outputs.append(np.array(output, np.int32))
                episodes.append(f"e{e}")
                shown.append(gate.picture_hashes(messages))
        self.responses = batches.Responses(prompts, outputs, episodes, shown, [store])

    def write(self, path):
        """As sft.jsonl, its pictures beside it."""
        r = self.responses
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.store.folder.exists():
            shutil.copytree(self.store.folder, path.parent / "images", dirs_exist_ok=True)
        path.write_text("".join(json.dumps({"episode_id": r.episodes[s], "turn": s, "prompt_token_ids": r.prompts[s].tolist(),
                                            "token_ids": r.outputs[s].tolist(), "pictures": r.pictures[s]}) + "\n"
                                for s in range(len(r.outputs))))
        return path


@pytest.fixture(scope="module")
def data(folders, tmp_path_factory):
    """{kind: Data}."""
    return {kind: Data(kind, folders[kind], tmp_path_factory.mktemp("images") / "images") for kind in KINDS}


def measured(net, data, chosen=None, **changed):
    """SFT loss of the chosen responses as one optimizer batch, log-probs (N,), gradients by name, forward tokens."""
    run = trainer.Trainer(net, arguments(**changed), trainer.Ranks(), data.pictures)
    r, chosen = data.responses, range(len(data.responses.outputs)) if chosen is None else chosen
    net.zero_grad()
    total, value, flat = int(r.lengths[list(chosen)].sum()), 0.0, torch.full((int(r.start[-1]),), torch.nan)
    for micro in run.micro_batches(r, chosen):
        logp = run.logp(micro)
        part, _ = loss.sft_loss(logp, torch.ones_like(logp, dtype=torch.bool), total)
        run.backward(part)
        value += part.item()
        flat[micro.index] = logp.detach()
    return value, flat, {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}, run.work["forward_tokens"]


def distance(a, b):
    """Largest differences of two `measured`: loss, log-prob (nats), gradient of a matrix, gradient of a vector, each gradient relative to
    the largest of its parameter. Vectors are gates and decays of the delta rule, sums over all tokens that nearly cancel: float32 leaves them
    3 digits, float64 (its code with every float32 replaced, tried once) 12."""
    assert a[2].keys() == b[2].keys() and torch.equal(a[1].isnan(), b[1].isnan())
    relative = {n: float((a[2][n] - b[2][n]).abs().max() / a[2][n].abs().max()) for n in a[2]}
    kind = lambda matrix: max(v for n, v in relative.items() if (a[2][n].ndim > 1) == matrix)
    return abs(a[0] - b[0]), float((a[1] - b[1]).abs().nan_to_num(0).max()), kind(True), kind(False)


# ---------------------------------------------------------------------------------------------- log-probs in chunks

def plain(hidden, weight, targets):
    """log softmax(h W')[y] and entropies the obvious way, (N,) and (N,)."""
    logp = (hidden @ weight.T).float().log_softmax(-1) if hidden.dtype != torch.float64 else (hidden @ weight.T).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def head(N, dtype=torch.float32, V=53, H=16, seed=0):
    """Random hidden (N, H), weight (V, H), targets (N,), upstream gradient (N,); logits spread over about ±15."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    hidden, weight = draw(N, H).to(dtype).requires_grad_(), (1.5 * draw(V, H)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=g), draw(N)


@pytest.mark.parametrize("chunk", [1, 3, 7, 14, 1000])
def test_chunked_log_probs_entropies_and_gradients_are_those_of_log_softmax(monkeypatch, chunk):
    monkeypatch.setattr(network, "LOGITS", 53 * chunk + 52)
    hidden, weight, targets, g = head(42)
    logp, h = network.ChunkedLogProb.apply(hidden, weight, targets, True)
    mine = torch.autograd.grad(logp, (hidden, weight), g)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    right, entropy = plain(*exact, targets)
    theirs = torch.autograd.grad(right, exact, g.double())
    assert not h.requires_grad and logp.dtype == h.dtype == torch.float32
    assert (logp - right).abs().max() < 1e-5 and (h - entropy).abs().max() < 1e-5
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() < 2e-5 * b.abs().max() and b.abs().max() > 1
    assert torch.equal(network.ChunkedLogProb.apply(hidden, weight, targets, False)[1], torch.zeros(42))
    with torch.no_grad():                                             # what rl.py's log b is: the same bits
        assert torch.equal(network.ChunkedLogProb.apply(hidden, weight, targets, True)[0], logp)


def test_chunked_log_probs_of_nothing_and_of_frozen_sides(monkeypatch):
    monkeypatch.setattr(network, "LOGITS", 53 * 4)
    hidden, weight, targets, _ = head(0)
    logp, h = network.ChunkedLogProb.apply(hidden, weight, targets, True)
    logp.sum().backward()
    assert logp.shape == h.shape == (0,) and hidden.grad.shape == (0, 16) and not weight.grad.any()
    hidden, weight, targets, g = head(9)
    both = torch.autograd.grad(network.ChunkedLogProb.apply(hidden, weight, targets, False)[0], (hidden, weight), g)
    one = torch.autograd.grad(network.ChunkedLogProb.apply(hidden, weight.detach(), targets, False)[0], hidden, g)
    other = torch.autograd.grad(network.ChunkedLogProb.apply(hidden.detach(), weight, targets, False)[0], weight, g)
    assert torch.equal(one[0], both[0]) and torch.equal(other[0], both[1])
    assert not network.ChunkedLogProb.apply(hidden.detach(), weight.detach(), targets, False)[0].requires_grad


def test_chunked_gradients_in_bfloat16_are_as_good_as_unchunked_ones(monkeypatch):
    monkeypatch.setattr(network, "LOGITS", 53 * 8)                     # 32 chunks: 32 roundings of the weight's gradient, were they summed in bfloat16
    errors = {"chunked": [], "plain": []}
    for seed in range(4):
        hidden, weight, targets, g = head(256, torch.bfloat16, seed=seed)
        exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        right = torch.autograd.grad(plain(*exact, targets)[0], exact, g.double())
        for name, logp in (("chunked", network.ChunkedLogProb.apply(hidden, weight, targets, False)[0]),
                           ("plain", plain(hidden, weight, targets)[0])):
            got = torch.autograd.grad(logp, (hidden, weight), g)
            assert all(x.dtype == torch.bfloat16 for x in got)
            errors[name].append([float((a - b).norm() / b.norm()) for a, b in zip(got, right, strict=True)])
    chunked, whole = (np.mean(errors[name], 0) for name in ("chunked", "plain"))
    assert (chunked < 1.1 * whole).all(), f"relative errors of (hidden, weight): {chunked} in chunks, {whole} whole"


def test_gradient_of_a_tied_embedding_is_the_sum_of_both_uses(monkeypatch):
    monkeypatch.setattr(network, "LOGITS", 53 * 3)
    _, weight, targets, g = head(10)
    ids = torch.arange(10) * 5 % 53
    mine, = torch.autograd.grad(network.ChunkedLogProb.apply(weight[ids].tanh(), weight, targets, False)[0], weight, g)
    theirs, = torch.autograd.grad(plain(weight[ids].tanh(), weight, targets)[0], weight, g)
    assert (mine - theirs).abs().max() < 2e-5 * theirs.abs().max()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gave."""
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return out


def test_no_tensor_of_all_targets_by_vocabulary_is_made(monkeypatch):
    monkeypatch.setattr(network, "LOGITS", 53 * 16)
    hidden, weight, targets, g = head(500)
    with Largest() as seen:
        logp, _ = network.ChunkedLogProb.apply(hidden, weight, targets, True)
        logp.backward(g)
    assert seen.elements == max(500 * 16, 16 * 53) < 500 * 53          # the gradient of hidden; a chunk's logits are 848


# ---------------------------------------------------------------------------------------------- recomputation

@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_changes_no_bit_and_keeps_less(folders, data, kind):
    got, kept = [], []
    for recompute in ("off", "on"):
        net = network.load_model(folders[kind], trainer.Ranks(), arguments(recompute=recompute, train_vision=True))
        size, held = [0], set()

        def pack(x, size=size, held=held):
            if x.untyped_storage().data_ptr() not in held:
                held.add(x.untyped_storage().data_ptr())
                size[0] += x.untyped_storage().nbytes()
            return x
        weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
        held |= weights
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            got.append(measured(net, data[kind], micro_tokens=100_000, recompute=recompute))
        kept.append(size[0])
    a, b = got
    assert a[0] == b[0] and torch.equal(a[1], b[1]) and a[2].keys() == b[2].keys()
    assert all(torch.equal(a[2][n], b[2][n]) for n in a[2])
    # a block's inputs are held by its closure, not by the hooks: one hidden state of 64 float32 numbers a token and block, 4 + 2 blocks at most
    print(f"\n{kind}: saved for backward {kept[0] / 1e6:.1f} MB, with recomputation {kept[1] / 1e6:.1f} MB and the blocks' inputs")
    assert kept[1] + 6 * 64 * 4 * a[3] < 0.5 * kept[0], kept


# ---------------------------------------------------------------------------------------------- what may not change a result

@pytest.fixture(scope="module")
def nets(folders):
    """{kind: the trainer's model, frozen vision}."""
    return {kind: network.load_model(folders[kind], trainer.Ranks(), arguments()) for kind in KINDS}


class WithoutVideo(Qwen3VLProcessor):
    """The processor of transformers, less its video half, which wants torchvision."""
    def check_argument_for_proper_class(self, *_):
        pass


def documented(folder, data, chosen):
    """Log-probs (N,) of one response after the other by transformers alone: its processor, its model, attention mask, full logits."""
    tokenizer, out = gate.load_tokenizer(folder), []
    auto, processor = AutoModelForCausalLM, None
    if data.pictures:
        auto = AutoModelForImageTextToText
        processor = WithoutVideo(load_pictures(folder).processor, tokenizer, None, tokenizer.chat_template)
    net = auto.from_pretrained(folder, dtype=torch.float32).eval()
    for s in chosen:
        text = tokenizer.apply_chat_template(data.messages[s], tokenize=False, add_generation_prompt=True)
        shown = [decode(data.store.get(sha)) for sha in data.responses.pictures[s]]
        given = dict(processor(text=[text], images=shown or None, return_tensors="pt") if processor else
                     tokenizer(text, return_tensors="pt", add_special_tokens=False))
        output = torch.from_numpy(data.responses.outputs[s]).long()                        # (L,)
        given["input_ids"] = torch.cat([given["input_ids"], output[None]], 1)              # (1, T)
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(output)))
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given.pop("token_type_ids", None)
        with torch.no_grad():
            logits = net(**given).logits[0, -len(output) - 1:-1]                           # (L, V)
        out.append(logits.log_softmax(-1).gather(-1, output[:, None])[:, 0])
    return torch.cat(out)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_transformers_alone(folders, data, nets, kind):
    d = data[kind]
    gap = (measured(nets[kind], d)[1] - documented(folders[kind], d, range(len(d.responses.outputs)))).abs()
    print(f"\n{kind}: trainer against transformers, largest log-prob gap {gap.max():.1e} nats")
    assert len(gap) == int(d.responses.start[-1]) and gap.max() < 3e-5


@pytest.mark.parametrize("kind", KINDS)
def test_merge_padding_order_and_split_change_nothing(data, nets, kind):
    d, worst = data[kind], {}
    r = d.responses
    rows = batches.merge_prefix(r, range(len(r.outputs)))
    assert len(rows) == 10 and len(r.outputs) == 20                    # seven episodes, three edited at the end
    assert max(len(row.tokens) for row in rows) > 150 and sum(len(row.tokens) % 64 == 0 for row in rows) < 2
    assert sum(bool(row.pictures) for row in rows) == (5 if kind == "vision" else 0)
    whole = measured(nets[kind], d)
    order = [s for episode in batches.shuffled(r.by_episode(), 1) for s in episode]
    for name, changed in {"rows apart": {"no_prefix_merge": True}, "one row a micro-batch": {"micro_tokens": 1},
                          "one micro-batch": {"micro_tokens": 100_000}, "other order": {"chosen": order, "micro_tokens": 600}}.items():
        again = measured(nets[kind], d, **changed)
        worst[name] = distance(whole, again)
        assert name != "rows apart" or again[3] > 1.5 * whole[3]
    print(f"\n{kind}: " + " | ".join(f"{k}: loss {v[0]:.0e}, log-prob {v[1]:.0e}, gradient {v[2]:.0e} {v[3]:.0e}" for k, v in worst.items()))
    assert all(a < 3e-6 and b < 3e-5 and c < 1e-3 and d < 1e-2 for a, b, c, d in worst.values()), worst
    frozen = [n for n, _ in nets[kind].named_parameters() if n not in whole[2]]
    assert bool(frozen) == (kind == "vision") and all("visual" in n for n in frozen)


def test_accumulated_gradients_are_the_sum_of_single_ones(data, nets):
    for kind in KINDS:
        d = data[kind]
        total, whole = int(d.responses.lengths[:8].sum()), measured(nets[kind], d, range(8), no_prefix_merge=True)
        parts = [measured(nets[kind], d, [s]) for s in range(8)]       # 8 x 1: each alone is its own mean
        share = [int(d.responses.lengths[s]) / total for s in range(8)]
        summed = {n: sum(part[2][n] * w for part, w in zip(parts, share, strict=True)) for n in whole[2]}
        assert abs(whole[0] - sum(part[0] * w for part, w in zip(parts, share, strict=True))) < 1e-6
        worst = distance(whole, (whole[0], whole[1], summed))
        assert worst[2] < 1e-3 and worst[3] < 1e-2, worst


def test_a_swapped_picture_of_the_same_grid_opens_a_row_and_matters(data, nets):
    d = data["vision"]
    r, last = d.responses, max(s for s, e in enumerate(d.responses.episodes) if e == "e2")
    earlier, edited = r.pictures[last - 1], r.pictures[last]
    assert edited[0] != earlier[0] and edited[1:len(earlier)] == earlier[1:]
    before = np.concatenate([r.prompts[last - 1], r.outputs[last - 1]])
    assert np.array_equal(r.prompts[last][:len(before)], before)       # token for token the same: only the hash tells
    rows = batches.merge_prefix(r, [last - 2, last - 1, last])
    assert [[s for *_, s in row.spans] for row in rows] == [[last - 2, last - 1], [last]]
    shown = list(r.pictures)
    shown[last] = [earlier[0], *edited[1:]]
    other = batches.Responses(r.prompts, r.outputs, r.episodes, shown, r.stores)
    assert len(batches.merge_prefix(other, [last - 2, last - 1, last])) == 1
    mine = slice(r.start[last], r.start[last + 1])
    wrong = Data.__new__(Data)
    wrong.responses, wrong.pictures = other, d.pictures
    moved = (measured(nets["vision"], d, [last])[1][mine] - measured(nets["vision"], wrong, [last])[1][mine]).abs().max()
    print(f"\nanother picture moves log-probs by up to {moved:.2f} nats")
    assert moved > 0.05


# ---------------------------------------------------------------------------------------------- reinforcement learning at rest

def play(folder, kind, model_dir, net):
    """Writes a round: two groups of four attempts with rewards 1 0 1 0, histories with pictures where the checkpoint sees them. log q
    comes from `net`, one row at a time. Returns the number of calls."""
    rng, tokenizer, pictures = random.Random(5), gate.load_tokenizer(model_dir), load_pictures(model_dir)
    store, version, episodes, calls = ImageStore(folder / "images"), policy_version(model_dir), [], []
    for attempt in range(8):
        name, shows, mine = f"a{attempt}", kind == "vision" and attempt % 4 != 3, []
        for turn, (messages, reply) in enumerate(talk(rng, rng.randint(2, 4), store if shows else None, "drop" if attempt == 2 else None)):
            prompt, output = gate.render_target(tokenizer, messages, None, reply, {}, store, pictures)
            alone = batches.Responses([np.array(prompt)], [np.array(output)], [name], [gate.picture_hashes(messages)], [store])
            micro = batches.pack(batches.merge_prefix(alone, [0]), alone, CPU, pictures)
            with torch.no_grad():
                logp = net.target_logp(micro.tokens, micro.where, micro.targets, micro.pictures)
            mine.append(Call(f"{name}/{turn}", name, turn, version, version, "tiny", messages, [], {},
                             {**TRAIN_SAMPLING, "max_tokens": 256, "seed": turn}, prompt, output, logp.tolist(), "stop", reply, True))
        calls += mine
        won = attempt % 2 == 0
        episodes.append(Episode(name, "skills", f"s/{attempt // 4}", 11, attempt % 4, float(won), True, None, version, f"state-{attempt // 4}",
                                won, won, None, True, "finish", [c.call_id for c in mine]))
    write_round(folder, episodes, calls)
    return len(calls)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_update_every_ratio_is_one_and_nothing_is_clipped(folders, nets, tmp_path, kind):
    source = folders[kind]
    calls = play(tmp_path / "round-1", kind, source, nets[kind])
    run_main(rl.main, "--model", source, "--rollouts", tmp_path / "round-1", "--output", tmp_path / "out", "--lr", 0, "--global-batch", 9,
             "--micro-tokens", 700)
    log = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(log) == -(-calls // 9) > 1 and sum(r["responses"] for r in log) == calls and all(r["gate_mismatch"] == 0 for r in log)
    for r in log:
        assert r["pi_b_min"] == r["pi_b_max"] == 1 and r["gap_bp_abs"] == 0        # b and π by the same forwards: the same bits
        assert r["update_norm"] == 0 and r["grad_norm"] > 0 and r["gap_qb_abs_max"] < 1e-4
        assert abs(r["ratio_min"] - 1) < 1e-4 and abs(r["ratio_max"] - 1) < 1e-4 and r["w"] == pytest.approx(1, abs=1e-5)
        assert r["clip_low"] == r["clip_high"] == r["clip_dual"] == r["w_capped"] == 0
    print(f"\n{kind}: largest |log b - log q| {max(r['gap_qb_abs_max'] for r in log):.1e}")
    a, b = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# ---------------------------------------------------------------------------------------------- work done

def test_counted_work_is_that_of_the_operations(monkeypatch):
    """Against torch's own counter: equal but for the upper triangle, which eager attention computes, and the rotary angles. Of the head
    both count 6 products a weight and target: torch sees the logits' second computation, but not the in-place addmm_ of its gradient."""
    net = tiny.make_model(404, 64, 3, 4, 2, 128, seed=0)
    net.set_attn_implementation("eager")
    B, T, N = 2, 96, 70
    tokens, where = torch.randint(404, (B, T)), torch.arange(N) * 2
    with FlopCounterMode(display=False) as counter:
        network.target_logp(net, tokens, where, tokens.flatten()[where + 1], {}).sum().backward()
    ours, counted = network.flop_counter(net)([T] * B, N), counter.get_total_flops()
    triangle, angles = 6 * 64 * 3 * B * T * T, 2 * 8 * T               # 12 heads · head_dim · T² a layer are computed; 8 frequencies
    print(f"\nFLOPs: torch {counted:,}, ours {ours:,} ({ours / counted:.1%} of it)")
    assert ours + triangle + angles == counted and 0.8 < ours / counted < 1

    assert network.peak_flops(CPU) is None
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA H200", 989e12),
                       ("NVIDIA GH200 480GB", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA B200", 2250e12), ("NVIDIA L40S", 362e12),
                       ("NVIDIA GeForce RTX 4090", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert network.peak_flops(torch.device("cuda")) == peak, name


def test_work_counts_real_tokens_of_hybrids_and_their_attention_layers_only(data, nets):
    d, config = data["hybrid"], nets["hybrid"].config
    run = trainer.Trainer(nets["hybrid"], arguments(), trainer.Ranks())
    for micro in run.micro_batches(d.responses, range(len(d.responses.outputs))):
        run.logp(micro)
    lengths = [len(row.tokens) for row in batches.merge_prefix(d.responses, range(len(d.responses.outputs)))]
    blocks = sum(p.numel() for n, p in nets["hybrid"].named_parameters() if ".layers." in n and p.ndim == 2)
    attention = 6 * 64 * config.layer_types.count("full_attention") * sum(n * n for n in lengths)
    head = 6 * config.vocab_size * 64 * int(d.responses.lengths.sum())
    work = run.take_work()
    assert work["flops"] == 6 * blocks * sum(lengths) + attention + head and config.layer_types.count("full_attention") == 2
    assert work["forward_tokens"] > sum(lengths)                        # padding is computed, but is no work
