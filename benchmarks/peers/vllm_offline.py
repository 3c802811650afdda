"""`python -m benchmarks.peers.vllm_offline`: time rollouts in vLLM's offline API, and print one
line of JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from benchmarks.peers.prompts import Rollouts
from benchmarks.peers.runs import Generate, flags, run


def main(arguments: Sequence[str]) -> int:
    options = flags(__doc__ or "", "vllm_offline").parse_args(arguments)

    def start(vllm: ModuleType, rollouts: Rollouts) -> Generate:
        speculation = {
            "method": "eagle3",
            "model": str(options.drafter),
            "num_speculative_tokens": options.drafts,
        }
        engine = vllm.LLM(
            model=str(options.target),
            dtype="bfloat16",
            max_num_seqs=options.max_running,
            max_model_len=rollouts.longest + rollouts.max_tokens + 16,
            speculative_config=speculation if options.drafts else None,
        )
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=rollouts.max_tokens, detokenize=False
        )

        def generate(prompts: list[list[int]]) -> int:
            engine.reset_prefix_cache()
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = engine.generate(inputs, sampling, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return generate

    return run(options, "vllm", start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
