"""Finished sequences as data, for `tlt bench record` and a drafter's training.

`Responses` and `Verifications` are the one definition of a response and of the drafts that each of
its cycles verified. `SampleSet` has many of them as arrays, `Sample` one as it leaves the engine.
No torch.
"""
