"""The model server of a stage: in-process engine, vLLM started here, or one already running."""

import records
from records import at_least


def add_engine_arguments(p):
    g = p.add_argument_group("model server")
    g.add_argument("--model", required=True, help="checkpoint folder of the policy (its content gives the policy version)")
    g.add_argument("--engine-url", default=None,
                   help="a running OpenAI-compatible server (vLLM) that serves --model; default: the in-process engine")
    g.add_argument("--slots", type=at_least(1), default=64, help="in-process engine: episodes whose prefix is kept (count)")
    g.add_argument("--batch", type=at_least(1), default=32, help="in-process engine: requests generated together (count)")
    g.add_argument("--max-length", type=at_least(2), default=2048, help="in-process engine: prompt plus response (tokens)")


def make_upstream(args):
    version = records.policy_version(args.model)
    if args.engine_url:
        from upstream import HttpUpstream
        return HttpUpstream(args.engine_url, version)
    from engine import Engine
    return Engine(args.model, args.slots, args.batch, args.max_length)
