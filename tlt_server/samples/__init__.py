"""Finished sequences as data: what `tlt bench record` and a drafter's training keep of a rollout.

`Responses` and `Verifications` are the one definition of a response and of what each cycle verified
of it. `SampleSet` holds many of them as arrays, `Sample` one as it leaves the engine. No torch.
"""
