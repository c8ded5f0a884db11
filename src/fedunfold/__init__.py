"""fedunfold: learn how much each client should count in each round of federated learning.

    import fedunfold as fu
    env = fu.environment("digits-label-skew")
    learned = fu.learn_weights(env)
    table = fu.compare(env, [fu.size(), fu.dr(q=1), learned], trials=5)

Names are loaded when first used, so that importing the package costs next to nothing. (lazy_loader does that too, but
knows no second name for a module, as `plot` is of `plotting`, and looks a name up again at every use.)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedunfold.version import VERSION as __version__

if TYPE_CHECKING:
    from fedunfold import plotting as plot
    from fedunfold import server as server
    from fedunfold.aggregation import krum as krum
    from fedunfold.aggregation import median as median
    from fedunfold.aggregation import trimmed_mean as trimmed_mean
    from fedunfold.api import compare as compare
    from fedunfold.api import learn_weights as learn_weights
    from fedunfold.api import run as run
    from fedunfold.api import trained_module as trained_module
    from fedunfold.config import Client as Client
    from fedunfold.config import Clock as Clock
    from fedunfold.config import Environment as Environment
    from fedunfold.config import GruSpec as GruSpec
    from fedunfold.config import ModelSpec as ModelSpec
    from fedunfold.config import bundled as bundled
    from fedunfold.config import environment as environment
    from fedunfold.core.algorithm import Algorithm as Algorithm
    from fedunfold.core.errors import DivergenceError as DivergenceError
    from fedunfold.core.errors import FederationError as FederationError
    from fedunfold.core.errors import FedunfoldError as FedunfoldError
    from fedunfold.core.errors import InputError as InputError
    from fedunfold.core.errors import WriteError as WriteError
    from fedunfold.core.messages import ClientUpdates as ClientUpdates
    from fedunfold.core.outcomes import RejectedUpdate as RejectedUpdate
    from fedunfold.core.parts import RoundDecision as RoundDecision
    from fedunfold.core.run_result import RunResult as RunResult
    from fedunfold.engines.flower.strategy import WeightedStrategy as WeightedStrategy
    from fedunfold.engines.simulation.engine import SimulatedFederation as SimulatedFederation
    from fedunfold.fine_tuning import fine_tune as fine_tune
    from fedunfold.leave_out import leave_one_out as leave_one_out
    from fedunfold.local import accumulated as accumulated
    from fedunfold.local import adamw as adamw
    from fedunfold.local import clipped as clipped
    from fedunfold.local import decayed as decayed
    from fedunfold.local import feddyn as feddyn
    from fedunfold.local import momentum as momentum
    from fedunfold.local import nova as nova
    from fedunfold.local import prox as prox
    from fedunfold.local import scaffold as scaffold
    from fedunfold.local import sgd as sgd
    from fedunfold.models import load_once as load_once
    from fedunfold.models import lora as lora
    from fedunfold.rules.afl import afl as afl
    from fedunfold.rules.dr import dr as dr
    from fedunfold.rules.fedadp import fedadp as fedadp
    from fedunfold.rules.fedawa import fedawa as fedawa
    from fedunfold.rules.fedbuff import fedbuff as fedbuff
    from fedunfold.rules.feddisco import feddisco as feddisco
    from fedunfold.rules.fedfa import fedfa as fedfa
    from fedunfold.rules.fedlaw import fedlaw as fedlaw
    from fedunfold.rules.fixed import fixed as fixed
    from fedunfold.rules.formula import unfolded_formula as unfolded_formula
    from fedunfold.rules.learned import LearnedWeights as LearnedWeights
    from fedunfold.rules.online_hypergradient import online_hypergradient as online_hypergradient
    from fedunfold.rules.pretrained import pretrained as pretrained
    from fedunfold.rules.q_fedavg import q_fedavg as q_fedavg
    from fedunfold.rules.rule import rule as rule
    from fedunfold.rules.size import size as size
    from fedunfold.rules.unbiased import unbiased as unbiased
    from fedunfold.rules.uniform import uniform as uniform
    from fedunfold.runs.trained_model import load_model as load_model
    from fedunfold.server import adagrad as adagrad
    from fedunfold.server import adam as adam
    from fedunfold.server import yogi as yogi
    from fedunfold.tasks import binary as binary
    from fedunfold.tasks import classification as classification
    from fedunfold.tasks import multilabel as multilabel
    from fedunfold.tasks import next_token as next_token
    from fedunfold.tasks import regression as regression
    from fedunfold.tasks import segmentation as segmentation
    from fedunfold.tasks import survival as survival
    from fedunfold.tasks import task as task
    from fedunfold.tracking.callback import Callback as Callback
    from fedunfold.training.comparison import Comparison as Comparison
    from fedunfold.training.methods import Method as Method
    from fedunfold.training.methods import method as method
    from fedunfold.training.methods import method_names as method_names
    from fedunfold.unfolding.learner import Learning as Learning

_HOMES = {
    "config": ("Client", "Clock", "Environment", "GruSpec", "ModelSpec", "bundled", "environment"),
    "core.algorithm": ("Algorithm",),
    "core.errors": ("DivergenceError", "FederationError", "FedunfoldError", "InputError", "WriteError"),
    "core.messages": ("ClientUpdates",),
    "core.outcomes": ("RejectedUpdate",),
    "core.parts": ("RoundDecision",),
    "aggregation": ("krum", "median", "trimmed_mean"),
    "local": ("accumulated", "adamw", "clipped", "decayed", "feddyn", "momentum", "nova", "prox", "scaffold", "sgd"),
    "server": ("adagrad", "adam", "yogi"),
    "models": ("load_once", "lora"),
    "rules.afl": ("afl",),
    "rules.dr": ("dr",),
    "rules.fedadp": ("fedadp",),
    "rules.fedawa": ("fedawa",),
    "rules.feddisco": ("feddisco",),
    "rules.fedbuff": ("fedbuff",),
    "rules.fedfa": ("fedfa",),
    "rules.fedlaw": ("fedlaw",),
    "rules.fixed": ("fixed",),
    "rules.formula": ("unfolded_formula",),
    "rules.learned": ("LearnedWeights",),
    "rules.online_hypergradient": ("online_hypergradient",),
    "rules.pretrained": ("pretrained",),
    "rules.q_fedavg": ("q_fedavg",),
    "rules.rule": ("rule",),
    "rules.size": ("size",),
    "rules.unbiased": ("unbiased",),
    "rules.uniform": ("uniform",),
    "api": ("compare", "learn_weights", "run", "trained_module"),
    "fine_tuning": ("fine_tune",),
    "leave_out": ("leave_one_out",),
    "training.comparison": ("Comparison",),
    "core.run_result": ("RunResult",),
    "training.methods": ("Method", "method", "method_names"),
    "tasks": (
        "binary",
        "classification",
        "multilabel",
        "next_token",
        "regression",
        "segmentation",
        "survival",
        "task",
    ),
    "runs.trained_model": ("load_model",),
    "tracking.callback": ("Callback",),
    "engines.simulation.engine": ("SimulatedFederation",),
    "unfolding.learner": ("Learning",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", "plot", "server", *_HOME_OF]

_HOME_OF["WeightedStrategy"] = "engines.flower"  # not in __all__, all of which is there without an extra


def __getattr__(name: str) -> Any:
    if name in ("plot", "server"):
        return import_module("fedunfold.plotting" if name == "plot" else "fedunfold.server")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedunfold' has no attribute '{name}'")
    value = getattr(import_module(f"fedunfold.{_HOME_OF[name]}"), name)
    globals()[name] = value  # also past the submodule of the same name, which importing it puts here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
