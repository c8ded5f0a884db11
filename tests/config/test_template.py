"""The file that `env new` writes."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fedunfold.config import Client, Environment, ModelSpec
from fedunfold.config.template import suggest_training, to_commented_toml
from fedunfold.data.config import NpzSource
from fedunfold.data.partitions import GivenPartition

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(
    name=TEXT.filter(str.isprintable),
    path=TEXT,
    classes=st.lists(TEXT, min_size=2, max_size=4, unique=True),
    sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=5),
    features=st.integers(1, 10**5),
    epochs=st.integers(1, 9),
    participation_probability=st.floats(0, 1),
)
def test_what_is_written_is_what_is_read(
    name: str,
    path: str,
    classes: list[str],
    sizes: list[int],
    features: int,
    epochs: int,
    participation_probability: float,
) -> None:
    """Whatever the names: quotes, signs of TOML and, where they may be, line ends come through."""
    training = suggest_training(sizes, features)
    keys = [f"site-{k}" for k in range(len(sizes))]
    env = Environment(
        name=name,
        description=name,
        seed=3,
        class_names=tuple(classes),
        data=NpzSource(path=path),
        partition=GivenPartition(),
        model=ModelSpec(hidden=training["hidden"]),
        clients=tuple(
            Client(
                key=key,
                epochs=epochs if key == keys[0] else training["epochs"],
                participation_probability=participation_probability if key == keys[-1] else 1.0,
            )
            for key in keys
        ),
        **{field: training[field] for field in ("rounds", "batch_size", "lr")},
    )
    text = to_commented_toml(env)
    read = Environment.parse(text, Path("mine.toml"))
    assert read == env
    assert (read.name, read.description, read.seed) == (name, name, 3)
    assert read.class_names == tuple(classes)
    assert read.model_dump()["data"] == {"source": "npz", "path": path}
    assert [client.key for client in read.clients] == keys
    assert read.clients[0].epochs == epochs
    assert read.clients[-1].participation_probability == participation_probability
    assert 4 <= read.batch_size <= 64
    assert text.startswith("# Change what you like") and text.count("[[clients]]") >= len(keys)
