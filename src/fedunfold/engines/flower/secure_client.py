"""A client app's answers in all five stages of a secure sum, and to requests for projections.

What a site demands is in its node-config, because the run's config is the server's to write: `secure-aggregation`,
whether no vector is to leave it but in a secure sum; `roster`, a JSON file of all sites' names and public keys, or
"none" where the server is trusted to follow the protocol; `signing-key`, the file with the site's private key;
`record`, the file with what it has revealed; and the bounds of `secagg.policy`, such as `min-members`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedunfold.consortium.roster import RECIPE, load_roster
from fedunfold.core.errors import InputError
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import Arrays, ClientReply, TrainInstruction
from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.keys import Identity, digest
from fedunfold.engines.flower.secagg.policy import SitePolicy
from fedunfold.engines.flower.secagg.protocol import read, to_record
from fedunfold.engines.flower.secagg.record import Claim, SumRecord
from fedunfold.engines.flower.secagg.statements import common_request, model_digest, own_request, scale_of
from fedunfold.engines.flower.wire import read_instruction, reply_record
from fedunfold.io.atomic import read_json, read_text, write_atomically
from fedunfold.io.limits import LimitError

OpenClient = Callable[[Context], LocalClient]
Roster = Mapping[str, str]
"""Every site's public key by its name, as OpenSSH or PEM writes it."""
SECURE = "secure-aggregation"
"""The setting of a node or a run under which a client shows no vector of its own."""
STATE, RECORD = "fedunfold-sum", "fedunfold-record"
"""Where a client's secrets are stored between the stages of the one sum it takes part in, and what it has revealed."""


def add_secagg_handlers(app: ClientApp, open_client: OpenClient, roster: Roster | None) -> None:
    """Let an app reply in all stages of a secure sum, and to requests for projections.

    Args:
        app: The app.
        open_client: Finds the client of a context.
        roster: The sites' public keys; by default the node-config says where they are.
    """

    @app.query("advertise")
    def advertise(message: Message, context: Context) -> Message:
        site = Site.of(context, open_client(context), roster)
        secrets, keys = site.member.advertise(read(message.content, protocol.SetupRequest), len(site.record.sums))
        return _answer(message, context, secrets, to_record(keys))

    @app.query("share")
    def share(message: Message, context: Context) -> Message:
        member = Site.of(context, open_client(context), roster).member
        secrets, shares = member.share(_stored(context), read(message.content, protocol.KeyBroadcast))
        return _answer(message, context, secrets, to_record(shares))

    @app.query("mask")
    def mask(message: Message, context: Context) -> Message:
        site = Site.of(context, open_client(context), roster)
        delivery, (instruction, arrays) = (
            read(message.content, protocol.ShareDelivery),
            read_instruction(message.content),
        )
        secrets, masked, metrics = site.mask(_stored(context), delivery, instruction, arrays)
        reply = ClientReply(metrics, {"masked": torch.from_numpy(masked.view("int64"))})
        return _answer(message, context, secrets, reply_record(reply))

    @app.query("confirm")
    def confirm(message: Message, context: Context) -> Message:
        site = Site.of(context, open_client(context), roster)
        secrets, confirmation = site.confirm(_stored(context), read(message.content, protocol.SurvivorList))
        return _answer(message, context, secrets, to_record(confirmation))

    @app.query("unmask")
    def unmask(message: Message, context: Context) -> Message:
        member = Site.of(context, open_client(context), roster).member
        shares = member.unmask(_stored(context), read(message.content, protocol.Confirmations))
        del context.state[STATE]  # there is no second reply, with other survivors
        return Message(to_record(shares), reply_to=message)

    @app.query("inner_products")
    def inner_products(message: Message, context: Context) -> Message:
        site = Site.of(context, open_client(context), roster)
        return Message(reply_record(site.project(*read_instruction(message.content))), reply_to=message)


