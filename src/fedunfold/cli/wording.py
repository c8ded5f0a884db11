"""The library's messages in the words of the command line: options in place of its arguments."""

import re

FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("absent", "again", "aggregator", "assignment", "batch_size", "clients", "dataset", "device", "drop", "dtype"),
        *("categorical", "event", "id", "missing_indicators", "positive", "time"),
        *(
            "holdout",
            "jobs",
            "kl_weight",
            "label",
            "methods",
            "min_patients",
            "model",
            "node_config",
            "num_samples",
            "only",
        ),
        *("out", "overwrite", "partitioner"),
        *("resume", "rounds", "task", "test", "threads", "tie_rounds", "update_storage"),
    )
} | {"allow_mapping": "--map", "aggregator": "--aggregator", "folder": "--in"}
"""The option that sets an argument, by the argument's name."""
QUOTES = "\"'"
_ARGUMENT = re.compile(r"`(\w+)`|`?(?<![\w:,])(\w+)=([^\s`,;()]*[^\s`,;().])`?")


def with_flags(text: str) -> str:
    """A message with the options that set the arguments it names.

    >>> with_flags("let the server remember (absent='remember'), or choose another `out`; `n` is no option")
    'let the server remember (--absent remember), or choose another --out; `n` is no option'
    >>> with_flags("replace it with overwrite=True, or learn with `dtype=torch.float64`.")
    'replace it with --overwrite, or learn with --dtype float64.'
    """
    return _ARGUMENT.sub(_flag, text)


def _flag(argument: re.Match[str]) -> str:
    """The option of an argument, with its value where it has one."""
    alone, name, value = argument.groups()
    if (alone or name) not in FLAGS:
        return argument[0]
    flag = FLAGS[alone or name]
    return flag if value in (None, "True") else f"{flag} {value.strip(QUOTES).removeprefix('torch.')}"
