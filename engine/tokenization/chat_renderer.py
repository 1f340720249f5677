"""Renders chats with a model's chat template in jinja2's sandbox, with the functions that transformers provides.

Templates are part of the model's files and are not trusted: they see plain values only and cannot change them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..protocol.errors import InvalidRequestError
from ..protocol.templates import ChatOptions, ChatTemplate, Conversation, Message

RESERVED: Final = frozenset(
    {"messages", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}
)
"""Names that chat_template_kwargs must not contain, because other options of the request set them."""

# Marks the end of a text. Templates do not contain this private-use character. A missing space shows that the template
# has trimmed the text.
_END: Final = "\ue0a4 "
_PROBE: Final = "\ue0a5"


class ChatRenderer:
    """Renders chats by one template. Safe to use from several threads.

    Args:
        template: The model's template. It is compiled on first use, because a broken template that is never used must
            not prevent the model from loading.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def render(self, conversation: Conversation, options: ChatOptions) -> str:
        """Returns the text of a chat.

        Raises:
            InvalidRequestError: The template rejects these messages. The error contains its message.
        """
        if options.add_generation_prompt and options.continue_final_message:
            raise InvalidRequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                param="continue_final_message",
            )
        reserved = sorted(RESERVED & set(options.arguments))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs contains {reserved[0]!r}, which is reserved; remove it.",
                param="chat_template_kwargs",
            )
        if not conversation:
            raise InvalidRequestError("messages is empty; give at least one message.", param="messages")
        messages = [self._adapt_content(message) for message in conversation]
        if options.continue_final_message:
            return self._render_continued(messages, options)
        return self._run(messages, options)

    def _run(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        values = {
            "tools": None,
            "documents": None,
            **self._template.special_tokens,
            **options.arguments,
            "messages": messages,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            return self._compiled.render(values)
        except TemplateError as error:
            raise _rejected(str(error)) from error
        except Exception as error:  # templates compute with the values of the request
            raise _rejected(f"{type(error).__name__}: {error}") from error

    def _render_continued(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        """Returns the chat up to the end of the text of its last message."""
        content = messages[-1].get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        text = parts[-1].get("text") or ""
        marked = text + _END if isinstance(content, str) else [*parts[:-1], {**parts[-1], "text": text + _END}]
        rendered = self._run([*messages[:-1], {**messages[-1], "content": marked}], options)
        end = rendered.rfind(_END[0])
        if end < 0 or text.strip() not in rendered:
            raise InvalidRequestError(
                "continue_final_message is true, but the model's chat template leaves the last message out or changes "
                "it.",
                param="continue_final_message",
            )
        return rendered[:end] if rendered.startswith(_END, end) else rendered[:end].rstrip()

    def _adapt_content(self, message: Message) -> dict[str, Any]:
        """Converts the content of a message to the template's format: a text or a list of typed parts."""
        content = message.get("content")
        if isinstance(content, list) and not self._reads_parts:
            if any("text" not in part for part in content):
                raise _rejected("it reads texts, not images")
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and self._reads_parts and not self._reads_texts:
            return {**message, "content": [{"type": "text", "text": content}]}
        return dict(message)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template iterates over the parts of a content. Other templates print the list itself."""
        return self._renders([{"type": "text", "text": _PROBE}])

    @cached_property
    def _reads_texts(self) -> bool:
        """Whether the template accepts a text as content. Some accept lists of parts only."""
        return self._renders(_PROBE * 2)

    def _renders(self, content: Any) -> bool:
        try:
            rendered = self._run([{"role": "user", "content": content}], ChatOptions())
        except InvalidRequestError:
            return False
        before, shown, _ = rendered.partition(content if isinstance(content, str) else _PROBE)
        return bool(shown) and not before.endswith('"text": "')

    @cached_property
    def _compiled(self) -> Template:
        return _environment().from_string(self._template.source)


def _rejected(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The model's chat template does not accept these messages: {reason}", param="messages")


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training. Here it renders its contents."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Returns the statements up to endgeneration, in their own scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _TemplateDict:
    """`dict` as a function, so that templates cannot reach the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` without access to private attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No parameter is called self, so that namespace(self=...) works.
        for name in dict(*args[1:], **kwargs):
            _check_public(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns jinja2's sandbox with the filters and functions that transformers gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # noqa: DTZ005 - as in transformers: the server's own time
