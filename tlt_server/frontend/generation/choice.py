"""A choice during its generation: takes outputs of the engine, returns deltas and finally one
finished choice.

When a stop string completes, the text ends before it and the token ids end with the token that
completed it. An abort tells the engine, which may send more tokens first; these are dropped. A stop
token (or EOS) is in the token ids and not in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tlt_client.wire import FinishReason, SdReport, VersionSpan
from tlt_server.frontend.generation.text import Incremental, StopStrings, Text
from tlt_server.wire.records import GenerateRequest, StepOutput, TokenLogprobs


class FinishedChoice(Struct, frozen=True, kw_only=True):
    index: int
    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    raw_logprobs: list[float] | UnsetType = UNSET
    top_logprobs: list[TokenLogprobs] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprobs | None] | UnsetType = UNSET
    finish_reason: FinishReason
    stop_reason: int | str | None
    weight_versions: list[VersionSpan]
    seed: int
    sd: SdReport


class Delta(Struct, frozen=True, kw_only=True):
    """The tokens and text that outputs added. Text may follow later than its tokens; the choice's
    text is the sum of its deltas.
    """

    index: int
    token_ids: list[int]
    text: str | None
    logprobs: list[float]
    top_logprobs: list[TokenLogprobs] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprobs | None] | UnsetType = UNSET  # with the first tokens


class GrowingChoice:
    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        text: Text,
        *,
        incremental: bool,
        stop: Callable[[str], object],
    ) -> None:
        """`stop(id)`: asks the engine to end the sequence. Without `incremental`, text is made
        once, at the end.
        """
        self.request, self.index = request, index
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self._text, self._stop = text, stop
        self._incremental = (
            Incremental(text)
            if (incremental or request.sampling.stop) and text.tokenizer is not None
            else None
        )
        self._keeps_stop = request.sampling.include_stop_str_in_output
        self._stops = StopStrings(request.sampling.stop, keeps=self._keeps_stop)
        self._shown: list[str] = []
        self._logprobs: list[float] = []
        self._raw: list[float] = []
        self._top: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.weight_versions: list[VersionSpan] = []
        self._steps = self._drafted = self._draft_emitted = 0
        self._accepted: list[int] = []  # per draft step
        self._last: StepOutput | None = None

    def push(self, outputs: Iterable[StepOutput]) -> Delta:
        """Add outputs. After the one with a `finish_reason`, `choice()` is complete."""
        before = len(self.token_ids)
        shown: list[str] = []
        for output in outputs:
            if output.prompt_logprobs is not None:
                self._prompt_logprobs = output.prompt_logprobs
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            start = len(self.token_ids)
            if self._stops.matched is None:  # tokens after a stop string do not count
                self._count(output)
                shown += self._take(output)
            self._span(output.weight_version, start, len(self.token_ids))
            if output.finish_reason is not None:
                shown += self._end(output)
        self._shown += shown
        return Delta(
            index=self.index,
            token_ids=self.token_ids[before:],
            logprobs=self._logprobs[before:],
            text="".join(shown) if self._incremental is not None else None,
            top_logprobs=self._top[before:] if self.request.sampling.logprobs else UNSET,
            prompt_logprobs=self._prompt_logprobs
            if self._prompt_logprobs is not None and not before
            else UNSET,
        )

    def _end(self, last: StepOutput) -> list[str]:
        """Return the held-back text."""
        self._last = last
        if self._incremental is None or self._stops.matched is not None:
            return []
        text = self._stops.push(self._incremental.flush(), armed=self._armed())
        named = self._named_stop() if self._keeps_stop else None
        return [text, self._stops.flush(), named or ""]

    def _named_stop(self) -> str | None:
        """Return the stop string that equals the special token which ended the sequence, if any."""
        stops, token = self.request.sampling.stop, self._last and self._last.stop_reason
        if not stops or not isinstance(token, int):
            return None
        name = self._text.decode([token], special=True)
        return name if name in stops else None

    def _take(self, output: StepOutput) -> list[str]:
        if self._incremental is None:
            self.token_ids += output.token_ids
            self._logprobs += output.logprobs
            self._raw += output.raw_logprobs or ()
            self._top += output.top_logprobs or ()
            return []
        shown: list[str] = []
        for i, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            self._logprobs.append(output.logprobs[i])
            if output.raw_logprobs is not None:
                self._raw.append(output.raw_logprobs[i])
            if output.top_logprobs is not None:
                self._top.append(output.top_logprobs[i])
            is_last = i + 1 == len(output.token_ids)
            if is_last and self._hides_last(output):
                continue
            shown.append(self._stops.push(self._incremental.push(token_id), armed=self._armed()))
            if self._stops.matched is not None:
                if output.finish_reason is None:
                    self._stop(self.request.id)
                break
        return shown

    def _hides_last(self, output: StepOutput) -> bool:
        """Return whether the output's last token is a stop token that the text leaves out."""
        by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        return by_token and not self._keeps_stop

    def _count(self, output: StepOutput) -> None:
        self._steps += output.steps if output.token_ids else 0
        self._drafted += output.drafted
        if output.accepted_each:
            self._accepted += output.accepted_each
            self._draft_emitted += output.draft_tokens
        elif output.drafted:
            self._accepted.append(output.accepted)
            self._draft_emitted += len(output.token_ids)

    def _span(self, version: str, start: int, end: int) -> None:
        if start == end:
            return
        if self.weight_versions and self.weight_versions[-1].version == version:
            start = self.weight_versions.pop().start
        self.weight_versions.append(VersionSpan(version, start, end))

    @property
    def finish_reason(self) -> str | None:
        """The finish reason; None while the choice grows."""
        if self._last is None:
            return None
        return "stop" if self._stops.matched is not None else self._last.finish_reason

    def resumed(self) -> GenerateRequest:
        """Return the request by which a new engine continues this sequence. If its stop string is
        complete, one more token ends it.
        """
        request, sampling = self.request, self.request.sampling
        if self._stops.matched is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=len(self.token_ids) + 1)
        begin_by_s = None if self.token_ids else request.begin_by_s
        return msgspec.structs.replace(
            request, generated=list(self.token_ids), sampling=sampling, begin_by_s=begin_by_s
        )

    def shed(self, count: int) -> bool:
        """Free the alternatives of `count` tokens. Return True if there are more."""
        lists = (self._top, self._prompt_logprobs or [])
        for best in lists:
            del best[-count:]
        return any(lists)

    def _armed(self) -> bool:
        return len(self.token_ids) >= self.request.sampling.min_tokens

    def choice(self) -> FinishedChoice:
        last, sampling, finish_reason = self._last, self.request.sampling, self.finish_reason
        assert last is not None and finish_reason is not None
        matched = self._stops.matched
        if self._incremental is not None:
            text: str | None = "".join(self._shown)
        elif self._text.tokenizer is not None:
            hides = self._hides_last(last)
            text = self._text.decode(self.token_ids[:-1] if hides else self.token_ids)
        else:
            text = None
        return FinishedChoice(
            index=self.index,
            token_ids=self.token_ids,
            text=text,
            logprobs=self._logprobs,
            raw_logprobs=self._raw if sampling.raw_logprobs else UNSET,
            top_logprobs=self._top if sampling.logprobs else UNSET,
            prompt_logprobs=self._prompt_logprobs or []
            if sampling.prompt_logprobs is not None
            else UNSET,
            finish_reason=cast(FinishReason, finish_reason),
            stop_reason=matched or self._named_stop() or last.stop_reason,
            weight_versions=self.weight_versions,
            seed=self.request.seed,
            sd=self._sd(),
        )

    def _sd(self) -> SdReport:
        histogram = [0] * (max(self._accepted, default=-1) + 1)
        for accepted in self._accepted:
            histogram[accepted] += 1
        mean = self._draft_emitted / len(self._accepted) if self._accepted else None
        return SdReport(
            self._steps, len(self._accepted), self._drafted, sum(self._accepted), mean, histogram
        )
