"""What runs at each client."""

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

import fedunfold as fu
from fedunfold.engines.flower import LocalClient, own_training_app
from tests.engines.flower.apps.torch_app.task import Net, load_data
from tests.engines.flower.apps.torch_app.task import test as test_fn
from tests.engines.flower.apps.torch_app.task import train as train_fn


def client(context: Context) -> LocalClient:
    k, n = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    x, y, _, _ = load_data(k, n)
    return LocalClient(f"client-{k}", x, y, fu.classification(10), Net)


app = own_training_app(client, metric_names={"loss": "train_loss"})


@app.train()
def train(msg: Message, context: Context) -> Message:
    net, config = Net(), msg.content.config_records["config"]
    net.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    partition: Any = context.node_config["partition-id"]
    x, y, _, _ = load_data(partition, int(context.node_config["num-partitions"]))
    lr, server_round = config["lr"], config["server-round"]
    assert isinstance(lr, float)
    assert isinstance(server_round, int)
    loss = train_fn(net, x, y, epochs=1, lr=lr, seed=1000 * server_round + partition)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    partition, partitions = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    _, _, x, y = load_data(partition, partitions)
    loss, accuracy = test_fn(net, x, y)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
