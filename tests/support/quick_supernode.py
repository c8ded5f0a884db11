"""Run as a program: Flower's SuperNode, but one that is missed after 20 s instead of a minute when it is killed."""

from flwr.common import constant

constant.HEARTBEAT_DEFAULT_INTERVAL = 10  # seconds; SuperNodes ask for it, and no option says so

from flwr.supernode.cli import flower_supernode  # noqa: E402  (reads the interval)

if __name__ == "__main__":
    flower_supernode()
