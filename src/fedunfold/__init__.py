"""fedunfold: learn how much each client should count in each round of federated learning.

    import fedunfold as fu
    env = fu.environment("digits-label-skew")
    learned = fu.learn_weights(env)
    table = fu.compare(env, [fu.size(), fu.dr(q=1), learned], trials=5)

Names are loaded when first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedunfold.version import VERSION as __version__

if TYPE_CHECKING:
    from fedunfold.environments import Client as Client
    from fedunfold.environments import Environment as Environment
    from fedunfold.environments import ModelSpec as ModelSpec
    from fedunfold.environments import bundled as bundled
    from fedunfold.environments import environment as environment
    from fedunfold.errors import DivergenceError as DivergenceError
    from fedunfold.errors import FedunfoldError as FedunfoldError
    from fedunfold.errors import InputError as InputError
    from fedunfold.experiments.comparing import Comparison as Comparison
    from fedunfold.experiments.comparing import compare as compare
    from fedunfold.experiments.comparing import run as run
    from fedunfold.experiments.comparing import trained_module as trained_module
    from fedunfold.experiments.learning import learn_weights as learn_weights
    from fedunfold.experiments.methods import Method as Method
    from fedunfold.experiments.methods import method as method
    from fedunfold.experiments.methods import method_names as method_names
    from fedunfold.federation import RoundReport as RoundReport
    from fedunfold.report import figures as plot
    from fedunfold.robust import krum as krum
    from fedunfold.robust import median as median
    from fedunfold.robust import trimmed as trimmed
    from fedunfold.rounds import Algorithm as Algorithm
    from fedunfold.rounds import RunResult as RunResult
    from fedunfold.screening import SetAside as SetAside
    from fedunfold.server import adagrad as adagrad
    from fedunfold.server import adam as adam
    from fedunfold.server import plain as plain
    from fedunfold.server import yogi as yogi
    from fedunfold.simulation.engine import SimulatedFederation as SimulatedFederation
    from fedunfold.tracking.protocol import Tracker as Tracker
    from fedunfold.unfolding.learner import Learning as Learning
    from fedunfold.updates import accumulated as accumulated
    from fedunfold.updates import momentum as momentum
    from fedunfold.updates import nova as nova
    from fedunfold.updates import prox as prox
    from fedunfold.updates import sgd as sgd
    from fedunfold.weighting.dr import dr as dr
    from fedunfold.weighting.fedadp import fedadp as fedadp
    from fedunfold.weighting.fedfa import fedfa as fedfa
    from fedunfold.weighting.fixed import fixed as fixed
    from fedunfold.weighting.learned import LearnedWeights as LearnedWeights
    from fedunfold.weighting.rule import rule as rule
    from fedunfold.weighting.size import size as size
    from fedunfold.weighting.uniform import uniform as uniform

_HOMES = {
    "environments": ("Client", "Environment", "ModelSpec", "bundled", "environment"),
    "errors": ("DivergenceError", "FedunfoldError", "InputError"),
    "experiments.comparing": ("Comparison", "compare", "run", "trained_module"),
    "experiments.learning": ("learn_weights",),
    "experiments.methods": ("Method", "method", "method_names"),
    "federation": ("RoundReport",),
    "robust": ("krum", "median", "trimmed"),
    "rounds": ("Algorithm", "RunResult"),
    "screening": ("SetAside",),
    "server": ("adagrad", "adam", "plain", "yogi"),
    "simulation.engine": ("SimulatedFederation",),
    "tracking.protocol": ("Tracker",),
    "unfolding.learner": ("Learning",),
    "updates": ("accumulated", "momentum", "nova", "prox", "sgd"),
    "weighting.dr": ("dr",),
    "weighting.fedadp": ("fedadp",),
    "weighting.fedfa": ("fedfa",),
    "weighting.fixed": ("fixed",),
    "weighting.learned": ("LearnedWeights",),
    "weighting.rule": ("rule",),
    "weighting.size": ("size",),
    "weighting.uniform": ("uniform",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", "plot", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name == "plot":
        return import_module("fedunfold.report.figures")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedunfold' has no attribute '{name}'")
    value = getattr(import_module(f"fedunfold.{_HOME_OF[name]}"), name)
    globals()[name] = value  # also past the submodule of the same name, which importing it puts here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