@dataclass(frozen=True)
class Site:
    """A client, what it demands of a server, and what it has revealed.

    Attributes:
        client: The client.
        member: Its part in sums.
        context: Where the record is stored, if it has no file.
    """

    client: LocalClient
    member: SecAggClient
    context: Context

    @classmethod
    def of(cls, context: Context, client: LocalClient, roster: Roster | None) -> "Site":
        """A client as its node-config has it."""
        policy, identity = SitePolicy.of(context.node_config), _identity(context, client.client_id, roster)
        return cls(client, SecAggClient(client.client_id, identity, policy), context)

    @property
    def record(self) -> SumRecord:
        """What it has revealed so far, from its file or from the context's state."""
        state, file = self.context.state.config_records, self.context.node_config.get("record")
        known = state[RECORD] if RECORD in state else ConfigRecord({"size": 0, "record": ""})
        if file is None:
            text = str(known["record"])
            return SumRecord.model_validate_json(text) if text else SumRecord()
        return self._read(Path(str(file)).expanduser(), known["size"])

    def _read(self, file: Path, size: Any) -> SumRecord:
        name = self.client.client_id
        try:
            text = read_text(file)
            found = SumRecord.model_validate_json(text) if text else SumRecord()
        except OSError as error:
            raise InputError(
                f"client '{name}' cannot read its record {file} ({error.strerror}), without which it would reveal the "
                "same again; bring it back, or, if this site has never taken part, make an empty file of that name."
            ) from error
        except LimitError:
            raise
        except ValueError as error:
            raise InputError(
                f"client '{name}' cannot read its record {file}, which is damaged; bring it back."
            ) from error
        if found.size < size:
            raise InputError(
                f"client '{name}' finds less in its record {file} than it has revealed in this run; bring it back."
            )
        return found

    def save(self, record: SumRecord) -> None:
        """Store what it has revealed, before it does."""
        file, text = self.context.node_config.get("record"), record.model_dump_json()
        if file is not None:
            path = Path(str(file)).expanduser()
            write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        self.context.state[RECORD] = ConfigRecord({"size": record.size, "record": "" if file else text})

    def mask(
        self,
        secrets: Secrets | None,
        delivery: protocol.ShareDelivery,
        instruction: TrainInstruction,
        arrays: Arrays,
    ) -> tuple[Secrets, np.ndarray, Mapping[str, float]]:
        """The client's masked vector, and the numbers it reports beside it, where it agrees to the sum."""
        kind, array, replies = delivery.message_type, delivery.array, list[ClientReply]()
        self._check(instruction, arrays, delivery.weight)

        def vector() -> np.ndarray:
            reply: ClientReply = getattr(self.client, kind)(instruction, arrays)
            if array not in reply.arrays:
                raise InputError(f"client '{self.client.client_id}' has no '{array}' to add up after {kind}.")
            replies.append(reply)
            added: np.ndarray = delivery.weight * reply.arrays[array].double().numpy()
            return added

        def record(who: bytes) -> tuple[str, ...]:
            claims = _claims(f"{kind}:{array}", instruction, arrays, who)
            self.save(self._agreed(self.record.after_sum, claims))
            return tuple(claim.key for claim in claims)

        scale, request = scale_of(instruction, arrays, array, delivery.weight), common_request(instruction, arrays)
        secrets, masked = self.member.mask(secrets, delivery, vector, scale=scale, request=request, record=record)
        return secrets, masked, replies[0].metrics

    def confirm(
        self, secrets: Secrets | None, survivors: protocol.SurvivorList
    ) -> tuple[Secrets, protocol.Confirmation]:
        """The client's signature under the list of survivors."""
        secrets, confirmation = self.member.confirm(secrets, survivors)
        self.save(self._agreed(self.record.after_survivors, secrets.claims, digest(*secrets.survivors).hex()))
        return secrets, confirmation

    def project(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """⟨λ, w_k − w^(t)⟩, where the client has not answered too many of them."""
        self._check(instruction, arrays)
        policy = self.member.policy
        limits = {"a_model": policy.max_projections_a_round, "in_all": policy.projections(self.client.num_params)}
        self.save(self._agreed(self.record.after_projection, model_digest(arrays["model"]).hex(), **limits))
        return self.client.inner_products(instruction, arrays)

    def _check(self, instruction: TrainInstruction, arrays: Arrays, weight: float = 1.0) -> None:
        if "model" not in arrays:
            raise InputError("the message comes without the array 'model'.")
        self._agreed(self.member.policy.check_request, instruction, arrays["model"], self.client.num_params, weight)

    def _agreed(self, check: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What a check returns; its refusal is a sentence that begins with the client."""
        try:
            return check(*given, **named)
        except InputError as error:
            raise InputError(f"client '{self.client.client_id}' {error}") from error


def _claims(term: str, instruction: TrainInstruction, arrays: Arrays, who: bytes) -> tuple[Claim, ...]:
    """By what a client's vector is on record: by its round, and by its model, whatever the server calls the round."""
    model = digest(term, model_digest(arrays["model"])).hex()
    alike = digest(who, own_request(instruction, arrays, named=False)).hex()
    by_model = Claim(model, alike, f"what comes of the model of round {instruction.round}")
    if term.startswith("evaluate"):  # a test has no round of its own
        return (by_model,)
    named = digest(who, own_request(instruction, arrays)).hex()
    about = f"round {instruction.round} of run {instruction.run}"
    name = digest(term, instruction.run, str(instruction.round)).hex()
    return Claim(name, named, about), by_model


def _identity(context: Context, client_id: str, roster: Roster | None) -> Identity | None:
    """What the client signs with; None where it trusts the server to follow the protocol."""
    node = context.node_config
    if roster is None:
        where = node.get("roster")
        if where == "none" or (where is None and not node.get(SECURE)):
            return None
        if where is None:
            raise InputError(
                f"client '{client_id}' has {SECURE}=true and no roster in its node-config; name there the roster, the "
                'signing-key and the record, or give roster="none" to trust the server to follow the protocol.'
            )
        roster = _read_roster(Path(str(where)).expanduser())
    for name in ("signing-key", "record"):
        if name not in node:
            raise InputError(f"client '{client_id}' has a roster and no {name} in its node-config; name a file there.")
    return Identity.of(client_id, Path(str(node["signing-key"])), roster)


def _read_roster(file: Path) -> Roster:
    """Public keys by name: a table of them, or the recipe of a consortium, which lists its sites."""
    try:
        found = read_json(file)
    except OSError as error:
        raise InputError(f"cannot read the roster {file}: {error.strerror}.") from error
    if isinstance(found, dict) and found.get("kind") == RECIPE:
        return {site.name: site.public_key for site in load_roster(file).sites}
    if not (isinstance(found, dict) and all(isinstance(text, str) for text in found.values())):
        raise InputError(f"the roster {file} must be a JSON table of names and public keys.")
    return found


def _answer(message: Message, context: Context, secrets: Secrets, content: RecordDict) -> Message:
    """The reply of a stage, whose secrets are stored for the next."""
    context.state[STATE] = protocol.to_config(secrets)
    return Message(content, reply_to=message)


def _stored(context: Context) -> Secrets | None:
    return protocol.from_config(context.state.config_records[STATE], Secrets) if STATE in context.state else None
