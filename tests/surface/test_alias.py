"""The name ``lycoris``: every public path of the peer gives this package's own module objects."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import textwrap

import pytest

import deltafuse
from deltafuse.core.errors import DeltaFuseError
from deltafuse.integrations.lycoris import install_as_lycoris, main, uninstall_lycoris_alias

PATHS = [
    "config",
    "config_sdk",
    "functional",
    *[f"functional.{name}" for name in ("boft", "diag_oft", "general", "locon", "loha", "lokr")],
    "kohya",
    "logging",
    "modules",
    *[
        f"modules.{name}"
        for name in (
            *("base", "boft", "diag_oft", "dylora", "full", "glora"),
            *("ia3", "locon", "loha", "lokr", "norms", "tlora"),
        )
    ],
    "utils",
    *[f"utils.{name}" for name in ("general", "logger", "preset", "quant", "xformers_utils")],
    "wrapper",
]


@pytest.fixture
def no_lycoris():
    """No ``lycoris`` imported, whatever ran before; what was there comes back."""
    saved = {n: m for n, m in sys.modules.items() if n == "lycoris" or n.startswith("lycoris.")}
    for name in saved:
        del sys.modules[name]
    yield
    uninstall_lycoris_alias()
    sys.modules.update(saved)


@pytest.mark.parametrize("path", PATHS)
def test_same_module_objects(no_lycoris, path):
    install_as_lycoris()
    alias = importlib.import_module(f"lycoris.{path}")
    own = importlib.import_module(f"deltafuse.{path}")
    assert alias is own
    assert own.__name__ == f"deltafuse.{path}"
    assert own.__spec__.name == f"deltafuse.{path}"
    assert own.__spec__.loader is own.__loader__
    assert sys.modules["lycoris"] is deltafuse


def test_from_imports_and_identity(no_lycoris):
    install_as_lycoris()
    from lycoris import LoConModule, create_lycoris, kohya
    from lycoris.modules import ButterflyOFTModule, IA3Module
    from lycoris.modules.locon import LoConModule as Deep

    assert Deep is LoConModule is deltafuse.modules.LoConModule
    assert create_lycoris is deltafuse.create_lycoris
    assert kohya is importlib.import_module("deltafuse.kohya")
    assert IA3Module.__module__.startswith("deltafuse.")
    assert pickle.loads(pickle.dumps(ButterflyOFTModule)) is ButterflyOFTModule
    # A pickle written where the class was still called lycoris.modules.locon.LoConModule.
    assert pickle.loads(b"clycoris.modules.locon\nLoConModule\n.") is LoConModule


def test_unknown_path_is_a_plain_import_error(no_lycoris):
    install_as_lycoris()
    with pytest.raises(ModuleNotFoundError, match=r"lycoris\.nothing_here"):
        importlib.import_module("lycoris.nothing_here")


def test_idempotent_and_removable(no_lycoris):
    finders = len(sys.meta_path)
    first = install_as_lycoris()
    assert install_as_lycoris() is first
    assert len(sys.meta_path) == finders + 1
    first.uninstall()
    first.uninstall()
    assert len(sys.meta_path) == finders
    assert not any(name == "lycoris" or name.startswith("lycoris.") for name in sys.modules)
    with install_as_lycoris() as handle:
        assert handle.active
    assert not handle.active


def test_a_real_package_is_not_replaced_silently(no_lycoris):
    real = pytest.importorskip("lycoris")
    deep = importlib.import_module("lycoris.config")
    with pytest.raises(DeltaFuseError, match="force=True"):
        install_as_lycoris()
    handle = install_as_lycoris(force=True)
    import lycoris.config

    assert lycoris.config is importlib.import_module("deltafuse.config")
    handle.uninstall()
    assert sys.modules["lycoris"] is real
    assert sys.modules["lycoris.config"] is deep


def test_unchanged_script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("WORD = 'beside the script'\n")
    (folder / "train.py").write_text(
        textwrap.dedent(
            """
            import sys
            import helper
            import lycoris.config
            from lycoris.utils.preset import read_preset
            import __main__
            assert __name__ == "__main__" and __main__.helper is helper
            print(lycoris.config.__name__, read_preset.__module__, sys.argv[1:], helper.WORD, __file__)
            sys.exit(7)
            """
        )
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "deltafuse.integrations.lycoris"]
    command += ["scripts/train.py", "--a", "b c", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path, check=False)
    assert done.returncode == 7, done.stderr
    assert done.stdout.split("\n")[0] == (
        "deltafuse.config deltafuse.utils.preset ['--a', 'b c', '-m'] beside the script scripts/train.py"
    )
    assert done.stderr == ""


def test_module_runs_and_errors_pass(no_lycoris, tmp_path, monkeypatch, capsys):
    source = "import sys, lycoris.config as c\nprint(__name__, c.__name__, sys.argv[1:])\nraise KeyError(3)\n"
    (tmp_path / "surface_job.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["before"])
    with pytest.raises(KeyError, match="3"):
        main(["-m", "surface_job", "x"])
    assert capsys.readouterr().out == "__main__ deltafuse.config ['x']\n"


@pytest.mark.parametrize(("args", "code"), [((), 2), (("--help",), 0), (("absent.py",), 2), (("-m",), 2)])
def test_usage(no_lycoris, capsys, args, code):
    assert main(args) == code
    written = capsys.readouterr()
    assert "usage:" in (written.err if code else written.out)
    assert "lycoris" not in sys.modules
