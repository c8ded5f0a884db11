"""A site: it trains on its own data and answers the server's requests, keeping nothing in between."""

from flwr.app import Context

from fedunfold.flower import Site, client_app, site_of


def open_site(context: Context) -> Site:
    """The client this node is: by `key` in its node-config, or by its number in a simulation."""
    return site_of(str(context.run_config["environment"]), context)


app = client_app(open_site)
