"""What sft.py and rl.py share: ranks, log-probs, optimizers, checkpoints, resume. (Rows and micro-batches: batches.py.)

One process on a CPU has no process group. Under torchrun (gloo on CPUs, NCCL on GPUs), and on any GPU, the model is
sharded with FSDP2. Parameters, gradients and optimizer state are float32; compute is bfloat16 on GPUs, float32 on CPUs.

Nothing is drawn at random while training: batches come from seeds, dropout is off. So a resumed run needs weights,
optimizer state and position alone, and on one CPU process it repeats the uninterrupted run bit for bit.

Shapes:  B rows, T padded length of a micro-batch | N its target tokens, laid end to end | V vocabulary.
"""

import json
import math
import os
import shutil
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from torch.optim._muon import Muon, _adjust_lr, _zeropower_via_newtonschulz
from tqdm import tqdm

from batches import merge_prefix, pack, plan_micro_batches
from records import at_least, BadInput, policy_version, read_json, read_jsonl, write_json


# arguments that change how a run is computed or shown, not its result: they may differ when a command is repeated
FREE = ("threads", "log_every", "micro_tokens", "no_prefix_merge", "attention", "output", "save_every")


def already_whole(output, stage, args):
    """True (and says so) if `output` holds this very run, finished. BadInput if it holds one with other arguments."""
    if not (output / "manifest.json").exists():
        return False
    before = read_json(output / "manifest.json")["arguments"]
    now = json.loads(json.dumps(vars(args), default=str))
    for name in sorted(before.keys() | now.keys()):
        if name not in FREE and before.get(name) != now.get(name):
            raise BadInput(f"{output}: holds a finished run with {name}={before.get(name)!r}, this command says {now.get(name)!r}; "
                           "give another --output")
    print(f"{stage}: {output} is already whole")
    return True


def add_arguments(p, lr, global_batch):
    """The arguments that sft.py and rl.py share; lr and global_batch: the stage's own defaults."""
    g = p.add_argument_group("batches")
    g.add_argument("--global-batch", type=int, default=global_batch,
                   help="responses per optimizer step, over all ranks (count)")
    g.add_argument("--micro-tokens", type=int, default=8192, help="padded tokens per forward on one rank (tokens)")
    g.add_argument("--max-length", type=int, default=32768,
                   help="longer prompt + response is left out, counted (tokens)")
    g.add_argument("--no-prefix-merge", action="store_true",
                   help="one row per response, even where prompts extend each other")
    g = p.add_argument_group("optimizer")
    g.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw",
                   help="muon: hidden matrices; AdamW: the rest")
    g.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    g.add_argument("--schedule", choices=("constant", "linear", "cosine", "wsd"), default="constant",
                   help="decay to 0 over the whole run; wsd: over its last 30 %%")
    g.add_argument("--warmup", type=int, default=0, help="linear warm-up (optimizer steps)")
    g.add_argument("--weight-decay", type=float, default=0.0, help="decoupled, not on embeddings and vectors")
    g.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), metavar="B", help="AdamW moments (ours)")
    g.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm")
    g = p.add_argument_group("run")
    g.add_argument("--seed", type=int, default=0,
                   help="of the order of episodes; rl.py: also of the draw of --max-responses")
    g.add_argument("--threads", type=int, default=0, help="CPU threads per rank (0: torch's own choice)")
    g.add_argument("--attention", default="sdpa", help="attention implementation of transformers")
    g.add_argument("--save-dtype", choices=("auto", "float32", "bfloat16"), default="auto",
                   help="of the saved checkpoint; auto: bfloat16 on GPUs, float32 on CPUs")
    g.add_argument("--log-every", type=at_least(1), default=1, help="print a line every so many optimizer steps (count)")


# ---------------------------------------------------------------------------------------------- ranks

