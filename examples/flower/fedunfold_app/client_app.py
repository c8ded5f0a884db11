"""A site: it trains on its own data and answers the server's requests, keeping nothing in between."""

from flwr.app import Context

from fedunfold.core.errors import InputError
from fedunfold.engines.flower import LocalClient, client_app, site_from_npz, site_of
from fedunfold_app.settings import agreement, bundled, precision


def open_site(context: Context) -> LocalClient:
    """The client this node is: `key` and `path` in its node-config, or one of a bundled environment's clients."""
    config, node = context.run_config, context.node_config
    agreed = agreement(config)
    if agreed is None:
        return site_of(bundled(str(config["environment"])), context, precision(config))
    if not {"key", "path"} <= node.keys():
        raise InputError("""node-config needs the client's key and data, as --node-config 'key="a" path="a.npz"'.""")
    return site_from_npz(str(node["path"]), str(node["key"]), agreed, precision(config))


app = client_app(open_site)
