"""The planner's network as the trainer sees it: checks before loading, loading and sharding, log-probs, work done.

Any transformers model of the usual calling form: base_model(input_ids, …).last_hidden_state, then one linear output
head without bias and nothing behind it (checked at load). Text models (Qwen3, Qwen3.5, Llama, …) come through
AutoModelForCausalLM; a config with a vision tower (Qwen3.5 as published) through AutoModelForImageTextToText.
The vision tower is frozen unless --train-vision is given.

Parameters are float32 and stay so; under FSDP2 on GPUs each block is gathered and computed in bfloat16.

Shapes:  B rows, T padded length of a micro-batch | N its target tokens, laid end to end | H width | V vocabulary |
         C target positions of one chunk | P patches of a micro-batch's pictures.
"""

import sys
from functools import partial
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from pictures import load_pictures
from records import BadInput

# Logits of one chunk of target positions: C x V <= this many float32 numbers (256 MiB). Larger chunks cost memory and
# gain little: at V = 248,320 a chunk is 270 positions, already a large matrix product.
LOGITS = 2**26
COMPUTE = {"cuda": torch.bfloat16}      # dtype of gathered weights and activations by kind of device; others: float32


# ---------------------------------------------------------------------------------------------- before anything is loaded

def checkpoint_folder(name, weights=True):
    """A folder as it is; a hub name is downloaded (Qwen/Qwen3.5-9B) and its folder on this node returned. weights: False for ranks
    that read none: on another node than rank 0's they need config, tokenizer and processor alone."""
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise BadInput(f"{name}: no such checkpoint folder; run the stage that writes it, or give a hub name, "
                       "owner/model")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, ignore_patterns=None if weights else ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf"]))
    except (OSError, ValueError) as e:                                    # every error of the hub's is one of these
        raise BadInput(f"{name}: not in the hub's cache on this node and cannot be downloaded ({str(e).strip().splitlines()[0]}); "
                       "look at the name, HF_TOKEN, and HF_HUB_OFFLINE, which setup.sh sets") from None


def read_config(folder):
    """Checkpoint folder -> (transformers config, the Auto class that loads it); BadInput if there is none."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    if not (Path(folder) / "config.json").exists():
        raise BadInput(f"{folder}: not a checkpoint folder (no config.json); run the stage that writes it")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as e:
        raise BadInput(f"{folder}/config.json: transformers cannot read it ({str(e).splitlines()[0]}); give a causal or "
                       "image-text model that the installed transformers knows") from None
    auto = AutoModelForImageTextToText if getattr(config, "vision_config", None) else AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        raise BadInput(f"{folder}/config.json: field model_type is {config.model_type!r}, which {auto.__name__} does not "
                       "load; give a causal or image-text model")
    return config, auto


def preflight(folder, responses, global_batch, world, rank):
    """Refuses what would fail hours later or train on nonsense, from files alone: no weight is read, no GPU touched.

    Returns the checkpoint's Pictures, or None if it has no vision tower. responses: batches.Responses; global_batch:
    responses per optimizer step (count; None: not an argument of this run); world: ranks, all of which call it, each by its
    `rank`: pictures are opened, which takes longest, by one rank each. BadInput names file or field.
    """
    import gate
    config, _ = read_config(folder)
    text, pictures = config.get_text_config(), load_pictures(folder)
    if global_batch and global_batch < world:
        raise BadInput(f"--global-batch {global_batch} on {world} ranks: some rank would never have a response; give at "
                       "least one per rank, or fewer ranks")
    largest = max(int(ids.max()) for ids in (*responses.prompts, *responses.outputs))
    if largest >= text.vocab_size:
        raise BadInput(f"token id {largest} in the data, but {folder} has a vocabulary of {text.vocab_size}; give the "
                       "checkpoint whose tokenizer made it")
    known = max(gate.load_tokenizer(folder).get_vocab().values())
    if known >= text.vocab_size:
        raise BadInput(f"{folder}: its tokenizer writes ids up to {known}, but config.json has a vocab_size of "
                       f"{text.vocab_size}; tokenizer and weights belong to different models")
    longest = max(len(p) + len(o) for p, o in zip(responses.prompts, responses.outputs, strict=True))
    if longest > text.max_position_embeddings:
        raise BadInput(f"a row of {longest} tokens, but {folder} has {text.max_position_embeddings} positions; give a "
                       "smaller --max-length")
    shown = sum(bool(p) for p in responses.pictures)
    if shown and pictures is None:
        raise BadInput(f"{folder}: {shown} of {len(responses.pictures)} responses have pictures in their prompts, but this "
                       "checkpoint has no vision tower; give a vision-language checkpoint, or collect without --pictures")
    if pictures is not None:
        total = len(responses.outputs)
        check_pictures(responses, pictures, range(total * rank // world, total * (rank + 1) // world))
    return pictures


def check_pictures(responses, pictures, chosen):
    """Every prompt must hold exactly the placeholders of its pictures, every response none: the model scatters picture
    features over all placeholders of a row, so one too many would shift them all. chosen: indices of responses."""
    counts = {}                                                           # sha256 -> placeholder tokens
    for s in chosen:
        prompt, output, shas = responses.prompts[s], responses.outputs[s], responses.pictures[s]
        for sha in shas:
            if sha not in counts:
                try:
                    counts[sha] = pictures.count(responses.picture(sha))
                except ValueError as e:
                    raise BadInput(f"picture {sha} of response {s} (episode {responses.episodes[s]}): {e}; leave that response "
                                   "out") from None
        expected, found = sum(counts[sha] for sha in shas), int((prompt == pictures.token).sum())
        if expected != found or (output == pictures.token).any():
            raise BadInput(f"response {s} (episode {responses.episodes[s]}): its prompt holds {found} picture placeholders, its "
                           f"{len(shas)} pictures make {expected}, the response itself holds "
                           f"{int((output == pictures.token).sum())}; it was sampled under another picture processor, or by "
                           "hand: leave it out")


# ---------------------------------------------------------------------------------------------- log-probs

def head_logits(hidden, weight):
    """(C, H), (V, H) -> (C, V) float32. Where torch can (on GPUs alone), products of bfloat16 are not rounded to it again: at
    logits of 16 and more that rounding is up to 0.06, which may exceed what an update at lr 1e-6 moves."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)                        # (C, V)
    return (hidden @ weight.T).float()                                                    # (C, V)


