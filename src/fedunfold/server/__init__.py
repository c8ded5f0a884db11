"""Server optimisers: what the server does with the clients' averaged update."""

from fedunfold.server.optimizers import ServerOptimizer, ServerState, adagrad, adam, momentum, plain, yogi

__all__ = ["ServerOptimizer", "ServerState", "adagrad", "adam", "momentum", "plain", "yogi"]
