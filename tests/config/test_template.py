"""The file that `env new` writes."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fedunfold.config import Environment
from fedunfold.config.template import Draft, suggest_training

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
def test_what_is_drafted_is_what_is_read(
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
    draft = Draft(
        name=name,
        description=name,
        data=path,
        partition={"kind": "given"},
        clients=keys,
        training=training,
        epochs={keys[0]: epochs},
        participation_probability={keys[-1]: participation_probability},
        class_names=classes,
        seed=3,
    )
    env = Environment.parse(draft.to_toml(), Path("mine.toml"))
    assert (env.name, env.description, env.seed) == (name, name, 3)
    assert env.class_names == tuple(classes)
    assert env.model_dump()["data"] == {"source": "npz", "path": path}
    assert (env.rounds, env.batch_size, env.lr) == (training.rounds, training.batch_size, training.lr)
    assert env.model.hidden == training.hidden
    assert [client.key for client in env.clients] == keys
    assert env.clients[0].epochs == epochs
    assert env.clients[-1].participation_probability == participation_probability
    assert 4 <= env.batch_size <= 64
