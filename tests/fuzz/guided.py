"""One format under atheris, which follows the coverage of the library's own code."""

import sys
from random import Random


def main() -> None:
    import atheris  # by hand only: the suite does without it

    name, arguments = sys.argv[1], sys.argv[2:]
    with atheris.instrument_imports(include=["fedunfold", "tests.fuzz.formats"]):
        from tests.fuzz.formats import format_of
        from tests.fuzz.judging import scratch
        from tests.fuzz.watching import Watch
        from tests.fuzz.working import confined, watched

        format = format_of(name)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        return format.mutate(data, Random(seed))[:longest]

    watch = Watch(scratch())

    def one(data: bytes) -> None:
        with watched(watch):
            format.fuzz(data)

    with confined():
        limits = ["-max_len=65536", "-timeout=120", "-rss_limit_mb=0", "-print_final_stats=1"]
        limits.append(f"-artifact_prefix={scratch()}/")
        atheris.Setup([sys.argv[0], *limits, *arguments], one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
