"""`python -m benchmarks.peers.sglang_offline`: time rollouts in SGLang's offline API, and print one
line of JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from benchmarks.peers.prompts import Rollouts
from benchmarks.peers.runs import Generate, flags, run


def main(arguments: Sequence[str]) -> int:
    options = flags(__doc__ or "", "sglang_offline").parse_args(arguments)

    def start(sglang: ModuleType, rollouts: Rollouts) -> Generate:
        speculation = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(options.drafter),
            "speculative_num_steps": options.drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": options.drafts + 1,
        }
        engine = sglang.Engine(
            model_path=str(options.target),
            dtype="bfloat16",
            max_running_requests=options.max_running,
            cuda_graph_max_bs=options.max_running,
            skip_tokenizer_init=True,
            **(speculation if options.drafts else {}),
        )
        sampling = {"temperature": 1.0, "max_new_tokens": rollouts.max_tokens}

        def generate(prompts: list[list[int]]) -> int:
            engine.flush_cache()
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
            return sum(output["meta_info"]["completion_tokens"] for output in outputs)

        return generate

    return run(options, "sglang", start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
