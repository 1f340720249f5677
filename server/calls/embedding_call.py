"""What /v1/embeddings, /v1/multi-vector and /v1/encode share: a body checked against its model, the answer's head."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.protocol.params import PoolingParams

from ..answers.vectors import check_encodings
from ..schemas.encode import EncodeRequest
from ..schemas.fields.common import usage_of
from ..schemas.openai import EmbeddingRequest
from ..wire.encoding import Encoding
from .chat_input import check_inputs
from .context import ServerContext, context_of
from .prompts import request_options


class EmbeddingCall(NamedTuple):
    """A request that may run.

    Attributes:
        context: The server.
        engine: Of the model that the body names.
        name: Of the model, as the answer shows it.
        params: For the engine.
        encodings: Of the answer, by key.
        options: For the engine.
    """

    context: ServerContext
    engine: AsyncEngine
    name: str
    params: PoolingParams
    encodings: Mapping[str, Encoding]
    options: RequestOptions

    @classmethod
    def of(cls, body: EmbeddingRequest | EncodeRequest, request: Request) -> EmbeddingCall:
        """Finds the model of a body and checks the body against it.

        Raises:
            ModelNotFoundError: No model has the name.
            InvalidRequestError: The model cannot do what the body asks for.
        """
        context = context_of(request)
        engine, name = context.models.find(body.model)
        check_inputs(context, body)
        params, encodings = body.pooling_params(), body.encodings()
        check_encodings(encodings, body.num_inputs(), engine.info, params, quantized_by=body.quantized_by())
        options = request_options(
            context,
            engine.info,
            prompt_name=body.prompt_name,
            input_type=body.input_type,
            task=body.task if isinstance(body, EmbeddingRequest) else None,
            instruction=body.instruction,
            priority=body.priority,
        )
        return cls(context, engine, name, params, encodings, options)

    def head(self, request: Request, task: str, num_tokens: Sequence[int], *, kind: str = "embd") -> dict[str, Any]:
        """Books the tokens of each input and returns the answer but for its vectors.

        Args:
            request: For its id.
            task: Name of the task, or of several, in the metrics.
            num_tokens: Tokens of each input.
            kind: What the id of the answer begins with.
        """
        return {
            "id": f"{kind}-{request.scope['request_id']}",
            "object": "list",
            "created": int(time.time()),
            "model": self.name,
            "usage": usage_of(self.context.metrics.count(task, num_tokens)),
        }
