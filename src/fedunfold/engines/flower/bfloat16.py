"""Updates in half as many bytes: Δ_k = w_k − w^(t) in bfloat16 on the wire, which the server adds to w^(t) again.

bfloat16 has float32's range and 8 significant bits: every entry of an update is off by at most 2⁻⁸ of itself, 0.4 %,
and a round's mean by at most 2⁻⁸ Σ_k α_k |Δ_k|. The same for w_k would be off by 0.4 % of the weights, far more than a
round changes them.
"""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.wire import flower_type, read_array

PRECISION = "fedunfold-update-precision"
"""The entry of a train message's config by which a server asks for it."""
BFLOAT16 = "bfloat16"


def bfloat16_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod for an ordinary client's app: it sends updates in bfloat16 to a server that asks for them.

    That is `WeightedStrategy(update_precision="bfloat16")`; other servers get what the train function replies. Arrays
    of half precision or of whole numbers stay as they are.

    >>> from flwr.clientapp import ClientApp
    >>> from fedunfold.engines.flower import bfloat16_mod
    >>> app = ClientApp(mods=[bfloat16_mod])
    """
    trains = message.metadata.message_type == flower_type("train")
    asked = trains and any(record.get(PRECISION) == BFLOAT16 for record in message.content.config_records.values())
    received = {name: array for record in message.content.array_records.values() for name, array in record.items()}
    reply = call_next(message, context)
    if not asked or reply.has_error():
        return reply
    for key, record in list(reply.content.array_records.items()):
        reply.content[key] = ArrayRecord(
            {name: _as_update(array, received.get(name)) for name, array in record.items()}
        )
    return reply


def _as_update(trained: Array, received: Array | None) -> Array:
    if received is None or received.shape != trained.shape or trained.dtype not in ("float32", "float64"):
        return trained
    change = np.asarray(trained.numpy() - received.numpy())
    bits = torch.from_numpy(change).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    plain = Array(bits)
    return Array(BFLOAT16, plain.shape, plain.stype, plain.data)


def read_update(array: Array, name: str, sent: np.ndarray) -> np.ndarray:
    """w_k from an update in bfloat16.

    Args:
        array: The update, its bits as whole numbers of 16.
        name: What it is called.
        sent: w^(t).
    """
    bits = read_array(array, name)
    if bits.dtype != np.uint16:
        raise InputError(f"has an array '{name}' that says it is bfloat16, of type {bits.dtype}")
    if bits.shape != sent.shape:
        return bits  # to be refused for its shape
    return np.asarray(sent + (bits.astype(np.uint32) << 16).view(np.float32), dtype=sent.dtype)
