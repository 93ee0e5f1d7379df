"""Eight CPU devices, strict JAX settings, jaxtyping checked: set before anything imports jax."""

import contextlib
import os
import pathlib
import sys
import warnings

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One cache for every worker and every run: most of the suite's time would otherwise be compilation.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(os.path.expanduser("~"), ".cache", "jaxpriv", "xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")

from jaxtyping import install_import_hook

install_import_hook("jaxpriv", "beartype.beartype")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture
def no_constants():
    """A context in which a program that holds arrays as constants is an error: they would outlive the run in the
    compilation cache, which is why what is private is an argument."""

    @contextlib.contextmanager
    def guard():
        name = "jax_captured_constants_warn_bytes"
        before = jax.config.values[name]
        jax.config.update(name, 64)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="A large amount of constants")
                yield
        finally:
            jax.config.update(name, before)

    return guard


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of reference data beside the checkout; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("reference data (../shared) is not beside this checkout")
    return folder
