"""Request fields of OpenAI's API, vLLM or SGLang, per body: refused, or ignored because they change
neither the prompt nor the tokens. Fields in a body's struct are supported.

`http.fields.Tolerant` reads the refusals, the docs' tables are generated from all three, and a test
sends each field. To support a field, add it to a struct and remove it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tlt_server.frontend.http.fields import OFF, RefusedField

COMPLETIONS, CHAT, TOKENIZE, RESPONSES = "completions", "chat", "tokenize", "responses"
VLLM, VLLM_SAMPLING = "vllm", "vllm sampling_params"
SGLANG, SGLANG_SAMPLING = "sglang", "sglang sampling_params"
COMPLETING = (COMPLETIONS, CHAT)
TALKING = (CHAT, RESPONSES)
OPENAI = (*COMPLETING, RESPONSES)
SAMPLED = (*OPENAI, VLLM_SAMPLING)  # bodies with vLLM's sampling parameters
STRUCTURED = (*COMPLETING, VLLM_SAMPLING)  # bodies with vLLM's structures


class Known(NamedTuple):
    """Fields with one verdict, in some bodies."""

    verdict: RefusedField | str  # a text: ignored, and why that is harmless
    bodies: tuple[str, ...]
    names: str


def _refused(bodies: tuple[str, ...], names: str, why: str, off: tuple[Any, ...] = OFF) -> Known:
    return Known(RefusedField(why, off), bodies, names)


_STRUCTURE = "structures have other fields here, see response_format or regex: use those"
_FORMAT = "a structure is asked for by text.format here: use that"
_SPACES = "white space in JSON is a space, or a line break with an indent: leave it out"
_ONE_SAMPLE = "a choice is one sample with a seed: ask for n choices, and rank them"
_OWN_SAMPLER = "no such sampling here: leave it out"
_CODE = "the server runs no code of requests: leave it out"
_MESSAGES = "the prompt would need it: put it into the text or messages"
_TEXT = "this server reads and writes text only: leave it out"
_MODEL = "an adapter is asked for by its name as model: use that"
_STOP = "not supported: use stop or max_tokens"
_BY_CHAT = "chat completions do this: use them"

REPLY = "the reply only lacks it"
BOOKS = "for bookkeeping or routing"
PACE = "for speed; the tokens are the same"
TEXT_ONLY = "token ids are returned as they are"

KNOWN = (
    _refused(STRUCTURED, "json_schema", _STRUCTURE, ()),
    _refused(STRUCTURED, "structural_tag", _STRUCTURE),
    _refused((*COMPLETING, SGLANG_SAMPLING), "grammar", _STRUCTURE),
    _refused(SAMPLED, "guided_whitespace_pattern", _SPACES),
    _refused(
        TALKING, "function_call", "its newer form is tool_choice: use that", (*OFF, "none", "auto")
    ),
    _refused(TALKING, "functions", "its newer form is tools: use that"),
    _refused(SAMPLED, "use_beam_search", _ONE_SAMPLE),
    _refused((*SAMPLED, SGLANG_SAMPLING), "best_of beam_width", _ONE_SAMPLE, (0, 1)),
    _refused(
        (*SAMPLED, SGLANG_SAMPLING),
        "typical_p mirostat dry_multiplier xtc_probability no_repeat_ngram_size",
        _OWN_SAMPLER,
        (*OFF, 0, 0.0, 1, 1.0),
    ),
    _refused((*SAMPLED, SGLANG_SAMPLING), "watermarking", _OWN_SAMPLER),
    _refused(
        OPENAI,
        "top_n_sigma top_a tfs_z dynatemp_range smoothing_factor epsilon_cutoff eta_cutoff",
        _OWN_SAMPLER,
        (*OFF, -1, -1.0, 0, 0.0, 1, 1.0),
    ),
    _refused(
        OPENAI, "repeat_penalty", "its name is repetition_penalty here: use that", (*OFF, 1, 1.0)
    ),
    _refused(
        COMPLETING, "n_predict num_predict", "its name is max_tokens here: use that", (*OFF, -1)
    ),
    _refused((*OPENAI, SGLANG_SAMPLING), "stop_regex", _STOP),
    _refused(SAMPLED, "repetition_detection", _STOP),
    _refused(SAMPLED, "thinking_token_budget", _STOP, (-1,)),
    _refused((SGLANG,), "max_thinking_tokens require_reasoning", _STOP),
    _refused(SAMPLED, "logits_processors vllm_xargs extra_args", _CODE),
    _refused((VLLM_SAMPLING,), "trace_decode_token_ids", _CODE),
    _refused((*OPENAI, SGLANG, SGLANG_SAMPLING), "custom_logit_processor custom_params", _CODE),
    _refused(TALKING, "documents task web_search_options", _MESSAGES),
    _refused((RESPONSES,), "input_ids", _MESSAGES),
    _refused((CHAT,), "reasoning", _MESSAGES),
    _refused((COMPLETIONS,), "suffix", _MESSAGES),
    _refused((*OPENAI, SGLANG), "session_params", _MESSAGES),
    _refused(
        SAMPLED, "truncation_side", "the last tokens are kept: truncate it yourself", ("left",)
    ),
    _refused(COMPLETING, "no_stop_trim", "its name is include_stop_str_in_output here: use that"),
    _refused((COMPLETIONS,), "prompt_embeds", _TEXT),
    _refused(TALKING, "modalities", _TEXT, (*OFF, ["text"])),
    _refused(TALKING, "audio", _TEXT),
    _refused((VLLM,), "features", _TEXT),
    _refused(
        (SGLANG,),
        "image_data video_data audio_data input_embeds positional_embed_overrides "
        "multi_item_delimiter_indices",
        _TEXT,
    ),
    _refused(OPENAI, "lora_path", _MODEL),
    _refused((*OPENAI, VLLM), "lora_request lora_name", _MODEL),
    _refused((SGLANG,), "lora_id", "an adapter is asked for by lora_path: use that"),
    Known(REPLY, SAMPLED, "logprob_token_ids"),
    Known(
        REPLY,
        OPENAI,
        "return_hidden_states return_routed_experts return_prompt_text return_token_offsets "
        "return_cached_tokens_details skip_special_tokens spaces_between_special_tokens",
    ),
    Known(REPLY, (COMPLETIONS,), "include_reasoning"),
    Known(REPLY, TALKING, "echo stream_reasoning"),
    Known(REPLY, (COMPLETIONS,), "return_prompt_token_ids"),
    Known(REPLY, (TOKENIZE,), "return_token_strs"),
    Known(
        REPLY,
        (SGLANG,),
        "return_hidden_states return_routed_experts token_ids_logprob return_sampling_mask "
        "return_entropy return_prompt_token_ids",
    ),
    Known(REPLY, (SGLANG_SAMPLING,), "spaces_between_special_tokens"),
    Known(
        TEXT_ONLY,
        (VLLM_SAMPLING,),
        "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
        "output_kind flat_logprobs",
    ),
    Known(BOOKS, OPENAI, "user rid extra_key custom_labels"),
    Known(BOOKS, (CHAT,), "metadata store"),
    Known(BOOKS, TALKING, "service_tier safety_identifier prompt_cache_key prediction"),
    Known(BOOKS, (SGLANG,), "extra_key custom_labels cache_salt no_logs log_metrics"),
    Known(
        PACE,
        (*OPENAI, VLLM, SGLANG),
        "kv_transfer_params bootstrap_host bootstrap_port bootstrap_room data_parallel_rank",
    ),
    Known(PACE, (*SAMPLED, SGLANG_SAMPLING), "stream_interval"),
    Known(PACE, (VLLM_SAMPLING,), "skip_reading_prefix_cache"),
    Known(PACE, SAMPLED, "guided_decoding_backend"),
    _refused((RESPONSES,), "conversation prompt context_management", _MESSAGES),
    _refused((RESPONSES,), "messages", "its name is input here: use that"),
    _refused(
        (RESPONSES,),
        "max_tokens max_completion_tokens n_predict num_predict",
        "its name is max_output_tokens here: use that",
    ),
    _refused((RESPONSES,), "reasoning_effort", "its name is reasoning.effort here: use that"),
    _refused((RESPONSES,), "verbosity", "its name is text.verbosity here: use that"),
    _refused((RESPONSES,), "n", "a response is one choice: ask several times", (1,)),
    _refused(
        (RESPONSES,),
        "logprobs top_logprobs prompt_logprobs return_token_ids return_tokens_as_token_ids "
        "return_weight_versions return_meta_info return_prompt_token_ids chat_template "
        "continue_final_message add_special_tokens include_stop_str_in_output no_stop_trim",
        _BY_CHAT,
    ),
    _refused(
        (RESPONSES,),
        "add_generation_prompt include_reasoning separate_reasoning",
        _BY_CHAT,
        (True,),
    ),
    _refused(
        (RESPONSES,), "truncate_prompt_tokens", "the conversation is not cut: shorten it yourself"
    ),
    _refused(
        (RESPONSES,),
        "truncation",
        "the conversation is not cut: shorten it yourself",
        ("disabled",),
    ),
    _refused((RESPONSES,), "background", "a reply is not awaited elsewhere: use stream"),
    _refused((RESPONSES,), "max_tool_calls", _STOP),
    _refused(
        (RESPONSES,), "response_format", "its name is text here: use that", (*OFF, {"type": "text"})
    ),
    _refused((RESPONSES,), "json_schema guided_json", _FORMAT, ()),
    _refused(
        (RESPONSES,),
        "structured_outputs guided_decoding guided_json_object guided_regex guided_choice "
        "guided_grammar structural_tag grammar regex ebnf",
        _FORMAT,
    ),
    Known(REPLY, (RESPONSES,), "include stream_options"),
    Known(BOOKS, (RESPONSES,), "prompt_cache_retention"),
    Known("it only weighs beams", (*SAMPLED, SGLANG_SAMPLING), "length_penalty"),
)


def each() -> Iterator[tuple[str, str, RefusedField | str]]:
    """Yield every body, field and verdict."""
    for known in KNOWN:
        for body in known.bodies:
            for name in known.names.split():
                yield body, name, known.verdict


def refused(body: str) -> dict[str, RefusedField]:
    """Return the fields that a body refuses, by name."""
    return {
        name: verdict
        for where, name, verdict in each()
        if where == body and isinstance(verdict, RefusedField)
    }