class Ranks:
    """The process group, or one process without any. Every method is a no-op or identity on one rank."""

    def __init__(self, threads=0):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if threads:
            torch.set_num_threads(threads)
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        self.sharded = self.world > 1 or cuda
        if cuda:
            torch.cuda.set_device(self.device)
        if self.sharded and not dist.is_initialized():      # a long time-out: rank 0 gates and saves while others wait
            alone = {} if self.world > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=2),
                                    device_id=self.device if cuda else None, **alone)
        self.main = self.rank == 0

    def gather(self, values):
        """dict of numbers -> list of the ranks' dicts (same keys, same order everywhere), as floats."""
        if self.world == 1:
            return [values]
        mine = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return [dict(zip(values, part.tolist(), strict=True)) for part in parts]

    def sum_(self, tensor):
        """Sums a tensor over ranks in place and returns it."""
        if self.world > 1:
            moved = tensor.to(self.device)
            dist.all_reduce(moved)
            tensor.copy_(moved)
        return tensor

    def barrier(self):
        if self.world > 1:
            dist.barrier()

    def on_main(self, function):
        """Runs `function` on rank 0, gives its (small) result to all; a BadInput there stops all, printed once."""
        if self.world == 1:
            return function()
        box = [None, None]
        if self.main:
            try:
                box[0] = function()
            except BadInput as e:
                box[1] = str(e)
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            self.stop(box[1])
        return box[0]

    def on_all(self, function):
        """Runs `function` on every rank (its result is too large to send); a BadInput on any of them stops all ranks,
        and the first of them prints its own."""
        result = sentence = None
        try:
            result = function()
        except BadInput as e:
            sentence = str(e)
        failed = [int(part["failed"]) for part in self.gather({"failed": sentence is not None})]
        if any(failed):
            self.stop(sentence, speaker=failed.index(1))
        return result

    def stop(self, sentence, speaker=0):
        """Ends all ranks with one line (of rank `speaker`) and exit code 2; to be called by all of them."""
        if self.world == 1:
            raise BadInput(sentence)
        if self.rank == speaker:
            print(f"error: {sentence}", file=sys.stderr, flush=True)
        self.close()                # nobody leaves before the line is out: torchrun kills the ranks that stay behind
        sys.exit(2)

    def close(self):
        if self.sharded:
            dist.barrier()
            dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- model

def checkpoint_folder(name):
    """A folder as it is; a hub name is downloaded (Qwen/Qwen3.5-9B) and its folder returned."""
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise BadInput(f"{name}: no such checkpoint folder; run the stage that writes it, or give a hub name, "
                       "owner/model")
    from huggingface_hub import snapshot_download
    return Path(snapshot_download(name))


def target_logp(model, tokens, where, targets, entropy=False):
    """log π of target tokens at temperature 1, float32 (N,); if asked for, also entropies (N,) in nats, no gradient.

    Only target positions meet the vocabulary: hidden states (B, T, H) -> (N, H) -> logits (N, V). No attention mask:
    padding stands on the right, where a causal model never looks.
    """
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state        # (B, T, H)
    logits = model.get_output_embeddings()(hidden.flatten(0, 1)[where]).float()           # (N, V)
    norm = logits.logsumexp(-1)                                                           # (N,)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - norm                         # (N,)
    if not entropy:
        return logp
    with torch.no_grad():
        return logp, norm - (logits.softmax(-1) * logits).sum(-1)                         # H = log Σe^z - Σ p z


