"""Text to tokens and back, and messages to a prompt, without an answer."""

from typing import Any

from fastapi import APIRouter

from soloist.errors import UsageError
from soloist.server.protocol.llama_cpp import DetokenizeRequest, TemplateRequest, TokenizeRequest
from soloist.server.rendering import render_chat
from soloist.server.service import Service
from soloist.tokenizer import Tokenizer


def token_routes(service: Service) -> APIRouter:
    """Make the routes of the tokenizer."""
    router = APIRouter()

    def tokenizer() -> Tokenizer:
        if service.llm.tokenizer is None:
            raise UsageError("this model came without a tokenizer")
        return service.llm.tokenizer

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Turn text into token ids."""
        text = body.content if body.content is not None else body.prompt
        if text is None:
            raise UsageError("content is missing; vLLM's name for it, prompt, is understood too")
        # llama.cpp adds no BOS unless asked to, vLLM adds it unless told not to.
        is_vllm = body.content is None
        adds_bos = body.add_special if body.add_special is not None else body.add_special_tokens
        adds_bos = is_vllm if adds_bos is None else adds_bos
        parses = body.parse_special is not False
        ids = tokenizer().encode(text, allow_special=parses, add_bos=adds_bos)
        tokens: list[Any] = list(ids)
        if body.with_pieces:
            tokens = [{"id": i, "piece": tokenizer().decode([i], show_special=True)} for i in ids]
        answer = {"tokens": tokens, "count": len(ids), "max_model_len": service.llm.max_context_len}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer().decode([i], show_special=True) for i in ids]
        return answer

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Turn token ids into text."""
        num_tokens = tokenizer().num_tokens
        if wrong := next((i for i in body.tokens if not 0 <= i < num_tokens), None):
            raise UsageError(f"there is no token {wrong}; the vocabulary has ids 0 to {num_tokens - 1}")
        text = tokenizer().decode(body.tokens, show_special=True)
        return {"content": text, "prompt": text}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Describe the tokenizer."""
        template = service.llm.chat_template
        return {
            "tokenizer_class": "ByteLevelBPE",
            **tokenizer().named_tokens,
            "eos_token_id": tokenizer().eos_id,
            "bos_token_id": tokenizer().bos_id,
            "stop_token_ids": list(service.llm.engine.eos_token_ids),
            "add_bos_token": tokenizer().adds_bos,
            "vocab_size": tokenizer().num_tokens,
            "model_max_length": service.llm.max_context_len,
            "chat_template": None if template is None else template.text_for(None),
        }

    @router.post("/apply-template")
    async def apply_template(body: TemplateRequest) -> dict[str, Any]:
        """Write messages down as the prompt that a chat would use."""
        rendered = render_chat(service.llm, body.messages, tools=body.tools, template_kwargs=body.chat_template_kwargs)
        return {"prompt": rendered.text, "tokens": rendered.ids}

    return router
