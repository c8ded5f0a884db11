"""FedJAX: its federated averaging, with a test after every round."""

import json
import sys
import time

import fedjax
import haiku
import jax
import numpy as np


def main(work: dict) -> list[float]:
    draw = np.random.default_rng(0)

    def images(n: int) -> dict[str, np.ndarray]:
        x = draw.random((n, work["features"]), dtype=np.float32)
        return {"x": x, "y": draw.integers(0, work["classes"], n).astype(np.int32)}

    (epochs,) = {epochs for _, epochs in work["clients"]}
    clients = fedjax.InMemoryFederatedData(
        {f"client-{k}".encode(): images(samples) for k, (samples, _) in enumerate(work["clients"])}
    )
    model = fedjax.create_model_from_haiku(
        haiku.transform(lambda batch: haiku.nets.MLP([*work["hidden"], work["classes"]])(batch["x"])),
        sample_batch=images(1),
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(work["lr"]),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work["batch_size"], num_epochs=epochs, seed=0),
    )
    test = list(
        fedjax.padded_batch_client_datasets([fedjax.ClientDataset(images(work["test"]))], batch_size=work["test"])
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    seconds = []
    for round in range(work["rounds"] + 1):
        began = time.perf_counter()
        keys = jax.random.split(jax.random.PRNGKey(round), len(work["clients"]))
        cohort = [(name, data, key) for (name, data), key in zip(clients.clients(), keys, strict=True)]
        state, _ = algorithm.apply(state, cohort)
        float(fedjax.evaluate_model(model, state.params, test)["accuracy"])
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
