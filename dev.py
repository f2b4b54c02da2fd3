"""Run FineServe from a fresh clone: each command makes its own environment first, from the lock file.

    python3 dev.py sim run experiments/fig10.yaml      the simulator (any fineserve-sim command)
    python3 dev.py test                                linters, type checks, import fences and tests
    python3 dev.py test tests/policy -k slab           pytest with these arguments only

Needs Python 3.11 or newer and a package index; nothing else. Environments live in .venv-sim and .venv-test and are made anew
when their lock file changes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
MINIMUM = (3, 11)


def environment(name: str, lock: str) -> Path:
    """The bin folder of the environment ``name``, made or renewed so that it holds what ``lock`` lists and this project."""
    folder = ROOT / f".venv-{name}"
    bin_folder = folder / ("Scripts" if sys.platform == "win32" else "bin")
    inputs = [ROOT / lock, ROOT / "pyproject.toml"]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + sys.version.encode()).hexdigest()
    marker = folder / "state"
    if not marker.exists() or marker.read_text() != state:
        print(f"Making the environment {folder.name} (a minute or two, once) ...", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "-r", str(ROOT / lock)], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
        marker.write_text(state)
    return bin_folder


def simulate(arguments: list[str]) -> int:
    bin_folder = environment("sim", "requirements.lock")
    return subprocess.run([str(bin_folder / "fineserve-sim"), *arguments], check=False).returncode


def test(arguments: list[str]) -> int:
    """All checks, or pytest alone when there are arguments. Stops at the first that fails."""
    tools = environment("test", "requirements-dev.lock")
    if arguments:
        return _run(tools, "pytest", *arguments)
    checks = [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("lint-imports",),
        ("pytest", "--durations=10"),
    ]
    return next((code for check in checks if (code := _run(tools, *check))), 0)


def _run(tools: Path, *command: str) -> int:
    print("$", *command, flush=True)
    return subprocess.run([str(tools / command[0]), *command[1:]], cwd=ROOT, check=False).returncode


def main() -> int:
    commands = {"sim": simulate, "test": test}
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
