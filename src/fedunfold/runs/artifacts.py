"""The files that a run leaves, by what was run: each name with how it is written, whole or not at all."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from safetensors.torch import save as serialize
from torch import nn

from fedunfold import plotting
from fedunfold.api import trained_module
from fedunfold.client_scores import client_scores
from fedunfold.config import Environment
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import finite
from fedunfold.fine_tuning import FineTuned
from fedunfold.io.atomic import write_atomically
from fedunfold.leave_out import LeftOut
from fedunfold.pretraining.finished import card as rule_card
from fedunfold.pretraining.finished import finished_rule
from fedunfold.pretraining.learner import Pretraining, Progress
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule_file import save_rule
from fedunfold.runs.model_card import Site, model_card, sites_of
from fedunfold.runs.schema import (
    CARD,
    CLIENT_SCORES,
    LEARNED,
    METRICS,
    MODEL,
    MODEL_RECORD,
    MOST_WEIGHTS,
    PRETRAINING,
    RESULT,
    RULE,
    file_name,
)
from fedunfold.runs.trained_model import ModelRecord
from fedunfold.tracking.scalars import iteration_records, round_record
from fedunfold.training.comparison import Comparison
from fedunfold.training.methods import Method

if TYPE_CHECKING:
    from fedunfold.engines.flower import RemoteFederation  # needs an extra

Files = Mapping[str, Callable[[Path], object]]


def of_learning(learned: LearnedWeights) -> Files:
    """Learned weights, the outer loss of every iteration, and two figures."""
    return {
        LEARNED: learned.save,
        METRICS: _lines_writer(iteration_records(learned)),
        "weights.png": partial(plotting.save, plotting.weights(learned)),
        "outer_loss.png": partial(plotting.save, plotting.outer_loss(learned)),
    }


def of_run(environment: Environment, method: Method, result: RunResult) -> Files:
    """A line for each round, how well the final model serves each client, and the model with its card.

    Args:
        environment: What was trained on.
        method: How.
        result: What came out.
    """
    record, module = ModelRecord.of(environment), trained_module(environment, result)
    tested_on = f"the test set, {len(environment.load().y_test)} rows"
    card = model_card(environment, method, result, record, module, sites_of(environment), tested_on)
    return {
        METRICS: _lines_writer(_round_lines(method.name, 0, result)),
        CLIENT_SCORES: _lines_writer(_client_lines(environment, method.name, [result])),
        **of_model(record, module, card),
    }


def of_remote_run(
    federation: "RemoteFederation", method: Method, result: RunResult, record: ModelRecord, tested_on: str
) -> Files:
    """The same model and card of a federation over Flower; the clients that hold out rows test the final model.

    Args:
        federation: The clients.
        method: How the model was trained.
        result: What came out.
        record: What the model is.
        tested_on: What the test rows are of.
    """
    sites = [
        Site(client.client_id, client.num_examples, client.label_counts, federation.num_held_out[client.client_id])
        for client in federation.clients
    ]
    result, module = replace(result, held_out=federation.held_out_scores(result.model)), federation.module(result.model)
    tested = f"{tested_on}, {federation.num_test_rows} rows"
    card = model_card(federation.environment, method, result, record, module, sites, tested)
    return of_model(record, module, card)


def of_model(record: ModelRecord, module: nn.Module, card: str) -> Files:
    """A trained model: its parameters by name, what it is, and its card.

    Args:
        record: What it is.
        module: The model.
        card: Its card.
    """
    content = serialize({name: tensor.contiguous() for name, tensor in module.state_dict().items()})
    return {
        MODEL: lambda path: write_atomically(path, lambda temporary: temporary.write_bytes(content)),
        MODEL_RECORD: text_writer(record.model_dump_json(indent=2) + "\n"),
        CARD: text_writer(card),
    }


def of_comparison(environment: Environment, comparison: Comparison, unfinished: Mapping[str, LearnedWeights]) -> Files:
    """Results, records and figures, and all weights that were learned.

    Args:
        environment: What the methods were compared on.
        comparison: The methods with results.
        unfinished: Weights of methods without results, by the method's name.
    """
    files: dict[str, Callable[[Path], object]] = {}
    if comparison.methods:
        files[RESULT] = text_writer(json.dumps(comparison.as_json(), indent=2) + "\n")
        files[METRICS] = _lines_writer(
            line
            for result in comparison.methods
            for trial, outcome in enumerate(result.trials)
            for line in _round_lines(result.name, trial, outcome)
        )
        files[CLIENT_SCORES] = _lines_writer(
            line for result in comparison.methods for line in _client_lines(environment, result.name, result.trials)
        )
        stem = file_name(comparison.primary.name)
        files[f"{stem}.png"] = partial(plotting.save, plotting.scores(comparison))
        if comparison.has_times:
            files[f"{stem}-over-time.png"] = partial(plotting.save, plotting.scores_over_time(comparison))
    finished = {result.name: result.learned for result in comparison.methods if result.learned is not None}
    for name, learned in {**unfinished, **finished}.items():
        stem = file_name(name)
        files[f"{stem}.safetensors"] = learned.save
        files[f"{stem}-weights.png"] = partial(plotting.save, plotting.weights(learned))
        files[f"{stem}-outer-loss.png"] = partial(plotting.save, plotting.outer_loss(learned))
    return files


def of_pretraining(settings: Pretraining, progress: Progress) -> Files:
    """The rule, how it was learned, and its card."""
    described = settings.model_dump(mode="json", exclude_none=True)
    return {
        RULE: partial(save_rule, finished_rule(settings, progress)),
        PRETRAINING: text_writer(tomli_w.dumps(described)),
        CARD: text_writer(rule_card(settings, progress)),
    }


def of_fine_tuning(tuned: FineTuned) -> Files:
    """The rule, and its validation loss before the first step and after each."""
    lines = ({"step": m, "validation_loss": finite(loss)} for m, loss in enumerate(tuned.losses))
    return {RULE: partial(save_rule, tuned.rule), METRICS: _lines_writer(lines)}


def of_left_out(found: LeftOut) -> Files:
    """What methods reach on each client without it."""
    return {RESULT: text_writer(json.dumps(found.as_json(), indent=2) + "\n")}


def text_writer(text: str) -> Callable[[Path], object]:
    """How a text is written to a file."""
    return lambda path: write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _lines_writer(records: Iterable[Mapping[str, Any]]) -> Callable[[Path], object]:
    return text_writer("".join(json.dumps(record) + "\n" for record in records))


def _round_lines(method: str, trial: int, result: RunResult) -> Iterable[Mapping[str, Any]]:
    for t, evaluation in enumerate(result.evaluations):
        yield {
            **round_record(method, trial, t, evaluation),
            **_weights_of(result, t),
            "rejected": {entry.client: entry.reason for entry in result.rejected if entry.round == t},
            **({"time": result.times[t]} if result.times else {}),
            **({"staleness": result.staleness[t]} if result.staleness else {}),
        }


def _weights_of(result: RunResult, t: int) -> Mapping[str, Any]:
    """Θ^(t) and who took part; of a large federation the weights of these clients alone, and their numbers."""
    weights, participated = result.weights[t], result.participated[t]
    if len(weights) <= MOST_WEIGHTS:
        return {"weights": weights.tolist(), "participated": participated.tolist()}
    clients = participated.nonzero().flatten()
    return {"clients": clients.tolist(), "weights": weights[clients].tolist()}


def _client_lines(environment: Environment, method: str, results: Sequence[RunResult]) -> Iterable[Mapping[str, Any]]:
    """The primary metric of the final models on each client's own training data, fractions in percent."""
    for trial, scores in enumerate(client_scores(environment, results)):
        factor = results[trial].evaluations[-1].primary.factor()
        line = {"method": method, "trial": trial, "client_scores": [finite(factor * score) for score in scores]}
        more = {"held_out": results[trial].held_out, "fine_tuned": results[trial].fine_tuned}
        yield line | {what: [finite(factor * own) for own in found.values()] for what, found in more.items() if found}
