"""Nothing in this project executes what it reads."""

import ast
from pathlib import Path

HERE = Path(__file__).parents[1]
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pd.read_pickle", "np.fromregex"}


def executes(source: str) -> list[str]:
    """Imports and calls that may run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module or "", *(alias.name for alias in node.names)] if module else [a.name for a in node.names]
            found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            pickles = {kw.arg: ast.unparse(kw.value) for kw in node.keywords}.get("allow_pickle")
            if name in FORBIDDEN_CALLS or (name == "np.load" and pickles != "False") or pickles not in (None, "False"):
                found.append(ast.unparse(node))
    return found


def test_nothing_read_is_executed() -> None:
    for file in sorted(path for folder in ("src", "examples", "benchmarks") for path in (HERE / folder).rglob("*.py")):
        assert executes(file.read_text(encoding="utf-8")) == [], file


def test_the_test_can_tell() -> None:
    for source in ("import pickle", "from marshal import loads", "torch.load(f)", "eval('1')", "np.load(f)"):
        assert executes(source), source
    assert executes("np.load(f, allow_pickle=True)")
    assert not executes("model.eval()\nnp.load(f, allow_pickle=False)\njson.loads(t)")
