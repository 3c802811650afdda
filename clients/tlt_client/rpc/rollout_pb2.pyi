from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("requests", "sampling", "timeout_s", "queue_timeout_s", "priority")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Item]
    sampling: SamplingFields
    timeout_s: float
    queue_timeout_s: float
    priority: int
    def __init__(self, requests: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingFields, _Mapping]] = ..., timeout_s: _Optional[float] = ..., queue_timeout_s: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("id", "prompt", "token_ids", "messages", "group_id", "salt", "n", "seed", "sd", "sd_object", "sampling", "train", "lora", "weight_version")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SD_FIELD_NUMBER: _ClassVar[int]
    SD_OBJECT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    group_id: str
    salt: str
    n: int
    seed: int
    sd: bool
    sd_object: SdFields
    sampling: SamplingFields
    train: bool
    lora: str
    weight_version: str
    def __init__(self, id: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., group_id: _Optional[str] = ..., salt: _Optional[str] = ..., n: _Optional[int] = ..., seed: _Optional[int] = ..., sd: _Optional[bool] = ..., sd_object: _Optional[_Union[SdFields, _Mapping]] = ..., sampling: _Optional[_Union[SamplingFields, _Mapping]] = ..., train: _Optional[bool] = ..., lora: _Optional[str] = ..., weight_version: _Optional[str] = ...) -> None: ...

class SdFields(_message.Message):
    __slots__ = ("drafter", "max_depth", "max_rows")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    max_depth: int
    max_rows: int
    def __init__(self, drafter: _Optional[str] = ..., max_depth: _Optional[int] = ..., max_rows: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "grammar", "structural_tag")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: _containers.RepeatedScalarFieldContainer[str]
    grammar: str
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Iterable[str]] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ...) -> None: ...

