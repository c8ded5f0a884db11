"""Layers that stay with the clients: each trains its own, and the server aggregates the others.

    start of client k:     w^(t) with v_k^(t) in the entries of these layers (w^(0)'s, before it has trained)
    after local training:  v_k^(t+1) is what it has there,  Δ_k = w_k − w^(t) elsewhere and 0 there

So nothing that is local enters an update, a norm, a cosine or a remembered update. The server's model has w^(0) in
these entries for good. What a simulation tests on the common test set, and gives as the final model, has there
Σ_k N_k v_k / Σ_k N_k over the clients that have trained; a client that has not is served by that too. The adjoint and
engines over a network have no such layers: both refuse them.

FedBN keeps the normalisation layers, with their running statistics, where clients' features differ: Li, Jiang, Zhang,
Kamp and Dou, "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021. FedPer keeps the
last layers, here the last one, where their labels differ: Arivazhagan, Aggarwal, Singh and Choudhary, "Federated
learning with personalization layers", 2019.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout

OwnLayers = Literal["none", "normalization", "last"]
"""Which layers stay with the clients: none, all normalisation layers with their running statistics, or the last one."""


def own_places(kind: OwnLayers, layout: ParamLayout) -> Tensor:
    """Where in w the layers lie that stay with the clients, [n], ascending.

    The last layer is the one of the last trainable parameter.

    Args:
        kind: Which layers.
        layout: What the entries of a model are.

    Raises:
        InputError: The model has no such layer, or no other.

    >>> from torch import nn
    >>> layout = ParamLayout.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)))
    >>> own_places("normalization", layout).tolist()
    [8, 9, 10, 11, 15, 16, 17, 18]
    >>> own_places("last", layout).tolist()
    [12, 13, 14]
    """
    last = layout.names[-1].rpartition(".")[0] if layout.names else ""
    chosen, begin = [], 0
    shapes = zip((*layout.names, *layout.buffer_names), (*layout.shapes, *layout.buffer_shapes), strict=True)
    for name, shape in shapes:
        end = begin + shape.numel()
        if name in layout.normalization if kind == "normalization" else name.rpartition(".")[0] == last:
            chosen.append(torch.arange(begin, end))
        begin = end
    if not chosen:
        raise InputError(
            "normalisation layers are to stay with the clients, and the model has none; give it some, or keep its last "
            "layer (own_layers='last', the method fedper)."
        )
    places = torch.cat(chosen)
    if int((places < layout.num_params).sum()) == layout.num_params:
        raise InputError(
            f"all parameters of the model are in layers that stay with the clients (own_layers='{kind}'), so that "
            "nothing is left to aggregate; give a model with more layers, or compare with the reference 'local'."
        )
    return places


@dataclass(frozen=True)
class OwnEntries:
    """The clients' own layers before a round, or after a run.

    Attributes:
        places: Where they lie in w, [n].
        values: v_k [n] by the client's index, of those that have trained.

    >>> own = OwnEntries(torch.tensor([1]), {0: torch.tensor([5.0])})
    >>> own.put(torch.zeros(2, 3), [0, 1]).tolist()
    [[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]
    """

    places: Tensor
    values: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, kind: OwnLayers, layout: ParamLayout, model: Tensor) -> "OwnEntries | None":
        """Before the first round; None where no layer stays with the clients."""
        return None if kind == "none" else cls(own_places(kind, layout).to(model.device))

    def put(self, models: Tensor, clients: Iterable[int]) -> Tensor:
        """Models [P, d] of some clients, each with its own layers in it."""
        models = models.clone(memory_format=torch.contiguous_format)
        for model, k in zip(models, clients, strict=True):
            if k in self.values:
                model[self.places] = self.values[k]
        return models

    def shared(self, rows: Tensor) -> Tensor:
        """Vectors [P, d] with 0 in the entries of these layers."""
        return rows.index_fill(1, self.places, 0.0)

    def trained(self, clients: Sequence[int], values: Tensor) -> "OwnEntries":
        """After a round in which some clients came to v_k [P, n]."""
        fresh = dict(zip(clients, values.detach().unbind(), strict=True))
        return OwnEntries(self.places, dict(sorted({**self.values, **fresh}.items())))

    def mean_in(self, model: Tensor, num_examples: Tensor) -> Tensor:
        """w [d] with the mean of the v_k in it, weighted by N_k [K]; as it is where nobody has trained."""
        if not self.values:
            return model
        weights = num_examples[list(self.values)].to(model)
        return model.index_copy(0, self.places, weights / weights.sum() @ torch.stack(list(self.values.values())))

    def to_tensors(self) -> dict[str, Tensor]:
        """All of it by name, for a checkpoint."""
        return {"own_places": self.places} | {f"own-{k}": values for k, values in self.values.items()}

    @classmethod
    def from_tensors(cls, found: Mapping[str, Tensor], device: torch.device) -> "OwnEntries | None":
        """What `to_tensors` gave, among other tensors; ValueError where its vectors are not alike."""
        if "own_places" not in found:
            return None
        places = found["own_places"].to(device)
        own = {int(name.removeprefix("own-")): t.to(device) for name, t in found.items() if name.startswith("own-")}
        if places.dtype != torch.long or any(values.shape != places.shape for values in own.values()):
            raise ValueError("its own layers are not alike")
        return cls(places, dict(sorted(own.items())))
