"""A client: it trains on its own data and answers the server's messages, storing nothing in between."""

from flwr.app import Context

from fedunfold.core.errors import InputError
from fedunfold.engines.flower import LocalClient, client_app, client_from_environment, client_from_npz
from fedunfold_app.settings import bundled, check_recipe, federation_config, precision


def open_client(context: Context) -> LocalClient:
    """The client this node is: `client-id`, `path` and `held-out` in its node-config, or one of an environment's."""
    config, node = context.run_config, context.node_config
    custom = federation_config(config)
    if custom is None:
        return client_from_environment(bundled(str(config["environment"])), context, precision(config))
    check_recipe(config, node)
    if not {"client-id", "path"} <= node.keys():
        raise InputError("""node-config needs the client's id and data, as 'client-id="a" path="a.npz"'.""")
    held_out = str(node["held-out"]) if node.get("held-out") else None
    return client_from_npz(str(node["path"]), str(node["client-id"]), custom, precision(config), held_out=held_out)


app = client_app(open_client)