class ChunkedLogProb(torch.autograd.Function):
    """log softmax(h W')[y] of N positions, without (N, V) numbers in memory: forward keeps (N,) normalisers, backward
    computes each chunk's logits again.

    With z = W h, p = softmax(z) and g = dL/d log p_y:  dL/dz = g (1[y] - p),  dL/dh = W' dL/dz,  dL/dW = Σ dL/dz h'.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, entropy):
        """hidden (N, H), weight (V, H), targets (N,) -> log-probs (N,), entropies (N,) in nats (zeros unless asked
        for), both float32; no gradient through the entropies."""
        N, step = len(targets), max(1, LOGITS // len(weight))
        norm, logp, h = (torch.zeros(N, dtype=torch.float32, device=hidden.device) for _ in range(3))     # (N,) each
        for i in range(0, N, step):
            z = head_logits(hidden[i:i + step], weight)                                   # (C, V)
            norm[i:i + step] = z.logsumexp(-1)                                            # (C,)
            logp[i:i + step] = z.gather(-1, targets[i:i + step, None])[:, 0] - norm[i:i + step]           # (C,)
            if entropy:                                                                   # H = log Σe^z - Σ p z
                h[i:i + step] = norm[i:i + step] - (z.softmax(-1) * z).sum(-1)            # (C,)
        ctx.save_for_backward(hidden, weight, targets, norm)
        ctx.mark_non_differentiable(h)
        return logp, h

    @staticmethod
    def backward(ctx, g, _):
        hidden, weight, targets, norm = ctx.saved_tensors
        N, step = len(targets), max(1, LOGITS // len(weight))
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None                   # (N, H)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None              # (V, H)
        for i in range(0, N, step):
            h = hidden[i:i + step]                                                        # (C, H)
            z = head_logits(h, weight)                                                    # (C, V)
            dz = z.sub_(norm[i:i + step, None]).exp_().mul_(-g[i:i + step, None])         # (C, V) -g p
            dz.scatter_add_(1, targets[i:i + step, None], g[i:i + step, None])            # + g 1[y]
            dz = dz.to(weight.dtype)                                                      # (C, V)
            if need_hidden:
                grad_hidden[i:i + step] = dz @ weight                                     # (C, H)
            if need_weight and weight.dtype == torch.float32:
                grad_weight.addmm_(dz.T, h)                                               # (V, H)
            elif need_weight:                 # each chunk's product is rounded to bfloat16 once, their sum is float32
                grad_weight += dz.T @ h                                                   # (V, H)
        return grad_hidden, grad_weight.to(weight.dtype) if need_weight else None, None, None


def target_logp(model, tokens, where, targets, pictures, entropy=False):
    """log π of target tokens at temperature 1, float32 (N,); if asked for, also entropies (N,) in nats, no gradient.

    tokens (B, T); where (N,) positions in (B*T) that predict the targets (N,); pictures: {} or the vision inputs of
    batches.pack. Only target positions meet the vocabulary: hidden states (B, T, H) -> (N, H) -> chunks (C, V). No
    attention mask: padding stands on the right, where neither causal attention nor a recurrent layer ever looks.
    """
    hidden = model.base_model(input_ids=tokens, use_cache=False, **pictures).last_hidden_state            # (B, T, H)
    logp, h = ChunkedLogProb.apply(hidden.flatten(0, 1)[where], model.get_output_embeddings().weight, targets, entropy)
    return (logp, h) if entropy else logp                                                 # (N,), (N,)


# ---------------------------------------------------------------------------------------------- loading

def load_model(folder, ranks, args):
    """Checkpoint folder -> model with float32 parameters and `target_logp`, sharded if there is a process group.

    args: attention, recompute, train_vision (trainer.add_arguments). Sharded: rank 0 alone reads the weights (into CPU
    memory, 4 bytes a parameter); the others are built without storage and receive their shards.
    """
    from transformers.utils import logging
    logging.disable_progress_bar()
    if ranks.device.type == "cuda":                   # not before: this is the first memory taken on a GPU
        torch.cuda.set_device(ranks.device)
    config, auto = read_config(folder)
    options = {"dtype": torch.float32, "attn_implementation": args.attention}
    recompute = args.recompute == "on" or args.recompute == "auto" and ranks.device.type == "cuda"
    if not ranks.sharded:
        return prepare(ranks.on_main(lambda: read_weights(folder, auto, options)), recompute, args.train_vision)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    whole = ranks.on_main(lambda: read_weights(folder, auto, options), share=False)          # None but on rank 0
    with torch.device("meta"):
        model = prepare(auto.from_config(config, **options), recompute, args.train_vision)
    mesh = dist.device_mesh.init_device_mesh(ranks.device.type, (dist.get_world_size(),))
    policy = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=COMPUTE.get(ranks.device.type),
                                                             reduce_dtype=torch.float32)}
    for layer in decoder_layers(model):
        fully_shard(layer, **policy)
    # Root group: embedding, last norm and head together, as tied weights demand; and the vision tower, so that a rank
    # without pictures in a micro-batch takes part in the same collectives as the others.
    fully_shard(model, **policy)
    if args.train_vision:                             # … and in the gradient of a tower that it did not use
        model.set_reduce_scatter_unused_params(True)
    model.to_empty(device=ranks.device)
    model.tie_weights()                               # to_empty gave tied weights a storage each
    set_model_state_dict(model, whole.state_dict() if ranks.main else {},
                         options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    source = dict(whole.named_buffers()) if ranks.main else {}
    for name, buffer in model.named_buffers():        # rotary frequencies and such are in no state dict
        if ranks.main:
            buffer.copy_(source[name])
        dist.broadcast(buffer, src=0)
    if ranks.main:                                    # how to write names as the checkpoint had them (transformers)
        model._weight_conversions = getattr(whole, "_weight_conversions", None)
    register_fsdp_forward_method(model, "target_logp")
    return model


def cpu_kernels_only():
    """For a process that runs models on the CPU of a machine with GPUs: transformers would take the fused kernels of recurrent
    layers, which refuse CPU tensors. To be called before the model is built."""
    sys.modules.update(dict.fromkeys(("fla", "causal_conv1d")))            # None: an import of it fails


def read_weights(folder, auto, options):
    """The whole model on the CPU; BadInput if its weights or its output head are not as expected."""
    from safetensors import SafetensorError
    from transformers.utils import logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()                     # what its table of missing and unused weights says is said below, or no fault
    try:
        model, info = auto.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except (OSError, SafetensorError) as e:
        raise BadInput(f"{folder}: its weights (model.safetensors) cannot be read ({str(e).splitlines()[0]}); the folder is damaged or "
                       "not whole: copy or download it again") from None
    except (ImportError, ValueError) as e:            # an attention that transformers does not know, or that is not installed
        raise BadInput(f"{folder}: cannot be loaded with --attention {options['attn_implementation']} "
                       f"({str(e).strip().splitlines()[0][:200]})") from None
    finally:
        logging.set_verbosity(verbosity)              # later ones count: that a fast kernel is not installed
    names = sorted([*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])])
    if names:                   # heads for speculative decoding (mtp.*) are not among them: transformers leaves them out by name
        raise BadInput(f"{folder}: {len(names)} weights are missing, unknown or of another shape than config.json says, {names[0]} "
                       "first; the folder is damaged or belongs to another model")
    model.eval()
    if not plain_head(model):
        raise BadInput(f"{folder}: {type(model).__name__} changes its logits behind the output head, which "
                       "model.target_logp does not; choose another model, or add that step there")
    return model


@torch.no_grad()
def plain_head(model):
    """Whether logits are hidden states times the head's weight and nothing else: some models scale or cap them, or add a bias,
    and target_logp would be wrong for them. Asked without the blocks: their fused kernels (fla, causal_conv1d) refuse a CPU, where
    the weights still are."""
    layers, probe = decoder_layers(model), torch.arange(4)[None] % model.config.get_text_config().vocab_size      # (1, 4)
    blocks, layers._modules = layers._modules, {}
    try:
        hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state     # (1, 4, H)
        ours = hidden @ model.get_output_embeddings().weight.T                            # (1, 4, V)
        return torch.allclose(ours, model(input_ids=probe, use_cache=False).logits, atol=1e-4)
    finally:
        layers._modules = blocks


def prepare(model, recompute, train_vision):
    """Sets what training needs of a freshly built model; returns it."""
    model.eval()                # no dropout, or π/b would not be 1 before the first update; gradients flow as usual
    if hasattr(model.config, "vision_config"):
        for tower in vision_towers(model):
            tower.requires_grad_(train_vision)
    if recompute:               # transformers' own switch acts in train mode only. No random number is drawn: no RNG state
        from transformers.modeling_layers import GradientCheckpointingLayer
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    model.target_logp = MethodType(target_logp, model)
    return model


def vision_towers(model):
    """The modules that read pixels: `visual` (Qwen-VL) or `vision_tower` (LLaVA, Gemma, …)."""
    found = [m for n, m in model.named_modules() if n.rpartition(".")[2] in ("visual", "vision_tower", "vision_model")]
    assert found, f"{type(model).__name__} has a vision_config but no module named visual, vision_tower or vision_model"
    return found


def decoder_layers(model):
    """The ModuleList of the language model's blocks, whatever the model calls it."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    assert lists, f"{type(model).__name__} has no ModuleList of layers to shard"
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


# ---------------------------------------------------------------------------------------------- work done

# Dense bfloat16 peak of one GPU (FLOP/s), as NVIDIA's data sheets give it; the first name found in the device's name counts.
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
         "A100": 312e12, "L40S": 362e12}


def peak_flops(device):
    """FLOP/s of `device` in bfloat16, or None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def flop_counter(model):
    """-> function (lengths, targets) -> FLOPs of forward and backward of rows of `lengths` real tokens (list) with
    `targets` target tokens, as MFU counts them: 6 per matrix weight of the blocks and token, 6 per head weight and target,
    and the lower triangle of softmax attention, 6 T² heads head_dim a layer. Not counted: recomputation, padding, the vision
    tower, the scan of recurrent layers.
    """
    config = model.config.get_text_config()
    blocks = sum(p.numel() for p in decoder_layers(model).parameters() if p.ndim == 2)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6 * config.num_attention_heads * head_dim * sum(kind != "linear_attention" for kind in kinds)
    head = config.vocab_size * config.hidden_size
    return lambda lengths, targets: 6 * blocks * sum(lengths) + 6 * head * targets + attention * sum(n * n for n in lengths)
