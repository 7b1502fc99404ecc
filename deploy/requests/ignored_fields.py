"""Unsupported fields of OpenAI, vLLM and SGLang, with the values that change no answer.

Clients send many of them by default. Any other value is rejected by field name. Null means absent, so it is not listed.
The fields are those of the request classes of vLLM and of SGLang 0.5.
"""

from __future__ import annotations

from typing import Any

IgnoredValues = dict[str, tuple[Any, ...] | None]
"""Accepted values of each field; None: any value."""


def _any(names: str) -> IgnoredValues:
    return dict.fromkeys(names.split())


def _only(names: str, *values: Any) -> IgnoredValues:
    return dict.fromkeys(names.split(), values)


OF_REQUESTS: IgnoredValues = {
    # Hints for caches, queues, billing, tracing and routing.
    **_any(
        "cache_salt custom_labels data_parallel_rank disagg_prefill_dp_rank extra_key metadata prediction priority "
        "prompt_cache_key prompt_cache_options prompt_cache_retention request_id rid routed_dp_rank "
        "safety_identifier service_tier session_id store user"
    ),
    # Settings of beam search, images, tools, reasoning parsers and other endpoints, which this service does not have.
    **_any(
        "early_stopping images_config include_reasoning length_penalty max_dynamic_patch max_tool_calls "
        "media_io_kwargs min_dynamic_patch mm_processor_kwargs parallel_tool_calls "
        "return_assistant_tokens_mask return_flat_raw_top_logprobs_b64 return_token_offsets routed_experts_start_len "
        "separate_reasoning spaces_between_special_tokens stream_reasoning truncation_side use_audio_in_video "
        "video_config"
    ),
    **_only(
        "continue_final_message echo return_cached_tokens_details return_flat_raw_output_top_logprobs "
        "return_hidden_states return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext "
        "return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask "
        "return_spec_tokens_details return_token_ids return_tokens_as_token_ids use_beam_search",
        False,
    ),
    **_only("add_generation_prompt detokenize skip_special_tokens", True),
    **_only("frequency_penalty min_new_tokens min_p min_tokens presence_penalty top_logprobs", 0),
    **_only("repetition_penalty", 1),
    # -1 means "as much as fits". A longer prompt is rejected by its length and not truncated.
    **_only("thinking_token_budget truncate_prompt_tokens", -1),
    **_only("bad_words documents functions logits_processors logprob_token_ids stop_regex tools", []),
    **_only("custom_params ec_transfer_params kv_transfer_params logit_bias session_params vllm_xargs", {}),
    **_only("function_call tool_choice", "none", "auto"),
    **_only("modalities", ["text"]),
    **_only("verbosity", "medium"),
    **_only(
        "allowed_token_ids audio bootstrap_host bootstrap_port bootstrap_room chat_template custom_logit_processor "
        "ebnf input_ids lora_path moderation prompt_embeds prompt_logprobs repetition_detection "
        "sampling_logprobs_mode task thinking watermark web_search_options"
    ),
}
"""Neutral values of completion and chat requests."""

OF_TOKENIZING: IgnoredValues = OF_REQUESTS | _only("return_token_strs", False)
"""Neutral values of `/tokenize`."""

OF_TURNS: IgnoredValues = {
    # Fields of an answer that clients store with its text and send back.
    **_any("cache_control id provider_specific_fields reasoning_details thinking_blocks"),
    **_only("annotations tool_calls", []),
    **_only("audio function_call refusal"),
}
"""Neutral values of a chat turn."""

OF_PARTS: IgnoredValues = _any("cache_control") | _only("annotations logprobs", [])
"""Neutral values of a part of a turn."""
