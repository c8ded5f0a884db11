"""The theorem applied to weights and a federation."""

import math

import numpy as np
import torch

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.engines.simulation.schedule import ClientSlice
from fedunfold.local.optimizers import LocalOptimizer
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import simplex_violation
from fedunfold.studies.theory.formulas import (
    a_tilde,
    b_tilde_parts,
    bound_terms,
    c_tilde,
    conditions,
    d_per_l2,
    effective_steps,
    local_factors,
    recast_weights,
    weight_variances,
)
from fedunfold.studies.theory.records import Constants, Terms, Theory
from fedunfold.training.methods import learned_method


def analyse(
    weights: np.ndarray,
    sizes: np.ndarray,
    steps: np.ndarray,
    lr: float,
    update: LocalOptimizer,
    constants: Constants | None = None,
    *,
    recast: bool = False,
) -> Theory:
    """Everything above for weights Θ[T, K], N_k[K], steps τ[T, K], η and a local update.

    With `recast`, clients that walk unscaled (sgd, prox, momentum) are described by the weights and τ_eff of
    `recast_weights`, for which the theorem is about the run as it is; all figures then belong to those.
    """
    constants = constants or Constants()
    recast = recast and not (update.accumulate or update.normalise_steps)
    weights, sizes, steps = _checked(weights, sizes, steps, lr)
    factors = local_factors(steps, sizes, lr, update)
    effective = effective_steps(factors, sizes)
    if recast:
        weights, effective = recast_weights(weights, factors)
    rescaled = recast or update.accumulate
    reach = np.broadcast_to(effective[:, None], steps.shape) if rescaled else factors.l1
    rounds, clients = weights.shape
    variances = weight_variances(weights)
    mean_steps = float(steps.mean(1).mean())
    a, a_published = (a_tilde(weights, factors, scale) for scale in (effective, np.ones(rounds)))
    b = b_tilde_parts(weights, factors)
    c = c_tilde(factors)

    def bound(a: float, b: float) -> Terms:
        return bound_terms(
            a_tilde=a,
            b_tilde=b,
            c_tilde=c,
            variances=variances.tolist(),
            effective_steps=float(effective.mean()),
            rounds=rounds,
            lr=lr,
            constants=constants,
        )

    return Theory(
        rounds=rounds,
        clients=clients,
        lr=lr,
        rate_lr=math.sqrt(clients / (mean_steps * rounds)),
        recast=recast,
        objective=tuple(weights.mean(0).tolist()),
        variances=tuple(variances.tolist()),
        mean_steps=mean_steps,
        effective_steps=tuple(effective.tolist()),
        a_tilde=a,
        a_tilde_published=a_published,
        b_tilde=float(b.sum()),
        b_tilde_published=tuple(b.tolist()),
        c_tilde=c,
        d_per_l2=d_per_l2(factors, lr),
        constants=constants,
        conditions=conditions(factors, effective, reach, lr, constants),
        bound=bound(a, float(b.sum())),
        published_bound=bound(a_published, float(b.max())),
    )


def analyse_learned(
    learned: LearnedWeights,
    env: Environment,
    constants: Constants | None = None,
    *,
    recast: bool = False,
) -> Theory:
    """The same for learned weights and the environment they were learned on, every client always present.

    Clients make τ_k^(t) = E_k^(t) ⌈N_k/B⌉ steps of the local update that the weights were learned for.
    """
    data = env.load()
    fitting = learned.adapt(data.keys, env.rounds, env.digest(data))
    steps = [
        [
            ClientSlice(key, 0, size, env.epochs(k, t)).steps(env.batch_size)
            for k, (key, size) in enumerate(zip(data.keys, data.sizes, strict=True))
        ]
        for t in range(env.rounds)
    ]
    return analyse(
        fitting.weights.numpy(),
        np.array(data.sizes),
        np.array(steps),
        env.lr,
        learned_method(fitting).algorithm.update,
        constants,
        recast=recast,
    )


def _checked(
    weights: np.ndarray, sizes: np.ndarray, steps: np.ndarray, lr: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights, sizes, steps = np.asarray(weights, np.float64), np.asarray(sizes), np.asarray(steps)
    if weights.ndim != 2 or not weights.size:
        raise InputError(f"weights must be a table [rounds, clients], not of shape {list(weights.shape)}.")
    if steps.shape != weights.shape or sizes.shape != weights.shape[1:]:
        raise InputError(
            f"weights {list(weights.shape)}, steps {list(steps.shape)} and sizes {list(sizes.shape)} must be "
            "[T, K], [T, K] and [K]."
        )
    names = [str(k) for k in range(len(sizes))]
    for t, row in enumerate(weights):
        if problem := simplex_violation(torch.from_numpy(row.copy()), names):
            raise InputError(f"weights: round {t} {problem}.")
    if not (sizes > 0).all():
        raise InputError("sizes must be positive: every client holds at least one sample.")
    if not (np.issubdtype(steps.dtype, np.integer) and (steps >= 1).all()):
        raise InputError("steps must be whole numbers >= 1: the theorem has every client train in every round.")
    if not (lr > 0 and math.isfinite(lr)):
        raise InputError(f"lr must be a finite number > 0, not {lr}.")
    return weights, sizes, steps
