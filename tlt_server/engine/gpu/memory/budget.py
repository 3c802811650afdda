"""The budget of a GPU's memory, as arithmetic: for the device before it allocates KV, and for `tlt
doctor`.

Figures are bytes unless named otherwise. Memory of other programs already counts as not free.
`refusals.py` has the messages for too little memory. No tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from tlt_server.engine.devices.sizing import MIB, Drafting
from tlt_server.engine.gpu.steps.buckets import MAX_DRAFTED, MAX_VERIFIED, sampled_rows
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.draft_part import DrafterPart
from tlt_server.models.training_memory import CONTEXT, TrainingShape
from tlt_server.samples.hidden_states import state_bytes

GIB = 2**30
RESERVE = 2 * GIB  # for graphs, libraries and fragmentation
EXCHANGES = "for exchanges between GPUs"
TEXTS = 64 * MIB  # for texts of sequences that have ended, which others draft from


class Needs(NamedTuple):
    """The sizes of a model, known before any of it is on the device."""

    weights: int  # target and drafter
    per_page: int  # KV of a page, and a drafter's part of it
    per_row: int  # activations of one row of a step
    per_logits: int  # logits of one row
    per_batch_slot: int  # counts of tokens, for penalties
    per_drafted: int  # a drafter's logits of one row
    per_state: int  # captured states of one row; 0: none are captured
    training: TrainingShape | None = None  # None: no drafter is trained on this GPU
    exchange: int = 0  # what ranks exchange through

    @property
    def loaded(self) -> int:
        """Return the memory in use once the weights are loaded."""
        return self.weights + self.exchange

    @classmethod
    def of(
        cls,
        settings: DecidedSettings,
        config: ModelConfig,
        drafter: Drafting | None,
        weights: int,
        feature_width: int = 0,
        part: DrafterPart | None = None,
        exchange: int = 0,
    ) -> Needs:
        """`weights`: bytes of target and drafter. `settings`: all decided. `feature_width`:
        features per position that the drafter reads. `part`: this rank's part of a shared drafter.
        `exchange`: bytes of its window.
        """
        itemsize = 4 if settings.dtype == "float32" else 2
        captures = bool(settings.feature_bytes and feature_width)
        values, tokens = kv_slot_values(config, config.layers), 0
        per_page = settings.page_size * values * itemsize
        if settings.quantises_kv:  # with a scale per head
            per_page = settings.page_size * (values + values // config.head_dim * 4)
        if drafter is not None:
            tokens = part.most_tokens if part else drafter.draft_vocab_size
            per_page += itemsize * (
                settings.page_size
                * kv_slot_values(part.layer if part else drafter.config, drafter.kv_layers)
                + drafter.config.hidden_size
            )  # and a hint per page
        return cls(
            weights,
            per_page,
            8 * config.intermediate_size + 64 * config.hidden_size,
            4 * config.vocab_size,
            4 * config.vocab_size,
            4 * tokens,
            state_bytes(feature_width, config.hidden_size, itemsize) if captures else 0,
            TrainingShape.of(drafter.config, drafter.draft_vocab_size, on_gpu=True)
            if drafter is not None and captures and not settings.trains_apart
            else None,
            exchange,
        )


class Wider(NamedTuple):
    """A larger width that the model supports, or FP8, and the needs of each rank with it."""

    settings: DecidedSettings
    needs: Needs


def kv_slot_values(config: ModelConfig, layers: int) -> int:
    """Return the number of key and value elements of one position."""
    return 2 * layers * config.kv_heads * config.head_dim


class MemoryPlan(NamedTuple):
    """The split of a GPU's memory by the settings. `free` and `total`: of the device, after the
    weights are loaded and ranks can exchange.
    """

    settings: DecidedSettings
    needs: Needs
    max_model_len: int
    free: int
    total: int

    @property
    def least(self) -> int:
        """Return the pages of one sequence of full length."""
        return -(-self.max_model_len // self.settings.page_size)

    @property
    def staging(self) -> int:
        """Return the memory for a pushed version and the previous one."""
        on_gpu = self.settings.channels and self.settings.weight_staging in (None, "device")
        return 2 * self.needs.weights if on_gpu else 0

    @property
    def text_slots(self) -> int:
        """Return the number of ended sequences whose text the device keeps in extra slots."""
        if self.settings.drafter == "none":
            return 0
        return min(2 * self.settings.max_running, TEXTS // (4 * self.max_model_len))

    @property
    def working(self) -> int:
        """Return the memory of the largest step, and of sequences apart from KV."""
        return (
            self.settings.max_rows * self.needs.per_row
            + sampled_rows(self.settings.max_running) * self.needs.per_logits
            + max(MAX_DRAFTED, self.settings.max_running) * self.needs.per_drafted
            + (self.settings.max_running + 1) * self.needs.per_batch_slot
            + 4 * self.text_slots * self.max_model_len
            + self.state_slots * self.needs.per_state
        )

    @property
    def training(self) -> int:
        """Return the memory of the process that trains the drafter."""
        if self.needs.training is None:
            return 0
        asked = (self.settings.drafter_training_mb or 0) * MIB
        return (asked or self.needs.training.most_bytes) + CONTEXT

    @property
    def trains_nothing(self) -> bool:
        """Return True if `drafter_training_mb` is too small for even the shortest pack."""
        shape, asked = self.needs.training, self.settings.drafter_training_mb
        return bool(shape and asked and not shape.slots_in(asked * MIB))

    @property
    def state_slots(self) -> int:
        """Return the rows of the ring of captured states: two steps' worth."""
        if not self.needs.per_state:
            return 0
        return 2 * (self.settings.max_rows + max(MAX_VERIFIED, self.settings.max_running))

    @property
    def named(self) -> bool:
        """Return True if a setting fixes the size of the KV."""
        return bool(self.settings.pages or self.settings.kv_memory_mb)

    @property
    def unused(self) -> int:
        """Return the memory that `memory_fraction` keeps free."""
        return 0 if self.named else math.ceil(self.total * (1 - self.settings.memory_fraction))

    @property
    def room(self) -> int:
        """Return the memory that is left for KV."""
        return self.free - self.unused - self.staging - self.working - self.training - RESERVE

    @property
    def held(self) -> int:
        """Pages that fit in `kv_memory_mb`."""
        return (self.settings.kv_memory_mb or 0) * MIB // self.needs.per_page

    @property
    def too_few(self) -> bool:
        """Return True if `kv_memory_mb` is too small for a full sequence; `pages` may allow a
        shorter one.
        """
        return bool(
            self.settings.kv_memory_mb and not self.settings.pages and self.held < self.least
        )

    @property
    def wanted(self) -> int:
        """Pages that a start requires at least."""
        if self.settings.pages:
            return self.settings.pages
        return min(self.held, self.most) if self.settings.kv_memory_mb else self.least

    @property
    def most(self) -> int:
        """Pages that could be in use at once, at most."""
        return self.least * self.settings.max_running

    @property
    def short(self) -> int:
        """Return the missing bytes; 0 or negative if the plan fits."""
        return self.wanted * self.needs.per_page - self.room

    @property
    def fits(self) -> bool:
        return self.short <= 0 and not self.too_few and not self.trains_nothing

    @property
    def pages(self) -> int:
        if self.named:
            return self.wanted
        return min(max(0, self.room) // self.needs.per_page, self.most)

    @property
    def kv(self) -> int:
        """Return the memory of the KV pages."""
        return self.pages * self.needs.per_page

    def changed(self, name: str, value: Any) -> MemoryPlan:
        """Return the plan with another value of a setting or field."""
        if name in self._fields:
            return self._replace(**{name: value})
        return self._replace(settings=replace(self.settings, **{name: value}))

    @property
    def halved(self) -> MemoryPlan:
        """Return the plan with the model at half its precision."""
        half, per_page = self.needs.weights // 2, self.needs.per_page
        per_page = per_page if self.settings.quantises_kv else per_page // 2
        needs = self.needs._replace(weights=half, per_page=per_page)
        return self.changed("dtype", "bfloat16")._replace(needs=needs, free=self.free + half)

    def widened(self, wider: Wider) -> MemoryPlan:
        """Return the plan of a rank at a larger width, with the same free memory per GPU."""
        free = self.free + self.needs.loaded - wider.needs.loaded
        return self._replace(settings=wider.settings, needs=wider.needs, free=free)

    def describe(self) -> str:
        staging = f"{size(self.staging)} for pushed weights, " if self.staging else ""
        training = f"{size(self.training)} to train the drafter, " if self.training else ""
        exchange = f"{size(self.needs.exchange)} {EXCHANGES}, " if self.needs.exchange else ""
        return (
            f"{size(self.needs.weights)} of weights, {exchange}{staging}{training}"
            f"{size(self.working)} for steps, "
            f"{size(RESERVE)} for graphs, {size(self.kv)} of KV: {self.pages} pages"
        )


def size(amount: float) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= 10 * GIB else f"{math.ceil(amount / MIB)} MiB"
