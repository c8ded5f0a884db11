"""Members of a secure sum in this process, each with a vector; some drop out in one of the stages."""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import RecordDict

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.replies import ExpectedReply
from fedunfold.engines.flower.schema import ClientReply, SumStage, TrainInstruction
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.policy import SitePolicy
from fedunfold.engines.flower.secagg.protocol import (
    Confirmations,
    KeyBroadcast,
    SetupRequest,
    ShareDelivery,
    SurvivorList,
    read,
    to_record,
)
from fedunfold.engines.flower.secagg.server import SumProtocol, SumResult, SumTerm
from fedunfold.engines.flower.secagg.statements import common_request
from fedunfold.engines.flower.wire import read_instruction, reply_record
from fedunfold.local import sgd
from tests.support.site_keys import identity

INSTRUCTION = TrainInstruction(run="trial-0", round=0, seed=0, lr=0.1, batch_size=1, epochs=1, optimizer=sgd())


class Room:
    """Carries messages to members; `lost` says in which stage one drops out, `received` what the server got."""

    def __init__(
        self,
        vectors: Mapping[str, np.ndarray],
        lost: Mapping[str, SumStage] | None = None,
        policy: SitePolicy | None = None,
    ) -> None:
        self.vectors, self.lost, self.policy = vectors, dict(lost or {}), policy or SitePolicy()
        self.roster = tuple(vectors)
        self.secrets: dict[str, Secrets | None] = {}
        self.received: list[tuple[SumStage, str, RecordDict]] = []
        self.refused: dict[str, str] = {}

    def member(self, key: str) -> SecAggClient:
        return SecAggClient(key, identity(key, self.roster), self.policy)

    def __call__(self, stage: SumStage, messages: Mapping[str, RecordDict], /) -> Mapping[str, RecordDict | str]:
        replies: dict[str, RecordDict | str] = {}
        for key, message in messages.items():
            if self.lost.get(key) == stage:
                continue
            try:
                replies[key] = reply = self.reply(stage, key, message)
                self.received.append((stage, key, reply))
            except InputError as error:
                replies[key] = self.refused[key] = str(error)
        return replies

    def reply(self, stage: SumStage, key: str, message: RecordDict) -> RecordDict:
        member, secrets = self.member(key), self.secrets.get(key)
        if stage == "advertise":
            self.secrets[key], keys = member.advertise(read(message, SetupRequest))
            return to_record(keys)
        if stage == "share":
            self.secrets[key], shares = member.share(secrets, read(message, KeyBroadcast))
            return to_record(shares)
        if stage == "mask":
            delivery, request = read(message, ShareDelivery), common_request(*read_instruction(message))
            self.secrets[key], masked = member.mask(
                secrets, delivery, lambda: self.vectors[key], scale=delivery.weight, request=request
            )
            return reply_record(ClientReply({}, {"masked": torch.from_numpy(masked.view(np.int64))}))
        if stage == "confirm":
            self.secrets[key], confirmation = member.confirm(secrets, read(message, SurvivorList))
            return to_record(confirmation)
        revealed = member.unmask(secrets, read(message, Confirmations))
        self.secrets[key] = None
        return to_record(revealed)


def term(length: int, weight: float = 1.0) -> SumTerm:
    """An update of so many entries."""
    expected = ExpectedReply({"masked": torch.empty(length, dtype=torch.int64)})
    return SumTerm("train", "updates", INSTRUCTION, {"model": torch.zeros(length)}, expected.check, weight)


def add_up(room: Room, failures: Failures | None = None) -> SumResult:
    """The secure sum of everybody in the room."""
    length = len(next(iter(room.vectors.values())))
    return SumProtocol(room, failures or Failures(), "round 0").run(dict.fromkeys(room.vectors, term(length)))
