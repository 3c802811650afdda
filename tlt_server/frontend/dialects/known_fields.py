"""Fields of requests that OpenAI's API, vLLM or SGLang know, per body: refused, or ignored because
they change neither the prompt nor the tokens. What a body's struct has is done.

`http.fields.Tolerant` reads the refusals, the docs' tables are made from all three, and a test
sends each field. To do a field, give it to a struct and take it out of here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
    Known(RefusedField(_STRUCTURE, ()), STRUCTURED, "json_schema"),
    Known(RefusedField(_STRUCTURE), STRUCTURED, "structural_tag"),
    Known(RefusedField(_STRUCTURE), (*COMPLETING, SGLANG_SAMPLING), "grammar"),
    Known(RefusedField(_SPACES), SAMPLED, "guided_whitespace_pattern"),
    Known(
        RefusedField("its newer form is tool_choice: use that", (*OFF, "none", "auto")),
        TALKING,
        "function_call",
    ),
    Known(RefusedField("its newer form is tools: use that"), TALKING, "functions"),
    Known(RefusedField(_ONE_SAMPLE), SAMPLED, "use_beam_search"),
    Known(RefusedField(_ONE_SAMPLE, (0, 1)), (*SAMPLED, SGLANG_SAMPLING), "best_of beam_width"),
    Known(
        RefusedField(_OWN_SAMPLER, (*OFF, 0, 0.0, 1, 1.0)),
        (*SAMPLED, SGLANG_SAMPLING),
        "typical_p mirostat dry_multiplier xtc_probability no_repeat_ngram_size",
    ),
    Known(RefusedField(_OWN_SAMPLER), (*SAMPLED, SGLANG_SAMPLING), "watermarking"),
    Known(  # llama.cpp's and others built on it
        RefusedField(_OWN_SAMPLER, (*OFF, -1, -1.0, 0, 0.0, 1, 1.0)),
        OPENAI,
        "top_n_sigma top_a tfs_z dynatemp_range smoothing_factor epsilon_cutoff eta_cutoff",
    ),
    Known(
        RefusedField("its name is repetition_penalty here: use that", (*OFF, 1, 1.0)),
        OPENAI,
        "repeat_penalty",
    ),
    Known(
        RefusedField("its name is max_tokens here: use that", (*OFF, -1)),
        COMPLETING,
        "n_predict num_predict",
    ),
    Known(RefusedField(_STOP), (*OPENAI, SGLANG_SAMPLING), "stop_regex"),
    Known(RefusedField(_STOP), SAMPLED, "repetition_detection"),
    Known(RefusedField(_STOP, (-1,)), SAMPLED, "thinking_token_budget"),
    Known(RefusedField(_STOP), (SGLANG,), "max_thinking_tokens require_reasoning"),
    Known(RefusedField(_CODE), SAMPLED, "logits_processors vllm_xargs extra_args"),
    Known(RefusedField(_CODE), (VLLM_SAMPLING,), "trace_decode_token_ids"),
    Known(
        RefusedField(_CODE),
        (*OPENAI, SGLANG, SGLANG_SAMPLING),
        "custom_logit_processor custom_params",
    ),
    Known(RefusedField(_MESSAGES), TALKING, "documents task web_search_options"),
    Known(RefusedField(_MESSAGES), (RESPONSES,), "input_ids"),
    Known(RefusedField(_MESSAGES), (CHAT,), "reasoning"),
    Known(RefusedField(_MESSAGES), (COMPLETIONS,), "suffix"),
    Known(RefusedField(_MESSAGES), (*OPENAI, SGLANG), "session_params"),
    Known(
        RefusedField("the last tokens are kept: truncate it yourself", ("left",)),
        SAMPLED,
        "truncation_side",
    ),
    Known(
        RefusedField("its name is include_stop_str_in_output here: use that"),
        COMPLETING,
        "no_stop_trim",
    ),
    Known(RefusedField(_TEXT), (COMPLETIONS,), "prompt_embeds"),
    Known(RefusedField(_TEXT, (*OFF, ["text"])), TALKING, "modalities"),
    Known(RefusedField(_TEXT), TALKING, "audio"),
    Known(RefusedField(_TEXT), (VLLM,), "features"),
    Known(
        RefusedField(_TEXT),
        (SGLANG,),
        "image_data video_data audio_data input_embeds positional_embed_overrides "
        "multi_item_delimiter_indices",
    ),
    Known(RefusedField(_MODEL), OPENAI, "lora_path"),
    Known(RefusedField(_MODEL), (*OPENAI, VLLM), "lora_request lora_name"),
    Known(RefusedField("an adapter is asked for by lora_path: use that"), (SGLANG,), "lora_id"),
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
        "return_hidden_states return_routed_experts token_ids_logprob "
        "return_sampling_mask return_entropy return_prompt_token_ids",
    ),
    Known(REPLY, (SGLANG_SAMPLING,), "spaces_between_special_tokens"),
    Known(
        TEXT_ONLY,
        (VLLM_SAMPLING,),
        "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
        "output_kind flat_logprobs",
    ),
    Known(BOOKS, OPENAI, "user rid session_id extra_key custom_labels"),
    Known(BOOKS, (CHAT,), "metadata store"),
    Known(BOOKS, TALKING, "service_tier safety_identifier prompt_cache_key prediction"),
    Known(BOOKS, (SGLANG,), "session_id extra_key custom_labels cache_salt no_logs log_metrics"),
    Known(
        PACE,
        (*OPENAI, VLLM, SGLANG),
        "kv_transfer_params bootstrap_host bootstrap_port bootstrap_room data_parallel_rank",
    ),
    Known(PACE, (*SAMPLED, SGLANG_SAMPLING), "stream_interval"),
    Known(PACE, (VLLM_SAMPLING,), "skip_reading_prefix_cache"),
    Known(PACE, SAMPLED, "guided_decoding_backend"),
    Known(RefusedField(_MESSAGES), (RESPONSES,), "conversation prompt context_management"),
    Known(RefusedField("its name is input here: use that"), (RESPONSES,), "messages"),
    Known(
        RefusedField("its name is max_output_tokens here: use that"),
        (RESPONSES,),
        "max_tokens max_completion_tokens n_predict num_predict",
    ),
    Known(
        RefusedField("its name is reasoning.effort here: use that"),
        (RESPONSES,),
        "reasoning_effort",
    ),
    Known(RefusedField("its name is text.verbosity here: use that"), (RESPONSES,), "verbosity"),
    Known(RefusedField("a response is one choice: ask several times", (1,)), (RESPONSES,), "n"),
    Known(
        RefusedField(_BY_CHAT),
        (RESPONSES,),
        "logprobs top_logprobs prompt_logprobs return_token_ids return_tokens_as_token_ids "
        "return_weight_versions return_meta_info return_prompt_token_ids chat_template "
        "continue_final_message add_special_tokens "
        "include_stop_str_in_output no_stop_trim",
    ),
    Known(
        RefusedField(_BY_CHAT, (True,)),
        (RESPONSES,),
        "add_generation_prompt include_reasoning separate_reasoning",
    ),
    Known(
        RefusedField("the conversation is not cut: shorten it yourself"),
        (RESPONSES,),
        "truncate_prompt_tokens",
    ),
    Known(
        RefusedField("the conversation is not cut: shorten it yourself", ("disabled",)),
        (RESPONSES,),
        "truncation",
    ),
    Known(RefusedField("a reply is not awaited elsewhere: use stream"), (RESPONSES,), "background"),
    Known(RefusedField(_STOP), (RESPONSES,), "max_tool_calls"),
    Known(
        RefusedField("its name is text here: use that", (*OFF, {"type": "text"})),
        (RESPONSES,),
        "response_format",
    ),
    Known(RefusedField(_FORMAT, ()), (RESPONSES,), "json_schema guided_json"),
    Known(
        RefusedField(_FORMAT),
        (RESPONSES,),
        "structured_outputs guided_decoding guided_json_object guided_regex guided_choice "
        "guided_grammar structural_tag grammar regex ebnf",
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
