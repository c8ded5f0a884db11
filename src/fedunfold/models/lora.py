"""Low-rank adapters of pretrained transformers, by peft."""

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedunfold.core.errors import InputError
from fedunfold.core.extras import HUB_ERRORS, import_extra, quiet
from fedunfold.core.params import place_model
from fedunfold.core.task import Task
from fedunfold.models.load_once import LoadOnce, reset_trainable

NEEDS = "adapters need peft and transformers; run: pip install 'fedunfold[peft]'"
ADAPTER = "default"  # peft's name for the only one


class Adapted(nn.Module):
    """A module with adapters in it, that gives plain logits.

    Attributes:
        model: The module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **inputs: Tensor) -> Tensor:
        """Logits; transformers give them among other outputs."""
        outputs = self.model(*args, **inputs)
        logits: Tensor = getattr(outputs, "logits", outputs)
        return logits


def lora(
    base: str | Path | nn.Module,
    task: Task | None = None,
    *,
    r: int = 8,
    alpha: float = 16,
    target_modules: Sequence[str] | str | None = None,
    dropout: float = 0.0,
    train_modules: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> LoadOnce:
    """A pretrained transformer of which clients train low-rank adapters:  W x becomes W x + (α/r) B A x.

    W stays as it was loaded, in its own precision, and is never sent. Every run starts from random A and B = 0, as the
    base predicts. A head that the base does not bring, as for its classes, is new and trained whole.

    Args:
        base: A model of the Hugging Face hub, a folder with one (config.json and model.safetensors), or a module. Only
            safetensors are read, and code that a repository brings is never run.
        task: What the model is loaded for: its logits are [B, C] for text or images, [B, S, V] for `next_token`. A
            module needs none.
        r: The adapters' rank.
        alpha: α.
        target_modules: Names of the linear layers that get adapters, or "all-linear"; by default what peft chooses for
            this kind of model, and all linear layers where it knows none.
        dropout: Of the adapters' inputs. The base's own dropout is off where it is loaded here.
        train_modules: Names of modules that are trained whole beside the adapters.
        dtype: In which precision the base is loaded; by default as it was saved.

    Returns:
        What a run takes as its model.

    Raises:
        InputError: peft is not installed, or the model cannot be loaded or adapted; the message says why.

    Reference: Hu et al. 2022, LoRA: Low-Rank Adaptation of Large Language Models.

    >>> net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> adapted = lora(net, r=2, target_modules=["0"], train_modules=["2"])()
    >>> sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    522
    """
    if not (r >= 1 and 0 <= dropout < 1):
        raise InputError(f"lora needs r >= 1 and 0 <= dropout < 1, not {r} and {dropout}.")
    peft = import_extra("peft", NEEDS)

    def build() -> nn.Module:
        module, new = (_frozen(base), ()) if isinstance(base, nn.Module) else _loaded(str(base), task, dtype)
        heads = (*new, *train_modules)
        known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        kind = getattr(getattr(module, "config", None), "model_type", None)
        chosen = target_modules if target_modules is not None else known.get(kind, "all-linear")
        settings = peft.LoraConfig(
            r=r,
            lora_alpha=alpha,
            target_modules=chosen if isinstance(chosen, str) else list(chosen),
            lora_dropout=dropout,
            exclude_modules=list(heads) or None,
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft sets it right by itself
                peft.inject_adapter_in_model(settings, module, ADAPTER)
            for head in heads:
                module.get_submodule(head).requires_grad_()
        except HUB_ERRORS as error:
            raise InputError(f"the model takes no adapters: {str(error).splitlines()[0]}") from error
        return place_model(Adapted(module), torch.device("cpu"), torch.promote_types(_precision(module), torch.float32))

    return LoadOnce(build, partial(_initialize, peft))


def _initialize(peft: Any, module: nn.Module) -> None:
    """As peft does: A random and B zero; modules trained whole by their own `reset_parameters`."""
    reset_trainable(module)
    for layer in module.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.reset_lora_parameters(ADAPTER, True)


def _frozen(module: nn.Module) -> nn.Module:
    """A copy that shares its parameters with the given module, which stays as it is."""
    return copy.deepcopy(module, {id(p): nn.Parameter(p.detach(), False) for p in module.parameters()})


def _precision(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _loaded(source: str, task: Task | None, dtype: torch.dtype | None) -> tuple[nn.Module, tuple[str, ...]]:
    """A pretrained model for a task, and the names of the modules that are new in it."""
    transformers = import_extra("transformers", NEEDS)
    if task is None:
        raise InputError("name the task that the model is for, such as task=fu.classification(10).")
    folder = Path(source).expanduser()
    where = str(folder) if folder.is_dir() else source
    try:
        with quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
            settings = {name: 0.0 for name, value in config.to_dict().items() if _is_dropout(name, value)}
            settings |= {"use_cache": False} if task.name == "next_token" else {"num_labels": task.num_outputs}
            model, loading = _kind(transformers, config, task).from_pretrained(
                where,
                dtype=dtype or "auto",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=task.name != "next_token",
                **settings,
            )
    except InputError:
        raise
    except (*HUB_ERRORS, SafetensorError) as error:
        remedy = (
            "the folder needs config.json and model.safetensors"
            if folder.is_dir()
            else "check the name and the network, or give a local folder with the model"
        )
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model {source} cannot be loaded ({first}); {remedy}.") from error
    absent = {*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])}
    return model.requires_grad_(False), _new_modules(source, model, absent)


def _kind(transformers: Any, config: Any, task: Task) -> Any:
    """The class of transformers that loads a model for a task."""
    names = (
        ["AutoModelForCausalLM"]
        if task.name == "next_token"
        else ["AutoModelForSequenceClassification", "AutoModelForImageClassification"]
    )
    for kind in (getattr(transformers, name) for name in names):
        if type(config) in kind._model_mapping:
            return kind
    raise InputError(f"transformers have no {config.model_type} model for the task {task.name}; choose another model.")


def _new_modules(source: str, model: nn.Module, absent: set[str]) -> tuple[str, ...]:
    """The modules that the file does not bring, which must be the head."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    lacking = sorted(key for key in absent if key.startswith(prefix) and ".pooler." not in key)
    if lacking:
        raise InputError(f"model {source} lacks {len(lacking)} of its weights, such as {lacking[0]}.")
    return tuple(sorted({key.rpartition(".")[0] for key in absent}))


def _is_dropout(name: str, value: object) -> bool:
    return ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float)