def load_model(folder, ranks, attention="sdpa"):
    """Checkpoint folder -> model with float32 parameters and `target_logp`, sharded if there is a process group."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    if not (Path(folder) / "config.json").exists():
        ranks.stop(f"{folder}: not a checkpoint folder (no config.json); run the stage that writes it")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    model.eval()                # no dropout, or π/b would not be 1 before the first update; gradients flow as usual
    with torch.no_grad():       # some models scale or cap logits behind the head; target_logp would be wrong for them
        probe = torch.arange(4)[None] % model.config.get_text_config().vocab_size         # (1, 4)
        ours = model.get_output_embeddings()(model.base_model(input_ids=probe, use_cache=False).last_hidden_state)
        if not torch.allclose(ours, model(input_ids=probe, use_cache=False).logits, atol=1e-4):
            ranks.stop(f"{folder}: {type(model).__name__} changes its logits behind the output head, which "
                       "trainer.target_logp does not; choose another model, or add that step there")
    model.target_logp = MethodType(target_logp, model)
    if not ranks.sharded:
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    half = torch.bfloat16 if ranks.device.type == "cuda" else None
    mesh = dist.device_mesh.init_device_mesh(ranks.device.type, (dist.get_world_size(),))
    policy = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)}
    for layer in decoder_layers(model):
        fully_shard(layer, **policy)
    fully_shard(model, **policy)    # root group: embedding, last norm and head together, as tied weights demand
    register_fsdp_forward_method(model, "target_logp")
    return model


def decoder_layers(model):
    """The ModuleList of transformer blocks, whatever the model calls it."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    assert lists, f"{type(model).__name__} has no ModuleList of layers to shard"
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def full(tensor):
    """A DTensor -> the whole tensor on every rank (a collective); a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


# ---------------------------------------------------------------------------------------------- optimizers

class ShardedMuon(Muon):
    """torch's Muon, also for sharded matrices. Newton-Schulz needs the whole matrix: each update is gathered, made
    orthogonal on every rank by the very operations of one process, and cut again (three times faster here than torch's
    own way through DTensor products). It works in bfloat16, so the last bits in which 1 and 2 ranks differ grow to
    about 2 % of an update: only AdamW is equal on any number of ranks."""

    @torch.no_grad()
    def step(self, closure=None):
        if not any(isinstance(p, dist.tensor.DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(state["momentum_buffer"], momentum).full_tensor()    # Nesterov; (rows, columns)
                whole = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                mine = dist.tensor.distribute_tensor(whole.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(mine, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], p.shape))


def make_optimizers(model, args):
    """List of optimizers over all parameters. Call it after sharding: built before, they would update nothing."""
    embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in params if p.ndim != 2 or id(p) in embeddings]
    adam = dict(lr=args.lr, betas=tuple(args.betas), eps=1e-8, fused=True)
    if args.optimizer == "muon":
        muon = dict(lr=args.lr, momentum=0.95, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")
        return [ShardedMuon(matrices, **muon), torch.optim.AdamW(others, weight_decay=0.0, **adam)]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, **adam)]


def lr_at(args, step, progress):
    """Learning rate of a step. step: optimizer steps done before it, progress in [0, 1): both over the whole run."""
    warm = min(1.0, (step + 1) / args.warmup) if args.warmup else 1.0
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2,
             "wsd": min(1.0, (1 - progress) / 0.3)}[args.schedule]
    return args.lr * warm * decay


class Trainer:
    """Model, optimizers and the count of steps taken."""

    def __init__(self, model, args, ranks):
        self.model, self.args, self.ranks = model, args, ranks
        self.optimizers = make_optimizers(model, args)
        self.steps = 0

    def micro_batches(self, responses, chosen):
        """The micro-batches that this rank runs for one optimizer batch."""
        rows = merge_prefix(responses, chosen, not self.args.no_prefix_merge)
        plan = plan_micro_batches(rows, self.args.micro_tokens, self.ranks.world)
        return [pack(slot[self.ranks.rank], responses, self.ranks.device) for slot in plan]

    def logp(self, micro, entropy=False):
        """(N,) log π of the micro-batch's target tokens; with entropy=True also (N,) entropies."""
        return self.model.target_logp(micro.tokens, micro.where, micro.targets, entropy)

    def backward(self, loss):
        """Adds the gradient of this rank's part of the loss. FSDP2 averages over ranks; the parts are to be summed."""
        (loss * self.ranks.world).backward()

    def step(self, lr, measure=False):
        """Clips, updates, clears. Returns grad_norm (before clipping); with `measure` also update_norm and
        bf16_changed, the share of weights whose bfloat16 value changed (costs a copy of this rank's parameters). A
        gradient that is not finite ends the run before it touches a weight."""
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(full(torch.nn.utils.clip_grad_norm_(params, self.args.clip)))
        if not math.isfinite(norm):
            self.ranks.stop(f"step {self.steps + 1}: the gradient norm is {norm}; this step changed no weight. Look at "
                            "the last lines of metrics.jsonl (loss, ratio_max, gaps) and at the batch's log-probs, or "
                            "lower --lr")
        local = lambda p: p.to_local() if isinstance(p, dist.tensor.DTensor) else p
        before = [local(p.detach()).clone() for p in params] if measure else []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        if not measure:
            return {"grad_norm": norm}
        after = [local(p.detach()) for p in params]
        pairs = list(zip(before, after, strict=True))
        parts = self.ranks.gather({
            "square": float(sum((a - b).double().square().sum() for b, a in pairs)),
            "changed": float(sum((a.bfloat16() != b.bfloat16()).sum() for b, a in pairs)),
            "count": sum(b.numel() for b in before)})
        square, changed, count = (sum(part[k] for part in parts) for k in ("square", "changed", "count"))
        return {"grad_norm": norm, "update_norm": math.sqrt(square), "bf16_changed": changed / count}


