"""The theorem applied to weights and a federation."""

import math

import numpy as np
import torch

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.parts import LocalOptimizer
from fedunfold.local.nova import Accumulated
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import simplex_violation
from fedunfold.studies.cases import local_steps
from fedunfold.studies.theory import formulas
from fedunfold.studies.theory.quantities import Constants, Theory


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
    """What the theorem says about weights and a federation.

    Args:
        weights: Θ[T, K].
        sizes: N_k, [K].
        steps: τ_k^(t), [T, K].
        lr: η.
        update: The local update.
        constants: What is known of the objective.
        recast: Describe clients whose local steps are not scaled (sgd, prox, momentum) by the weights and τ_eff of
            `recast_weights`, for which the theorem is about the run as it is; all figures then belong to those.

    Raises:
        InputError: The arrays do not fit together, or cannot be those of a run.
    """
    constants = constants or Constants()
    recast = recast and not update.normalized
    weights, sizes, steps = _checked(weights, sizes, steps, lr)
    factors = formulas.local_factors(steps, sizes, lr, update)
    effective = formulas.effective_steps(factors, sizes)
    if recast:
        weights, effective = formulas.recast_weights(weights, factors)
    rescaled = recast or isinstance(update, Accumulated)
    reach = np.broadcast_to(effective[:, None], steps.shape) if rescaled else factors.l1
    rounds, clients = weights.shape
    mean_steps = float(steps.mean(1).mean())
    b = formulas.b_tilde_parts(weights, factors)
    return Theory(
        rounds=rounds,
        clients=clients,
        lr=lr,
        rate_lr=math.sqrt(clients / (mean_steps * rounds)),
        recast=recast,
        objective=tuple(weights.mean(0).tolist()),
        variances=tuple(formulas.weight_variances(weights).tolist()),
        mean_steps=mean_steps,
        effective_steps=tuple(effective.tolist()),
        a_tilde=formulas.a_tilde(weights, factors, effective),
        a_tilde_published=formulas.a_tilde(weights, factors, np.ones(rounds)),
        b_tilde=float(b.sum()),
        b_tilde_published=tuple(b.tolist()),
        c_tilde=formulas.c_tilde(factors),
        d_per_l2=formulas.d_per_l2(factors, lr),
        constants=constants,
        conditions=formulas.conditions(factors, effective, reach, lr, constants),
    )


def analyse_learned(
    learned: LearnedWeights,
    env: Environment,
    constants: Constants | None = None,
    *,
    recast: bool = False,
) -> Theory:
    """The same for learned weights and the environment they were learned on, with every client in every round.

    Clients make τ_k^(t) = E_k^(t) ⌈N_k/B⌉ steps of the local update that the weights were learned for.

    Args:
        learned: The weights.
        env: The environment.
        constants: What is known of the objective.
        recast: As in `analyse`.

    Raises:
        InputError: The weights were learned on another federation.
    """
    data = env.load()
    fitting = learned.adapt(data.keys, env.rounds, env.digest(data))
    steps, update = local_steps(env, data, env.rounds), fitting.algorithm.local
    return analyse(fitting.weights.numpy(), np.array(data.sizes), steps, env.lr, update, constants, recast=recast)


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
