"""What `make generate` and `make test` install, and that the first needs no more than it does."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = ("run", "server", "clients", "dev")


def pinned(name: str) -> dict[str, str]:
    """Package -> version of one file, without those that it includes."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    kept = [line for line in lines if line and not line.startswith(("#", "-r"))]
    return {_plain(name): version for name, _, version in (line.partition("==") for line in kept)}


def _plain(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-")


def planned(target: str, folder: Path) -> str:
    """What make would run in a checkout without a virtual environment."""
    command = ["make", "-n", target, f"VENV={folder / 'venv'}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_generate_installs_what_the_engine_runs_on_and_test_the_rest(tmp_path: Path) -> None:
    install = re.compile(r"pip install [^\n]*-r (\S+)")
    assert install.findall(planned("generate", tmp_path)) == ["requirements/run.txt"]
    assert install.findall(planned("serve", tmp_path)) == ["requirements/run.txt", "requirements/server.txt"]
    assert install.findall(planned("test", tmp_path)) == ["requirements/run.txt", "requirements/dev.txt"]
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for done in ("bin/python", ".installed-run"):
        (tmp_path / "venv" / done).touch()
    assert install.findall(planned("generate", tmp_path)) == []
    assert install.findall(planned("test", tmp_path)) == ["requirements/dev.txt"]
    for done in (".installed-server", ".installed"):
        (tmp_path / "venv" / done).touch()
    assert install.findall(planned("serve", tmp_path)) == []
    assert install.findall(planned("test", tmp_path)) == []


def test_every_dependency_is_pinned_once() -> None:
    packages = [package for name in FILES for package in pinned(name)]
    assert len(packages) - len(set(packages)) == len({"pydantic"}), "the command line and the server need it"
    assert pinned("run")["pydantic"] == pinned("server")["pydantic"]
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for name in FILES for version in pinned(name).values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {_plain(dependency) for dependency in project["dependencies"]} <= set(pinned("run"))
    for extra, name in (("server", "server"), ("clients", "clients"), ("dev", "dev")):
        assert {_plain(dependency) for dependency in project["optional-dependencies"][extra]} <= set(pinned(name))


def test_generating_needs_no_package_of_the_server_or_of_the_tests() -> None:
    """Other than the triton of a GPU, nothing beyond ``run.txt`` is imported."""
    names = {package.replace("-", "_") for name in ("server", "clients", "dev") for package in pinned(name)}
    names = names - {"pydantic", "httpx"} | {"zmq"}  # typer needs the one, huggingface_hub the other
    code = (
        f"import sys\nfor name in {sorted(names)!r}: sys.modules[name] = None\n"
        "sys.argv = ['sidestream', 'generate', 'Question: What is 1 + 2?\\nAnswer:', '--max-tokens', '2', '--device', "
        "'cpu']\nfrom sidestream.cli.main import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_serving_without_the_servers_packages_names_a_command_of_this_interpreter() -> None:
    code = (
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'uvicorn' else find(name)\n"
        "sys.argv = ['sidestream', 'serve']\nfrom sidestream.cli.main import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "serve needs uvicorn; in the clone's folder run: " in done.stderr
    assert f"{sys.executable} -m pip install -e '.[server]'" in done.stderr


def test_the_list_of_targets_is_aligned() -> None:
    make = ["make", "--no-print-directory", "help"]  # the tests themselves may run below a make
    shown = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {re.match(r"\S+ +", line).end() for line in shown.splitlines()}  # type: ignore[union-attr]
    assert texts == {20}
