"""What runs at each client."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from tests.engines.flower.apps.sklearn_app.task import create_model, fit, get_params, load_data, set_params

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = set_params(create_model(), msg.content.array_records["arrays"].to_numpy_ndarrays())
    x, y, _, _ = load_data(int(context.node_config["partition-id"]))
    fit(model, x, y)
    loss = float(log_loss(y, model.predict_proba(x), labels=range(10)))
    metrics = MetricRecord({"train_logloss": loss, "num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(get_params(model)), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = set_params(create_model(), msg.content.array_records["arrays"].to_numpy_ndarrays())
    _, _, x, y = load_data(int(context.node_config["partition-id"]))
    loss, accuracy = float(log_loss(y, model.predict_proba(x), labels=range(10))), float(model.score(x, y))
    metrics = MetricRecord({"test_logloss": loss, "accuracy": accuracy, "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