class SamplingFields(_message.Message):
    __slots__ = ("temperature", "top_p", "min_p", "top_k", "max_tokens", "max_tokens_null", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "raw_logprobs", "prompt_logprobs", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "structured_outputs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_NULL_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    max_tokens: int
    max_tokens_null: _struct_pb2.NullValue
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    raw_logprobs: bool
    prompt_logprobs: int
    include_stop_str_in_output: bool
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    structured_outputs: StructuredOutputs
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_tokens_null: _Optional[_Union[_struct_pb2.NullValue, str]] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., raw_logprobs: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("results", "usage", "numerics")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    usage: Usage
    numerics: str
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., numerics: _Optional[str] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("token", "result", "error", "done")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    token: Token
    result: ItemResult
    error: ItemResult
    done: Done
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., result: _Optional[_Union[ItemResult, _Mapping]] = ..., error: _Optional[_Union[ItemResult, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("id", "choices", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    error: Error
    def __init__(self, id: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "finish_reason", "stop_token_id", "stop_string", "weight_versions", "seed", "sd", "raw_logprobs", "top_logprobs", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SD_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: str
    stop_token_id: int
    stop_string: str
    weight_versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    seed: int
    sd: SdReport
    raw_logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[Alternatives]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Alternatives]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., weight_versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., seed: _Optional[int] = ..., sd: _Optional[_Union[SdReport, _Mapping]] = ..., raw_logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[Alternatives, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Alternatives, _Mapping]]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: str
    start: int
    end: int
    def __init__(self, version: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class SdReport(_message.Message):
    __slots__ = ("steps", "draft_steps", "drafted", "accepted", "mean_accept_length", "histogram")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    steps: int
    draft_steps: int
    drafted: int
    accepted: int
    mean_accept_length: float
    histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[int] = ..., draft_steps: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., mean_accept_length: _Optional[float] = ..., histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class Alternatives(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "index", "token_ids", "text", "logprobs", "top_logprobs", "prompt_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[Alternatives]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Alternatives]
    def __init__(self, id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[Alternatives, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Alternatives, _Mapping]]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("usage", "numerics")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    numerics: str
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., numerics: _Optional[str] = ...) -> None: ...

class ListRolloutsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRolloutRequest(_message.Message):
    __slots__ = ("id", "wait_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    wait_s: float
    def __init__(self, id: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class DeleteRolloutRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("id", "status")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    id: str
    status: str
    def __init__(self, id: _Optional[str] = ..., status: _Optional[str] = ...) -> None: ...

class RolloutList(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[RolloutSummary]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[RolloutSummary, _Mapping]]] = ...) -> None: ...

class RolloutSummary(_message.Message):
    __slots__ = ("id", "status", "detached", "created_s", "done_s", "bytes", "progress", "owner")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    DONE_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    id: str
    status: str
    detached: bool
    created_s: float
    done_s: float
    bytes: int
    progress: Progress
    owner: str
    def __init__(self, id: _Optional[str] = ..., status: _Optional[str] = ..., detached: _Optional[bool] = ..., created_s: _Optional[float] = ..., done_s: _Optional[float] = ..., bytes: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., owner: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("items", "items_ended", "tokens")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_ENDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    items: int
    items_ended: int
    tokens: int
    def __init__(self, items: _Optional[int] = ..., items_ended: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class RolloutReply(_message.Message):
    __slots__ = ("id", "status", "progress", "results", "usage", "numerics")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    id: str
    status: str
    progress: Progress
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    usage: Usage
    numerics: str
    def __init__(self, id: _Optional[str] = ..., status: _Optional[str] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., numerics: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("clear_cache", "in_flight", "new_requests")
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    clear_cache: bool
    in_flight: str
    new_requests: str
    def __init__(self, clear_cache: _Optional[bool] = ..., in_flight: _Optional[str] = ..., new_requests: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("memory", "in_flight")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    memory: _containers.RepeatedScalarFieldContainer[str]
    in_flight: str
    def __init__(self, memory: _Optional[_Iterable[str]] = ..., in_flight: _Optional[str] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("memory",)
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    memory: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, memory: _Optional[_Iterable[str]] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("unless_held",)
    UNLESS_HELD_FIELD_NUMBER: _ClassVar[int]
    unless_held: bool
    def __init__(self, unless_held: _Optional[bool] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("ids", "all")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("paused", "new_requests", "asleep")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    new_requests: str
    asleep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, paused: _Optional[bool] = ..., new_requests: _Optional[str] = ..., asleep: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: int
    def __init__(self, sequences: _Optional[int] = ...) -> None: ...

class GetStrategyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetStrategyRequest(_message.Message):
    __slots__ = ("policy", "strategy", "arms", "pins")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    strategy: str
    arms: _containers.RepeatedScalarFieldContainer[str]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    def __init__(self, policy: _Optional[str] = ..., strategy: _Optional[str] = ..., arms: _Optional[_Iterable[str]] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("batch", "strategy")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    batch: _containers.RepeatedScalarFieldContainer[int]
    strategy: str
    def __init__(self, batch: _Optional[_Iterable[int]] = ..., strategy: _Optional[str] = ...) -> None: ...

class StrategyState(_message.Message):
    __slots__ = ("policy", "strategy", "in_force", "expected_tokens_per_s", "arms", "pins", "policies", "drafters", "cost_error", "outlook_ratio", "calibration_error", "switches", "prepared", "preparing")
    class OutlookRatioEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CalibrationErrorEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    COST_ERROR_FIELD_NUMBER: _ClassVar[int]
    OUTLOOK_RATIO_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_ERROR_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    PREPARING_FIELD_NUMBER: _ClassVar[int]
    policy: str
    strategy: str
    in_force: str
    expected_tokens_per_s: float
    arms: _containers.RepeatedScalarFieldContainer[str]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    policies: _containers.RepeatedScalarFieldContainer[str]
    drafters: _containers.RepeatedScalarFieldContainer[str]
    cost_error: float
    outlook_ratio: _containers.ScalarMap[str, float]
    calibration_error: _containers.ScalarMap[str, float]
    switches: _containers.RepeatedCompositeFieldContainer[Switch]
    prepared: str
    preparing: str
    def __init__(self, policy: _Optional[str] = ..., strategy: _Optional[str] = ..., in_force: _Optional[str] = ..., expected_tokens_per_s: _Optional[float] = ..., arms: _Optional[_Iterable[str]] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ..., policies: _Optional[_Iterable[str]] = ..., drafters: _Optional[_Iterable[str]] = ..., cost_error: _Optional[float] = ..., outlook_ratio: _Optional[_Mapping[str, float]] = ..., calibration_error: _Optional[_Mapping[str, float]] = ..., switches: _Optional[_Iterable[_Union[Switch, _Mapping]]] = ..., prepared: _Optional[str] = ..., preparing: _Optional[str] = ...) -> None: ...

class Switch(_message.Message):
    __slots__ = ("time_s", "strategy", "before", "reason", "batch")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    strategy: str
    before: str
    reason: str
    batch: int
    def __init__(self, time_s: _Optional[float] = ..., strategy: _Optional[str] = ..., before: _Optional[str] = ..., reason: _Optional[str] = ..., batch: _Optional[int] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("part", "manifest")
    PART_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    part: Part
    manifest: Manifest
    def __init__(self, part: _Optional[_Union[Part, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("version", "part", "start", "total", "data")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    version: str
    part: str
    start: int
    total: int
    data: bytes
    def __init__(self, version: _Optional[str] = ..., part: _Optional[str] = ..., start: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetPartRequest(_message.Message):
    __slots__ = ("version", "part")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    version: str
    part: str
    def __init__(self, version: _Optional[str] = ..., part: _Optional[str] = ...) -> None: ...

class PartStatus(_message.Message):
    __slots__ = ("part", "bytes", "total", "begins")
    PART_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    part: str
    bytes: int
    total: int
    begins: bool
    def __init__(self, part: _Optional[str] = ..., bytes: _Optional[int] = ..., total: _Optional[int] = ..., begins: _Optional[bool] = ...) -> None: ...

class JoinGroupRequest(_message.Message):
    __slots__ = ("name", "master_address", "master_port", "rank_offset", "world_size", "backend", "prefixed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PREFIXED_FIELD_NUMBER: _ClassVar[int]
    name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str
    prefixed: bool
    def __init__(self, name: _Optional[str] = ..., master_address: _Optional[str] = ..., master_port: _Optional[int] = ..., rank_offset: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., prefixed: _Optional[bool] = ...) -> None: ...

class LeaveGroupRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GroupsReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "path", "role", "channel", "drafter_path", "tensors", "group", "packed", "bucket_bytes", "in_flight", "commit", "partial", "adapter", "adapter_config")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_PATH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    version: str
    path: str
    role: str
    channel: str
    drafter_path: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorFields]
    group: str
    packed: bool
    bucket_bytes: int
    in_flight: str
    commit: bool
    partial: bool
    adapter: str
    adapter_config: AdapterFields
    def __init__(self, version: _Optional[str] = ..., path: _Optional[str] = ..., role: _Optional[str] = ..., channel: _Optional[str] = ..., drafter_path: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorFields, _Mapping]]] = ..., group: _Optional[str] = ..., packed: _Optional[bool] = ..., bucket_bytes: _Optional[int] = ..., in_flight: _Optional[str] = ..., commit: _Optional[bool] = ..., partial: _Optional[bool] = ..., adapter: _Optional[str] = ..., adapter_config: _Optional[_Union[AdapterFields, _Mapping]] = ...) -> None: ...

class AdapterFields(_message.Message):
    __slots__ = ("r", "lora_alpha", "use_rslora", "target_modules")
    R_FIELD_NUMBER: _ClassVar[int]
    LORA_ALPHA_FIELD_NUMBER: _ClassVar[int]
    USE_RSLORA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, r: _Optional[int] = ..., lora_alpha: _Optional[float] = ..., use_rslora: _Optional[bool] = ..., target_modules: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "in_flight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    in_flight: str
    def __init__(self, name: _Optional[str] = ..., in_flight: _Optional[str] = ...) -> None: ...

class TensorFields(_message.Message):
    __slots__ = ("name", "dtype", "shape", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    checksum: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., checksum: _Optional[str] = ...) -> None: ...

class CommitWeightsRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class AbortWeightsRequest(_message.Message):
    __slots__ = ("version", "upload_only")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ONLY_FIELD_NUMBER: _ClassVar[int]
    version: str
    upload_only: bool
    def __init__(self, version: _Optional[str] = ..., upload_only: _Optional[bool] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("to", "in_flight", "role")
    TO_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    to: str
    in_flight: str
    role: str
    def __init__(self, to: _Optional[str] = ..., in_flight: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class GetWeightsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("state", "version", "role", "weight_version", "checksums", "phases_s", "pause_ms", "lagging")
    class ChecksumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PhasesSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LaggingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PHASES_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    LAGGING_FIELD_NUMBER: _ClassVar[int]
    state: str
    version: str
    role: str
    weight_version: str
    checksums: _containers.ScalarMap[str, str]
    phases_s: _containers.ScalarMap[str, float]
    pause_ms: float
    lagging: _containers.ScalarMap[str, str]
    def __init__(self, state: _Optional[str] = ..., version: _Optional[str] = ..., role: _Optional[str] = ..., weight_version: _Optional[str] = ..., checksums: _Optional[_Mapping[str, str]] = ..., phases_s: _Optional[_Mapping[str, float]] = ..., pause_ms: _Optional[float] = ..., lagging: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WeightState(_message.Message):
    __slots__ = ("target", "drafter", "previous", "open", "spooled", "quarantined", "groups", "sockets", "uploads", "update", "adapters", "drafter_quantization", "quantization")
    class PreviousEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class OpenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class QuarantinedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SPOOLED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SOCKETS_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    target: str
    drafter: str
    previous: _containers.ScalarMap[str, str]
    open: _containers.ScalarMap[str, str]
    spooled: bool
    quarantined: _containers.ScalarMap[str, str]
    groups: _containers.RepeatedScalarFieldContainer[str]
    sockets: str
    uploads: _containers.RepeatedCompositeFieldContainer[UploadStatus]
    update: UpdateStatus
    adapters: _containers.ScalarMap[str, str]
    drafter_quantization: str
    quantization: str
    def __init__(self, target: _Optional[str] = ..., drafter: _Optional[str] = ..., previous: _Optional[_Mapping[str, str]] = ..., open: _Optional[_Mapping[str, str]] = ..., spooled: _Optional[bool] = ..., quarantined: _Optional[_Mapping[str, str]] = ..., groups: _Optional[_Iterable[str]] = ..., sockets: _Optional[str] = ..., uploads: _Optional[_Iterable[_Union[UploadStatus, _Mapping]]] = ..., update: _Optional[_Union[UpdateStatus, _Mapping]] = ..., adapters: _Optional[_Mapping[str, str]] = ..., drafter_quantization: _Optional[str] = ..., quantization: _Optional[str] = ...) -> None: ...

class UpdateStatus(_message.Message):
    __slots__ = ("selector", "pushes", "age_s", "ends_in_s")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDS_IN_S_FIELD_NUMBER: _ClassVar[int]
    selector: str
    pushes: int
    age_s: float
    ends_in_s: float
    def __init__(self, selector: _Optional[str] = ..., pushes: _Optional[int] = ..., age_s: _Optional[float] = ..., ends_in_s: _Optional[float] = ...) -> None: ...

class UploadStatus(_message.Message):
    __slots__ = ("version", "parts", "bytes", "total", "age_s", "idle_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    parts: int
    bytes: int
    total: int
    age_s: float
    idle_s: float
    def __init__(self, version: _Optional[str] = ..., parts: _Optional[int] = ..., bytes: _Optional[int] = ..., total: _Optional[int] = ..., age_s: _Optional[float] = ..., idle_s: _Optional[float] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReplicaRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResumeReplicaRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RestartReplicaRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ScaleFleetRequest(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    def __init__(self, replicas: _Optional[int] = ...) -> None: ...

class FleetStatus(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "state", "address", "url", "versions", "running", "waiting", "expected_wait_s", "moves", "fault", "asleep")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    address: str
    url: str
    versions: _containers.ScalarMap[str, str]
    running: int
    waiting: int
    expected_wait_s: float
    moves: int
    fault: str
    asleep: bool
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., url: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., expected_wait_s: _Optional[float] = ..., moves: _Optional[int] = ..., fault: _Optional[str] = ..., asleep: _Optional[bool] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "served_model_name", "ready", "paused", "asleep", "numerics", "engine", "open_sequences", "max_queue", "config", "vllm_config", "model_path", "tokenizer_path", "weight_version", "max_total_num_tokens", "max_running_requests", "context_length", "tp_size", "pp_size", "dp_size", "num_gpus", "disaggregation_mode", "enable_memory_saver", "host", "port", "nnodes", "node_rank", "base_gpu_id", "gpu_id_step", "ep_size", "dtype", "enable_metrics", "enable_lora", "max_loras_per_batch", "max_lora_rank")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    VLLM_CONFIG_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_GPUS_FIELD_NUMBER: _ClassVar[int]
    DISAGGREGATION_MODE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_MEMORY_SAVER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    BASE_GPU_ID_FIELD_NUMBER: _ClassVar[int]
    GPU_ID_STEP_FIELD_NUMBER: _ClassVar[int]
    EP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_METRICS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_LORA_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_PER_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    version: str
    served_model_name: str
    ready: bool
    paused: bool
    asleep: _containers.RepeatedScalarFieldContainer[str]
    numerics: str
    engine: EngineInfo
    open_sequences: int
    max_queue: int
    config: _struct_pb2.Struct
    vllm_config: VllmConfigInfo
    model_path: str
    tokenizer_path: str
    weight_version: str
    max_total_num_tokens: int
    max_running_requests: int
    context_length: int
    tp_size: int
    pp_size: int
    dp_size: int
    num_gpus: int
    disaggregation_mode: str
    enable_memory_saver: bool
    host: str
    port: int
    nnodes: int
    node_rank: int
    base_gpu_id: int
    gpu_id_step: int
    ep_size: int
    dtype: str
    enable_metrics: bool
    enable_lora: bool
    max_loras_per_batch: int
    max_lora_rank: int
    def __init__(self, version: _Optional[str] = ..., served_model_name: _Optional[str] = ..., ready: _Optional[bool] = ..., paused: _Optional[bool] = ..., asleep: _Optional[_Iterable[str]] = ..., numerics: _Optional[str] = ..., engine: _Optional[_Union[EngineInfo, _Mapping]] = ..., open_sequences: _Optional[int] = ..., max_queue: _Optional[int] = ..., config: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., vllm_config: _Optional[_Union[VllmConfigInfo, _Mapping]] = ..., model_path: _Optional[str] = ..., tokenizer_path: _Optional[str] = ..., weight_version: _Optional[str] = ..., max_total_num_tokens: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., context_length: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., dp_size: _Optional[int] = ..., num_gpus: _Optional[int] = ..., disaggregation_mode: _Optional[str] = ..., enable_memory_saver: _Optional[bool] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., nnodes: _Optional[int] = ..., node_rank: _Optional[int] = ..., base_gpu_id: _Optional[int] = ..., gpu_id_step: _Optional[int] = ..., ep_size: _Optional[int] = ..., dtype: _Optional[str] = ..., enable_metrics: _Optional[bool] = ..., enable_lora: _Optional[bool] = ..., max_loras_per_batch: _Optional[int] = ..., max_lora_rank: _Optional[int] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("leaves", "dtype", "architecture", "numerics", "attention", "quantization")
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    leaves: int
    dtype: str
    architecture: str
    numerics: str
    attention: str
    quantization: str
    def __init__(self, leaves: _Optional[int] = ..., dtype: _Optional[str] = ..., architecture: _Optional[str] = ..., numerics: _Optional[str] = ..., attention: _Optional[str] = ..., quantization: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("model", "weight_version", "drafter_version", "vocab_size", "max_model_len", "eos_token_ids", "pages", "page_size", "max_running", "drafter", "policy", "numerics", "max_rows", "attention", "dtype", "device", "gpu", "products", "graphs", "choices", "threads", "phases", "pid", "spooled", "lost", "training_device", "adapters", "fingerprint", "tensor_parallel", "rank_pids", "prepared", "libraries", "stages", "drafter_quantization")
    class ChoicesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LostEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LibrariesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SPOOLED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    TRAINING_DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    weight_version: str
    drafter_version: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pages: int
    page_size: int
    max_running: int
    drafter: str
    policy: str
    numerics: str
    max_rows: int
    attention: str
    dtype: str
    device: str
    gpu: str
    products: str
    graphs: bool
    choices: _containers.ScalarMap[str, str]
    threads: int
    phases: _containers.ScalarMap[str, float]
    pid: int
    spooled: bool
    lost: _containers.ScalarMap[str, str]
    training_device: str
    adapters: _containers.ScalarMap[str, str]
    fingerprint: Fingerprint
    tensor_parallel: int
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    prepared: str
    libraries: _containers.ScalarMap[str, str]
    stages: bool
    drafter_quantization: str
    def __init__(self, model: _Optional[str] = ..., weight_version: _Optional[str] = ..., drafter_version: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., pages: _Optional[int] = ..., page_size: _Optional[int] = ..., max_running: _Optional[int] = ..., drafter: _Optional[str] = ..., policy: _Optional[str] = ..., numerics: _Optional[str] = ..., max_rows: _Optional[int] = ..., attention: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., gpu: _Optional[str] = ..., products: _Optional[str] = ..., graphs: _Optional[bool] = ..., choices: _Optional[_Mapping[str, str]] = ..., threads: _Optional[int] = ..., phases: _Optional[_Mapping[str, float]] = ..., pid: _Optional[int] = ..., spooled: _Optional[bool] = ..., lost: _Optional[_Mapping[str, str]] = ..., training_device: _Optional[str] = ..., adapters: _Optional[_Mapping[str, str]] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., tensor_parallel: _Optional[int] = ..., rank_pids: _Optional[_Iterable[int]] = ..., prepared: _Optional[str] = ..., libraries: _Optional[_Mapping[str, str]] = ..., stages: _Optional[bool] = ..., drafter_quantization: _Optional[str] = ...) -> None: ...

class VllmConfigInfo(_message.Message):
    __slots__ = ("model_config", "weight_transfer_config", "parallel_config", "lora_config")
    MODEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TRANSFER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    LORA_CONFIG_FIELD_NUMBER: _ClassVar[int]
    model_config: ModelConfigInfo
    weight_transfer_config: TransferConfig
    parallel_config: ParallelConfigInfo
    lora_config: LoraConfigInfo
    def __init__(self, model_config: _Optional[_Union[ModelConfigInfo, _Mapping]] = ..., weight_transfer_config: _Optional[_Union[TransferConfig, _Mapping]] = ..., parallel_config: _Optional[_Union[ParallelConfigInfo, _Mapping]] = ..., lora_config: _Optional[_Union[LoraConfigInfo, _Mapping]] = ...) -> None: ...

class LoraConfigInfo(_message.Message):
    __slots__ = ("max_loras", "max_lora_rank")
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    max_loras: int
    max_lora_rank: int
    def __init__(self, max_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ...) -> None: ...

class ModelConfigInfo(_message.Message):
    __slots__ = ("dtype", "max_model_len", "logprobs_mode")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    max_model_len: int
    logprobs_mode: str
    def __init__(self, dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., logprobs_mode: _Optional[str] = ...) -> None: ...

class TransferConfig(_message.Message):
    __slots__ = ("backend",)
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    backend: str
    def __init__(self, backend: _Optional[str] = ...) -> None: ...

class ParallelConfigInfo(_message.Message):
    __slots__ = ("tensor_parallel_size", "data_parallel_size")
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_size: int
    data_parallel_size: int
    def __init__(self, tensor_parallel_size: _Optional[int] = ..., data_parallel_size: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    def __init__(self, state: _Optional[_Union[ServerState, _Mapping]] = ...) -> None: ...

class ServerState(_message.Message):
    __slots__ = ("ready", "reason", "draining", "paused", "asleep", "weight_version", "drafter_version", "engine_pid")
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    reason: str
    draining: bool
    paused: bool
    asleep: _containers.RepeatedScalarFieldContainer[str]
    weight_version: str
    drafter_version: str
    engine_pid: int
    def __init__(self, ready: _Optional[bool] = ..., reason: _Optional[str] = ..., draining: _Optional[bool] = ..., paused: _Optional[bool] = ..., asleep: _Optional[_Iterable[str]] = ..., weight_version: _Optional[str] = ..., drafter_version: _Optional[str] = ..., engine_pid: _Optional[int] = ...) -> None: ...
