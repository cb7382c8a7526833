"""What a training step costs here: our SFT step against TRL's SFTTrainer, our RL step against a plain one; on a GPU, ours alone.

    python bench/train.py                    about 8 minutes on 2 cores; needs requirements-bench.txt (TRL, accelerate, datasets)
    python bench/train.py --quick            the tiny model alone, a minute
    python bench/train.py --without-trl      the RL step alone; requirements.txt is enough
    python bench/train.py --gpu              one datacentre GPU: a Qwen3.5-9B-shaped stack of fewer layers, 8k to 32k tokens

Every side is a process of its own that loads the same checkpoint and the same rows; steps alternate (A B C, C B A, …), so that drift of
the machine cancels; the first step of each warms up and is not counted. All sides: float32, SDPA attention, no activation checkpointing,
AdamW of one setting, the same rows in the same optimizer batches. They must agree: a side whose loss, after any number of updates, is
more than 1e-4 (relative) from ours ends the bench with exit code 1.
    models      tiny   0.46M parameters, vocabulary 512 (the demo's planner)
                wide   91M parameters, vocabulary 151,936 (Qwen3's), most of them in the tied embedding
    rows        apart  every row an episode of its own: nothing to merge, apples to apples; a quarter of the tokens are targets
                turns  four turns an episode, each prompt extends the one before: ours merges them into one row, exactly. (The others have
                       one row per response. Whoever lays out a whole append-only conversation as one masked row gets that saving too.)
    SFT sides   TRL    SFTTrainer as a user runs it: rows in the order of the data, padded in TRL's micro-batches
                TRL+   what it could do at best: rows of a batch sorted by length, and only target positions scored, which TRL 1.16 does on
                       GPUs (Triton) and not on CPUs; switched on here by a patch. On a GPU expect this row, not the one above.
    RL side     plain  full logits, log_softmax, gather; one row per response, padded, under the same budget of padded tokens
tokens/s counts the real tokens of the unmerged rows for every side. Memory: maximum resident size of the process (ru_maxrss) less its size
just before the first step, when model, data and trainer stood; in brackets in all. TRL also computes entropy and accuracy of every scored
token, which it cannot be told to leave out; our RL step computes its metrics and measures its update, as rl.py does, plain does not.
On a machine with other load give --threads 1 and trust the ratio of CPU time.
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import loss
import model as network
import tiny
import trainer
from batches import Responses
from records import BadInput, Formatter, at_least, run_main

LR = 1e-4
TOLERANCE = 1e-4                                           # largest relative difference of two sides' losses
MODELS = {"tiny": dict(vocab_size=512, hidden=128, layers=2, heads=4, kv_heads=2, ff=384),
          "wide": dict(vocab_size=151_936, hidden=512, layers=4, heads=8, kv_heads=4, ff=1536)}


@dataclass
class Case:
    """One comparison: its sides run the same batches. `rows`: per optimizer batch."""
    stage: str                                             # sft or rl
    model: str
    turns: int                                             # of an episode; 1: rows apart
    rows: int
    longest: int                                           # tokens of an episode's last row, at most
    micro_tokens: int                                      # padded tokens of one forward, ours and plain
    trl_rows: int                                          # rows of one forward, TRL
    steps: int                                             # counted ones
    sides: tuple = ()
    folder: str = ""                                       # of the checkpoint and the recorded log-probs

    @property
    def name(self):
        return f"{self.stage} {self.model} {'apart' if self.turns == 1 else 'turns'}"


# ---------------------------------------------------------------------------------------------- data

def make_data(case):
    """-> (Responses of all batches, list of batches as lists of indices, the warm-up's first); random ids, the same for the same case. An
    episode's last row has between a quarter of `longest` and `longest` tokens in `turns` equal turns, three quarters of each context."""
    draw = np.random.default_rng([case.turns, case.rows])
    prompts, outputs, episodes = [], [], []
    for number in range((case.steps + 1) * case.rows // case.turns):
        size = int(draw.integers(case.longest // 4, case.longest + 1)) // case.turns
        ids = draw.integers(3, MODELS[case.model]["vocab_size"], size * case.turns, dtype=np.int32)
        for turn in range(case.turns):
            last = (turn + 1) * size
            prompts.append(ids[:last - size // 4])
            outputs.append(ids[last - size // 4:last])
            episodes.append(f"episode-{number:05d}")
    batches = [list(range(k * case.rows, (k + 1) * case.rows)) for k in range(case.steps + 1)]
    return Responses(prompts, outputs, episodes), batches


def length(responses, s):
    return len(responses.prompts[s]) + len(responses.outputs[s])


def our_args(micro_tokens):
    """The trainer's arguments as a stage has them, weight decay off: transformers and ours leave different weights out of it."""
    p = argparse.ArgumentParser()
    trainer.add_arguments(p, lr=LR, global_batch=1)
    return p.parse_args(["--micro-tokens", str(micro_tokens), "--weight-decay", "0"])


def our_run(case):
    args, ranks = our_args(case.micro_tokens), trainer.Ranks()
    return trainer.Trainer(network.load_model(case.folder, ranks, args), args, ranks)


def rl_data(case, responses):
    """Flat tensors (N,) of a round that somebody recorded: log_q, log_b, advantage, weight; and u (S,)."""
    recorded = np.load(Path(case.folder) / "recorded.npz")
    A, k = torch.empty(len(responses.outputs)), torch.empty(len(responses.outputs), dtype=torch.long)     # (S,), (S,)
    for number, episode in enumerate(responses.by_episode()):
        A[episode], k[episode] = (1.0, -0.5, 0.2)[number % 3], len(episode)
    u = loss.response_weights(k)                                                                          # (S,)
    return {"log_q": torch.from_numpy(recorded["log_q"]), "log_b": torch.from_numpy(recorded["log_b"]), "u": u,
            "advantage": torch.repeat_interleave(A, responses.lengths), "weight": loss.token_weights(responses.lengths, u)}


def record(case):
    """Writes recorded.npz: log b of the checkpoint at every target token, and a log q near it, as another engine would have said."""
    run, (responses, batches) = our_run(case), make_data(case)
    log_b = np.zeros(int(responses.lengths.sum()), np.float32)                                            # (N,)
    with torch.no_grad():
        for micro in (m for batch in batches for m in run.micro_batches(responses, batch)):
            log_b[micro.index.numpy()] = run.logp(micro).numpy()
    noise = np.random.default_rng(0).normal(0, 0.01, log_b.shape).astype(np.float32)              # (N,)
    np.savez(Path(case.folder) / "recorded.npz", log_b=log_b, log_q=np.minimum(log_b + noise, 0))


# ---------------------------------------------------------------------------------------------- the sides, each in its own process

class Turns:
    """A side's half of the alternation: it waits for a line on stdin, does one step, says what it cost."""

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)                                      # whatever libraries print goes to the log

    def say(self, **what):
        print(json.dumps(what), file=self.out, flush=True)

    def ready(self):
        """Model, data and trainer stand: what memory grows by from here on is the steps'."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.say(level=pages * os.sysconf("SC_PAGE_SIZE"))

    def wait(self):
        sys.stdin.readline()
        self.clock = time.perf_counter(), time.process_time()

    def done(self, loss):
        seconds, cpu = time.perf_counter() - self.clock[0], time.process_time() - self.clock[1]
        self.say(seconds=seconds, cpu=cpu, loss=float(loss), peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def ours_sft(case, turns):
    """The loop of sft.py."""
    run, (responses, batches) = our_run(case), make_data(case)
    turns.ready()
    for batch in batches:
        turns.wait()
        total_tokens, parts = int(responses.lengths[batch].sum()), []
        for micro in run.micro_batches(responses, batch):
            logp = run.logp(micro)                                        # (N,)
            part, metric = loss.sft_loss(logp, torch.ones_like(logp, dtype=torch.bool), total_tokens)
            run.backward(part)
            parts.append(metric)
        run.step(LR)
        turns.done(trainer.reduce_metrics(parts, run.ranks, loss.merge_metrics)["nll"] / total_tokens)


def ours_rl(case, turns):
    """The loop of rl.py."""
    run, (responses, batches) = our_run(case), make_data(case)
    data = rl_data(case, responses)
    turns.ready()
    for batch in batches:
        turns.wait()
        total_u, parts = float(data["u"][batch].sum()), []
        for micro in run.micro_batches(responses, batch):
            logp, i = run.logp(micro), micro.index                        # (N,), (N,)
            part, metric = loss.rl_loss(logp, *(data[k][i] for k in ("log_q", "log_b", "advantage", "weight")), total_u)
            run.backward(part)
            parts.append({"loss": part.detach(), **metric})
        run.step(LR, measure=True)
        turns.done(trainer.reduce_metrics(parts, run.ranks, loss.merge_metrics)["loss"])


def plain_micro_batches(responses, batch, micro_tokens):
    """Rows in the order of the data, as many as stay within the budget of padded tokens."""
    micros = [[]]
    for s in batch:
        if micros[-1] and (len(micros[-1]) + 1) * max(length(responses, r) for r in (*micros[-1], s)) > micro_tokens:
            micros.append([])
        micros[-1].append(s)
    return micros


def plain_loss(model, responses, micro, data, total_u):
    """L_RL (loss.py, 6) of some responses, as one writes it first: everything (B, T), full logits. Returns a scalar."""
    T = max(length(responses, s) for s in micro)
    tokens, attention = torch.zeros(len(micro), T, dtype=torch.long), torch.zeros(len(micro), T, dtype=torch.long)        # (B, T) each
    per_token = {k: torch.zeros(len(micro), T) for k in ("log_q", "log_b", "advantage", "weight")}                        # (B, T) each
    for b, s in enumerate(micro):
        first, last = len(responses.prompts[s]), length(responses, s)
        tokens[b, :first], tokens[b, first:last] = torch.from_numpy(responses.prompts[s]), torch.from_numpy(responses.outputs[s])
        attention[b, :last] = 1
        for k, x in per_token.items():
            x[b, first:last] = data[k][responses.start[s]:responses.start[s + 1]]
    q, b, A, weight = (x[:, 1:] for x in per_token.values())                                                             # (B, T-1) each
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1]                            # (B, T-1, V)
    logp = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)                                      # (B, T-1)
    ratio = torch.where(weight > 0, logp - q, 0.0).exp()                                                                 # (B, T-1)
    ppo = torch.maximum(-ratio * A, -ratio.clamp(1 - loss.EPS_LO, 1 + loss.EPS_HI) * A)                                  # (B, T-1)
    ppo = torch.where(A < 0, torch.minimum(ppo, -loss.D * A), ppo)                                                       # (B, T-1)
    return (weight * (q - b).exp().clamp(max=loss.C) * ppo).sum() / total_u                                              # ()


def plain_rl(case, turns):
    from transformers import AutoModelForCausalLM
    args, (responses, batches) = our_args(case.micro_tokens), make_data(case)
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32, attn_implementation=args.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=tuple(args.betas), eps=1e-8, weight_decay=0.0, fused=True)
    data = rl_data(case, responses)
    turns.ready()
    for batch in batches:
        turns.wait()
        total_u, total = float(data["u"][batch].sum()), 0.0
        for micro in plain_micro_batches(responses, batch, case.micro_tokens):
            part = plain_loss(model, responses, micro, data, total_u)
            part.backward()
            total += float(part.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        turns.done(total)


def trl_sft(case, turns, best=False):
    """TRL's own loop; the alternation hangs on its callbacks. best: the side TRL+ of the docstring."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer
    from trl.trainer import utils

    if best:
        assert utils._use_triton(torch.device("cpu")) is False
        utils._use_triton = lambda device: True            # read by the fused head to choose positions; its kernels ask their own module
    args, (responses, batches) = our_args(case.micro_tokens), make_data(case)
    order = [s for batch in batches for s in (sorted(batch, key=lambda s: length(responses, s)) if best else batch)]
    rows = Dataset.from_dict({
        "input_ids": [np.concatenate([responses.prompts[s], responses.outputs[s]]) for s in order],
        "completion_mask": [[0] * len(responses.prompts[s]) + [1] * len(responses.outputs[s]) for s in order]})
    assert case.rows % case.trl_rows == 0, f"{case.rows} rows of a batch in micro-batches of {case.trl_rows}"
    config = SFTConfig(
        tempfile.mkdtemp(dir=case.folder), max_length=None, completion_only_loss=True, train_sampling_strategy="sequential",
        per_device_train_batch_size=case.trl_rows, gradient_accumulation_steps=case.rows // case.trl_rows, max_steps=len(batches),
        learning_rate=LR, lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta1=args.betas[0], adam_beta2=args.betas[1],
        adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=args.clip, bf16=False, use_cpu=True, gradient_checkpointing=False,
        logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True,
        logging_nan_inf_filter=False, dataloader_num_workers=0, dataloader_pin_memory=False)
    parts = []

    class Alternate(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            turns.ready()
            turns.wait()

        def on_step_end(self, args, state, control, **kwargs):
            turns.done(sum(map(float, parts)))
            parts.clear()
            if state.global_step < len(batches):
                turns.wait()

    class Listening(SFTTrainer):
        def training_step(self, *args, **kwargs):
            parts.append(super().training_step(*args, **kwargs))          # () already over the number of targets of the whole batch
            return parts[-1]

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<end>": 2})), pad_token="<pad>", eos_token="<end>")
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32, attn_implementation=args.attention)
    Listening(model=model, args=config, train_dataset=rows, processing_class=words, callbacks=[Alternate()]).train()


SIDES = {"ours-sft": ours_sft, "ours-rl": ours_rl, "plain": plain_rl, "TRL": trl_sft,
         "TRL+": lambda case, turns: trl_sft(case, turns, best=True)}


# ---------------------------------------------------------------------------------------------- measuring

class Side:
    """A side's process as the bench sees it. Its prints and its traceback are in <folder>/<name>.log."""

    def __init__(self, name, case, threads):
        self.name, self.log = name, Path(case.folder) / f"{name}.log"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--side", json.dumps({"side": name, "threads": threads, **vars(case)})], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=open(self.log, "w"), text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
        self.steps = []

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text()[-3000:]
            sys.exit(f"{tail}\nerror: the side {self.name} ended with {self.process.wait()}; its last words stand above")
        return json.loads(line)

    def step(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.steps.append(self.read())

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


def measure(case, threads):
    """Runs a case -> {side: {seconds, cpu: [of counted steps], losses: [of all], level, peak}}; in seconds and bytes."""
    if case.stage == "rl":
        record(case)
    sides = []
    try:
        sides.extend(Side(name, case, threads) for name in case.sides)
        levels = [side.read()["level"] for side in sides]
        for k in range(case.steps + 1):
            for side in sides if k % 2 == 0 else sides[::-1]:
                side.step()
    finally:
        for side in sides:
            side.close()
    return {side.name: {**{k: [step[k] for step in side.steps[1:]] for k in ("seconds", "cpu")}, "losses": [s["loss"] for s in side.steps],
                        "level": level, "peak": side.steps[-1]["peak"]} for side, level in zip(sides, levels, strict=True)}


def compare(ours, other, tokens):
    """Two sides of measure(), tokens of each counted step -> row of numbers; ratios > 1 mean that ours is better."""
    rate = lambda side: sum(tokens) / sum(side["seconds"])
    each = [b / a for a, b in zip(ours["seconds"], other["seconds"], strict=True)]
    grown = [side["peak"] - side["level"] for side in (ours, other)]
    return {"ours": rate(ours), "other": rate(other), "ratio": rate(ours) / rate(other), "least": min(each), "most": max(each),
            "cpu": sum(other["cpu"]) / sum(ours["cpu"]), "memory": grown[1] / grown[0],
            "mb": [f"{g / 1e6:,.0f} ({side['peak'] / 1e6:,.0f})" for g, side in zip(grown, (ours, other), strict=True)],
            "difference": max(abs(a - b) / max(abs(a), 0.1) for a, b in zip(ours["losses"], other["losses"], strict=True))}


def cases(args):
    """The comparisons of this call. TRL's micro-batches: as large as ours; on the tiny model 4, 8, 16, 32 rows took it equally long."""
    rows, steps = (32, 3) if args.quick else (64, 8)
    shapes = [("tiny", 1, rows, 512, 8192, 16, steps), ("tiny", 4, rows, 512, 8192, 16, steps)]
    if not args.quick:
        shapes += [("wide", 1, 12, 320, 2048, 6, 2), ("wide", 4, 12, 480, 2048, 4, 2)]
    sft = [] if args.without_trl else [Case("sft", *shape, sides=("ours-sft", "TRL", "TRL+")) for shape in shapes]
    return sft + [Case("rl", *shape, sides=("ours-rl", "plain")) for shape in shapes]


def bench(args):
    missing = [] if args.without_trl else [n for n in ("trl", "accelerate", "datasets") if not importlib.util.find_spec(n)]
    if missing:
        raise BadInput(f"not installed: {', '.join(missing)}; see requirements-bench.txt, or give --without-trl")
    print("| step, model, rows | targets | against | tokens/s ours | other | ratio (of single steps) | of CPU time | MB ours (in all) | "
          "other | ratio | loss differs by |")
    print("|---" * 11 + "|", flush=True)
    found, wrong = {}, []
    with tempfile.TemporaryDirectory(prefix="bench-train-") as root:
        for case in cases(args):
            case.folder = str(Path(root) / case.model)
            if not Path(case.folder).exists():
                tiny.make_model(seed=0, **MODELS[case.model]).save_pretrained(case.folder)
            responses, batches = make_data(case)
            tokens = [sum(length(responses, s) for s in batch) for batch in batches[1:]]
            share = int(responses.lengths[batches[1][0]:].sum()) / sum(tokens)
            ours, *others = measure(case, args.threads).items()
            for name, side in others:
                row = found[case.name, name] = compare(ours[1], side, tokens)
                print(f"| {case.name} | {share:.0%} | {name} | {row['ours']:,.0f} | {row['other']:,.0f} | **{row['ratio']:.2f}** "
                      f"({row['least']:.2f}–{row['most']:.2f}) | {row['cpu']:.2f} | {row['mb'][0]} | {row['mb'][1]} | "
                      f"**{row['memory']:.2f}** | {row['difference']:.0e} |", flush=True)
                if not row["difference"] < TOLERANCE:
                    wrong.append(f"{case.name}: other losses than {name}'s: {ours[1]['losses']} against {side['losses']}")
    print(f"load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; bench: {args.threads or os.cpu_count()}")
    for case, name, key, aim, words in (
            ("sft tiny apart", "TRL", "ratio", 1.2, "tokens/s"), ("sft wide apart", "TRL", "ratio", 2.0, "tokens/s"),
            ("sft wide apart", "TRL+", "ratio", 2.0, "tokens/s"), ("sft wide apart", "TRL", "memory", 2.0, "less memory"),
            ("rl wide apart", "plain", "memory", 2.0, "less memory")):
        if (case, name) in found:
            value = found[case, name][key]
            print(f"aim: {case} against {name}, ≥ {aim:g} × {words}: {value:.2f}, {'met' if value >= aim else 'NOT met'}")
    for sentence in wrong:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


# ---------------------------------------------------------------------------------------------- one GPU

QWEN = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=16, num_key_value_heads=4, head_dim=256, vocab_size=248_320,
            linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
            tie_word_embeddings=False)                     # Qwen3.5-9B's, which has 32 layers, every fourth with attention


def write_stack(folder, layers, longest, shape=QWEN):
    """A Qwen3.5 text checkpoint of random bfloat16 weights; layers: a multiple of 4. Made layer by layer where the device allows."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5 import Qwen3_5TextConfig
    config = Qwen3_5TextConfig(**shape, num_hidden_layers=layers, max_position_embeddings=longest, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return config


def one_length(run, config, tokens, steps):
    """Trains on one sequence of so many tokens, a quarter of them targets -> (seconds of each counted step, peak bytes or None on CPUs)."""
    cuda = run.ranks.device.type == "cuda"
    draw = np.random.default_rng(0)
    ids, first, seconds = draw.integers(0, config.vocab_size, tokens, dtype=np.int32), tokens - tokens // 4, []
    responses = Responses([ids[:first]], [ids[first:]], ["episode"])
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps + 1):                             # the first one warms up
        clock = time.perf_counter()
        for micro in run.micro_batches(responses, [0]):
            logp = run.logp(micro)                         # (N,)
            run.backward(loss.sft_loss(logp, torch.ones_like(logp, dtype=torch.bool), tokens - first)[0])
        run.step(LR)                                       # reads the gradient norm: waits for the device, but for the update itself
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - clock)
    return seconds[1:], torch.cuda.max_memory_allocated() if cuda else None


def gpu(args):
    if not torch.cuda.is_available():
        raise BadInput("--gpu: torch.cuda is not available here; run it on a machine with a CUDA device and torch's CUDA build")
    ranks, our = trainer.Ranks(), our_args(max(args.lengths))
    peak = network.peak_flops(ranks.device)
    kernels = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)]
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        config = write_stack(folder, args.layers, max(args.lengths))
        torch.cuda.empty_cache()
        run = trainer.Trainer(network.load_model(folder, ranks, our), our, ranks)
    size = sum(p.numel() for p in run.model.parameters()) / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels of linear attention: {', '.join(kernels) or 'none (slow)'}\n"
          f"{args.layers} layers, {size:.2f}B parameters, float32 masters, AdamW, bf16 compute, recompute: {our.recompute}; a step: one "
          f"sequence, a quarter of it targets; median of {args.steps}\nMFU, dense part: 6 × (weights of the layers' matrices × tokens + "
          "head × targets) / seconds / peak; in brackets with causal attention\n| tokens | tokens/s | MFU | peak GB |\n" + "|---" * 4 + "|",
          flush=True)
    for tokens in args.lengths:
        try:
            seconds, memory = one_length(run, config, tokens, args.steps)
        except torch.cuda.OutOfMemoryError:
            print(f"| {tokens:,} | out of memory | | > {torch.cuda.max_memory_allocated() / 1e9:.1f} |", flush=True)
            for p in run.model.parameters():
                p.grad = None
            torch.cuda.empty_cache()
            continue
        second = statistics.median(seconds)
        work = [run.flops(lengths, tokens // 4) for lengths in ([1] * tokens, [tokens])]     # rows of one token: next to no attention
        mfu = [f"{flops / second / peak:.1%}" if peak else "?" for flops in work]
        print(f"| {tokens:,} | {tokens / second:,.0f} | {mfu[0]} ({mfu[1]}) | {memory / 1e9:.1f} |", flush=True)
    ranks.close()


# ---------------------------------------------------------------------------------------------- main

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--quick", action="store_true", help="the tiny model alone, fewer steps")
    p.add_argument("--without-trl", action="store_true", help="the RL step alone")
    p.add_argument("--threads", type=at_least(0), default=0, help="CPU threads of each side (0: torch's own choice)")
    p.add_argument("--gpu", action="store_true", help="the GPU bench instead; all of the following are its own")
    p.add_argument("--layers", type=at_least(4), default=8, help="decoder layers, a multiple of 4 (32 are Qwen3.5-9B)")
    p.add_argument("--lengths", type=at_least(64), nargs="+", default=[8192, 16384, 32768], help="of the one sequence of a step (tokens)")
    p.add_argument("--steps", type=at_least(1), default=3, help="counted steps a length")
    p.add_argument("--side", help=argparse.SUPPRESS)       # a process of this bench itself: a Case as JSON
    args = p.parse_args()
    if args.layers % 4:
        p.error(f"--layers {args.layers}: expected a multiple of 4, every fourth layer has attention")
    if args.side:
        told = json.loads(args.side)
        side, threads = told.pop("side"), told.pop("threads")
        if threads:
            torch.set_num_threads(threads)
        return SIDES[side](Case(**told), Turns())
    return gpu(args) if args.gpu else bench(args)


if __name__ == "__main__":
    run_main(main)
