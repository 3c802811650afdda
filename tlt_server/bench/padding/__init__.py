"""A small trained pair inside the shapes of a large one: real acceptance at real cost, where no
large weights are at hand.

`recipe.pad(target, drafter, SHAPES["qwen2.5-7b"], torch.bfloat16)` gives the recipe of a target and
an EAGLE-3 drafter whose tensors have the large model's names, shapes and dtypes, and whose outputs
are the small pair's; build it in memory, on any device, or `pad.write` it as ordinary
checkpoints that other engines load too. `recipe` says why the outputs are the same. The command is
`tlt bench pad`.
"""
