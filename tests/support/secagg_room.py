"""Members of a secure sum in this process, each with a vector; some are lost in one of the stages."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.faults import Faults
from fedunfold.engines.flower.schema import ClientReply, SumStage, TrainInstruction, UpdateRule, checked
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.protocol import (
    KeyBroadcast,
    SetupRequest,
    ShareDelivery,
    SurvivorList,
    read,
    to_record,
)
from fedunfold.engines.flower.secagg.server import SecureSum, Summed, SumTerm
from fedunfold.engines.flower.wire import reply_record

ASSIGNMENT = TrainInstruction(
    run="trial-0", round=0, seed=0, lr=0.1, batch_size=1, epochs=1, update=UpdateRule(name="sgd", mu=0.0)
)


class Room:
    """Carries letters to the members; `lost` says in which stage a member is gone, `heard` what the server got."""

    def __init__(self, vectors: Mapping[str, np.ndarray], lost: Mapping[str, SumStage] | None = None) -> None:
        self.vectors, self.lost = vectors, dict(lost or {})
        self.secrets: dict[str, Secrets | None] = {}
        self.heard: list[tuple[SumStage, str, RecordDict]] = []

    def __call__(self, verb: SumStage, messages: Mapping[str, RecordDict], /) -> Mapping[str, RecordDict | str]:
        answers: dict[str, RecordDict | str] = {}
        for key, message in messages.items():
            if self.lost.get(key) == verb:
                continue
            try:
                answers[key] = answer = self.answer(verb, key, message)
                self.heard.append((verb, key, answer))
            except InputError as error:
                answers[key] = str(error)
        return answers

    def answer(self, verb: SumStage, key: str, message: RecordDict) -> RecordDict:
        member, kept = SecAggClient(key), self.secrets.get(key)
        if verb == "advertise":
            self.secrets[key], keys = member.advertise(read(message, SetupRequest))
            return to_record(keys)
        if verb == "share":
            self.secrets[key], shares = member.share(kept, read(message, KeyBroadcast))
            return to_record(shares)
        if verb == "mask":
            self.secrets[key], masked = member.mask(kept, read(message, ShareDelivery), self.vectors[key])
            return reply_record(ClientReply({}, {"masked": torch.from_numpy(masked.view(np.int64))}))
        revealed = member.unmask(kept, read(message, SurvivorList))
        self.secrets[key] = None
        return to_record(revealed)


def add_up(room: Room, faults: Faults | None = None) -> Summed:
    """The secure sum of everybody in the room."""
    length = len(next(iter(room.vectors.values())))
    like = {"masked": torch.empty(length, dtype=torch.int64)}
    part: Any = SumTerm("train", "updates", ASSIGNMENT, {}, lambda reply: checked(reply, like, set(), set()))
    return SecureSum(room, faults or Faults(), "round 0").of(dict.fromkeys(room.vectors, part))
