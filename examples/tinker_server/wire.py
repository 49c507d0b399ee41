"""The protocol's messages: decoded and validated before anything happens, and encoded.

forward_backward is protobuf in both directions, by the descriptors of the tinker SDK itself;
everything else is JSON. Whatever is wrong with a request is a UserError here, so that nothing that
was accepted can fail for a reason that could have been known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tinker.proto import tinker_public_pb2 as pb

INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
}
"""What each loss reads beside target_tokens, one number per token."""

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

_DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}


class UserError(Exception):
    """The client asked for something that can't be done; the message says what and why."""


@dataclass
class Datum:
    """One sequence. Position i of ``tokens`` predicts ``targets[i]``."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclass
class Work:
    """The data of one forward_backward or forward request."""

    data: list[Datum]
    loss_fn: str
    config: dict[str, float]


@dataclass
class Limits:
    vocabulary: int
    max_tokens: int


class AdamParams(BaseModel):
    """Everything an update depends on. NaN and infinity arrive as null, and are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    learning_rate: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    eps: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)
    """0: off."""


def parse_adam(message: dict[str, Any]) -> AdamParams:
    """Raises UserError."""
    if message.get("adam_params") is None:
        raise UserError("optim_step without adam_params: this server's only optimizer is AdamW")
    try:
        return AdamParams.model_validate(message["adam_params"])
    except ValidationError as error:
        wrong = [f"{e['loc'][-1]} = {e['input']!r}: {e['msg']}" for e in error.errors()]
        raise UserError("adam_params: " + "; ".join(wrong)) from None


def parse_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """Raises ValueError if this is no such message."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"not a ForwardBackwardRequest: {error}") from None


def work_of(message: pb.ForwardBackwardRequest, limits: Limits) -> Work:
    """The validated contents of a message. Raises UserError."""
    loss_fn = message.loss_fn
    if loss_fn not in INPUTS:
        raise UserError(f"loss_fn = {loss_fn!r}: this server has {', '.join(INPUTS)}")
    if not message.data:
        raise UserError("data is empty")
    data: list[Datum] = []
    try:
        for datum in message.data:
            data.append(_datum(datum, loss_fn, limits))  # noqa: PERF401 -- len() tells which failed
    except UserError as error:
        raise UserError(f"data[{len(data)}]: {error}") from None
    return Work(data, loss_fn, _loss_config(message))


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    given = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise UserError(f"loss_fn_config[{name!r}] = {value.text!r} is not a number")
        given[name] = value.number
    allowed = CLIP if message.loss_fn == "ppo" else {}
    for name, value in given.items():
        if name not in allowed:
            raise UserError(f"loss_fn_config[{name!r}] is unknown to {message.loss_fn}")
        if not np.isfinite(value):
            raise UserError(f"loss_fn_config[{name!r}] = {value} is not finite")
    return allowed | given


def _datum(message: pb.Datum, loss_fn: str, limits: Limits) -> Datum:
    tokens = _tokens(message)
    if not 1 <= len(tokens) <= limits.max_tokens:
        raise UserError(f"{len(tokens)} tokens; this model takes 1 to {limits.max_tokens}")
    given = {name: _array(name, tensor) for name, tensor in message.loss_fn_inputs.items()}
    if loss_fn == "cross_entropy":
        given.setdefault("weights", np.ones(len(tokens), np.float32))
    wanted = {"target_tokens", *INPUTS[loss_fn]}
    if given.keys() != wanted:
        raise UserError(f"{loss_fn} takes {sorted(wanted)}, not {sorted(given)}")
    for name, array in given.items():
        if array.shape != tokens.shape:
            raise UserError(f"{name} has shape {array.shape} for {len(tokens)} tokens")
        if not np.isfinite(array).all():
            raise UserError(f"{name} has values that are not finite")
    targets = given.pop("target_tokens")
    for name, array in (("model_input", tokens), ("target_tokens", targets)):
        if array.dtype.kind != "i" or array.min() < 0 or array.max() >= limits.vocabulary:
            raise UserError(f"{name} has values that are no token below {limits.vocabulary}")
    return Datum(tokens, targets, {name: given[name].astype(np.float32) for name in given})


def _tokens(message: pb.Datum) -> np.ndarray:
    chunks = [np.zeros(0, "<i4")]
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError("model_input has a chunk that is no text; this server takes text only")
        try:
            chunks.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
        except ValueError as error:
            raise UserError(f"model_input: {error}") from None
    return np.concatenate(chunks).astype(np.int64)


def _array(name: str, tensor: pb.Tensor) -> np.ndarray:
    if tensor.WhichOneof("encoding") == "sparse_csr" or tensor.dtype not in _DTYPES:
        raise UserError(f"{name} is sparse or of an unknown dtype; send dense float32 or int64")
    try:
        return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).reshape(tuple(tensor.shape))
    except ValueError as error:
        raise UserError(f"{name} of shape {tuple(tensor.shape)}: {error}") from None


def encode_output(logprobs: list[np.ndarray], metrics: dict[str, float]) -> bytes:
    """The answer to a forward_backward or forward request: the log-probability of every target.
    The names of metrics end in how chunks of one call are combined, as in ``loss:sum``."""
    offsets = np.cumsum([0, *(array.nbytes for array in logprobs)])
    field = pb.BatchedTensor(
        data=b"".join(array.astype("<f4").tobytes() for array in logprobs),
        offsets=offsets.astype("<i8").tobytes(),
        dtype=pb.DTYPE_FLOAT32,
    )
    record = pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(logprobs))
    return pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    ).SerializeToString()
