"""A small trained pair inside the shapes of a large one: real acceptance at real cost, without
large weights.

`recipe.pad(target, drafter, SHAPES["qwen2.5-7b"], torch.bfloat16)` returns the recipe of a target
and an EAGLE-3 drafter whose tensors have the large model's names, shapes and dtypes, and whose
outputs are the small pair's. Build it in memory, on any device, or `pad.write` it as ordinary
checkpoints that other engines load too. `recipe` explains why the outputs are the same. The command
is `tlt bench pad`.
"""