def reduce_metrics(parts, ranks, merge):
    """Metrics of this rank's micro-batches (dicts of 0-d tensors) -> floats of the whole optimizer batch, on all ranks.
    merge: loss.merge_metrics. One device-to-host copy per step, not one per number."""
    values = torch.stack([torch.stack([x.double() for x in part.values()]) for part in parts]).tolist()
    mine = merge([dict(zip(parts[0], row, strict=True)) for row in values])
    return merge(ranks.gather(mine))


# ---------------------------------------------------------------------------------------------- state and checkpoints

def save_state(folder, trainer, extra):
    """Weights (float32) and optimizer state as torch's distributed checkpoint; then trainer_state.json with `extra` and
    the step count. All ranks call it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    model, optim = get_state_dict(trainer.model, trainer.optimizers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")   # one process, on purpose
        dcp.save({"model": model, "optim": optim}, checkpoint_id=str(folder))
    if trainer.ranks.main:
        write_json(Path(folder) / "trainer_state.json", {"steps": trainer.steps, **extra})


def load_state(folder, trainer):
    """Restores what save_state wrote, on any number of ranks; returns its `extra`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    extra = read_json(Path(folder) / "trainer_state.json")
    model, optim = get_state_dict(trainer.model, trainer.optimizers)      # gives an optimizer without state its zeros
    state = {"model": model, "optim": optim}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(trainer.model, trainer.optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    trainer.steps = extra["steps"]
    return extra


def save_resume(output, trainer, extra, keep=2):
    """A state under <output>/resume/step-N, renamed into place when it is whole; the newest `keep` stay."""
    folder = Path(output) / "resume"
    part, final = folder / "part", folder / f"step-{trainer.steps:08d}"
    if trainer.ranks.main:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        part.mkdir(parents=True)
    trainer.ranks.barrier()
    save_state(part, trainer, extra)
    trainer.ranks.barrier()
    if trainer.ranks.main:
        part.rename(final)
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    trainer.ranks.barrier()


def newest_resume(output):
    """The newest whole state under <output>/resume, or None."""
    return max((Path(output) / "resume").glob("step-*"), default=None)


def save_checkpoint(output, trainer, source, extra, dtype="auto"):
    """<output>/: a checkpoint for transformers and vLLM, and <output>/state/ for the next round. Returns the policy
    version.

    All is written to <output>/part/ first; config.json moves last, and without it a folder is no checkpoint to anybody.
    source: the folder the model came from; its tokenizer, template and generation config are copied byte for byte.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    output, model, ranks = Path(output), trainer.model, trainer.ranks
    if dtype == "auto":
        dtype = "bfloat16" if ranks.device.type == "cuda" else "float32"
    part, version = output / "part", None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)                # a collective; {} but on rank 0
    if ranks.main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for alias, name in (getattr(model, "_tied_weights_keys", None) or {}).items():
            if model.config.get_text_config().tie_word_embeddings and alias in weights:
                assert torch.equal(weights[alias], weights[name]), f"{alias} and {name} are tied but differ"
                del weights[alias]
        model.save_pretrained(part, state_dict={k: v.to(getattr(torch, dtype)) for k, v in weights.items()})
        config = read_json(part / "config.json")           # transformers wrote the dtype of the model in memory
        for section in [config, *(v for v in config.values() if isinstance(v, dict) and "dtype" in v)]:
            section["dtype"] = dtype
        write_json(part / "config.json", config)
        ours = ("config.json", "manifest.json", "args.json", "round.json", "model.safetensors.index.json")
        for path in Path(source).iterdir():
            if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in ours:
                shutil.copyfile(path, part / path.name)
        version = policy_version(part)
    ranks.barrier()
    save_state(part / "state", trainer, {**extra, "policy_version": version})
    ranks.barrier()
    if ranks.main:
        shutil.rmtree(output / "state", ignore_errors=True)
        for path in sorted(part.iterdir(), key=lambda p: p.name == "config.json"):
            path.replace(output / path.name)
        part.rmdir()
    ranks.barrier()
    return version


# ---------------------------------------------------------------------------------------------- logging

class Metrics:
    """metrics.jsonl: one object a step, keys frozen by the first; a printed line every few steps. Rank 0 only."""

    def __init__(self, folder, ranks, steps, every, shown):
        """steps: how many there will be (for the printed count); shown: {key: format} of the printed line."""
        self.path, self.main = Path(folder) / "metrics.jsonl", ranks.main
        self.total, self.every, self.shown = steps, every, shown
        self.keys, self.clock = None, time.perf_counter()

    def keep(self, steps):
        """Drops rows behind step `steps`: a killed run logged them, the resumed one does them again."""
        if self.main:
            rows = [row for _, row in read_jsonl(self.path)] if self.path.exists() else []
            part = self.path.with_suffix(".part")
            part.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= steps))
            part.replace(self.path)

    def log(self, row):
        now = time.perf_counter()
        row = {**row, "seconds": now - self.clock, "tokens_per_second": row["forward_tokens"] / (now - self.clock)}
        self.clock = now
        if not self.main:
            return
        self.keys = self.keys or list(row)
        assert list(row) == self.keys, f"metrics changed: {sorted(set(row) ^ set(self.keys))}"
        with open(self.path, "a") as f:
            f.write(json.dumps({k: round(v, 9) if isinstance(v, float) else v for k, v in row.items()}) + "\n")
        if row["step"] % self.every == 0 or row["step"] == self.total:
            line = " | ".join(f"{k} {row[k]:{f}}" for k, f in self.shown.items())
            tqdm.write(f"step {row['step']:>5}/{self.total} | {line}")


def show_row(tokenizer, row, note=""):
    """Prints one row, its target tokens marked: green on a terminal, «…» elsewhere."""
    left, right = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("«", "»")
    text, at = "", 0
    for first, last, _ in row.spans:
        text += tokenizer.decode(row.tokens[at:first]) + left + tokenizer.decode(row.tokens[first:last]) + right
        at = last
    targets = sum(last - first for first, last, _ in row.spans)
    print(f"--- one row: {len(row.tokens)} tokens, {targets} of them targets (marked) | {note}\n{text}\n---",
          flush=True)
