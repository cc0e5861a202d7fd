"""Which conversation a request belongs to: the same at every turn of it, so that one replica keeps what was read."""

import hashlib
import json
from typing import Any

from soloist.server.protocol.anthropic import BILLING_LINE

# Fields with which clients name a conversation themselves.
_NAMES = ("session_id", "prompt_cache_key", "id_slot")
# Of a prompt that is no chat: its beginning tells one text from another.
_NUM_CHARS = 1000


def conversation_of(path: str, body: bytes) -> str | None:
    """Give a name for the conversation of a request; None: it is not known, and any replica will do.

    Args:
        path: of the route.
        body: as it was sent.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    named = [[name, fields[name]] for name in _NAMES if fields.get(name) is not None]
    start = named or _beginning(fields)
    if not start:
        return None
    # Routes of one protocol share their prompts, those of two do not.
    text = json.dumps([path.rpartition("/")[2], start], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _beginning(fields: dict[str, Any]) -> list[Any]:
    """Give what does not change from turn to turn: instructions, and everything up to the user's first words."""
    start: list[Any] = [_without_billing_line(fields[key]) for key in ("system", "instructions") if fields.get(key)]
    for key in ("messages", "input"):
        items = fields.get(key)
        if isinstance(items, str):
            return [*start, items[:_NUM_CHARS]]
        for item in items if isinstance(items, list) else ():
            start.append(item)
            if isinstance(item, dict) and item.get("role") == "user":
                return start
    for key in ("prompt", "input_prefix"):
        if prompt := fields.get(key):
            start.append(prompt[:_NUM_CHARS] if isinstance(prompt, str | list) else prompt)
    return start


def _without_billing_line(system: Any) -> Any:
    """Leave out what coding agents change at every turn."""
    blocks = [{"text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list):
        return system
    texts = [str(block.get("text")) for block in blocks if isinstance(block, dict)]
    return [text for text in texts if not text.startswith(BILLING_LINE)]
