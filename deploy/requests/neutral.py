"""Fields of OpenAI, vLLM and SGLang that this service does not have, with the values that change no answer.

Clients send many of them by default. Every other value is refused by the name of the field. A field that is null is
left out before these tables are read. They follow the request classes of vLLM 0.25 and SGLang 0.5.
"""

from __future__ import annotations

from typing import Any

Neutral = dict[str, tuple[Any, ...] | None]
"""For each field the values that are taken; None: whatever it says."""

OF_REQUESTS: Neutral = {
    # Hints for caches, queues, bills, traces and routers.
    **dict.fromkeys(
        (
            *("cache_salt", "custom_labels", "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "metadata"),
            *("priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id", "rid"),
            *("routed_dp_rank", "safety_identifier", "service_tier", "session_id", "store", "user"),
        )
    ),
    # Of beams, images, tools, reasoning parsers and other endpoints: what they would change is not here.
    **dict.fromkeys(
        (
            *("early_stopping", "guided_decoding_backend", "images_config", "include_reasoning", "length_penalty"),
            *("max_dynamic_patch", "max_tool_calls", "media_io_kwargs", "min_dynamic_patch", "mm_processor_kwargs"),
            *("parallel_tool_calls", "return_assistant_tokens_mask", "return_flat_raw_top_logprobs_b64"),
            *(
                "return_token_offsets",
                "routed_experts_start_len",
                "separate_reasoning",
                "spaces_between_special_tokens",
            ),
            *("stream_reasoning", "truncation_side", "use_audio_in_video", "video_config"),
        )
    ),
    # Flags that are off.
    **dict.fromkeys(
        (
            *("echo", "return_cached_tokens_details", "return_flat_raw_output_top_logprobs", "return_hidden_states"),
            *("return_input_ids_in_sglext", "return_meta_info", "return_output_ids_in_sglext", "return_prompt_text"),
            *("return_prompt_token_ids", "return_routed_experts", "return_sampling_mask", "return_spec_tokens_details"),
            *("return_token_ids", "return_tokens_as_token_ids", "use_beam_search"),
        ),
        (False,),
    ),
    # Numbers that leave the law of the tokens as it is.
    **dict.fromkeys(
        ("frequency_penalty", "min_new_tokens", "min_p", "min_tokens", "presence_penalty", "top_logprobs"), (0,)
    ),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    # Cutting what is too long is not here, so a prompt that is too long is refused by its length.
    "truncate_prompt_tokens": (-1,),
    # Lists and objects with nothing in them.
    **dict.fromkeys(("bad_words", "documents", "functions", "logprob_token_ids", "stop_regex", "tools"), ([],)),
    **dict.fromkeys(
        ("custom_params", "ec_transfer_params", "kv_transfer_params", "logit_bias", "session_params", "vllm_xargs"),
        ({},),
    ),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
    # What no value but null leaves as it is.
    **dict.fromkeys(
        (
            *("allowed_token_ids", "audio", "bootstrap_host", "bootstrap_port", "bootstrap_room", "chat_template"),
            *("custom_logit_processor", "ebnf", "guided_grammar", "guided_whitespace_pattern", "input_ids"),
            *("lora_path", "moderation", "prediction", "prompt_embeds", "prompt_logprobs", "repetition_detection"),
            *("sampling_logprobs_mode", "task", "thinking", "watermark", "web_search_options"),
        ),
        (),
    ),
}
"""Of completions, chats and responses."""

OF_CONVERSATIONS: Neutral = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
"""Of what the chat template makes of turns."""

OF_CHATS: Neutral = OF_REQUESTS | OF_CONVERSATIONS
"""Of `/v1/chat/completions`."""

OF_RESPONSES: Neutral = {name: neutral for name, neutral in OF_REQUESTS.items() if name != "metadata"} | {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("auto", "disabled"),
}
"""Of `/v1/responses`, which has `metadata`. What is said of `truncate_prompt_tokens` is true of `truncation`."""

OF_TOKENIZING: Neutral = OF_REQUESTS | OF_CONVERSATIONS | {"return_token_strs": (False,)}
"""Of `/tokenize`."""

OF_TURNS: Neutral = {
    # What clients keep beside the text of an answer, and send back with it.
    **dict.fromkeys(("cache_control", "provider_specific_fields", "reasoning_details", "thinking_blocks")),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}
"""Of a turn of a chat."""

OF_ITEMS: Neutral = dict.fromkeys(("id", "phase", "status"))
"""Of an item of `/v1/responses`, as an answer says it of its own."""

OF_PARTS: Neutral = {"annotations": ([],), "cache_control": None, "logprobs": ([],)}
"""Of a part of a turn."""


def asks_nothing(value: Any, neutral: tuple[Any, ...] | None) -> bool:
    """Whether a value that is not null is one that is taken."""
    # To Python False is 0, but `logprobs: 0` asks for log-probabilities.
    return neutral is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
